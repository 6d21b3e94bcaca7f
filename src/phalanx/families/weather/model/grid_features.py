"""What does not depend on data: patches of a grid, areas of points, places and pressure levels of variables, and waves.

Waves are the initial tables of sines and cosines, and the features of lead time, pressure and place. This is the one module
that knows which names end in a number that is no pressure, as u10 does, the wind 10 m above the ground.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.families.weather.config import WeatherModel
from phalanx.families.weather.sizes import FEATURES

# pi/2 as a sum of two numbers, of which the first has few bits: see `exact_sine`.
_HALF_PI_HIGH = math.floor(math.pi / 2 * 2**32) / 2**32
_HALF_PI_LOW = math.pi / 2 - _HALF_PI_HIGH
_AT_LEVEL = re.compile(r"(.+?)_?(\d+)")
_LAYER = re.compile(r"_(level|layer)$")
"""End of the long names of soil layers: soil_temperature_level_1."""
_ABOVE_GROUND = (
    *("u10", "v10", "u100", "v100", "si10", "si100", "ws10", "ws100", "wdir10", "wdir100", "fg10"),
    *("t2", "d2", "td2", "q2", "rh2"),
)
"""Short names of variables at so many metres above the ground."""
_SOIL = ("stl1", "stl2", "stl3", "stl4", "swvl1", "swvl2", "swvl3", "swvl4")
_SUMS = ("tp6", "tp12", "tp24")
"""Precipitation summed over so many hours."""
_MOLECULES = ("o3", "co2", "ch4", "no2", "so2", "hno3")
_NO_LEVEL = frozenset((*_ABOVE_GROUND, *_SOIL, *_SUMS, *_MOLECULES))


def patches_of(fields_BVHW: Tensor, patch_size: int, *, beyond: float | None = None) -> Tensor:
    """Cut fields [B, V, H, W] into patches [B, L, V, P]: locations row by row from the first latitude, points of a
    patch too.

    beyond: value of points that the last patches have beyond the grid; None repeats the last row and column there.
    """
    rows, columns = fields_BVHW.shape[-2:]
    missing = (0, -columns % patch_size, 0, -rows % patch_size)
    # Not called without need: it would copy, and 721 rows are the exception.
    if any(missing):
        filled = {"mode": "replicate"} if beyond is None else {"value": beyond}
        fields_BVHW = F.pad(fields_BVHW, missing, **filled)
    tiles = fields_BVHW.unflatten(-1, (-1, patch_size)).unflatten(-3, (-1, patch_size))
    patches_BLVP: Tensor = tiles.permute(0, 2, 4, 1, 3, 5).flatten(4, 5).flatten(1, 2)
    return patches_BLVP


def fields_of(patches_BLVP: Tensor, config: WeatherModel) -> Tensor:
    """Join patches [B, L, V, P] into fields [B, V, H, W]: the inverse of `patches_of`. What lies beyond is dropped."""
    size = config.patch_size
    tiles = patches_BLVP.unflatten(3, (size, size)).unflatten(1, (config.patch_rows, config.patch_columns))
    fields_BVHW: Tensor = tiles.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
    return fields_BVHW[..., : config.n_lat, : config.n_lon]


def row_latitudes(config: WeatherModel, device: torch.device) -> Tensor:
    """Return the latitudes of the rows' points in degrees, float64 [H]: evenly spaced."""
    rows = torch.arange(config.n_lat, dtype=torch.float64, device=device)
    if config.first_latitude is None or config.last_latitude is None:
        return (rows + 0.5) * (180.0 / config.n_lat) - 90.0
    return config.first_latitude + rows * (config.last_latitude - config.first_latitude) / (config.n_lat - 1)


def cell_edges(config: WeatherModel, device: torch.device) -> Tensor:
    """Return the latitudes between which the rows' cells lie, degrees, float64 [H + 1].

    Halfway between points, and as far beyond the outer points; cells end at the poles (a row of points on a pole has a
    polar cap of half the height).
    """
    lat_H = row_latitudes(config, device)
    half = (lat_H[1] - lat_H[0]) / 2 if len(lat_H) > 1 else torch.full((), 90.0, dtype=lat_H.dtype, device=device)
    return torch.cat((lat_H - half, lat_H[-1:] + half)).clamp(-90.0, 90.0)


def row_weights(config: WeatherModel, device: torch.device) -> Tensor:
    """Return the weight of a point in each row, float64 [H], with mean 1 over the grid.

    `cos`: cosine of the latitude (ClimaX). `area`: the exact area of the cell, from the sines of its edges (WeatherBench 2,
    Rasp et al. 2024), which is not 0 for points on a pole.
    """
    if config.latitude_weights == "cos":
        weight_H = torch.cos(row_latitudes(config, device) * (pi / 180.0))
    else:
        weight_H = torch.sin(cell_edges(config, device) * (pi / 180.0)).diff().abs()
    # Of mean 1, so that a loss has the same size on every grid.
    return weight_H / weight_H.mean()


def patch_places(config: WeatherModel, device: torch.device) -> Tensor:
    """Return for each patch, float64 [L, 4], its centre as a point (x, y, z) of the unit sphere, and its area in steradians.

    Longitudes go round the globe in even steps. The centre halves the area. Of a patch that reaches beyond the grid, the
    part within counts.
    """
    rows, columns = (
        torch.arange(patches + 1, device=device).mul(config.patch_size).clamp(max=points)
        for patches, points in ((config.patch_rows, config.n_lat), (config.patch_columns, config.n_lon))
    )
    edges = torch.sin(cell_edges(config, device)[rows] * (pi / 180.0))
    height = torch.asin((edges[1:] + edges[:-1]) / 2)
    turns = columns.double() * (2 * pi / config.n_lon)
    turn = (turns[1:] + turns[:-1]) / 2
    ring = torch.cos(height)[:, None]
    area = edges.diff().abs()[:, None] * turns.diff()
    parts = (ring * torch.cos(turn), ring * torch.sin(turn), torch.sin(height)[:, None], area)
    return torch.stack([part.expand_as(area) for part in parts], dim=-1).flatten(0, 1)


def outputs_among_inputs(config: WeatherModel) -> list[int]:
    """Return the numbers of the variables that are predicted, among those that are read."""
    return [config.input_names.index(name) for name in config.output_names]


def take_places(tensor: Tensor, places: Sequence[int], dim: int) -> Tensor:
    """Return the elements of `tensor` at `places` along `dim`; a view where they are consecutive."""
    first, count = places[0], len(places)
    # A view costs nothing and keeps gradients in place; index_select copies.
    if list(places) == list(range(first, first + count)):
        return tensor.narrow(dim, first, count)
    return tensor.index_select(dim, torch.tensor(places, device=tensor.device))


def split_level(name: str) -> tuple[str, int] | None:
    """Return the array and the pressure level in hPa that a name stands for: z500 and z_500 are z at 500 hPa.

    None for names without a level. Short names of the surface have none: u10 and u100 are winds 10 m and 100 m above the
    ground. With an underscore the number always is a level: u_10 is the wind at 10 hPa.
    """
    match = _AT_LEVEL.fullmatch(name)
    if match is None or name.lower() in _NO_LEVEL or _LAYER.search(match[1]):
        return None
    return match[1], int(match[2])


def level_name(array: str, level: float) -> str:
    """Return the shortest name under which `split_level` finds a level, in hPa, of an array."""
    short = f"{array}{level:g}"
    return short if split_level(short) == (array, level) else f"{array}_{level:g}"


def wave_features(x: Tensor, shortest: float, longest: float, count: int = FEATURES) -> Tensor:
    """Return the sine and cosine of `x` at `count` wavelengths, evenly spaced in their logarithm: float64 [..., 2 * count].

    The expansion of Aurora (Bodnar et al. 2024, arXiv:2405.13063, section B.4). x: in the unit of the wavelengths.
    """
    # float64: angles of short waves at large x lose their phase in float32.
    steps = torch.arange(count, dtype=torch.float64, device=x.device) / max(count - 1, 1)
    wavelengths = shortest * (longest / shortest) ** steps
    angles = x.to(torch.float64)[..., None] * (2 * math.pi) / wavelengths
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def sine_table(index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return elements of a table [N, D] that starts row n with the waves of n (Vaswani et al. 2017), as ClimaX's
    variables do.

    index: int64, row-major in the whole table. Half of a row is sines, half cosines, of n / 10000^(2i/D).
    """
    row, column = index // shape[1], index % shape[1]
    return _wave_values(row, column, shape[1])


def grid_table(columns: int, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return elements of a table [L, D] for locations of a grid with `columns` columns: waves of the column, then of
    the row.

    The order is that of the published tables (MAE, He et al. 2022). index: int64, row-major in the whole table.
    """
    half = shape[1] // 2
    location, feature = index // shape[1], index % shape[1]
    place = torch.where(feature < half, location % columns, location // columns)
    return _wave_values(place, feature % half, half)


def _wave_values(place: Tensor, feature: Tensor, width: int) -> Tensor:
    """Return the wave number `feature` of `width` at the whole number `place`."""
    half = width // 2
    # From the C library's power function, one by one: a vectorised one may round differently.
    slowness = torch.tensor([10000.0 ** (-i / half) for i in range(half)], dtype=torch.float64, device=place.device)
    angle = place.to(torch.float64) * slowness[feature % half]
    return exact_sine(angle, quarter_turns=(feature >= half).to(torch.int64))


def exact_sine(angle: Tensor, quarter_turns: Tensor) -> Tensor:
    """Return sin(angle + quarter_turns * pi/2) of float64 `angle` from 0 to about 1e5, within 1e-11.

    By additions and multiplications alone, which all devices and all vector widths round alike: a value then does not
    depend on which part of a table is computed where.
    """
    # Reduced to an eighth of a turn on either side of zero, where short series are exact enough.
    turns = (angle * (2.0 / math.pi)).round()
    # pi/2 in two parts: the first has few enough bits that its product with `turns` is exact.
    rest = (angle - turns * _HALF_PI_HIGH) - turns * _HALF_PI_LOW
    square = rest * rest
    sines = _horner_sum(square, [(-1) ** k / math.factorial(2 * k + 1) for k in range(8)]) * rest
    cosines = _horner_sum(square, [(-1) ** k / math.factorial(2 * k) for k in range(8)])
    quadrant = (turns.to(torch.int64) + quarter_turns) % 4
    value = torch.where(quadrant % 2 == 0, sines, cosines)
    return torch.where(quadrant < 2, value, -value)


def _horner_sum(x: Tensor, coefficients: list[float]) -> Tensor:
    """Evaluate the polynomial with these coefficients, lowest power first, by Horner's rule."""
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total.mul(x).add(coefficient)
    return total
