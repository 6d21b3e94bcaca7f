"""Wrong data: each mistake gives a message that names file, variable and time, and none is trained on silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import pytest
import zarr

from field_files import LATITUDES, dataset, field, field_data, write_climax, write_year
from phalanx.errors import ConfigError, DataError, PhalanxError
from phalanx.families.weather.config import FieldSource
from phalanx.families.weather.data.field_samples import FieldReader
from phalanx.families.weather.data.open_fields import FieldSet
from phalanx.families.weather.data.prepare_fields import prepare_fields

HOURS = np.arange(240) * 6


def refused(kind: type[PhalanxError], *sources: Any, **changes: Any) -> str:
    """The message of a data section that is refused."""
    with pytest.raises(kind) as caught:
        FieldSet(field_data(*sources, **changes)).reader("train", seed=0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def reader(*sources: Any, **changes: Any) -> FieldReader:
    return FieldSet(field_data(*sources, **changes)).reader("train", seed=0)


def test_a_month_missing(tmp_path: Path) -> None:
    write_year(tmp_path / "year")
    (tmp_path / "year" / "part1.nc").unlink()
    message = refused(DataError, tmp_path / "year", splits={"train": {"first": "step 0", "last": "step 150"}})
    assert "part0.nc: time index 59 (2000-01-15 18:00) is followed by 2000-01-31 00:00 in" in message
    assert "part2.nc: 60 steps of 6 h are missing" in message


def test_with_the_hole_skipped_no_sample_reaches_over_it(tmp_path: Path) -> None:
    write_year(tmp_path / "year")
    (tmp_path / "year" / "part1.nc").unlink()
    splits = {"train": {"first": "2000-01-01", "last": "2000-02-10"}}
    windows = reader(tmp_path / "year", gaps="skip", splits=splits).sources[0].windows
    for lead, column in ((6, 0), (12, 1), (24, 2)):
        found = windows.targets[:, column] >= 0
        steps = np.concatenate([np.arange(60), np.arange(120, 240)])
        jump = steps[windows.targets[found, column]] - steps[windows.starts[found]]
        assert (jump == lead // 6).all()
    assert 59 not in windows.starts  # the last before the hole, which has no target at all


def test_times_that_are_uneven(tmp_path: Path) -> None:
    hours = HOURS.copy()
    hours[100] += 2
    dataset(hours).to_netcdf(tmp_path / "uneven.nc")
    assert "uneven.nc: time index 99" in (message := refused(DataError, tmp_path / "uneven.nc"))
    assert "steps are uneven" in message


def test_a_variable_missing_everywhere(tmp_path: Path) -> None:
    dataset(HOURS, ("z500", "t850")).to_netcdf(tmp_path / "two.nc")
    message = refused(DataError, tmp_path / "two.nc")
    assert (
        "two.nc has no variable u10; it has orography, t850, z500; other names go under names of the source" in message
    )


def test_a_variable_missing_in_one_file(tmp_path: Path) -> None:
    dataset(HOURS[:100]).to_netcdf(tmp_path / "a.nc")
    dataset(HOURS[100:], ("z500", "t850")).to_netcdf(tmp_path / "b.nc")
    message = refused(DataError, tmp_path)
    assert "b.nc: no variable u10 at 2000-01-26 00:00, where z500 has a frame" in message


def test_a_static_field_missing_with_holes_or_not_static(tmp_path: Path) -> None:
    dataset(HOURS, static=False).to_netcdf(tmp_path / "a.nc")
    assert "has no static field orography" in refused(DataError, tmp_path / "a.nc")
    assert "depends on time; name it under data.inputs" in refused(
        DataError, tmp_path / "a.nc", static=["t850"], inputs=["z500"]
    )
    holes = dataset(HOURS)
    holes["orography"][2, 3] = np.nan
    holes.to_netcdf(tmp_path / "b.nc")
    assert "b.nc: static field orography has 1 points without a value" in refused(DataError, tmp_path / "b.nc")
    message = refused(DataError, tmp_path / "b.nc", inputs=["z500", "orography"], static=[])
    assert "orography does not depend on time; name it under data.static" in message


def test_files_that_overlap_in_time(tmp_path: Path) -> None:
    dataset(HOURS[:130]).to_netcdf(tmp_path / "a.nc")
    dataset(HOURS[120:]).to_netcdf(tmp_path / "b.nc")
    message = refused(DataError, tmp_path)
    assert "a.nc and" in message
    assert "b.nc overlap in time: z500 goes to 2000-02-02 06:00 in the first and begins at 2000-01-31 00:00" in message


@pytest.mark.parametrize("order", [[0, 1, 1, 2], [0, 2, 1, 3]])
def test_double_and_unsorted_steps(tmp_path: Path, order: list[int]) -> None:
    dataset(HOURS[order]).to_netcdf(tmp_path / "a.nc")
    assert "a.nc: time: time index 2" in refused(DataError, tmp_path / "a.nc")


def test_unequal_grids(tmp_path: Path) -> None:
    dataset(HOURS[:120]).to_netcdf(tmp_path / "a.nc")
    dataset(HOURS[120:], latitudes=LATITUDES + np.array([0, 0, 1, 0, 0, 0])).to_netcdf(tmp_path / "b.nc")
    assert "b.nc: another grid than that of" in (message := refused(DataError, tmp_path))
    assert "latitude 2 is -14 instead of -15" in message
    assert "another grid than that of" in refused(DataError, tmp_path / "a.nc", tmp_path / "b.nc", splits=split(99))


def split(last: int) -> dict[str, Any]:
    return {"train": {"first": "step 0", "last": f"step {last}"}}


def test_files_of_two_calendars(tmp_path: Path) -> None:
    dataset(HOURS[:120]).to_netcdf(tmp_path / "a.nc")
    dataset(HOURS[120:], calendar="360_day").to_netcdf(tmp_path / "b.nc")
    message = refused(DataError, tmp_path)
    assert "a.nc: calendar proleptic_gregorian, but" in message
    assert "b.nc has 360_day" in message


def test_a_calendar_of_360_days_trains(tmp_path: Path) -> None:
    dataset(np.arange(1440) * 6, calendar="360_day").to_netcdf(tmp_path / "a.nc")
    periods = {"train": {"first": "2000-01", "last": "2000-02-30"}}
    batch = reader(tmp_path / "a.nc", splits=periods).read(np.arange(64))
    assert batch.time_of_year.max() < 60 / 360


def test_latitudes_turned_in_the_file_are_turned_back(tmp_path: Path) -> None:
    dataset(HOURS).to_netcdf(tmp_path / "south.nc")
    dataset(HOURS).isel(lat=slice(None, None, -1)).to_netcdf(tmp_path / "north.nc")
    south, north = (reader(tmp_path / name).read(np.arange(8)) for name in ("south.nc", "north.nc"))
    assert south.fields.equal(north.fields)
    assert south.targets.equal(north.targets)


def test_latitudes_that_do_not_belong_to_the_fields(tmp_path: Path) -> None:
    dataset(HOURS).to_netcdf(tmp_path / "a.nc")
    wrong = dataset(HOURS)
    for name in ("z500", "t850", "u10"):
        wrong[name] = wrong[name][:, ::-1].assign_coords(lat=LATITUDES)
    wrong.to_netcdf(tmp_path / "b.nc")
    message = refused(DataError, tmp_path / "a.nc", tmp_path / "b.nc")
    assert "latitudes of" in message
    assert "b.nc look reversed" in message
    reader(tmp_path / "a.nc", tmp_path / "b.nc", check_units=False)


@pytest.mark.parametrize(
    ("scale", "offset", "cause"),
    [
        (1 / 9.80665, 0.0, "factor of about 9.80665, as between geopotential"),
        (100.0, 0.0, "factor of about 100, as between hPa"),
    ],
)
def test_units_off_by_a_factor_between_sources(tmp_path: Path, scale: float, offset: float, cause: str) -> None:
    dataset(HOURS).to_netcdf(tmp_path / "a.nc")
    other = dataset(HOURS)
    other["z500"] = other["z500"] * scale + offset
    other.to_netcdf(tmp_path / "b.nc")
    message = refused(DataError, tmp_path / "a.nc", tmp_path / "b.nc")
    assert "z500 has mean" in message
    assert "b.nc, but" in message
    assert cause in message
    right = {"name": "z500", "stored_as": "z500", "scale": 1 / scale, "offset": -offset}
    both = [
        FieldSource(path=str(tmp_path / "a.nc")),
        FieldSource.model_validate({"path": str(tmp_path / "b.nc"), "names": [right]}),
    ]
    assert reader(*both).read(np.arange(4)).fields.isfinite().all()


def test_units_that_change_from_one_file_to_the_next(tmp_path: Path) -> None:
    dataset(HOURS[:120]).to_netcdf(tmp_path / "a.nc")
    other = dataset(HOURS[120:])
    other["t850"] = other["t850"] - 273.15
    other.to_netcdf(tmp_path / "b.nc")
    message = refused(DataError, tmp_path)
    assert "t850 has mean" in message
    assert "b.nc, but" in message
    assert "off by about 273.15, as between kelvin and degrees Celsius" in message


@pytest.mark.parametrize(("scale", "fits"), [(1 / 3.5, True), (1 / 9.80665, False)])
def test_files_of_two_seasons_may_spread_further_apart_than_those_of_one(
    tmp_path: Path, scale: float, fits: bool
) -> None:
    dataset(HOURS[:120]).to_netcdf(tmp_path / "a.nc")
    other = dataset(HOURS[120:])
    other["z500"] = 54000.0 + scale * (other["z500"] - 54000.0)
    other.to_netcdf(tmp_path / "b.nc")
    if fits:
        FieldSet(field_data(tmp_path))
        # The same spread within the very days of the first file is none of a season.
        other["time"] = dataset(HOURS[:120])["time"]
        other.to_netcdf(tmp_path / "b.nc")
        splits = {"train": {"first": "step 0", "last": "step 119"}}
        assert "z500 has mean" in refused(DataError, tmp_path / "a.nc", tmp_path / "b.nc", splits=splits)
    else:
        assert "z500 has mean" in refused(DataError, tmp_path)


def test_units_other_than_those_of_the_statistics(tmp_path: Path) -> None:
    dataset(HOURS).to_netcdf(tmp_path / "a.nc")
    FieldSet(field_data(tmp_path / "a.nc")).statistics.write(tmp_path / "statistics.json")
    other = dataset(HOURS)
    other["t850"] = other["t850"] - 273.15
    other.to_netcdf(tmp_path / "b.nc")
    message = refused(DataError, tmp_path / "b.nc", statistics=str(tmp_path / "statistics.json"))
    assert "b.nc, but" in message
    assert "kelvin and degrees Celsius" in message


def test_a_frame_without_values_costs_its_samples_and_is_reported(tmp_path: Path) -> None:
    holes = dataset(HOURS)
    holes["t850"][50] = np.nan
    holes["u10"][70, 0, 0] = np.nan
    holes.to_netcdf(tmp_path / "a.nc")
    windows = reader(tmp_path / "a.nc").sources[0].windows
    assert not np.isin(windows.starts, [50, 70]).any()
    assert not np.isin(windows.targets, [50, 70]).any()
    assert (windows.without_input, windows.without_target) == (2, 6)
    report = windows.report()
    assert report.startswith("train: 157 samples; 2 input frames and 6 targets left out for missing values in ")
    assert "a.nc: t850, time index 50 (2000-01-13 12:00); " in report
    message = refused(DataError, tmp_path / "a.nc", missing="refuse")
    assert "a.nc: t850, time index 50 (2000-01-13 12:00): 48 more missing points than usual; 2 of 160 frames" in message


def test_with_masks_a_point_missing_is_filled_in_the_input_and_no_target(tmp_path: Path) -> None:
    holes = dataset(HOURS)
    holes["t850"][50] = np.nan
    holes["u10"][70, 0, 0] = np.nan
    holes.to_netcdf(tmp_path / "a.nc")
    found = reader(tmp_path / "a.nc", missing="mask")
    cases = found.cases()
    assert 50 not in cases.start
    assert {50, 70} <= set(cases.target.tolist())
    batch = found.read_cases(cases)
    assert batch.fields.isfinite().all()
    assert batch.fields[cases.start == 70][:, 2, 0, 0].eq(0).all()
    masked = batch.targets.isnan().sum((2, 3))
    assert masked[cases.target == 50].tolist() == [[0, 48, 0]] * 3
    assert masked[cases.target == 70].tolist() == [[0, 0, 1]] * 3
    assert int(batch.target_counts()) == batch.targets.numel() - 3 * 48 - 3


def test_a_chunk_that_was_never_written_is_missing(tmp_path: Path) -> None:
    dataset(HOURS).to_zarr(
        tmp_path / "a.zarr",
        zarr_format=2,
        consolidated=False,
        encoding={"u10": {"chunks": (20, 6, 8), "_FillValue": None}},
    )
    (tmp_path / "a.zarr" / "u10" / "2.0.0").unlink()
    windows = reader(tmp_path / "a.zarr").sources[0].windows
    assert windows.without_input == 20
    assert not np.isin(windows.starts, np.arange(40, 60)).any()


@pytest.mark.parametrize(
    ("value", "words"), [(np.inf, "infinite values"), (-1e30, "the value -1e+30, which no field has")]
)
def test_infinite_and_absurd_values(value: float, words: str, tmp_path: Path) -> None:
    bad = dataset(HOURS)
    bad["z500"][7, 0, 0] = value
    bad.to_netcdf(tmp_path / "a.nc")
    assert f"a.nc: z500, time index 7 (2000-01-02 18:00): holds {words}" in refused(DataError, tmp_path / "a.nc")


def test_a_variable_that_never_changes(tmp_path: Path) -> None:
    flat = dataset(HOURS)
    flat["z500"][:] = 3.0
    flat.to_netcdf(tmp_path / "a.nc")
    assert "z500 is 3 everywhere in the training split" in refused(DataError, tmp_path / "a.nc")


def test_a_variable_without_any_value(tmp_path: Path) -> None:
    fields = dataset(HOURS)
    fields["t850"][:] = np.nan
    fields.to_netcdf(tmp_path / "empty.nc")
    for missing in ("skip", "mask", "refuse"):
        message = refused(DataError, tmp_path / "empty.nc", missing=missing)
        assert message == f"{tmp_path}/empty.nc: t850 has no value in the training split; nothing can be learnt from it"


def test_coordinates_without_any_value(tmp_path: Path) -> None:
    for name in ("lat", "lon", "time"):
        fields = dataset(HOURS)
        fields[name] = (name, np.full(fields.sizes[name], np.nan), fields[name].attrs)
        fields.to_netcdf(tmp_path / f"{name}.nc")
        assert f"{name}.nc" in refused(DataError, tmp_path / f"{name}.nc")


@pytest.mark.parametrize("name", ["lat", "time"])
def test_dimensions_that_are_declared_longer_than_memory(tmp_path: Path, name: str) -> None:
    """Files of a few kilobytes, of which nothing is read."""
    lengths = {"time": 4, "lat": 6, "lon": 8} | {name: 4_000_000_000}
    with netCDF4.Dataset(tmp_path / "huge.nc", "w") as file:
        for one, length in lengths.items():
            file.createDimension(one, length)
            file.createVariable(one, "f8", (one,), zlib=True, chunksizes=(min(length, 2**20),))
        file["time"].units = "hours since 2000-01-01"
        file.createVariable("z500", "f4", ("time", "lat", "lon"), zlib=True, chunksizes=(1, 1, 8))
    assert (tmp_path / "huge.nc").stat().st_size < 10**6
    message = refused(DataError, tmp_path / "huge.nc")
    assert message == (
        f"{tmp_path}/huge.nc: 4,000,000,000 values along {name} are more than the 16,777,216 that can be read; the file is "
        f"damaged, or must be parted"
    )
    group = zarr.open_group(str(tmp_path / "huge.zarr"), mode="w", zarr_format=2)
    for one, length in lengths.items():
        array = group.create_array(one, shape=(length,), chunks=(min(length, 2**20),), dtype="f8")
        array.attrs["_ARRAY_DIMENSIONS"] = [one]
    assert f"huge.zarr: 4,000,000,000 values along {name}" in refused(DataError, tmp_path / "huge.zarr")


def test_a_grid_larger_than_memory(tmp_path: Path) -> None:
    with netCDF4.Dataset(tmp_path / "grid.nc", "w") as file:
        for one, values in (
            ("time", np.arange(4.0)),
            ("lat", np.linspace(-89, 89, 20_000)),
            ("lon", np.arange(20_000) * 0.018),
        ):
            file.createDimension(one, len(values))
            file.createVariable(one, "f8", (one,))[:] = values
        file["time"].units = "hours since 2000-01-01"
        file.createVariable("z500", "f4", ("time", "lat", "lon"), zlib=True, chunksizes=(1, 1000, 1000))
    assert "grid.nc: a grid of 20,000 x 20,000 points is more than" in refused(DataError, tmp_path / "grid.nc")


def test_a_truncated_netcdf_file(tmp_path: Path) -> None:
    write_year(tmp_path / "year")
    path = tmp_path / "year" / "part2.nc"
    path.write_bytes(path.read_bytes()[:9000])
    assert "part2.nc: cannot be opened" in refused(DataError, tmp_path / "year")


def test_a_damaged_chunk(tmp_path: Path) -> None:
    hours = HOURS[:240]
    dataset(hours).to_zarr(
        tmp_path / "a.zarr", zarr_format=2, consolidated=False, encoding={"u10": {"chunks": (20, 6, 8)}}
    )
    chunk = tmp_path / "a.zarr" / "u10" / "2.0.0"
    chunk.write_bytes(chunk.read_bytes()[:50])
    assert "a.zarr: u10, time indices 40 to 59: cannot be read" in refused(DataError, tmp_path / "a.zarr")


def climax(folder: Path, **changes: Any) -> str:
    daily = {"lead_hours": 24, "splits": {"train": {"first": "2000", "last": "2001"}}, **changes}
    return refused(DataError, folder, **daily)


def test_climax_shards_that_are_truncated_missing_double_or_lack_a_variable(tmp_path: Path) -> None:
    write_climax(tmp_path / "a", (2000, 2001, 2002))
    shard = tmp_path / "a" / "train" / "2001_1.npz"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1000])
    assert "2001_1.npz: z500 cannot be read" in climax(tmp_path / "a")
    shard.unlink()
    assert "train/2001_1.npz is missing: 2 shards expected" in climax(tmp_path / "a")
    np.savez(shard, z500=np.zeros((182, 1, 6, 8)), t850=np.zeros((182, 1, 6, 8)))
    assert "2001_1.npz has no variable u10; it has t850, z500" in climax(tmp_path / "a")
    np.savez(shard, z500=np.zeros((182, 1, 6, 9)))
    assert "2001_1.npz: z500 has the shape (182, 1, 6, 9)" in climax(tmp_path / "a")
    shard.write_bytes(whole)
    (tmp_path / "a" / "val" / "2001_1.npz").write_bytes(whole)
    assert "overlap in time: both are shard 1 of 2001" in climax(tmp_path / "a")


def test_climax_shards_of_a_missing_year_or_an_unknown_step(tmp_path: Path) -> None:
    write_climax(tmp_path / "a", (2000, 2002))
    assert "367 steps of 24 h are missing" in climax(tmp_path / "a")
    write_climax(tmp_path / "b", (2000, 2001), frames=100)
    assert "100 frames in 2000 are no whole year of hours; set step_hours" in climax(tmp_path / "b")
    assert "reach into what begins there" in climax(
        tmp_path / "b", sources=[{"path": str(tmp_path / "b"), "step_hours": 96}]
    )


def test_what_climax_drops_at_the_end_of_a_year_is_no_hole_prepared_or_not(tmp_path: Path) -> None:
    write_climax(tmp_path / "a", (2000, 2001))
    splits = {"train": {"first": "2000", "last": "2001"}}
    names = {"variables": ["z500", "t850", "u10"], "statics": ["orography"]}
    prepare_fields(FieldSource(path=str(tmp_path / "a")), tmp_path / "whole", **names)
    prepare_fields(FieldSource(path=str(tmp_path / "a")), tmp_path / "unchecked", skip_gaps=True, **names)
    for name in ("a", "whole"):
        windows = reader(tmp_path / name, lead_hours=24, splits=splits).sources[0].windows
        assert len(windows.starts) == 2 * 363
    assert "2 steps of 24 h are missing" in climax(tmp_path / "unchecked")
    FieldSet(field_data(tmp_path / "whole", lead_hours=24, splits=splits)).verify()


def test_times_that_say_nothing_need_units(tmp_path: Path) -> None:
    numbered = dataset(HOURS).rename(time="timestep")
    numbered["timestep"].attrs.clear()
    numbered.to_netcdf(tmp_path / "a.nc")
    assert "z500 does not depend on time" not in (
        message := refused(DataError, source(tmp_path / "a.nc", time_dim="timestep"))
    )
    assert "the numbers of timestep do not say what they count; give the source time_units" in message
    assert "no dimension 'hour' with times" in refused(DataError, source(tmp_path / "a.nc", time_dim="hour"))
    reader(source(tmp_path / "a.nc", time_dim="timestep", time_units="hours since 1996-01-05"))


def source(path: Path, **options: Any) -> FieldSource:
    return FieldSource.model_validate({"path": str(path), **options})


def test_splits_that_overlap_or_hold_nothing(tmp_path: Path) -> None:
    dataset(HOURS).to_netcdf(tmp_path / "a.nc")
    both = {"train": {"first": "step 0", "last": "step 120"}, "test": {"first": "2000-01-30", "last": "2000-02"}}
    assert "data.splits.test (2000-01-30 00:00 to 2000-02-29 18:00) share times" in refused(
        ConfigError, tmp_path / "a.nc", splits=both
    )
    nothing = {"train": {"first": "2001", "last": "2002"}}
    message = refused(DataError, tmp_path / "a.nc", splits=nothing)
    assert "no frame from 2001 to 2002; it goes from 2000-01-01 00:00 to 2000-02-29 18:00" in message
    assert "step 240 is not in" in refused(DataError, tmp_path / "a.nc", splits=split(240))


def test_a_lead_time_between_the_steps(tmp_path: Path) -> None:
    dataset(HOURS).to_netcdf(tmp_path / "a.nc")
    message = refused(DataError, tmp_path / "a.nc", lead_hours=[6, 9])
    assert "lead time 9 h fits no two frames of data.splits.train" in message
    assert "6 h apart" in message


def test_statistics_of_other_variables(tmp_path: Path) -> None:
    dataset(HOURS).to_netcdf(tmp_path / "a.nc")
    FieldSet(field_data(tmp_path / "a.nc", inputs=["z500"])).statistics.write(tmp_path / "s.json")
    message = refused(DataError, tmp_path / "a.nc", statistics=str(tmp_path / "s.json"))
    assert "s.json has no statistics of t850, u10; it has z500, orography" in message
    (tmp_path / "s.json").write_text('{"format": "phalanx-field-statistics"}')
    assert "s.json: period: Field required" in refused(
        DataError, tmp_path / "a.nc", statistics=str(tmp_path / "s.json")
    )


def test_field_values_are_as_the_tests_think() -> None:
    assert field("t850", np.array([0])).mean() == pytest.approx(275, abs=3)
