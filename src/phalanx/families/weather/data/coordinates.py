"""Coordinates of fields: latitude-longitude grids, and time axes in the calendar of the data.

Fields run from south to north and eastward, whatever the order in the file: files of the other order are turned while
they are read. A global grid begins at its first longitude from Greenwich, a regional one where the file begins. Cells have
their exact areas. Times are whole seconds; this module also says what models and scores want to know of a date.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import cftime  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

from phalanx.data.sample_order import Int64Array
from phalanx.errors import ConfigError, DataError

Float64Array = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

_TOLERANCE = 1e-3
"""Degrees by which the coordinates of equal grids may differ: files keep them in single precision."""
EPOCH = "seconds since 1970-01-01 00:00:00"
HOUR = 3600
DAY = 24 * HOUR
_GREGORIAN = "proleptic_gregorian"
_SAME = {"standard": _GREGORIAN, "gregorian": _GREGORIAN, "365_day": "noleap", "366_day": "all_leap"}
"""Calendars under another name; the Gregorian ones differ before 1582 only."""
_DAYS_BEFORE = np.cumsum([0, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30])
"""Days before each month of a leap year, in other years too: a date then has the same day in all years."""


@dataclass(frozen=True)
class Grid:
    """Cell centres in degrees."""

    latitudes: Float64Array
    """[H], south to north."""
    longitudes: Float64Array
    """[W], eastward, without a jump at the date line or at Greenwich; the first is in [0, 360)."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return rows and columns."""
        return len(self.latitudes), len(self.longitudes)

    @property
    def wraps(self) -> bool:
        """Return whether the last column is the western neighbour of the first."""
        columns = len(self.longitudes)
        if columns < 2:
            return False
        step = (self.longitudes[-1] - self.longitudes[0]) / (columns - 1)
        # Rounded coordinates may come short of the whole circle, but not by a column.
        return bool(abs(step * columns - 360) < min(360 * _TOLERANCE, step / 2))

    @property
    def longitude_bounds(self) -> tuple[float, float]:
        """Return the longitudes at which the outer columns' cells end, in degrees; 0 and 360 of a whole circle."""
        if self.wraps or len(self.longitudes) < 2:
            return 0.0, 360.0
        west, east = self.longitudes[:2], self.longitudes[-2:]
        return float(west[0] - (west[1] - west[0]) / 2), float(east[1] + (east[1] - east[0]) / 2)

    def difference(self, other: Grid) -> str | None:
        """Return the first way in which `other` is another grid, in words; None where it is the same."""
        if self.shape != other.shape:
            return f"{other.shape[0]} x {other.shape[1]} points instead of {self.shape[0]} x {self.shape[1]}"
        pairs = (("latitude", self.latitudes, other.latitudes), ("longitude", self.longitudes, other.longitudes))
        for name, mine, theirs in pairs:
            far = np.flatnonzero(np.abs(mine - theirs) > _TOLERANCE)
            if far.size:
                index = int(far[0])
                return f"{name} {index} is {theirs[index]:g} instead of {mine[index]:g}"
        return None

    def area_weights(self) -> Float64Array:
        """Return the areas of the cells [H, W] divided by their mean.

        A cell reaches half-way to its neighbours and its area is the difference of the sines of its latitude bounds
        times its width, so it is exact and positive at the poles too (WeatherBench 2, Rasp et al. 2024, section 3.1).
        The outermost cells of a grid end at the pole where that is less than a whole cell from their centres, else as
        far out as they reach in.
        """
        bounds = np.array([-90.0, 90.0])
        if len(self.latitudes) > 1:
            centres = self.latitudes
            inner = (centres[:-1] + centres[1:]) / 2
            south, north = centres[1] - centres[0], centres[-1] - centres[-2]
            # Rounding of the coordinates must not decide, hence the hundredth.
            first = -90.0 if centres[0] - 1.01 * south <= -90.0 else centres[0] - south / 2
            last = 90.0 if centres[-1] + 1.01 * north >= 90.0 else centres[-1] + north / 2
            bounds = np.concatenate([[first], inner, [last]])
        heights = np.diff(np.sin(np.deg2rad(bounds)))
        # By their own spacing: a regional grid may be uneven.
        widths = np.gradient(self.longitudes) if len(self.longitudes) > 1 else np.ones(1)
        areas = heights[:, None] * widths[None, :]
        weights: Float64Array = areas / areas.mean()
        return weights


def require_same_grid(first_path: Path, first: Grid, path: Path, grid: Grid) -> None:
    """Raise DataError where the data at `path` lie on another grid than those at `first_path`, naming the difference."""
    different = first.difference(grid)
    if different is not None:
        raise DataError(f"{path}: another grid than that of {first_path}: {different}; regrid one of them")


@dataclass(frozen=True)
class Orientation:
    """How a field of a file is turned into one of its `Grid`."""

    flip: bool
    """Whether the file runs from north to south."""
    roll: int
    """Columns of the file that lie west of the grid's first."""

    def apply(self, fields: Float32Array) -> Float32Array:
        """Turn fields [..., H, W]."""
        if self.flip:
            fields = fields[..., ::-1, :]
        if self.roll:
            fields = np.roll(fields, -self.roll, axis=-1)
        return fields


def orient_grid(latitudes: Float64Array, longitudes: Float64Array, where: str) -> tuple[Grid, Orientation]:
    """Return the grid of a file from its coordinates in degrees, in their order in the file, and how to get there.

    where: names the file in messages. Raises DataError for coordinates that are no latitude-longitude grid.
    """
    for name, values in (("latitude", latitudes), ("longitude", longitudes)):
        if values.ndim != 1 or not values.size or not np.isfinite(values).all():
            raise DataError(f"{where}: {name} of shape {values.shape} is not a list of finite degrees; regrid the file")
    # Either way is fine, as fields are turned; a jump in between would misplace rows.
    steps = np.diff(latitudes)
    if np.abs(latitudes).max() > 90 + _TOLERANCE or not ((steps > 0).all() or (steps < 0).all()):
        raise DataError(
            f"{where}: latitudes from {latitudes[0]:g} to {latitudes[-1]:g} do not run steadily from one pole to the other"
        )
    # Modulo the circle: a jump from 359 to 0, or from 180 to -180, is a step to the east.
    eastward = np.mod(np.diff(longitudes), 360.0)
    if (eastward == 0).any() or eastward.sum() > 360 - _TOLERANCE:
        raise DataError(
            f"{where}: longitudes from {longitudes[0]:g} to {longitudes[-1]:g} do not run steadily eastward"
        )
    flip = bool(len(latitudes) > 1 and latitudes[0] > latitudes[-1])
    start = np.mod(longitudes[0], 360.0)
    grid = Grid(latitudes[::-1] if flip else latitudes, np.concatenate([[start], start + np.cumsum(eastward)]))
    # A region has a western edge, where it begins; a whole circle is turned to begin at Greenwich.
    if not grid.wraps:
        return grid, Orientation(flip, 0)
    # A coordinate that rounding put west of Greenwich must not become one of 360 degrees.
    roll = int(np.argmin(np.mod(longitudes + _TOLERANCE, 360.0)))
    rolled = np.roll(np.mod(longitudes + _TOLERANCE, 360.0) - _TOLERANCE, -roll)
    return Grid(grid.latitudes, rolled), Orientation(flip, roll)


@dataclass(frozen=True)
class TimeAxis:
    """Times of frames, ascending."""

    calendar: str
    seconds: Int64Array
    """[T]: seconds since the beginning of 1970 in `calendar`."""

    def __len__(self) -> int:
        return len(self.seconds)

    def text(self, frame: int) -> str:
        """Return the time of a frame, to the minute."""
        return str(cftime.num2date(int(self.seconds[frame]), EPOCH, self.calendar).strftime("%Y-%m-%d %H:%M"))

    @cached_property
    def step(self) -> int:
        """Return the usual time between frames in seconds; 0 of a single frame."""
        return int(np.median(np.diff(self.seconds))) if len(self.seconds) > 1 else 0

    @cached_property
    def _dates(self) -> Any:
        return cftime.num2date(self.seconds, EPOCH, self.calendar, only_use_cftime_datetimes=True)

    @cached_property
    def days_of_year(self) -> Int64Array:
        """Return the day of the year [T], from 0; the same for a date of every year, so of a leap year where the
        calendar has any."""
        if self.calendar == "360_day":
            return np.array([30 * (date.month - 1) + date.day - 1 for date in self._dates], dtype=np.int64)
        return np.array([_DAYS_BEFORE[date.month - 1] + date.day - 1 for date in self._dates], dtype=np.int64)

    @property
    def days_in_year(self) -> int:
        """Return the number of values that `days_of_year` may have."""
        return 360 if self.calendar == "360_day" else 366

    @cached_property
    def months(self) -> Int64Array:
        """Return the calendar month [T], from 0."""
        return np.array([date.month - 1 for date in self._dates], dtype=np.int64)

    @property
    def seconds_of_day(self) -> Int64Array:
        """Return seconds since midnight, [T]."""
        return np.mod(self.seconds, DAY)

    @property
    def frames_a_day(self) -> int:
        """Return the number of frames a day where that is a whole number greater than one, else 1."""
        return DAY // self.step if 0 < self.step < DAY and DAY % self.step == 0 else 1

    def parts_of_day(self, parts: int) -> Int64Array:
        """Return which of `parts` equal parts of the day each time is in, [T]."""
        return self.seconds_of_day * parts // DAY

    @cached_property
    def parts_of_cycles(self) -> Float32Array:
        """Return the part of the year, and of the day, that has passed, from 0 to 1, [T, 2]."""
        year = (self.days_of_year + self.seconds_of_day / DAY) / self.days_in_year
        return np.stack([year, self.seconds_of_day / DAY], axis=1).astype(np.float32)

    def nearest(self, wanted: Int64Array, tolerance: int = 0) -> Int64Array:
        """Return for each time `wanted` (seconds, any shape) the nearest frame, or -1 where none is within `tolerance`
        seconds."""
        # Times ascend, so the nearest frame is one of the two around the wanted time.
        after = np.clip(np.searchsorted(self.seconds, wanted), 0, len(self.seconds) - 1)
        before = np.maximum(after - 1, 0)
        closer = np.abs(self.seconds[before] - wanted) <= np.abs(self.seconds[after] - wanted)
        found = np.where(closer, before, after)
        return np.where(np.abs(self.seconds[found] - wanted) <= tolerance, found, -1).astype(np.int64)


def canonical_calendar(calendar: str) -> str:
    """Return the one name under which a calendar is known here. Raises ConfigError for an unknown one."""
    name = _SAME.get(calendar.lower(), calendar.lower())
    known = (_GREGORIAN, "noleap", "all_leap", "360_day", "julian")
    if name not in known:
        raise ConfigError(f"calendar {calendar!r} is not known; take one of standard, {', '.join(known)}")
    return name


def decode_times(values: Float64Array | Int64Array, units: str, calendar: str, where: str) -> TimeAxis:
    """Return the time axis that numbers of a file stand for. where: names the file in messages.

    Raises DataError where units and calendar do not fit or times are missing, repeated or out of order.
    """
    name = canonical_calendar(calendar)
    # A masked time becomes NaN, which would be rounded to some moment.
    if not np.isfinite(values).all():
        raise DataError(f"{where}: time index {int(np.flatnonzero(~np.isfinite(values))[0])} has no time")
    # A reference before 1582 counts from there in the file's own calendar; only the proleptic one has a year 0.
    own = name != _GREGORIAN or re.search(r"since\s+0+-", units) is not None
    counting = name if own else calendar.lower()
    try:
        dates = cftime.num2date(values, units, counting, only_use_cftime_datetimes=True)
        # Files count in fractions of days, which are whole seconds but for rounding.
        seconds = np.rint(np.asarray(cftime.date2num(dates, EPOCH, counting), dtype=np.float64)).astype(np.int64)
    except (ValueError, OverflowError, TypeError) as error:
        raise DataError(
            f"{where}: times in {units!r}, calendar {calendar}: {error}; give time_units and calendar of the source"
        ) from error
    axis = TimeAxis(name, np.atleast_1d(seconds))
    # Frames are found by time: a repeated or misplaced one would be read in place of another.
    wrong = np.flatnonzero(np.diff(axis.seconds) <= 0)
    if wrong.size:
        index = int(wrong[0]) + 1
        what = "repeats" if axis.seconds[index] == axis.seconds[index - 1] else "comes before"
        raise DataError(
            f"{where}: time index {index} ({axis.text(index)}) {what} the time before it ({axis.text(index - 1)}); "
            f"sort the file and drop what is double"
        )
    return axis


def moment_bounds(moment: str, calendar: str) -> tuple[int, int]:
    """Return first and last second, since 1970, that a date as in 2015, 2015-12 or 2015-12-31 stands for.

    Raises ConfigError for a date that `calendar` does not have.
    """
    year, *stated = map(int, re.findall(r"\d+", moment))
    month, day, hour, minute = [*stated, None, None, None, None][:4]
    try:
        start = cftime.datetime(year, month or 1, day or 1, hour or 0, minute or 0, calendar=calendar)
        # December is followed by January of the next year.
        after_month = (year, month + 1) if month and month < 12 else (year + 1, 1)
        next_start = cftime.datetime(*(after_month if month else (year + 1, 1)), 1, calendar=calendar)
    except ValueError as error:
        raise ConfigError(
            f"{moment} is not a date of the calendar {calendar}: {str(error).partition(' provided')[0]}; a period that ends "
            f"with the month is one of every calendar: {moment[:7]}"
        ) from None
    first = int(cftime.date2num(start, EPOCH, calendar))
    if minute is not None:
        return first, first + 59
    # A date stands for all that it leaves open: a day for its hours, a year for its months.
    if hour is not None:
        return first, first + HOUR - 1
    if day is not None:
        return first, first + DAY - 1
    return first, int(cftime.date2num(next_start, EPOCH, calendar)) - 1
