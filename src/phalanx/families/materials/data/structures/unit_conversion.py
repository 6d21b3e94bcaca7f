"""Units of positions and labels, converted to one system: eV, angstrom, elementary charge, kelvin.

A unit is written as symbols joined by `*` and `/`, each with an optional `^power`: "Ha/bohr", "eV/A^3", "kcal/mol".
Values are the CODATA 2018 recommended ones (Tiesinga et al., Rev. Mod. Phys. 93, 025010, 2021); eV, J, mol and e are exact.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

_JOULE = 1.0 / 1.602176634e-19
_BOHR = 0.529177210903
_HARTREE = 27.211386245988
_AVOGADRO = 6.02214076e23

Dimension = tuple[int, int, int, int]
"""Powers of energy, length, charge and temperature."""

ENERGY: Dimension = (1, 0, 0, 0)
LENGTH: Dimension = (0, 1, 0, 0)
CHARGE: Dimension = (0, 0, 1, 0)
FORCE: Dimension = (1, -1, 0, 0)
STRESS: Dimension = (1, -3, 0, 0)
DIPOLE: Dimension = (0, 1, 1, 0)

_PRESSURE = _JOULE * 1e-30
"""One pascal in eV/A^3."""

SYMBOLS: dict[str, tuple[float, Dimension]] = {
    "1": (1.0, (0, 0, 0, 0)),
    "eV": (1.0, ENERGY),
    "meV": (1e-3, ENERGY),
    "Ha": (_HARTREE, ENERGY),
    "mHa": (_HARTREE * 1e-3, ENERGY),
    "Ry": (_HARTREE / 2, ENERGY),
    "J": (_JOULE, ENERGY),
    "kJ": (_JOULE * 1e3, ENERGY),
    "cal": (_JOULE * 4.184, ENERGY),
    "kcal": (_JOULE * 4184.0, ENERGY),
    "mol": (_AVOGADRO, (0, 0, 0, 0)),
    "A": (1.0, LENGTH),
    "bohr": (_BOHR, LENGTH),
    "nm": (10.0, LENGTH),
    "pm": (0.01, LENGTH),
    "Pa": (_PRESSURE, STRESS),
    "GPa": (_PRESSURE * 1e9, STRESS),
    "bar": (_PRESSURE * 1e5, STRESS),
    "kbar": (_PRESSURE * 1e8, STRESS),
    "e": (1.0, CHARGE),
    "D": (0.20819433270935603, DIPOLE),
    "K": (1.0, (0, 0, 0, 1)),
}
"""What one of each symbol is in eV, A, e and K, and its dimension. The debye is 1e-21 C m^2/s divided by c and e."""

_FACTOR = re.compile(r"([A-Za-z]+|1)(?:\^(-?[1-9]))?")


@dataclass(frozen=True)
class Unit:
    """A unit that was understood."""

    text: str
    """As it was written."""
    factor: float
    """What one of it is in eV, A, e and K."""
    dimension: Dimension


def parse_unit(text: str) -> Unit:
    """The unit that `text` writes. Raises ValueError naming the part that is not understood."""
    factor, powers, sign = 1.0, [0, 0, 0, 0], 1
    for part in re.split(r"([*/])", text.replace(" ", "")):
        if part in ("*", "/"):
            sign = 1 if part == "*" else -1
            continue
        found = _FACTOR.fullmatch(part)
        if found is None or found[1] not in SYMBOLS:
            raise ValueError(f'unit "{text}": {_unknown(part)}')
        value, dimension = SYMBOLS[found[1]]
        power = sign * int(found[2] or 1)
        factor *= value**power
        powers = [total + power * one for total, one in zip(powers, dimension, strict=True)]
    return Unit(text, factor, (powers[0], powers[1], powers[2], powers[3]))


def unit_of(text: str, dimension: Dimension, what: str) -> Unit:
    """The unit `text`, which must be one of `what`. Raises ValueError for a unit of something else."""
    unit = parse_unit(text)
    if unit.dimension != dimension:
        raise ValueError(f'unit "{text}" is {_name(unit.dimension)}, not one of {what} ({_name(dimension)})')
    return unit


def _unknown(part: str) -> str:
    near = difflib.get_close_matches(part, SYMBOLS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    return f'"{part}" is not known; {hint}known are {", ".join(SYMBOLS)}, joined by * and /, with powers as in A^3'


def _name(dimension: Dimension) -> str:
    names = ("energy", "length", "charge", "temperature")
    parts = [name if power == 1 else f"{name}^{power}" for name, power in zip(names, dimension, strict=True) if power]
    return " * ".join(parts) or "a pure number"
