"""Grids: one orientation whatever the file's order, and cell areas that are exact."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.errors import DataError
from phalanx.families.weather.data.coordinates import Grid, orient_grid

EVERY_90 = np.arange(4) * 90.0


def test_areas_of_cells_are_those_of_the_sphere() -> None:
    grid = Grid(np.array([-90.0, -45.0, 0.0, 45.0, 90.0]), EVERY_90)
    bounds = np.sin(np.deg2rad([-90, -67.5, -22.5, 22.5, 67.5, 90]))
    expected = np.diff(bounds) / np.diff(bounds).mean()
    np.testing.assert_allclose(grid.area_weights(), np.repeat(expected[:, None], 4, axis=1), rtol=1e-14)
    assert (grid.area_weights() > 0).all()


def test_a_global_grid_without_points_at_the_poles_ends_at_the_poles() -> None:
    latitudes = np.linspace(-88.57, 88.57, 96)  # Gaussian: the last spacing does not reach the pole exactly
    heights = Grid(latitudes, EVERY_90).area_weights()[:, 0]
    middle = np.deg2rad((latitudes[0] + latitudes[1]) / 2)
    assert heights[0] / heights.sum() == pytest.approx((np.sin(middle) + 1) / 2, rel=1e-12)


def test_a_regional_grid_ends_half_a_cell_beyond_its_points() -> None:
    weights = Grid(np.array([20.0, 30.0, 40.0]), np.array([10.0, 20.0])).area_weights()
    areas = np.diff(np.sin(np.deg2rad([15, 25, 35, 45])))
    np.testing.assert_allclose(weights[:, 0], areas / areas.mean(), rtol=1e-14)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("roll", [0, 1, 3])
def test_every_order_of_a_file_gives_the_same_grid_and_field(flip: bool, roll: int) -> None:
    latitudes, longitudes = np.array([-45.0, 0.0, 45.0]), EVERY_90
    field = (latitudes[:, None] + longitudes / 1000).astype(np.float32)
    stored_lat, stored = (latitudes[::-1], field[::-1]) if flip else (latitudes, field)
    stored_lon, stored = np.roll(longitudes, roll), np.roll(stored, roll, axis=1)
    stored_lon = np.where(stored_lon >= 180, stored_lon - 360, stored_lon)
    grid, orientation = orient_grid(stored_lat, stored_lon, "file")
    np.testing.assert_array_equal(grid.latitudes, latitudes)
    np.testing.assert_allclose(grid.longitudes, longitudes, atol=1e-9)
    np.testing.assert_array_equal(orientation.apply(stored), field)


def test_a_region_across_greenwich_stays_in_one_piece() -> None:
    grid, orientation = orient_grid(np.array([40.0, 50.0]), np.array([350.0, 0.0, 10.0]), "file")
    np.testing.assert_array_equal(grid.longitudes, [350.0, 360.0, 370.0])
    assert orientation.roll == 0
    assert not grid.wraps


@pytest.mark.parametrize(
    ("latitudes", "longitudes", "part"),
    [
        (np.array([0.0, 10.0, 5.0]), EVERY_90, "latitudes"),
        (np.array([0.0, 100.0]), EVERY_90, "latitudes"),
        (np.array([0.0, np.nan]), EVERY_90, "latitude"),
        (np.array([0.0, 10.0]), np.array([20.0, 10.0, 0.0]), "longitudes"),
        (np.array([0.0, 10.0]), np.array([0.0, 120.0, 240.0, 360.0]), "longitudes"),
    ],
)
def test_what_is_no_grid_is_refused(latitudes: np.ndarray, longitudes: np.ndarray, part: str) -> None:
    with pytest.raises(DataError, match=f"^file: {part}"):
        orient_grid(latitudes, longitudes, "file")


def test_the_first_difference_between_grids_is_named() -> None:
    grid = Grid(np.array([0.0, 10.0]), EVERY_90)
    assert grid.difference(Grid(np.array([0.0, 10.0004]), EVERY_90)) is None
    assert grid.difference(Grid(np.array([0.0, 11.0]), EVERY_90)) == "latitude 1 is 11 instead of 10"
    assert grid.difference(Grid(np.array([0.0, 10.0]), EVERY_90[:3])) == "2 x 3 points instead of 2 x 4"


def test_a_circle_that_lacks_one_column_does_not_wrap() -> None:
    whole = np.arange(1440) * 0.25
    rounded = np.round(np.arange(192) * 1.875, 2)
    assert Grid(EVERY_90[:3], whole).wraps and Grid(EVERY_90[:3], rounded).wraps
    assert not Grid(EVERY_90[:3], whole[:-1]).wraps
