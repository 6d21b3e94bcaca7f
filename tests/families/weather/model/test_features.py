"""Tables and features of waves."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from phalanx.families.weather.model.grid_features import (
    exact_sine,
    grid_table,
    sine_table,
    split_level,
    take_places,
    wave_features,
)
from phalanx.families.weather.sizes import FEATURES
from phalanx.nn.parameters import Table


def _published_row(place: float, width: int) -> list[float]:
    angles = [place / 10000 ** (i / (width / 2)) for i in range(width // 2)]
    return [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]


def _whole(table: Table, shape: tuple[int, int]) -> torch.Tensor:
    return table(torch.arange(shape[0] * shape[1]), shape).view(shape)


def test_variables_start_as_the_published_table() -> None:
    expected = torch.tensor([_published_row(n, 64) for n in range(91)], dtype=torch.float64)
    torch.testing.assert_close(_whole(sine_table, (91, 64)), expected, rtol=0, atol=1e-12)


def test_positions_start_with_waves_of_the_column_then_of_the_row() -> None:
    rows, columns, width = 4, 6, 32
    expected = [
        _published_row(c, width // 2) + _published_row(r, width // 2) for r in range(rows) for c in range(columns)
    ]
    found = _whole(partial(grid_table, columns), (rows * columns, width))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("table", [sine_table, partial(grid_table, 7)])
def test_a_part_of_a_table_has_the_same_bits(table: Table) -> None:
    shape = (63, 48)
    whole = _whole(table, shape)
    index = torch.arange(63 * 48).unflatten(0, shape)
    assert torch.equal(table(index[5:41, 3:30].flatten(), shape), whole[5:41, 3:30].flatten())
    assert all(torch.equal(table(index[place, place], shape), whole[place, place]) for place in range(48))


def test_sines_are_accurate() -> None:
    angle = torch.linspace(0, 1e5, 100_003, dtype=torch.float64)
    for turns in (0, 1):
        exact = (angle + turns * math.pi / 2).sin()
        found = exact_sine(angle, torch.full_like(angle, turns, dtype=torch.int64))
        assert (found - exact).abs().max() < 3e-11
    small = torch.linspace(0, 100, 10_001, dtype=torch.float64)
    assert (exact_sine(small, torch.zeros((), dtype=torch.int64)) - small.sin()).abs().max() < 1e-13


def test_waves_between_the_shortest_and_the_longest() -> None:
    features = wave_features(torch.tensor([0.0, 1.0, 500.0]), 1.0, 1000.0)
    assert features.shape == (3, 2 * FEATURES) and features.dtype == torch.float64
    assert torch.equal(features[0], torch.tensor([0.0] * FEATURES + [1.0] * FEATURES, dtype=torch.float64))
    assert features[1, 0] == pytest.approx(0.0, abs=1e-12)
    assert features[2, FEATURES - 1] == pytest.approx(math.sin(math.pi), abs=1e-9)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("temperature_850", 850),
        ("geopotential_50", 50),
        ("z500", 500),
        ("u_10", 10),
        ("2m_temperature", None),
        ("10m_u_component_of_wind", None),
        ("u10", None),
        ("v100", None),
        ("soil_temperature_level_1", None),
    ],
)
def test_pressure_levels_stand_in_names(name: str, level: int | None) -> None:
    found = split_level(name)
    assert (found and found[1]) == level


@pytest.mark.parametrize("places", [[0, 1, 2], [2, 3], [3, 0], [1]])
def test_taking_places(places: list[int]) -> None:
    x = torch.arange(20).reshape(2, 5, 2)
    assert torch.equal(take_places(x, places, 1), x[:, places])
