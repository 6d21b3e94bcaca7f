"""What is refused before a store is read for training: holes in time, other units, and latitudes turned upside down.

Normalisation would hide the last two, and a model would train on them without complaint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.errors import DataError
from phalanx.families.weather.data.coordinates import HOUR, Float64Array
from phalanx.families.weather.data.field_store import FieldStore
from phalanx.families.weather.data.field_survey import Moments, Survey

_STD_RATIO = 3.0
"""Standard deviations further apart than this are taken for other units: the smallest usual factor, between geopotential
and its height, is 9.8; models differ by less than 2."""
_STD_RATIO_OF_SEASONS = 5.0
"""The same for data of different seasons: the temperature of SPEEDY at 200 hPa spreads 3.1 times as far in August as in
March."""
_MEAN_DISTANCE = 6.0
"""Means further apart than this many standard deviations are taken for another zero: degrees Celsius are 13 away from
kelvin near the ground."""
_COMMON_DAYS = 0.5
"""Part of the days of the year that two sources share if they are of one season: means by latitude are then compared."""
_LEAST_ROWS = 4
_UNITS = (
    (9.80665, "geopotential and its height"),
    (100.0, "hPa and Pa, or percent and fractions"),
    (1000.0, "g/kg and kg/kg, or mm and m"),
    (3600.0, "per hour and per second"),
    (86400.0, "per day and per second"),
)
_ZERO = (273.15, "kelvin and degrees Celsius")


@dataclass(frozen=True)
class SourceSummary:
    """What is known of the variables in one file or source."""

    names: Sequence[str]
    """[V]: where each variable lies, for messages."""
    moments: Moments
    profile: Float64Array | None
    """[V, H]: mean by latitude, south to north; None where unknown."""
    days: frozenset[int]
    """Days of the year it has frames of."""


def require_alike(variables: Sequence[str], first: SourceSummary, second: SourceSummary) -> None:
    """Refuse `second` where a variable is in other units than in `first`, or upside down.

    Raises DataError naming both, the variable, the figures and the likely cause.
    """
    # January and July differ much as two hemispheres do.
    same_season = len(first.days & second.days) > _COMMON_DAYS * len(first.days | second.days)
    std_ratio = _STD_RATIO if same_season else _STD_RATIO_OF_SEASONS
    for index, variable in enumerate(variables):
        mean_a, mean_b = (float(summary.moments.mean[index]) for summary in (first, second))
        std_a, std_b = (float(summary.moments.std[index]) for summary in (first, second))
        # Without values, or constant, there is nothing to compare.
        if not all(np.isfinite([mean_a, mean_b, std_a, std_b])) or std_a == 0 or std_b == 0:
            continue
        ratio = std_b / std_a
        distance = abs(mean_b - mean_a) / max(std_a, std_b)
        if max(ratio, 1 / ratio) > std_ratio or distance > _MEAN_DISTANCE:
            raise DataError(
                f"{variable} has mean {mean_b:.4g} and standard deviation {std_b:.4g} in {second.names[index]}, "
                f"but {mean_a:.4g} and {std_a:.4g} in {first.names[index]}: {_guess_cause(ratio, mean_b - mean_a)}; "
                f"give scale and offset under names of the source, or set data.check_units to false"
            )
    if same_season:
        _require_same_way_up(variables, first, second)


def _guess_cause(ratio: float, shift: float) -> str:
    factor = max(ratio, 1 / ratio)
    for known, what in _UNITS:
        if 0.6 < factor / known < 1.6:
            return f"off by a factor of about {known:g}, as between {what}"
    if factor < _STD_RATIO and abs(abs(shift) - _ZERO[0]) < 30:
        return f"off by about {_ZERO[0]}, as between {_ZERO[1]}"
    return "these are not the same units"


def _require_same_way_up(variables: Sequence[str], first: SourceSummary, second: SourceSummary) -> None:
    if first.profile is None or second.profile is None or first.profile.shape[1] < _LEAST_ROWS:
        return
    upright, turned = [], []
    for a, b in zip(first.profile, second.profile, strict=True):
        upright.append(_correlate_rows(a, b))
        turned.append(_correlate_rows(a, b[::-1]))
    # Over all variables: a field that is nearly symmetric by itself says little.
    gain = np.nan_to_num(np.array(turned) - np.array(upright))
    index = int(np.argmax(gain))
    # A reversed field fits well once turned and badly before; a mere difference of climates does neither.
    if turned[index] > 0.9 and gain[index] > 0.3 and np.sum(gain[gain > 0]) > -np.sum(gain[gain < 0]):
        raise DataError(
            f"latitudes of {second.names[index]} look reversed: the mean of {variables[index]} by latitude correlates "
            f"by {upright[index]:.2f} with that of {first.names[index]}, and by {turned[index]:.2f} upside down; "
            f"correct the latitude coordinate, or set data.check_units to false"
        )


def _correlate_rows(a: Float64Array, b: Float64Array) -> float:
    both = np.isfinite(a) & np.isfinite(b)
    if both.sum() < _LEAST_ROWS or a[both].std() == 0 or b[both].std() == 0:
        return float("nan")
    return float(np.corrcoef(a[both], b[both])[0, 1])


def require_whole_axis(store: FieldStore, *, skip_gaps: bool, tolerance_hours: float) -> None:
    """Refuse holes in the time axis of `store` unless `skip_gaps`. tolerance_hours: how much a time may be off.

    Raises DataError naming the files and time indices on both sides of a hole and how much is missing.
    """
    if skip_gaps or store.gaps_refused:
        return
    times = store.times
    steps = np.diff(times.seconds)
    for index in np.flatnonzero(np.abs(steps - times.step) > 2 * round(tolerance_hours * HOUR)).tolist():
        if store.allows_gap(index):
            continue
        before = next(s for s in store.segments if s.first <= index < s.end)
        after = next(s for s in store.segments if s.first <= index + 1 < s.end)
        missing = round(steps[index] / times.step) - 1
        lacking = f"{missing} steps of {times.step / HOUR:g} h are missing" if missing > 0 else "steps are uneven"
        other = "" if after is before else f" in {after.path}"
        raise DataError(
            f"{before.path}: time index {index - before.first} ({times.text(index)}) is followed by "
            f"{times.text(index + 1)}{other}: {lacking}; add the missing file, or set data.gaps to skip (or "
            f"data.time_tolerance_hours where steps differ by nature, as months do)"
        )


def require_one_quantity(store: FieldStore, survey: Survey) -> None:
    """Refuse a file of `store` whose variables are in other units than in the other files, or upside down."""
    if len(survey.segment_frames) < 2:
        return
    summaries, first = [], 0
    for segment, length in enumerate(survey.segment_frames.tolist()):
        frames = np.arange(first, first + length, dtype=np.int64)
        names = [str(store.locate(variable, first)[0]) for variable in range(len(store.variables))]
        days = frozenset(store.times.days_of_year[frames].tolist())
        summaries.append(SourceSummary(names, survey.moments(frames), survey.profile[segment], days))
        first += length
    # The first file stands for the source: messages then name two files, not an average.
    for summary in summaries[1:]:
        require_alike(store.variables, summaries[0], summary)
