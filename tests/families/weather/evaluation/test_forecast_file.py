"""Forecasts as files: what xarray reads is what the model forecast, under the names that WeatherBench 2 uses."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xarray

from distributed_ranks import run_ranks
from field_files import LATITUDES, LONGITUDES, dataset
from phalanx.config.load import load_run
from phalanx.errors import ConfigError, DataError
from phalanx.families.weather.config import FieldSource
from phalanx.families.weather.data.open_fields import FieldSet
from phalanx.families.weather.data.prepare_fields import prepare_fields
from phalanx.families.weather.evaluation.forecast_file import FileLayout, open_forecast_file
from phalanx.families.weather.evaluation.forecast_from import forecast_from
from phalanx.families.weather.evaluation.forecast_split import (
    LoadedForecaster,
    forecast_split,
    lead_steps,
    load_forecaster,
    roll_out,
)
from phalanx.training.start import train
from weather_runs import write_weather_run

CPU = torch.device("cpu")
STARTS = 7


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, on fields that say their units."""
    folder = tmp_path_factory.mktemp("files")
    stored = dataset(np.arange(240) * 6)
    stored["t850"].attrs["units"] = "K"
    stored.to_netcdf(folder / "fields.nc")
    train(load_run(write_weather_run(folder), ["training.steps=3", "optimizer.lr=0.05"]), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def loaded(run_dir: Path) -> LoadedForecaster:
    return load_forecaster(run_dir, CPU)


@pytest.fixture(scope="module")
def written(run_dir: Path, loaded: LoadedForecaster) -> dict[str, Path]:
    """The same forecasts as a zarr store and as a netCDF file."""
    found = {kind: run_dir / f"forecasts.{kind}" for kind in ("zarr", "nc")}
    for path in found.values():
        forecast_split(loaded, hours=36, split="test", starts=STARTS, out=path)
    return found


def opened(path: Path) -> xarray.Dataset:
    with xarray.open_dataset(path, engine="zarr" if path.suffix == ".zarr" else "netcdf4") as found:
        return found.load()


@pytest.mark.parametrize("kind", ["zarr", "nc"])
def test_coordinates_are_those_of_weatherbench(written: dict[str, Path], kind: str) -> None:
    found = opened(written[kind])
    assert dict(found.sizes) == {
        "time": STARTS, "prediction_timedelta": 6, "level": 2, "latitude": 6, "longitude": 8,
    }  # fmt: skip
    assert found.time.dtype.kind == "M" and found.prediction_timedelta.dtype.kind == "m"
    hours = found.prediction_timedelta.values / np.timedelta64(1, "h")
    assert hours.tolist() == [6, 12, 18, 24, 30, 36]
    # The last input of the split has one truth, 6 h on; what it forecasts beyond is in the file all the same.
    assert found.time.values[-1] == np.datetime64("2000-01-01") + np.timedelta64(238 * 6, "h")
    np.testing.assert_array_equal(found.latitude, LATITUDES)
    np.testing.assert_array_equal(found.longitude, LONGITUDES)
    assert found.level.values.tolist() == [500, 850] and found.level.attrs["units"] == "hPa"
    assert found.time.attrs["standard_name"] == "forecast_reference_time"
    assert found.attrs["Conventions"].startswith("CF-")
    assert set(found.data_vars) == {"z", "t", "u10"}
    assert found.t.attrs["units"] == "K" and "units" not in found.z.attrs
    assert found.t.dims == ("time", "prediction_timedelta", "level", "latitude", "longitude")


@pytest.mark.parametrize("kind", ["zarr", "nc"])
def test_fields_are_those_that_the_model_forecast(
    loaded: LoadedForecaster, written: dict[str, Path], kind: str
) -> None:
    found, steps = opened(written[kind]), lead_steps(loaded.run, 36, None)
    reader = FieldSet(loaded.run.data).reader("test", seed=0, leads=list(steps))
    start = reader.sources[0].windows.starts[[-1]]
    for column, fields in enumerate(roll_out(loaded.model, reader, 0, start, steps)):
        last = found.isel(time=-1, prediction_timedelta=column)
        for place, one in enumerate((last.z.sel(level=500), last.t.sel(level=850), last.u10)):
            np.testing.assert_allclose(one, fields[0, place].numpy(), rtol=1e-5, atol=1e-4)
    # Levels that a variable does not have.
    assert np.isnan(found.z.sel(level=850)).all() and np.isnan(found.t.sel(level=500)).all()
    assert not np.isnan(found.z.sel(level=500)).any()


def test_scores_of_the_file_are_those_of_the_command(loaded: LoadedForecaster, run_dir: Path, tmp_path: Path) -> None:
    rows = forecast_split(loaded, hours=24, split="test", starts=STARTS, out=tmp_path / "a.zarr").rows
    found = opened(tmp_path / "a.zarr")
    truth = xarray.open_dataset(run_dir.parent / "fields.nc").load().rename(lat="latitude", lon="longitude")
    area = xarray.DataArray(np.diff(np.sin(np.deg2rad([-90, -60, -30, 0, 30, 60, 90]))), dims="latitude")
    for row in rows:
        lead = np.timedelta64(row.lead_hours, "h")
        arrays = {"z500": ("z", 500), "t850": ("t", 850)}
        forecast = found.sel(prediction_timedelta=lead)
        forecast = forecast.u10 if row.variable == "u10" else forecast[arrays[row.variable][0]].sel(
            level=arrays[row.variable][1]
        )  # fmt: skip
        valid = forecast.time + lead
        known = valid.isin(truth.time)
        there = truth[row.variable].sel(time=valid[known].values)
        error = forecast[known].values - there.values
        weighted = xarray.DataArray(error**2, dims=("n", "latitude", "longitude")).weighted(area).mean()
        assert row.forecasts == int(known.sum())
        assert row.rmse == pytest.approx(math.sqrt(float(weighted)), rel=1e-5)


THREE_TIMES = ["2000-02-20 06:00", "2000-02-18 00:00", "2000-02-21 18:00"]


def _write_shares(run_dir: Path, folder: Path) -> int:
    loaded, share = load_forecaster(run_dir, CPU), {"rank": dist.get_rank(), "ranks": dist.get_world_size()}
    forecast_from(loaded, THREE_TIMES, folder / "three.zarr", hours=36, **share)
    # Of a single time the second rank has nothing to forecast.
    forecast_from(loaded, THREE_TIMES[:1], folder / "single.zarr", hours=36, **share)
    return forecast_split(loaded, hours=36, split="test", starts=STARTS, out=folder / "split.zarr", **share).starts


def test_ranks_write_one_store(
    run_dir: Path, loaded: LoadedForecaster, written: dict[str, Path], tmp_path: Path
) -> None:
    assert run_ranks(_write_shares, 2, run_dir, tmp_path) == [STARTS] * 2
    xarray.testing.assert_allclose(opened(tmp_path / "split.zarr"), opened(written["zarr"]), rtol=1e-5, atol=1e-4)
    for name, times in (("three.zarr", THREE_TIMES), ("single.zarr", THREE_TIMES[:1])):
        alone = tmp_path / f"alone {name}"
        forecast_from(loaded, times, alone, hours=36)
        # Every start is forecast by itself, so that not a bit depends on the ranks.
        files = {path.relative_to(alone): path.read_bytes() for path in alone.rglob("*") if path.is_file()}
        shared = tmp_path / name
        assert files == {path.relative_to(shared): path.read_bytes() for path in shared.rglob("*") if path.is_file()}
    assert len(list(tmp_path.iterdir())) == 5


def test_a_forecast_from_a_time_needs_no_truth(
    loaded: LoadedForecaster, written: dict[str, Path], tmp_path: Path
) -> None:
    known = opened(written["nc"]).isel(time=[0, -1])
    times = [str(time)[:16].replace("T", " ") for time in known.time.values]
    steps = forecast_from(loaded, times[::-1], tmp_path / "some.nc", hours=36)
    assert list(steps) == [6, 12, 18, 24, 30, 36]
    xarray.testing.assert_allclose(opened(tmp_path / "some.nc"), known, rtol=1e-5, atol=1e-4)
    # A file of one frame, later than all that the run knows.
    alone = dataset(np.array([240 * 6]))
    alone.to_netcdf(tmp_path / "today.nc")
    later = loaded.run.data.model_copy(update={"sources": [FieldSource(path=str(tmp_path / "today.nc"))]})
    moved = LoadedForecaster(loaded.model, loaded.run.model_copy(update={"data": later}), loaded.where, 3)
    forecast_from(moved, ["2000-03-01"], tmp_path / "later.zarr", hours=48, step_hours=24)
    found = opened(tmp_path / "later.zarr")
    assert found.time.values[0] == np.datetime64("2000-03-01") and found.sizes["prediction_timedelta"] == 2
    assert not np.isnan(found.z.sel(level=500)).any()
    # The model changes little in three steps: what comes out is near what went in.
    assert np.abs(found.u10[0, 0] - alone.u10[0].values).max() < 5
    alone["u10"][:] = np.nan
    alone.to_netcdf(tmp_path / "empty.nc")
    empty = later.model_copy(update={"sources": [FieldSource(path=str(tmp_path / "empty.nc"))]})
    moved = LoadedForecaster(loaded.model, loaded.run.model_copy(update={"data": empty}), loaded.where, 3)
    with pytest.raises(DataError, match="no value at any point; nothing can be forecast from it"):
        forecast_from(moved, ["2000-03-01"], tmp_path / "none.zarr", hours=24)


def test_a_time_that_is_no_frame_is_refused(loaded: LoadedForecaster, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no frame of that time\nnearest: --from '2000-01-02 06:00'"):
        forecast_from(loaded, ["2000-01-02 07:30"], tmp_path / "a.nc", hours=24)
    with pytest.raises(ConfigError, match="has 4 frames in it; name one, to the minute"):
        forecast_from(loaded, ["2000-01-02"], tmp_path / "a.nc", hours=24)
    assert not list(tmp_path.iterdir())


def test_paths_that_cannot_be_written_are_refused(loaded: LoadedForecaster, tmp_path: Path) -> None:
    (tmp_path / "old.nc").touch()
    for name, message in (("a.txt", "name FILE.nc or FILE.zarr"), ("old.nc", "is already there; remove it")):
        with pytest.raises(ConfigError, match=message):
            forecast_split(loaded, hours=24, split="test", starts=1, out=tmp_path / name)
    with pytest.raises(ConfigError, match=r"2 ranks cannot write one netCDF file; name FILE\.zarr"):
        forecast_split(loaded, hours=24, split="test", starts=1, out=tmp_path / "b.nc", ranks=2)


def test_a_forecast_that_fails_leaves_no_file(loaded: LoadedForecaster, tmp_path: Path) -> None:
    store = FieldSet(loaded.run.data).stores[0]
    layout = FileLayout.of(store, ["z500"], np.array([0]), [6])
    for name in ("a.zarr", "a.nc"):
        with pytest.raises(RuntimeError), open_forecast_file(tmp_path / name, layout, "a test") as file:
            file.write(np.array([0]), 0, torch.zeros(1, 1, 6, 8))
            raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_prepared_fields_know_their_units(run_dir: Path, tmp_path: Path) -> None:
    source = FieldSource(path=str(run_dir.parent / "fields.nc"))
    prepare_fields(source, tmp_path / "out", variables=["z500", "t850", "u10"], statics=["orography"])
    data = load_run(run_dir.parent / "run.yaml", [f'data.sources=["{tmp_path / "out"}"]']).data
    store = FieldSet(data).stores[0]  # type: ignore[arg-type]
    assert [store.unit_of(place) for place in range(3)] == ["", "K", ""]
    scaled = FieldSource.model_validate({"path": str(run_dir.parent / "fields.nc"), "names": [
        {"name": "t850", "stored_as": "t850", "offset": -273.15}]})  # fmt: skip
    store = FieldSet(data.model_copy(update={"sources": [scaled]})).stores[0]  # type: ignore[arg-type]
    # Kelvin no more, and nobody says what.
    assert store.unit_of(1) == ""
