"""Times: every calendar in whole seconds, dates that a run file may name, and finding frames by time."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.errors import ConfigError, DataError
from phalanx.families.weather.data.coordinates import DAY, HOUR, TimeAxis, decode_times, moment_bounds


def test_the_same_times_in_other_units_are_the_same_seconds() -> None:
    in_hours = decode_times(np.array([0.0, 6.0]), "hours since 2000-03-01", "standard", "file")
    in_days = decode_times(np.array([60.0, 60.25]), "days since 2000-01-01", "proleptic_gregorian", "file")
    np.testing.assert_array_equal(in_hours.seconds, in_days.seconds)
    assert in_hours.calendar == in_days.calendar
    assert in_hours.text(1) == "2000-03-01 06:00"


def test_a_reference_before_the_gregorian_reform_counts_in_the_files_calendar() -> None:
    # 1-1-1 in the mixed calendar lies two days before 1-1-1 in the proleptic one.
    mixed = decode_times(np.array([17522904.0]), "hours since 1-1-1 00:00:0.0", "standard", "file")
    assert mixed.text(0) == "2000-01-01 00:00"


def test_a_climatology_of_the_year_0_is_read() -> None:
    axis = decode_times(np.array([366.0, 1096.0]), "hour since 0000-01-01 00:00:00", "standard", "file")
    assert axis.text(0).endswith("-01-16 06:00")
    assert axis.days_of_year.tolist() == [15, 45]


def test_a_calendar_of_360_days_has_a_thirtieth_of_february() -> None:
    axis = decode_times(np.array([59.0, 60.0, 359.0]), "days since 2000-01-01", "360_day", "file")
    assert axis.text(0) == "2000-02-30 00:00"
    assert axis.days_of_year.tolist() == [59, 60, 359]
    assert axis.days_in_year == 360


def test_a_date_has_the_same_day_of_year_in_leap_years() -> None:
    axis = decode_times(np.array([60, 425]), "days since 2000-01-01", "standard", "file")
    assert [axis.text(0), axis.text(1)] == ["2000-03-01 00:00", "2001-03-01 00:00"]
    assert axis.days_of_year.tolist() == [60, 60]


def test_parts_of_year_and_day() -> None:
    axis = decode_times(np.array([0.0, 183 * 24 + 6.0]), "hours since 2000-01-01", "standard", "file")
    np.testing.assert_allclose(axis.parts_of_cycles, [[0.0, 0.0], [183.25 / 366, 0.25]], rtol=1e-6)


@pytest.mark.parametrize(("hours", "word"), [([0, 6, 6], "repeats"), ([0, 12, 6], "comes before")])
def test_double_and_unsorted_times_are_refused(hours: list[int], word: str) -> None:
    with pytest.raises(DataError, match=f"file: time index 2 .* {word} the time before it"):
        decode_times(np.array(hours), "hours since 2000-01-01", "standard", "file")


def test_a_missing_time_is_refused() -> None:
    with pytest.raises(DataError, match="time index 1 has no time"):
        decode_times(np.array([0.0, np.nan]), "hours since 2000-01-01", "standard", "file")


def test_units_that_do_not_fit_the_calendar_are_refused() -> None:
    with pytest.raises(DataError, match="give time_units and calendar of the source"):
        decode_times(np.array([0.0, 1.0]), "months since 2000-01-01", "standard", "file")
    with pytest.raises(ConfigError, match="calendar 'lunar' is not known"):
        decode_times(np.array([0.0, 1.0]), "days since 2000-01-01", "lunar", "file")


@pytest.mark.parametrize(
    ("moment", "first", "last"),
    [
        ("2000", "2000-01-01 00:00", "2000-12-31 23:59"),
        ("2000-02", "2000-02-01 00:00", "2000-02-29 23:59"),
        ("2000-12", "2000-12-01 00:00", "2000-12-31 23:59"),
        ("2000-02-03", "2000-02-03 00:00", "2000-02-03 23:59"),
        ("2000-02-03 18", "2000-02-03 18:00", "2000-02-03 18:59"),
        ("2000-02-03T18:30", "2000-02-03 18:30", "2000-02-03 18:30"),
    ],
)
def test_a_date_stands_for_all_of_it(moment: str, first: str, last: str) -> None:
    bounds = moment_bounds(moment, "proleptic_gregorian")
    axis = TimeAxis("proleptic_gregorian", np.array(bounds))
    assert [axis.text(0), axis.text(1)] == [first, last]


def test_a_date_the_calendar_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="2001-02-29 is not a date"):
        moment_bounds("2001-02-29", "noleap")


def test_frames_are_found_by_time_within_a_tolerance() -> None:
    axis = TimeAxis("noleap", np.array([0, 6, 12, 24]) * HOUR)
    wanted = np.array([0, 6, 18, 23, 30]) * HOUR
    assert axis.nearest(wanted).tolist() == [0, 1, -1, -1, -1]
    assert axis.nearest(wanted, tolerance=1 * HOUR).tolist() == [0, 1, -1, 3, -1]
    assert axis.nearest(wanted, tolerance=DAY).tolist() == [0, 1, 2, 3, 3]
