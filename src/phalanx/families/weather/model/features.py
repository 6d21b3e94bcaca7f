"""Numbers as waves: initial tables of sines and cosines, and features of lead time, pressure and place."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.families.weather.sizes import FEATURES


def wave_features(x: Tensor, shortest: float, longest: float, count: int = FEATURES) -> Tensor:
    """Sine and cosine of `x` at `count` wavelengths, evenly spaced in their logarithm: float64 [..., 2 * count].

    The expansion of Aurora (Bodnar et al. 2024, arXiv:2405.13063, section B.4). x: in the unit of the wavelengths.
    """
    steps = torch.arange(count, dtype=torch.float64, device=x.device) / max(count - 1, 1)
    wavelengths = shortest * (longest / shortest) ** steps
    angles = x.to(torch.float64)[..., None] * (2 * math.pi) / wavelengths
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def sine_table(index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Elements of a table [N, D] that starts row n with the waves of n (Vaswani et al. 2017), as ClimaX's variables do.

    index: int64, row-major in the whole table. Half of a row is sines, half cosines, of n / 10000^(2i/D).
    """
    row, column = index // shape[1], index % shape[1]
    return _wave(row, column, shape[1])


def grid_table(columns: int, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Elements of a table [L, D] for locations of a grid with `columns` columns: waves of the column, then of the row.

    The order is that of the published tables (MAE, He et al. 2022). index: int64, row-major in the whole table.
    """
    half = shape[1] // 2
    location, feature = index // shape[1], index % shape[1]
    place = torch.where(feature < half, location % columns, location // columns)
    return _wave(place, feature % half, half)


def _wave(place: Tensor, feature: Tensor, width: int) -> Tensor:
    """The wave number `feature` of `width` at the whole number `place`."""
    half = width // 2
    # From the C library's power function, one by one: a vectorised one may round differently.
    slowness = torch.tensor([10000.0 ** (-i / half) for i in range(half)], dtype=torch.float64, device=place.device)
    angle = place.to(torch.float64) * slowness[feature % half]
    return sine(angle, quarter_turns=(feature >= half).to(torch.int64))


def sine(angle: Tensor, quarter_turns: Tensor) -> Tensor:
    """sin(angle + quarter_turns * pi/2) of float64 `angle` from 0 to about 1e5, within 1e-11.

    By additions and multiplications alone, which all devices and all vector widths round alike: a value then does not
    depend on which part of a table is computed where.
    """
    turns = (angle * (2.0 / math.pi)).round()
    # pi/2 in two parts: the first has few enough bits that its product with `turns` is exact.
    rest = (angle - turns * _HALF_PI_HIGH) - turns * _HALF_PI_LOW
    square = rest * rest
    sines = _series(square, [(-1) ** k / math.factorial(2 * k + 1) for k in range(8)]) * rest
    cosines = _series(square, [(-1) ** k / math.factorial(2 * k) for k in range(8)])
    quadrant = (turns.to(torch.int64) + quarter_turns) % 4
    value = torch.where(quadrant % 2 == 0, sines, cosines)
    return torch.where(quadrant < 2, value, -value)


_HALF_PI_HIGH = math.floor(math.pi / 2 * 2**32) / 2**32
_HALF_PI_LOW = math.pi / 2 - _HALF_PI_HIGH


def _series(x: Tensor, coefficients: list[float]) -> Tensor:
    """The polynomial with these coefficients, lowest power first, by Horner's rule."""
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total.mul(x).add(coefficient)
    return total
