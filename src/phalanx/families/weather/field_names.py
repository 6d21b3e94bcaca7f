"""What the name of a gridded field says: the array it is of, and the pressure level.

The one place that knows which names end in a number that is no pressure, as u10 does, the wind 10 m above the ground.
"""

from __future__ import annotations

import re

_AT_LEVEL = re.compile(r"(.+?)_?(\d+)")
_LAYER = re.compile(r"_(level|layer)$")
"""Ends long names of the soil's layers: soil_temperature_level_1."""
_ABOVE_GROUND = (
    *("u10", "v10", "u100", "v100", "si10", "si100", "ws10", "ws100", "wdir10", "wdir100", "fg10"),
    *("t2", "d2", "td2", "q2", "rh2"),
)
"""At so many metres."""
_SOIL = ("stl1", "stl2", "stl3", "stl4", "swvl1", "swvl2", "swvl3", "swvl4")
_SUMS = ("tp6", "tp12", "tp24")
"""Over so many hours."""
_MOLECULES = ("o3", "co2", "ch4", "no2", "so2", "hno3")
_NO_LEVEL = frozenset((*_ABOVE_GROUND, *_SOIL, *_SUMS, *_MOLECULES))


def split_level(name: str) -> tuple[str, int] | None:
    """The array and the pressure level in hPa that a name stands for: z500 and z_500 are z at 500 hPa.

    None for names without a level. Short names of the surface have none: u10 and u100 are winds 10 m and 100 m above the
    ground. With an underscore the number always is a level: u_10 is the wind at 10 hPa.
    """
    match = _AT_LEVEL.fullmatch(name)
    if match is None or name.lower() in _NO_LEVEL or _LAYER.search(match[1]):
        return None
    return match[1], int(match[2])


def level_name(array: str, level: float) -> str:
    """The shortest name under which `split_level` finds a level, in hPa, of an array."""
    short = f"{array}{level:g}"
    return short if split_level(short) == (array, level) else f"{array}_{level:g}"
