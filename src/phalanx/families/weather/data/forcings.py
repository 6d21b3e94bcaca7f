"""Forcings: fields that are known for every time, past or future, from the place of the sun alone.

Names are those of anemoi-datasets, as AIFS reads them (Lang et al. 2024, arXiv:2406.01465); GraphCast has the same as
top-of-atmosphere radiation, day progress and year progress (Lam et al. 2023, arXiv:2212.12794). They are computed where
samples are made and never stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import cftime  # type: ignore[import-untyped]
import numpy as np

from phalanx.data.sample_order import Int64Array
from phalanx.families.weather.config import Forcing
from phalanx.families.weather.data.coordinates import DAY, EPOCH, Float32Array, Float64Array, Grid

SOLAR_CONSTANT = 1361.0
"""Radiation of the sun at its mean distance, in W/m2 (Kopp and Lean 2011, doi:10.1029/2010GL045777)."""
_MEAN_COSINE, _STD_COSINE = 1.0 / 4.0, math.sqrt(1.0 / 6.0 - 1.0 / 16.0)
"""Mean and standard deviation over a sphere of the cosine of the sun's zenith angle, 0 at night."""
_YEARS = {"noleap": 365.0, "all_leap": 366.0, "360_day": 360.0, "julian": 365.25, "proleptic_gregorian": 365.2425}
"""Mean days in a year of each calendar."""


def forcing_fields(names: Sequence[Forcing], grid: Grid, calendar: str, seconds_N: Int64Array) -> Float32Array:
    """Return forcings [N, F, H, W] at times in seconds since 1970 in `calendar`, normalised.

    Insolation is normalised by its mean and standard deviation over the globe at the sun's mean distance; waves stay as
    they are.
    """
    out = np.empty((len(seconds_N), len(names), *grid.shape), dtype=np.float32)
    for column, name in enumerate(names):
        out[:, column] = _FIELDS[name](grid, calendar, seconds_N)
    # Exactly 0 throughout is how a field that is not there looks, and the sine of the time of year is 0 once a year.
    out[out == 0.0] = np.finfo(np.float32).tiny
    return out


def insolation(grid: Grid, calendar: str, seconds_N: Int64Array) -> Float64Array:
    """Return the radiation of the sun on a level surface at the top of the atmosphere, in W/m2, [N, H, W].

    Of the moment, not a mean. The place of the sun is that of the low-precision formulas of the Astronomical Almanac (as in
    Michalsky 1988, Solar Energy 40, 227): within 0.01 degrees from 1950 to 2050. Of calendars with other years than ours,
    theirs begin where ours do and last as long, so that seasons stay where they are.
    """
    days_N = _days_since_2000(calendar, seconds_N)
    longitude_N = np.deg2rad(280.460 + 0.9856474 * days_N)
    anomaly_N = np.deg2rad(357.528 + 0.9856003 * days_N)
    ecliptic_N = longitude_N + np.deg2rad(1.915) * np.sin(anomaly_N) + np.deg2rad(0.020) * np.sin(2 * anomaly_N)
    tilt_N = np.deg2rad(23.439 - 4e-7 * days_N)
    sine_N = np.sin(tilt_N) * np.sin(ecliptic_N)
    cosine_N = np.sqrt(1.0 - sine_N**2)
    # How far the sun is ahead of the mean sun that clocks follow: mean longitude minus right ascension.
    ahead_N = longitude_N - np.arctan2(np.cos(tilt_N) * np.sin(ecliptic_N), np.cos(ecliptic_N))
    hour_NW = _local_angles(grid, seconds_N) - math.pi + ahead_N[:, None]
    latitude_H = np.deg2rad(grid.latitudes)
    overhead_NH = sine_N[:, None] * np.sin(latitude_H)
    turning_NH = cosine_N[:, None] * np.cos(latitude_H)
    height_NHW = overhead_NH[..., None] + turning_NH[..., None] * np.cos(hour_NW)[:, None]
    distance_N = 1.00014 - 0.01671 * np.cos(anomaly_N) - 0.00014 * np.cos(2 * anomaly_N)
    radiation: Float64Array = SOLAR_CONSTANT * np.maximum(height_NHW, 0.0) / distance_N[:, None, None] ** 2
    return radiation


def _normalised_insolation(grid: Grid, calendar: str, seconds_N: Int64Array) -> Float64Array:
    return (insolation(grid, calendar, seconds_N) / SOLAR_CONSTANT - _MEAN_COSINE) / _STD_COSINE


def _local_angles(grid: Grid, seconds_N: Int64Array) -> Float64Array:
    """Return the angle that the mean sun has gone since midnight at each longitude, [N, W]."""
    angles: Float64Array = np.mod(seconds_N, DAY)[:, None] * (2 * math.pi / DAY) + np.deg2rad(grid.longitudes)
    return angles


def _year_angles(calendar: str, seconds_N: Int64Array) -> Float64Array:
    """Return the angle that the Earth has gone round the sun since the year began, [N, 1, 1]."""
    # Years of the mean length, as GraphCast has them: in single years this is up to a day off the calendar.
    turns = (_days_since_2000(calendar, seconds_N) + 0.5) / _YEARS["proleptic_gregorian"]
    return 2 * math.pi * turns[:, None, None]


def _days_since_2000(calendar: str, seconds_N: Int64Array) -> Float64Array:
    """Return days since noon of 1 January 2000, [N], in years of the length of ours."""
    days: Float64Array = (seconds_N - _midnight_of_2000(calendar)) / DAY
    return days * (_YEARS["proleptic_gregorian"] / _YEARS[calendar]) - 0.5


@cache
def _midnight_of_2000(calendar: str) -> int:
    """Return the seconds since 1970 at which the year 2000 begins."""
    return int(cftime.date2num(cftime.datetime(2000, 1, 1, calendar=calendar), EPOCH, calendar))


_FIELDS: dict[Forcing, Callable[[Grid, str, Int64Array], Float64Array]] = {
    "insolation": _normalised_insolation,
    "cos_local_time": lambda grid, calendar, seconds_N: np.cos(_local_angles(grid, seconds_N))[:, None],
    "sin_local_time": lambda grid, calendar, seconds_N: np.sin(_local_angles(grid, seconds_N))[:, None],
    "cos_julian_day": lambda grid, calendar, seconds_N: np.cos(_year_angles(calendar, seconds_N)),
    "sin_julian_day": lambda grid, calendar, seconds_N: np.sin(_year_angles(calendar, seconds_N)),
}
"""Each forcing, of a shape that broadcasts to [N, H, W]."""
