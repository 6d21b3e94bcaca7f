"""Insolation against what others know of the sun, and waves of the time of day and of year, in samples and roll-outs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import cftime  # type: ignore[import-untyped]
import numpy as np
import pytest

from field_files import LATITUDES, LONGITUDES, field_data, write_year
from phalanx.families.weather.config import Forcing
from phalanx.families.weather.data.coordinates import EPOCH, Grid
from phalanx.families.weather.data.field_samples import FieldReader
from phalanx.families.weather.data.forcings import SOLAR_CONSTANT, forcing_fields, insolation
from phalanx.families.weather.data.open_fields import FieldSet

GREGORIAN = "proleptic_gregorian"
NAMES: tuple[Forcing, ...] = get_args(Forcing)
GRID = Grid(LATITUDES, LONGITUDES)


def seconds(*date: int, calendar: str = GREGORIAN) -> np.ndarray:
    """The time of a date, as an array of one."""
    return np.array([cftime.date2num(cftime.datetime(*date, calendar=calendar), EPOCH, calendar)], dtype=np.int64)


def column(*latitudes: float) -> Grid:
    """Points at Greenwich."""
    return Grid(np.array(latitudes), np.zeros(1))


def test_the_sun_stands_where_an_almanac_has_it() -> None:
    """13 October 1992, 0 h: declination -7.78507 degrees, distance 0.99766, equation of time 13 min 42.7 s (Meeus,
    Astronomical Algorithms, examples 25.a and 28.a)."""
    at = seconds(1992, 10, 13)
    pole = insolation(column(-90.0), GREGORIAN, at)[0, 0, 0]
    assert pole == pytest.approx(SOLAR_CONSTANT * np.sin(np.deg2rad(7.78507)) / 0.99766**2, rel=1e-3)
    longitudes = np.arange(17000, 18000) / 100.0
    around = insolation(Grid(np.array([-7.78507]), longitudes), GREGORIAN, at)[0, 0]
    assert longitudes[around.argmax()] == pytest.approx(180.0 - (13 + 42.7 / 60) / 4, abs=0.02)
    assert around.max() == pytest.approx(SOLAR_CONSTANT / 0.99766**2, rel=1e-5)


def test_noon_of_an_equinox_at_the_equator_polar_night_and_midnight_sun() -> None:
    # 20 March 2000, 7:35, on the meridian where it is noon: the sun at 0.99594 of its mean distance.
    noon = insolation(Grid(np.zeros(1), np.arange(0, 360, 0.1)), GREGORIAN, seconds(2000, 3, 20, 7, 35)).max()
    assert noon == pytest.approx(SOLAR_CONSTANT / 0.99594**2, rel=1e-3)
    day = seconds(2001, 12, 21) + np.arange(0, 24) * 3600
    found = insolation(column(-80.0, 70.0, 80.0), GREGORIAN, day)[:, :, 0]
    assert found[:, 0].min() > 200.0
    assert found[:, 1:].max() == 0.0


@pytest.mark.parametrize("day", [15, 100, 190, 280])
@pytest.mark.parametrize("latitude", [-60.0, 0.0, 45.0])
def test_the_mean_of_a_day_is_that_of_the_closed_form(day: int, latitude: float) -> None:
    """S/pi (r/d)^2 (h sin f sin d + cos f cos d sin h), h the hour angle of sunset, with declination and distance by the
    series of Spencer (1971), which is of that year."""
    times = seconds(1971, 1, 1) + day * 86400 + np.arange(0, 86400, 300)
    found = insolation(column(latitude), GREGORIAN, times).mean()
    turn = 2 * np.pi * (day + 0.5) / 365
    waves = np.array([f(k * turn) for k in (1, 2, 3) for f in (np.cos, np.sin)])
    declination = 0.006918 + waves @ [-0.399912, 0.070257, -0.006758, 0.000907, -0.002697, 0.001480]
    nearness = 1.000110 + waves[:4] @ [0.034221, 0.001280, 0.000719, 0.000077]
    f = np.deg2rad(latitude)
    sunset = np.arccos(np.clip(-np.tan(f) * np.tan(declination), -1, 1))
    lit = sunset * np.sin(f) * np.sin(declination) + np.cos(f) * np.cos(declination) * np.sin(sunset)
    assert found == pytest.approx(SOLAR_CONSTANT / np.pi * nearness * lit, rel=0.006)


@pytest.mark.parametrize("calendar", ["noleap", "360_day", "all_leap", "julian"])
def test_seasons_stay_where_they_are_in_other_calendars(calendar: str) -> None:
    for year in (1850, 2000, 2100):
        # At the north pole: the declination alone. A day is 0.4 degrees of it near an equinox.
        for month in (3, 6, 9):
            ours, theirs = (
                insolation(column(90.0), name, seconds(year, month, 20, 12, calendar=name))[0, 0, 0]
                for name in (GREGORIAN, calendar)
            )
            assert theirs == pytest.approx(ours, abs=4.0 * 9.5)
    # The sun goes round once a day of theirs.
    day = insolation(GRID, calendar, seconds(2001, 6, 1, calendar=calendar) + np.array([0, 86400]))
    np.testing.assert_allclose(day[0], day[1], atol=4.0)


def test_waves_are_of_local_time_and_of_the_time_of_year_and_nothing_looks_absent() -> None:
    _, cos_day, sin_day, cos_year, sin_year = forcing_fields(NAMES, GRID, GREGORIAN, seconds(2000, 1, 1, 6))[0]
    hour = (6 + LONGITUDES / 15) % 24
    np.testing.assert_allclose(cos_day[2], np.cos(2 * np.pi * hour / 24), atol=1e-6)
    np.testing.assert_allclose(sin_day[5], np.sin(2 * np.pi * hour / 24), atol=1e-6)
    assert cos_year[0, 0] == pytest.approx(1.0, abs=1e-4)
    assert sin_year[3, 4] == pytest.approx(2 * np.pi * 0.25 / 365.2425, rel=1e-4)
    # The year begins: a sine that is 0 throughout.
    assert (forcing_fields(NAMES, GRID, GREGORIAN, seconds(2000, 1, 1)) != 0.0).all()
    # Normalised over the globe and a year: mean 0, spread 1.
    globe = Grid(np.arange(-88.75, 90, 2.5), np.arange(0, 360, 15.0))
    year = forcing_fields(["insolation"], globe, GREGORIAN, seconds(2001, 1, 1) + np.arange(0, 365) * 86400)[:, 0]
    weights = np.broadcast_to(globe.area_weights(), year.shape)
    mean = np.average(year, weights=weights)
    assert mean == pytest.approx(0.0, abs=2e-3)
    assert np.sqrt(np.average((year - mean) ** 2, weights=weights)) == pytest.approx(1.0, abs=5e-3)


@pytest.fixture(scope="module")
def year(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forcings") / "year"
    write_year(folder)
    return folder


def reader(year: Path, **changes: Any) -> FieldReader:
    return FieldSet(field_data(year, **changes)).reader("train", seed=1)


def expected(reader: FieldReader, times: np.ndarray) -> np.ndarray:
    return forcing_fields(reader.data.forcings, reader.grid, reader.sources[0].store.times.calendar, times)


def test_samples_have_the_forcings_of_the_time_that_is_predicted(year: Path) -> None:
    found = reader(year, forcings=["sin_local_time", "insolation"])
    cases, batch = found.locate(np.arange(20)), found.read(np.arange(20))
    assert batch.fields.shape[1] == 6 and batch.forcings.numel() == 0
    assert "forcings_BKTFHW" not in batch.inputs()[1]
    times = found.sources[0].store.times.seconds
    np.testing.assert_array_equal(batch.fields[:, 4:], expected(found, times[cases.target]))
    assert len(set((cases.target - cases.start).tolist())) == 3
    plain = reader(year)
    np.testing.assert_array_equal(plain.read(np.arange(20)).fields, batch.fields[:, :4])
    assert plain.fingerprint != found.fingerprint


def test_a_roll_out_has_them_at_the_end_of_each_step(year: Path) -> None:
    found = reader(year, forcings=["insolation"], rollout_hours=6, history=2)
    cases, batch = found.locate(np.arange(5)), found.read(np.arange(5))
    assert batch.forcings.shape == (5, 3, 2, 1, 6, 8)
    start = found.sources[0].store.times.seconds[cases.start]
    for age in (0, 1):
        np.testing.assert_array_equal(batch.fields[:, 5 * age + 4], expected(found, start + (1 - age) * 21600)[:, 0])
        for step in range(3):
            np.testing.assert_array_equal(
                batch.forcings[:, step, age], expected(found, start + (step + 2 - age) * 21600)
            )
    assert batch.inputs()[1]["forcings_BKTFHW"] is batch.forcings
    # A forecast asks for them a step at a time.
    np.testing.assert_array_equal(found.read_forcings(0, cases.start, 12), batch.forcings[:, 0])
