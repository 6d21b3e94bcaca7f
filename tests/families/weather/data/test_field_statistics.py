"""Statistics and climatology: of the whole training period and of nothing else, checked against numpy on all values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray

from field_files import dataset, field, field_data, write_climax
from phalanx.errors import DataError
from phalanx.families.weather.config import FieldSource
from phalanx.families.weather.data import open_fields as field_set
from phalanx.families.weather.data.field_statistics import mean_by_day, read_statistics
from phalanx.families.weather.data.field_store import BlockCache
from phalanx.families.weather.data.open_fields import FieldSet, open_store
from phalanx.families.weather.data.prepare_fields import prepare_fields

HOURS = np.arange(240) * 6


def drifting(folder: Path) -> dict[str, np.ndarray]:
    """Four files in which variables grow from file to file, with some points missing; gives all values."""
    values = {name: field(name, HOURS).astype(np.float64) for name in ("z500", "t850", "u10")}
    values["t850"] += np.repeat([0.0, 5.0, 10.0, 25.0], 60)[:, None, None]
    values["u10"][:, 1, 2] = np.nan
    values["u10"][17] = np.nan
    values = {name: value.astype(np.float32) for name, value in values.items()}
    folder.mkdir()
    for number in range(4):
        part = slice(60 * number, 60 * number + 60)
        stored = dataset(HOURS[part])
        for name, value in values.items():
            stored[name] = (("time", "lat", "lon"), value[part])
        stored.to_netcdf(folder / f"{number}.nc")
    return values


@pytest.mark.parametrize("prepared", [False, True])
def test_statistics_are_of_every_training_frame_of_every_file(tmp_path: Path, prepared: bool) -> None:
    values = drifting(tmp_path / "files")
    path = tmp_path / "files"
    if prepared:
        prepare_fields(
            FieldSource(path=str(path)), tmp_path / "out", variables=["u10", "z500", "t850"], statics=["orography"]
        )
        path = tmp_path / "out"
    statistics = FieldSet(field_data(path)).statistics
    for name, value in values.items():
        training = value[:160].astype(np.float64)
        assert statistics.variables[name].mean == pytest.approx(np.nanmean(training), rel=1e-12)
        assert statistics.variables[name].std == pytest.approx(np.nanstd(training), rel=1e-10)
    assert statistics.frames == 160
    assert statistics.period == "2000-01-01 00:00 to 2000-02-09 18:00"
    orography = np.outer(np.arange(6) * 30 + 15.0, np.arange(8) + 1.0)
    assert statistics.variables["orography"].std == pytest.approx(orography.std(), rel=1e-6)
    # What the published script would have found: the last file alone.
    assert abs(statistics.variables["t850"].mean - values["t850"][120:160].mean()) > 5


def test_statistics_of_climax_shards_are_not_of_the_last_year(tmp_path: Path) -> None:
    write_climax(tmp_path / "shards", (2000, 2001, 2002))
    for path in (tmp_path / "shards" / "train").glob("2001_*.npz"):
        arrays = dict(np.load(path))
        np.savez(path, **{**arrays, "t850": arrays["t850"] + 8})
    np.savez(tmp_path / "shards" / "normalize_mean.npz", z500=np.zeros(1), t850=np.zeros(1), u10=np.zeros(1))
    periods = {"train": {"first": "2000", "last": "2001"}, "validation": {"first": "2002", "last": "2002"}}
    found = FieldSet(field_data(tmp_path / "shards", lead_hours=24, splits=periods)).statistics.variables["t850"].mean
    days = np.concatenate([np.arange(364), 366 + np.arange(364)]) * 24
    assert found == pytest.approx(field("t850", days).astype(np.float64).mean() + 4, abs=1e-4)


def test_statistics_of_several_sources_count_every_value_once(tmp_path: Path) -> None:
    dataset(HOURS).to_netcdf(tmp_path / "a.nc")
    other = dataset(HOURS)
    other["t850"] = other["t850"] + 20
    other.isel(time=slice(0, 200)).to_netcdf(tmp_path / "b.nc")
    periods = {"train": {"first": "2000-01-01", "last": "2000-02-29"}}
    statistics = FieldSet(field_data(tmp_path / "a.nc", tmp_path / "b.nc", splits=periods)).statistics
    a = field("t850", HOURS).astype(np.float64)
    both = np.concatenate([a, a[:200] + 20])
    assert statistics.variables["t850"].mean == pytest.approx(both.mean(), rel=1e-7)
    assert statistics.variables["t850"].std == pytest.approx(both.std(), rel=1e-6)
    assert statistics.frames == 440


@pytest.mark.parametrize("missing", ["skip", "mask"])
def test_frames_that_were_never_written_count_for_nothing(tmp_path: Path, missing: str) -> None:
    values = drifting(tmp_path / "files")["t850"]
    for number in range(2):
        path = tmp_path / "files" / f"{number}.nc"
        stored = xarray.load_dataset(path)
        stored["t850"][5:8] = 0.0
        stored.to_netcdf(path)
    fields = FieldSet(field_data(tmp_path / "files", missing=missing))
    unwritten = [5, 6, 7, 65, 66, 67]
    written = np.delete(values[:160].astype(np.float64), unwritten, axis=0)
    assert fields.statistics.variables["t850"].mean == pytest.approx(written.mean(), rel=1e-12)
    assert fields.statistics.variables["t850"].std == pytest.approx(written.std(), rel=1e-10)
    reader = fields.reader("train", seed=0)
    cases = reader.cases(0)
    assert len(cases) and not np.isin(cases.target, unwritten).any()


def test_statistics_of_an_earlier_run_are_used_as_they_are(tmp_path: Path) -> None:
    dataset(HOURS).to_netcdf(tmp_path / "a.nc")
    first = FieldSet(field_data(tmp_path / "a.nc")).statistics
    first.write(tmp_path / "s.json")
    assert read_statistics(tmp_path / "s.json", ["z500", "orography"]) == first
    warmer = dataset(HOURS)
    warmer["t850"] = warmer["t850"] + 2
    warmer.to_netcdf(tmp_path / "b.nc")
    later = FieldSet(field_data(tmp_path / "b.nc", statistics=str(tmp_path / "s.json")))
    assert later.statistics == first
    reader = later.reader("train", seed=0)
    batch = reader.read(np.arange(4))
    expected = (
        reader.read_outputs(reader.locate(np.arange(4))).numpy()[:, 1] - first.variables["t850"].mean
    ) / first.variables["t850"].std
    np.testing.assert_allclose(batch.targets[:, 1].numpy(), expected, atol=1e-5)


def test_fields_too_large_to_look_through_must_be_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset(HOURS).to_netcdf(tmp_path / "a.nc")
    monkeypatch.setattr(field_set, "_SURVEY_BYTES", 240 * 3 * 48 * 4 - 1)
    with pytest.raises(DataError, match="run phalanx data prepare-fields once"):
        FieldSet(field_data(tmp_path / "a.nc"))
    prepare_fields(
        FieldSource(path=str(tmp_path / "a.nc")),
        tmp_path / "out",
        variables=["z500", "t850", "u10"],
        statics=["orography"],
    )
    FieldSet(field_data(tmp_path / "out"))


def daily_mean(values: np.ndarray, days: np.ndarray, hours: np.ndarray, day: int, hour: int, window: int) -> np.ndarray:
    """The climatology by its definition."""
    distance = (days - day + 183) % 366 - 183
    chosen = (distance >= -(window // 2)) & (distance <= (window - 1) // 2) & (hours == hour)
    return values[chosen].astype(np.float64).mean(axis=0)


@pytest.mark.parametrize("window", [1, 30, 61])
def test_the_climatology_is_the_mean_around_each_day_of_year_and_time_of_day(tmp_path: Path, window: int) -> None:
    hours = np.arange(3 * 1464) * 6
    dataset(hours, ("t850",)).to_netcdf(tmp_path / "a.nc")
    store = open_store(FieldSource(path=str(tmp_path / "a.nc")), ["t850"], [], BlockCache(2**22))
    # Only the first two years; what comes after must not matter.
    frames = np.arange(2 * 1464, dtype=np.int64)
    found = mean_by_day(store, [0], frames, days=window)
    assert found.mean.shape == (366, 4, 1, 6, 8)
    dates = store.times.days_of_year[frames], store.times.seconds_of_day[frames] // 3600
    values = field("t850", hours)[frames]
    for day, part in ((0, 0), (59, 1), (180, 2), (365, 3)):
        expected = daily_mean(values, *dates, day, part * 6, window)
        np.testing.assert_allclose(found.mean[day, part, 0], expected, rtol=1e-6)
    # Some days alone, none of whose windows holds every frame: the same means.
    asked = np.array([5, 6, 300, 2 * 1464 - 1])
    some = mean_by_day(store, [0], frames, days=window, asked=asked)
    assert some.mean.shape == (3, 4, 1, 6, 8)
    np.testing.assert_allclose(some.at(store.times, asked), found.at(store.times, asked), rtol=1e-6)
    later = np.array([3 * 1464 - 1])
    date = store.times.days_of_year[later][0], 3
    np.testing.assert_array_equal(found.at(store.times, later)[0], found.mean[date])


@pytest.mark.parametrize("window", [2, 5, 10, 61])
def test_linear_weights_are_those_of_weatherbench(tmp_path: Path, window: int) -> None:
    """From 0 at the ends of an odd window to 1 in its middle (weatherbench2.utils.create_window_weights)."""
    hours = np.arange(2 * 1464) * 6
    dataset(hours, ("t850",)).to_netcdf(tmp_path / "a.nc")
    store = open_store(FieldSource(path=str(tmp_path / "a.nc")), ["t850"], [], BlockCache(2**22))
    frames = np.arange(2 * 1464, dtype=np.int64)
    found = mean_by_day(store, [0], frames, days=window, weights="linear")
    days, parts = store.times.days_of_year[frames], store.times.seconds_of_day[frames] // 21_600
    values = field("t850", hours)[frames].astype(np.float64)
    half = window // 2
    ramp = np.linspace(0.0, 1.0, half + 1)
    weights = np.concatenate([ramp, ramp[::-1][1:]]) if window > 2 else np.array([1.0, 1.0, 0.0])
    for day, part in ((0, 0), (59, 1), (365, 3)):
        distance = (days - day + 183) % 366 - 183
        near = (np.abs(distance) <= half) & (parts == part)
        expected = np.average(values[near], axis=0, weights=weights[distance[near] + half])
        np.testing.assert_allclose(found.mean[day, part, 0], expected, rtol=1e-6)
        assert found.frames[day, part] == np.count_nonzero(weights[distance[near] + half])


def test_the_climatology_leaves_out_what_is_missing(tmp_path: Path) -> None:
    hours = np.arange(366 * 4) * 6
    holes = dataset(hours)
    holes["t850"][8, 2, 2] = np.nan
    holes["t850"][12] = np.nan
    holes["t850"][:, 0, 0] = np.nan
    holes.to_netcdf(tmp_path / "a.nc")
    splits: dict[str, Any] = {"train": {"first": "2000", "last": "2000"}}
    found = FieldSet(field_data(tmp_path / "a.nc", splits=splits, climatology_days=5)).climatology()
    values = holes["t850"].values[np.array([0, 1, 2, 3, 4]) * 4].astype(np.float64)
    np.testing.assert_allclose(found.mean[2, 0, 1, 1:], np.nanmean(values[:, 1:], axis=0), rtol=1e-6)
    assert np.isnan(found.mean[2, 0, 1, 0, 0])


def test_the_climatology_is_of_the_training_split_and_refuses_days_it_does_not_know(tmp_path: Path) -> None:
    dataset(np.arange(400) * 6).to_netcdf(tmp_path / "a.nc")
    base = field_data(tmp_path / "a.nc", climatology_days=11)
    fields = FieldSet(base)
    found = fields.climatology()
    times = fields.stores[0].times
    assert found.frames.sum() == 160 * 11
    with pytest.raises(
        DataError, match=r"no frame within 5 days of the day of year of 2000-02-19 00:00; let data.climatology"
    ):
        found.at(times, np.array([196]))
    whole = base.model_copy(update={"climatology": base.splits.train.model_copy(update={"last": "step 399"})})
    assert np.isfinite(FieldSet(whole).climatology().at(times, np.array([196]))).all()


def test_monthly_means_have_one_climatology_a_month(tmp_path: Path) -> None:
    times = xarray.date_range("2000-01-16", "2002-12-17", freq="MS") + np.timedelta64(15, "D")
    hours = ((times - np.datetime64("2000-01-01")) / np.timedelta64(1, "h")).to_numpy()
    dataset(hours, ("t850",)).to_netcdf(tmp_path / "a.nc")
    store = open_store(FieldSource(path=str(tmp_path / "a.nc")), ["t850"], [], BlockCache(2**22))
    found = mean_by_day(store, [0], np.arange(len(hours), dtype=np.int64), days=15)
    assert found.mean.shape[:2] == (366, 1)
    expected = field("t850", hours)[[4, 16, 28]].mean(axis=0)
    np.testing.assert_allclose(found.at(store.times, np.array([16]))[0, 0], expected, rtol=1e-6)
