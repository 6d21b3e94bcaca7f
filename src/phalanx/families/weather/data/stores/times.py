"""Time axes: whole seconds in the calendar of the data, and what models and scores want to know of a date."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import cftime  # type: ignore[import-untyped]
import numpy as np

from phalanx.data.order import Int64Array
from phalanx.errors import ConfigError, DataError
from phalanx.families.weather.data.stores.grid import Float32Array, Float64Array

EPOCH = "seconds since 1970-01-01 00:00:00"
HOUR = 3600
DAY = 24 * HOUR

_GREGORIAN = "proleptic_gregorian"
_SAME = {"standard": _GREGORIAN, "gregorian": _GREGORIAN, "365_day": "noleap", "366_day": "all_leap"}
"""Calendars under another name; the Gregorian ones differ before 1582 only."""
_DAYS_BEFORE = np.cumsum([0, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30])
"""Days before each month of a leap year."""
_DATE = re.compile(r"(\d{4})(?:-(\d{2})(?:-(\d{2})(?:[ T](\d{2})(?::(\d{2}))?)?)?)?")


@dataclass(frozen=True)
class TimeAxis:
    """Times of frames, ascending."""

    calendar: str
    seconds: Int64Array
    """[T]: seconds since the beginning of 1970 in `calendar`."""

    def __len__(self) -> int:
        return len(self.seconds)

    def text(self, frame: int) -> str:
        """The time of a frame, to the minute."""
        return date_text(int(self.seconds[frame]), self.calendar)

    @cached_property
    def step(self) -> int:
        """The usual time between frames in seconds; 0 of a single frame."""
        return int(np.median(np.diff(self.seconds))) if len(self.seconds) > 1 else 0

    @cached_property
    def _dates(self) -> Any:
        return cftime.num2date(self.seconds, EPOCH, self.calendar, only_use_cftime_datetimes=True)

    @cached_property
    def days_of_year(self) -> Int64Array:
        """[T]: from 0; the same for a date of every year, so of a leap year where the calendar has any."""
        if self.calendar == "360_day":
            return np.array([30 * (date.month - 1) + date.day - 1 for date in self._dates], dtype=np.int64)
        return np.array([_DAYS_BEFORE[date.month - 1] + date.day - 1 for date in self._dates], dtype=np.int64)

    @property
    def days_in_year(self) -> int:
        """How many values `days_of_year` has."""
        return 360 if self.calendar == "360_day" else 366

    @property
    def seconds_of_day(self) -> Int64Array:
        """[T]: seconds since midnight."""
        return np.mod(self.seconds, DAY)

    @cached_property
    def parts_of_cycles(self) -> Float32Array:
        """[T, 2]: the part of the year, and of the day, that has passed, from 0 to 1."""
        year = (self.days_of_year + self.seconds_of_day / DAY) / self.days_in_year
        return np.stack([year, self.seconds_of_day / DAY], axis=1).astype(np.float32)

    def nearest(self, wanted: Int64Array, tolerance: int = 0) -> Int64Array:
        """For each time `wanted` (seconds, any shape) the nearest frame, or -1 where none is within `tolerance` seconds."""
        after = np.clip(np.searchsorted(self.seconds, wanted), 0, len(self.seconds) - 1)
        before = np.maximum(after - 1, 0)
        closer = np.abs(self.seconds[before] - wanted) <= np.abs(self.seconds[after] - wanted)
        found = np.where(closer, before, after)
        return np.where(np.abs(self.seconds[found] - wanted) <= tolerance, found, -1).astype(np.int64)


def canonical(calendar: str) -> str:
    """One name for each calendar. Raises ConfigError for an unknown one."""
    name = _SAME.get(calendar.lower(), calendar.lower())
    known = (_GREGORIAN, "noleap", "all_leap", "360_day", "julian")
    if name not in known:
        raise ConfigError(f"calendar {calendar!r} is not known; take one of standard, {', '.join(known)}")
    return name


def decode_times(values: Float64Array | Int64Array, units: str, calendar: str, where: str) -> TimeAxis:
    """The time axis that numbers of a file stand for. where: names the file in messages.

    Raises DataError where units and calendar do not fit or times are missing, repeated or out of order.
    """
    name = canonical(calendar)
    if not np.isfinite(values).all():
        raise DataError(f"{where}: time index {int(np.flatnonzero(~np.isfinite(values))[0])} has no time")
    # A reference before 1582 counts from there in the file's own calendar; only the proleptic one has a year 0.
    own = name != _GREGORIAN or re.search(r"since\s+0+-", units) is not None
    counting = name if own else calendar.lower()
    try:
        dates = cftime.num2date(values, units, counting, only_use_cftime_datetimes=True)
        seconds = np.rint(np.asarray(cftime.date2num(dates, EPOCH, counting), dtype=np.float64)).astype(np.int64)
    except (ValueError, OverflowError, TypeError) as error:
        raise DataError(
            f"{where}: times in {units!r}, calendar {calendar}: {error}; give time_units and calendar of the source"
        ) from error
    axis = TimeAxis(name, np.atleast_1d(seconds))
    wrong = np.flatnonzero(np.diff(axis.seconds) <= 0)
    if wrong.size:
        index = int(wrong[0]) + 1
        what = "repeats" if axis.seconds[index] == axis.seconds[index - 1] else "comes before"
        raise DataError(
            f"{where}: time index {index} ({axis.text(index)}) {what} the time before it ({axis.text(index - 1)}); "
            f"sort the file and drop what is double"
        )
    return axis


def date_text(seconds: int, calendar: str) -> str:
    """Seconds since 1970 as a date, to the minute."""
    return str(cftime.num2date(seconds, EPOCH, calendar).strftime("%Y-%m-%d %H:%M"))


def moment_bounds(moment: str, calendar: str) -> tuple[int, int]:
    """First and last second, since 1970, that a date as in 2015, 2015-12 or 2015-12-31 stands for.

    Raises ConfigError for a date that `calendar` does not have.
    """
    match = _DATE.fullmatch(moment)
    assert match is not None, moment
    year, month, day, hour, minute = (None if part is None else int(part) for part in match.groups())
    assert year is not None
    try:
        start = cftime.datetime(year, month or 1, day or 1, hour or 0, minute or 0, calendar=calendar)
        after_month = (year, month + 1) if month and month < 12 else (year + 1, 1)
        next_start = cftime.datetime(*(after_month if month else (year + 1, 1)), 1, calendar=calendar)
    except ValueError as error:
        raise ConfigError(f"{moment} is not a date of the calendar {calendar}: {error}") from None
    first = int(cftime.date2num(start, EPOCH, calendar))
    if minute is not None:
        return first, first + 59
    if hour is not None:
        return first, first + HOUR - 1
    if day is not None:
        return first, first + DAY - 1
    return first, int(cftime.date2num(next_start, EPOCH, calendar)) - 1
