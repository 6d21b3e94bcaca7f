"""The sample weather: the same numbers again, weather that is like weather, a file that a run reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray

from phalanx.errors import DataError
from phalanx.families.weather.data.sample_weather import FRAME_HOURS, LATITUDES, simulate_weather, write_weather


@pytest.fixture(scope="module")
def weather() -> xarray.Dataset:
    return simulate_weather(30, seed=0)


def area_mean(field: xarray.DataArray) -> float:
    return float(field.weighted(np.cos(np.deg2rad(field.lat))).mean())


def test_the_same_seed_gives_the_same_bits(tmp_path: Path) -> None:
    first, again, other = (simulate_weather(2, seed, spin_up_days=1) for seed in (0, 0, 1))
    for name in again:
        np.testing.assert_array_equal(again[name], first[name])
        assert name == "orography" or not np.allclose(again[name], other[name], rtol=1e-6)
    samples = [write_weather(tmp_path / name, days=1, spin_up_days=1) for name in "ab"]
    assert samples[0] == samples[1] and len(samples[0].files[0].sha256) == 64


def test_it_is_like_weather(weather: xarray.Dataset) -> None:
    westerlies = weather["u_component_of_wind_200"].mean(("time", "lon"))
    jets = [float(LATITUDES[half][int(westerlies.values[half].argmax())]) for half in (LATITUDES < 0, LATITUDES > 0)]
    assert jets == pytest.approx([-45, 45], abs=12) and 20 < float(westerlies.max()) < 60
    # Warm tropics, cold poles; colder above.
    warm, cold = (weather["temperature_650"].sel(lat=lat, method="nearest").mean() for lat in (0, 88))
    assert 15 < float(warm - cold) < 60
    assert float((weather["temperature_650"] - weather["temperature_350"]).min()) > 5
    # Eddies of the middle latitudes, and forecasts of persistence that get worse by the day.
    eddies = weather["v_component_of_wind_500"].std("time").sel(lat=slice(30, 60))
    assert 3 < float(eddies.mean()) < 20
    height = weather["geopotential_500"]
    errors = [area_mean((height - height.shift(time=frames)) ** 2) ** 0.5 for frames in (1, 2, 4)]
    assert errors == sorted(errors) and 100 < errors[0] < 600
    assert area_mean((height - height.mean("time")) ** 2) ** 0.5 < errors[2] * 1.5


def test_thickness_is_temperature(weather: xarray.Dataset) -> None:
    # Thermal wind: where the middle latitudes are colder poleward, westerlies grow upward.
    shear = (weather["u_component_of_wind_500"] - weather["u_component_of_wind_800"]).mean(("time", "lon"))
    slope = weather["temperature_650"].mean(("time", "lon")).differentiate("lat")
    for north in (True, False):
        zone = slice(30, 60) if north else slice(-60, -30)
        assert float(shear.sel(lat=zone).mean()) > 2
        assert (float(slope.sel(lat=zone).mean()) < 0) is north


def test_the_file_holds_what_was_simulated(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "weather.nc"
    write_weather(path.parent, days=2, seed=3, spin_up_days=1)
    assert sorted(item.name for item in path.parent.iterdir()) == ["sample.json", "weather.nc"]
    simulated = simulate_weather(2, seed=3, spin_up_days=1)
    with xarray.open_dataset(path) as written:
        assert written.sizes == {"time": 2 * 24 // FRAME_HOURS, "lat": 32, "lon": 64}
        for name in simulated:
            step = simulated[name].encoding.get("scale_factor", 0.0)
            np.testing.assert_allclose(written[name], simulated[name], atol=0.51 * step + 1e-3)
    with pytest.raises(DataError, match=r"weather.nc is already there; remove it or name another folder"):
        write_weather(path.parent, days=2)
    with pytest.raises(DataError, match=r"cannot write .*name another --out DIR"):
        write_weather(path / "below-a-file", days=1, spin_up_days=0)
