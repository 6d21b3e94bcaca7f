"""Latitudes, weights of rows, and where patches lie."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from phalanx.families.weather.model.grid_features import patch_places, row_latitudes, row_weights
from small_forecasters import small

CPU = torch.device("cpu")
POLES = {"n_lat": 9, "n_lon": 12, "patch_size": 3, "first_latitude": 90.0, "last_latitude": -90.0}
STORM = {"n_lat": 33, "n_lon": 36, "patch_size": 3, "first_latitude": 20.0, "last_latitude": 60.0}


def test_cells_of_a_global_grid_span_it() -> None:
    lat = row_latitudes(small(n_lat=32, n_lon=64), CPU)
    torch.testing.assert_close(lat[[0, 1, -1]], torch.tensor([-87.1875, -81.5625, 87.1875], dtype=torch.float64))
    assert row_latitudes(small(**POLES), CPU).tolist() == numpy.linspace(90, -90, 9).tolist()


@pytest.mark.parametrize("changes", [{}, POLES, STORM])
@pytest.mark.parametrize("kind", ["cos", "area"])
def test_weights_have_mean_one(changes: dict[str, float], kind: str) -> None:
    config = small(**changes, latitude_weights=kind)
    weights = row_weights(config, CPU)
    assert weights.mean() == pytest.approx(1.0, abs=1e-14) and (weights > -1e-15).all()
    rising = row_weights(small(**{**changes, **_reversed(changes)}, latitude_weights=kind), CPU)
    torch.testing.assert_close(rising, weights.flip(0))


def _reversed(changes: dict[str, float]) -> dict[str, float]:
    if "first_latitude" not in changes:
        return {}
    return {"first_latitude": changes["last_latitude"], "last_latitude": changes["first_latitude"]}


def test_areas_are_those_of_zones_of_the_sphere() -> None:
    weights = row_weights(small(n_lat=4, n_lon=4, latitude_weights="area"), CPU)
    zones = [math.sin(math.radians(north)) - math.sin(math.radians(north - 45)) for north in (-45, 0, 45, 90)]
    assert weights.tolist() == pytest.approx([zone * 2 for zone in zones])


def test_a_row_on_a_pole_has_an_area_and_no_cosine() -> None:
    cosine = row_weights(small(**POLES), CPU)
    area = row_weights(small(**POLES, latitude_weights="area"), CPU)
    assert cosine[0] < 1e-15
    # A cap of half a row's height, beside zones of whole ones.
    cap = (1 - math.cos(math.radians(11.25))) / 2
    assert area[0] / 9 == pytest.approx(cap) and area.argmax() == 4


def test_area_and_cosine_agree_on_fine_grids() -> None:
    fine = {"n_lat": 128, "n_lon": 256}
    area, cosine = (row_weights(small(**fine, latitude_weights=kind), CPU) for kind in ("area", "cos"))
    assert (area / cosine - 1).abs().max() < 1e-10


def test_patches_lie_on_the_sphere_and_cover_it() -> None:
    places = patch_places(small(n_lat=32, n_lon=64, patch_size=4), CPU)
    assert places.shape == (8 * 16, 4)
    torch.testing.assert_close(places[:, :3].square().sum(1), torch.ones(128, dtype=torch.float64))
    assert places[:, 3].sum() == pytest.approx(4 * math.pi)
    assert (places[:16, 2] < -0.9).all() and (places[-16:, 2] > 0.9).all()
    # Neighbours across the date line are as close as any others of the row.
    first, last, second = places[64, :3], places[79, :3], places[65, :3]
    assert (first - last).norm() == pytest.approx(float((first - second).norm()))


def test_patches_that_reach_beyond_the_grid_count_as_far_as_it_goes() -> None:
    whole, cut = (small(n_lat=n_lat, n_lon=n_lon, patch_size=4) for n_lat, n_lon in ((32, 64), (31, 62)))
    places = patch_places(cut, CPU)
    assert places.shape == patch_places(whole, CPU).shape
    assert places[:, 3].sum() == pytest.approx(4 * math.pi)
    # Half as wide as its neighbour, and three rows of four high.
    assert places[15, 3] == pytest.approx(float(places[14, 3]) / 2)
    edge = 180 / 31 * 3
    assert places[-16, 3] == pytest.approx((1 - math.cos(math.radians(edge))) * 2 * math.pi * 4 / 62)
