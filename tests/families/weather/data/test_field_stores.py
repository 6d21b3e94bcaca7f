"""Stores of every format give the same fields for the same times, whatever the files' order and packing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from field_files import LATITUDES, LONGITUDES, dataset, field, write_climax, write_year
from phalanx.errors import DataError
from phalanx.families.weather.config import FieldName, FieldSource
from phalanx.families.weather.data.field_store import BlockCache, FieldStore
from phalanx.families.weather.data.open_fields import open_store
from phalanx.families.weather.data.prepare_fields import prepare_fields

VARIABLES = ("z500", "u10")


def open_at(path: Path, *, cache: int = 2**20, variables: tuple[str, ...] = VARIABLES, **options: object) -> FieldStore:
    return open_store(
        FieldSource.model_validate({"path": str(path), **options}), variables, ["orography"], BlockCache(cache)
    )


def check(store: FieldStore, hours: np.ndarray) -> None:
    """Frames in any order, over file borders, and again."""
    order = np.random.default_rng(0).permutation(len(hours))[:40]
    for _ in range(2):
        found = store.read(order, [1, 0])
        for column, name in enumerate(("u10", "z500")):
            np.testing.assert_allclose(found[:, column], field(name, hours[order]), rtol=1e-5, atol=1e-3)
    assert found.dtype == np.float32
    np.testing.assert_allclose(store.read_static()[0], np.outer(LATITUDES + 90, np.arange(8) + 1.0))


@pytest.mark.parametrize("cache", [0, 1500, 2**20])
def test_netcdf_files_that_follow_each_other_are_one_store(tmp_path: Path, cache: int) -> None:
    hours = write_year(tmp_path / "year")
    store = open_at(tmp_path / "year", cache=cache)
    check(store, hours)
    assert store.place(1, 61) == f"{tmp_path}/year/part1.nc: u10, time index 1 (2000-01-16 06:00)"
    check(open_at(tmp_path / "year" / "part*.nc"), hours)


def test_files_may_part_the_variables(tmp_path: Path) -> None:
    hours = np.arange(20) * 6
    for name in ("z500", "u10"):
        dataset(hours[:12], (name,)).to_netcdf(tmp_path / f"{name}_a.nc")
        dataset(hours[12:], (name,)).to_netcdf(tmp_path / f"{name}_b.nc")
    check(open_at(tmp_path), hours)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_zarr_store_in_chunks(tmp_path: Path, zarr_format: int) -> None:
    hours = np.arange(50) * 6
    chunked = {name: {"chunks": (7, 3, 8)} for name in VARIABLES}
    dataset(hours).to_zarr(tmp_path / "a.zarr", zarr_format=zarr_format, encoding=chunked, consolidated=False)
    store = open_at(tmp_path / "a.zarr")
    check(store, hours)


def test_packed_compressed_fields_upside_down_from_the_date_line(tmp_path: Path) -> None:
    hours = np.arange(30) * 6
    turned = dataset(hours).isel(lat=slice(None, None, -1)).roll(lon=4, roll_coords=True)
    turned = turned.assign_coords(lon=np.where(turned.lon >= 180, turned.lon - 360, turned.lon))
    packed = {
        "z500": {
            "dtype": "int16",
            "scale_factor": 0.5,
            "add_offset": 54000.0,
            "_FillValue": -32768,
            "zlib": True,
            "chunksizes": (11, 6, 8),
        }
    }
    turned.to_netcdf(tmp_path / "era5.nc", encoding=packed)
    store = open_at(tmp_path / "era5.nc")
    np.testing.assert_allclose(store.read(np.arange(30), [0])[:, 0], field("z500", hours), atol=0.26)
    np.testing.assert_allclose(store.read(np.arange(30), [1])[:, 0], field("u10", hours), atol=1e-5)
    np.testing.assert_allclose(store.grid.longitudes, LONGITUDES, atol=1e-9)
    np.testing.assert_array_equal(store.grid.latitudes, LATITUDES)


@pytest.mark.parametrize(("levels", "units"), [([850, 500], "hPa"), ([85000.0, 50000.0], "Pa")])
def test_a_number_in_a_name_is_a_pressure_level(tmp_path: Path, levels: list[float], units: str) -> None:
    hours = np.arange(10) * 6
    stack = np.stack([field("t850", hours), field("z500", hours)], axis=1)
    base = dataset(hours, ("u10",))
    base["z"] = (("time", "level", "lat", "lon"), stack)
    base = base.assign_coords(level=("level", levels, {"units": units}))
    base.to_netcdf(tmp_path / "levels.nc")
    np.testing.assert_array_equal(open_at(tmp_path / "levels.nc").read(np.arange(10), [0])[:, 0], field("z500", hours))
    named = open_at(tmp_path / "levels.nc", names=[FieldName(name="z500", stored_as="z_850")])
    np.testing.assert_array_equal(named.read(np.arange(10), [0])[:, 0], field("t850", hours))
    with pytest.raises(DataError, match=r"levels.nc has no variable z300; did you mean z500"):
        open_at(tmp_path / "levels.nc", variables=("z300",))


def test_other_names_and_units_become_those_of_the_run(tmp_path: Path) -> None:
    hours = np.arange(10) * 6
    other = dataset(hours).rename(z500="zg")
    other["zg"] = other["zg"] / 9.80665
    other.to_netcdf(tmp_path / "cmip.nc")
    store = open_at(tmp_path / "cmip.nc", names=[{"name": "z500", "stored_as": "zg", "scale": 9.80665, "offset": 0.5}])
    np.testing.assert_allclose(store.read(np.arange(10), [0])[:, 0], field("z500", hours) + 0.5, rtol=1e-6)


@pytest.mark.parametrize("compressed", [False, True])
def test_climax_shards(tmp_path: Path, compressed: bool) -> None:
    write_climax(tmp_path / "climax", (2000, 2001), compressed=compressed)
    store = open_at(tmp_path / "climax")
    hours = np.concatenate([np.arange(364) * 24, 366 * 24 + np.arange(364) * 24])
    np.testing.assert_array_equal(store.times.seconds, 946684800 + hours * 3600)
    check(store, hours)


@pytest.mark.parametrize("form", ["mapped", "compressed", "prepared"])
def test_converting_units_leaves_what_is_stored_alone(tmp_path: Path, form: str) -> None:
    write_climax(tmp_path / "climax", (2000,), compressed=form == "compressed")
    path = tmp_path / "climax"
    if form == "prepared":
        prepare_fields(FieldSource(path=str(path)), tmp_path / "out", variables=["z500"], statics=["orography"])
        path = tmp_path / "out"
    names = [
        FieldName(name="height", stored_as="z500", scale=1 / 9.80665),
        FieldName(name="low", stored_as="orography", offset=-15.0),
        FieldName(name="high", stored_as="orography", offset=15.0),
    ]
    source = FieldSource(path=str(path), names=names)
    store = open_store(source, ["height", "z500"], ["low", "high"], BlockCache(2**20))
    frames = np.array([7, 3, 7])
    expected = field("z500", frames * 24)
    for _ in range(2):
        found = store.read(frames, [0, 1])
        np.testing.assert_allclose(found[:, 0], expected / 9.80665, rtol=1e-6)
        np.testing.assert_array_equal(found[:, 1], expected)
        low, high = store.read_static()
        np.testing.assert_array_equal(high - low, 30)


def test_climax_shards_of_cmip_begin_where_their_name_says(tmp_path: Path) -> None:
    write_climax(tmp_path / "climax", (2000,))
    for path in (tmp_path / "climax" / "train").glob("*.npz"):
        path.rename(path.with_name(path.name.replace("2000_", "200001010600-200012290600_")))
    store = open_at(tmp_path / "climax", step_hours=24, calendar="noleap")
    assert [store.times.text(0), store.times.text(1)] == ["2000-01-01 06:00", "2000-01-02 06:00"]


def test_the_prepared_form_holds_the_same_and_says_so(tmp_path: Path) -> None:
    hours = write_year(tmp_path / "year", steps=60)
    source = FieldSource(path=str(tmp_path / "year"))
    seen = []
    manifest = prepare_fields(
        source,
        tmp_path / "prepared",
        variables=["t850", "u10", "z500"],
        statics=["orography"],
        shard_bytes=25 * 3 * 6 * 8 * 4,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(25, 60), (50, 60), (60, 60)]
    assert (manifest.frames, manifest.step_hours, manifest.first) == (60, 6.0, "2000-01-01 00:00")
    store = open_at(tmp_path / "prepared")
    check(store, hours)
    scaled = open_at(tmp_path / "prepared", names=[FieldName(name="z500", stored_as="t850", scale=-2.0, offset=1.0)])
    np.testing.assert_allclose(scaled.read(np.arange(60), [0])[:, 0], 1 - 2 * field("t850", hours), rtol=1e-6)
    with pytest.raises(DataError, match="is already there"):
        prepare_fields(source, tmp_path / "prepared", variables=["z500"])


@pytest.mark.parametrize("form", ["mapped", "prepared"])
def test_a_file_that_is_cut_short_while_it_is_read_is_named(tmp_path: Path, form: str) -> None:
    write_climax(tmp_path / "climax", (2000,), compressed=False)
    path = tmp_path / "climax"
    if form == "prepared":
        prepare_fields(FieldSource(path=str(path)), tmp_path / "out", variables=["z500"])
        path = tmp_path / "out"
    store = open_store(FieldSource(path=str(path)), ["z500"], [], BlockCache(2**20))
    store.read(np.array([0]), [0])
    file = store.segments[0].path
    os.truncate(file, 100)
    with pytest.raises(DataError, match=rf"{file.name}: 100 bytes found, \d+ expected; the file was cut short"):
        store.read(np.array([0]), [0])


@pytest.mark.parametrize("name", ["frames-00001.bin", "fields.safetensors"])
def test_a_damaged_prepared_folder_is_refused(tmp_path: Path, name: str) -> None:
    write_year(tmp_path / "year", steps=60)
    prepare_fields(FieldSource(path=str(tmp_path / "year")), tmp_path / "out", variables=VARIABLES, shard_bytes=20000)
    path = tmp_path / "out" / name
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-4])
    open_without_static = lambda: open_store(FieldSource(path=str(tmp_path / "out")), VARIABLES, [], BlockCache(0))  # noqa: E731
    with pytest.raises(DataError, match=f"{name}: .* bytes found"):
        open_without_static()
    content[-10] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{name}: sha256"):
        open_without_static().verify()  # type: ignore[attr-defined]


def test_nothing_is_left_of_a_preparation_that_failed(tmp_path: Path) -> None:
    broken = dataset(np.arange(10) * 6)
    broken["u10"][7, 0, 0] = np.inf
    broken.to_netcdf(tmp_path / "broken.nc")
    with pytest.raises(DataError, match=r"broken.nc: u10, time index 7 .* infinite"):
        prepare_fields(FieldSource(path=str(tmp_path / "broken.nc")), tmp_path / "out", variables=VARIABLES)
    assert [path.name for path in tmp_path.iterdir()] == ["broken.nc"]


def test_the_fingerprint_tells_stores_apart(tmp_path: Path) -> None:
    write_year(tmp_path / "year", steps=60)
    one = open_at(tmp_path / "year").fingerprint
    assert one == open_at(tmp_path / "year").fingerprint
    (tmp_path / "year" / "part3.nc").unlink()
    assert one != open_at(tmp_path / "year").fingerprint


def test_what_lies_at_a_path_is_told(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("none")
    with pytest.raises(DataError, match=r"no prepared fields, ClimaX shards .* it holds notes.txt"):
        open_at(tmp_path)
    with pytest.raises(DataError, match="nothing there"):
        open_at(tmp_path / "absent")
    with pytest.raises(DataError, match="is no netCDF file by its name"):
        open_at(tmp_path / "notes.txt")
    with pytest.raises(DataError, match="no netCDF file or zarr store has a name like that"):
        open_at(tmp_path / "*.nc")


def test_the_wind_above_the_ground_is_not_that_of_a_pressure_level(tmp_path: Path) -> None:
    hours = np.arange(4) * 6
    base = dataset(hours, ("z500",))
    base["u"] = (("time", "level", "lat", "lon"), np.stack([field("u10", hours), field("t850", hours)], axis=1))
    base.assign_coords(level=("level", [10.0, 850.0], {"units": "hPa"})).to_netcdf(tmp_path / "levels.nc")
    with pytest.raises(DataError, match=r"levels.nc has no variable u10; did you mean u_10"):
        open_at(tmp_path / "levels.nc", variables=("u10",))
    store = open_at(tmp_path / "levels.nc", variables=("u_10", "u850"))
    np.testing.assert_array_equal(store.read(np.arange(4), [0])[:, 0], field("u10", hours))
    np.testing.assert_array_equal(store.read(np.arange(4), [1])[:, 0], field("t850", hours))


def test_names_that_preparing_has_applied_may_stay_in_the_run_file(tmp_path: Path) -> None:
    hours = np.arange(10) * 6
    dataset(hours).to_netcdf(tmp_path / "raw.nc")
    for number, stored_as in enumerate(("z500", "t850")):
        names = [FieldName(name="z500", stored_as=stored_as, scale=2.0, offset=1.0)]
        source = FieldSource(path=str(tmp_path / "raw.nc"), names=names)
        folder = tmp_path / f"prepared{number}"
        prepare_fields(source, folder, variables=["z500"], statics=["orography"])
        kept, left = (open_at(folder, variables=("z500",), names=rules) for rules in (names, []))
        wanted = 1 + 2 * field(stored_as, hours)
        for store in (kept, left):
            np.testing.assert_allclose(store.read(np.arange(10), [0])[:, 0], wanted, rtol=1e-6)
            np.testing.assert_allclose(store.read_survey().high[:, 0].max(), wanted.max(), rtol=1e-6)
        assert kept.fingerprint == left.fingerprint
        other = [FieldName(name="z500", stored_as=stored_as, scale=3.0)]
        with pytest.raises(
            DataError, match=r"z500 was prepared from .* with scale 2 and offset 1, but names says scale 3"
        ):
            open_at(folder, variables=("z500",), names=other)
