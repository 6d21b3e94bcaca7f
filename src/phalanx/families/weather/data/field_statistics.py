"""Statistics that a run normalises by, and the climatology that forecasts are compared with.

Both are taken over whole periods, never over a part of them. The climatology is the mean of past years for each day of the
year and time of day: a forecast that is no better is of no use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from phalanx.data.prepared_folder import read_checked
from phalanx.data.sample_order import Int64Array
from phalanx.errors import DataError
from phalanx.families.weather.data.coordinates import Float32Array, Float64Array, TimeAxis
from phalanx.families.weather.data.field_store import FieldStore
from phalanx.files import write_atomically

_FRAMES_AT_ONCE = 64
"""Frames of one variable that are in memory together."""
_LIGHT_SHARE = 2.0 / 3.0
"""Share of the wet amounts that are light."""
_MONTHS = 12


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class VariableStatistics(_Part):
    """One variable, in its own units."""

    mean: float
    std: Annotated[float, Field(gt=0.0)]


class FieldStatistics(_Part):
    """Means and deviations that a run normalises by; a run directory keeps them, and a later run may start from them."""

    format: Literal["phalanx-field-statistics"] = "phalanx-field-statistics"
    version: Literal[1] = 1
    period: str
    """Times that they are taken over, in words."""
    frames: int
    """Number of frames that they are taken over."""
    variables: dict[str, VariableStatistics]
    """Statistics by name in the run, those of static fields too."""

    def mean_of(self, names: Sequence[str]) -> Float64Array:
        """Return the means of these variables, [n]."""
        return np.array([self.variables[name].mean for name in names])

    def std_of(self, names: Sequence[str]) -> Float64Array:
        """Return the standard deviations of these variables, [n]."""
        return np.array([self.variables[name].std for name in names])

    def write(self, path: Path) -> None:
        """Write the statistics to a file."""
        write_atomically(path, self.model_dump_json(indent=1) + "\n")


def read_statistics(path: Path, names: Sequence[str]) -> FieldStatistics:
    """Read statistics of at least the variables `names` from a file. Raises DataError naming the file and what is wrong."""
    earlier = "data.statistics names a file written by an earlier run"
    statistics = read_checked(path, FieldStatistics, missing=earlier)
    missing = [name for name in names if name not in statistics.variables]
    if missing:
        raise DataError(f"{path} has no statistics of {', '.join(missing)}; it has {', '.join(statistics.variables)}")
    return statistics


def static_statistics(names: Sequence[str], fields: Float32Array) -> dict[str, VariableStatistics]:
    """Return statistics of static fields [S, H, W], each over its points; a constant field gets the deviation 1."""
    found = {}
    for name, field in zip(names, fields.astype(np.float64), strict=True):
        found[name] = VariableStatistics(mean=float(field.mean()), std=float(field.std()) or 1.0)
    return found


@dataclass(frozen=True)
class PrecipitationClimate:
    """Says how often it is dry at each grid point and from which amount on precipitation is heavy there, for SEEPS.

    Each variable in its own unit; by calendar month, as Rodwell et al. (2010, Q. J. R. Meteorol. Soc. 136, 1344) take it,
    and by time of day.
    """

    places: tuple[int, ...]
    """[P]: their places among the variables of the forecasts."""
    dry_threshold: Float64Array
    """[P]: amount up to which a time is dry."""
    dry_fraction: Float32Array
    """[12, K, P, H, W]: share of dry times in each month and part of the day; NaN where there was no value."""
    heavy_threshold: Float32Array
    """[12, K, P, H, W]: amount above which precipitation is heavy; NaN where it was never wet."""

    def at(self, times: TimeAxis, frames: Int64Array) -> tuple[Float32Array, Float32Array]:
        """Return dry fractions and heavy thresholds [n, P, H, W] of the times of `frames`, int64 [n]."""
        month, part = times.months[frames], times.parts_of_day(self.dry_fraction.shape[1])[frames]
        return self.dry_fraction[month, part], self.heavy_threshold[month, part]


@dataclass(frozen=True)
class Climatology:
    """Means of some variables by day of the year and time of day."""

    mean: Float32Array
    """[N, K, V, H, W]: mean of the n-th day that was asked for and the k-th of K equal parts of the day; NaN where there
    was no value."""
    frames: Int64Array
    """[N, K]: frames behind each mean."""
    row: Int64Array
    """[D]: where each day of the year stands among those that were asked for; -1 for a day that was not."""
    calendar: str
    days: int
    """Days of the year that each mean covers, its own in the middle; those of weight 0 are none of them."""
    name: str
    """Path that the frames come from, for messages."""
    precipitation: PrecipitationClimate | None = None
    """Climate of those of the variables that are precipitation; None where none is."""

    def at(self, times: TimeAxis, frames: Int64Array) -> Float32Array:
        """Return the climatology [n, V, H, W] of the times of `frames`, int64 [n], whose days were asked for.

        Raises DataError for a time of year that the climatology has no frame of.
        """
        if times.calendar != self.calendar:
            raise DataError(
                f"the climatology of {self.name} has calendar {self.calendar}, the forecasts {times.calendar}"
            )
        row, part = self.row[times.days_of_year[frames]], times.parts_of_day(self.mean.shape[1])[frames]
        assert (row >= 0).all()
        unknown = np.flatnonzero(self.frames[row, part] == 0)
        # A mean of no frames is NaN, which would drop the case from the scores without a word.
        if unknown.size:
            raise DataError(
                f"the climatology of {self.name} has no frame within {self.days // 2} days of the day of year of "
                f"{times.text(int(frames[unknown[0]]))}; let data.climatology cover a whole year, or raise "
                f"data.climatology_days"
            )
        return self.mean[row, part]


def mean_by_day(
    store: FieldStore,
    variables: Sequence[int],
    frames: Int64Array,
    *,
    days: int,
    weights: Literal["equal", "linear"] = "equal",
    asked: Int64Array | None = None,
) -> Climatology:
    """Return the climatology of some variables of a store over `frames`, each mean over a window of `days` days of the year.

    The window counts each frame once and wraps around the year's end. Weights are equal, or fall linearly from the window's
    middle to 0 at its ends, as in WeatherBench 2 (Rasp et al. 2024, section 3.2). Data with less than a day between frames
    has means for each time of day. asked: frames, of the store, whose days of the year are wanted; None for the whole year,
    which on a fine grid takes long and is large.
    """
    times = store.times
    in_year, parts = times.days_in_year, times.frames_a_day
    wanted = np.arange(in_year) if asked is None else np.unique(times.days_of_year[asked])
    weight_ND = _window_weights(wanted, in_year, days, weights)
    # One slot for each day of the year and time of day: the daily cycle is no forecast skill.
    day, part = times.days_of_year[frames], times.parts_of_day(parts)[frames]
    count_DK = np.bincount(day * parts + part, minlength=in_year * parts).reshape(in_year, parts)
    # Days whose frames count in a window that is wanted; no other frame is read.
    near = np.flatnonzero(weight_ND.any(axis=0) & count_DK.any(axis=1))
    counted = np.isin(day, near)
    frames, place, part = frames[counted], np.searchsorted(near, day)[counted], part[counted]
    weight_NM = weight_ND[:, near]
    mean = np.empty((len(wanted), parts, len(variables), *store.grid.shape), dtype=np.float32)
    for column, variable in enumerate(variables):
        sums = np.zeros((len(near), parts, *store.grid.shape))
        valid = np.zeros_like(sums)
        for first in range(0, len(frames), _FRAMES_AT_ONCE):
            rows = slice(first, first + _FRAMES_AT_ONCE)
            block = store.read(frames[rows], [variable])[:, 0].astype(np.float64)
            there = ~np.isnan(block)
            # One frame at a time: numpy's unbuffered addition at repeated places is many times slower.
            for *slot, field, known in zip(place[rows], part[rows], np.where(there, block, 0.0), there, strict=True):
                sums[*slot] += field
                valid[*slot] += known
        total, points = (np.tensordot(weight_NM, array, axes=1) for array in (sums, valid))
        mean[:, :, column] = np.divide(total, points, out=np.full(total.shape, np.nan), where=points > 0.5)
    row = np.full(in_year, -1)
    row[wanted] = np.arange(len(wanted))
    covered = 2 * (days // 2) - 1 if weights == "linear" and days > 2 else days
    return Climatology(mean, (weight_ND > 0) @ count_DK, row, times.calendar, covered, str(store.path))


def _window_weights(wanted: Int64Array, in_year: int, days: int, weights: Literal["equal", "linear"]) -> Float64Array:
    """Return what each day of the year counts in the window around each day of `wanted`, [N, D]: whole numbers.

    Equal weights are 1 over `days` days, an even number of which reaches further back; linear ones are `days // 2` in the
    middle, one less for each day of distance.
    """
    half = days // 2
    weight_ND = np.zeros((len(wanted), in_year))
    for offset in range(-half, (days - 1) // 2 + 1):
        # The year is a circle: late December is next to early January.
        at = (wanted + offset) % in_year
        weight_ND[np.arange(len(wanted)), at] = half - abs(offset) if weights == "linear" and days > 2 else 1
    return weight_ND


def climate_by_month(
    store: FieldStore, variables: Sequence[str], frames: Int64Array, dry_thresholds: Mapping[str, float]
) -> PrecipitationClimate:
    """Return the climate of precipitation in a store over `frames`.

    variables: all that are forecast. dry_thresholds: by name, for those of them that are precipitation.
    """
    places = tuple(place for place, name in enumerate(variables) if name in dry_thresholds)
    thresholds = np.array([dry_thresholds[variables[place]] for place in places])
    parts = store.times.frames_a_day
    shape = (_MONTHS, parts, len(places), *store.grid.shape)
    fraction, heavy = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    months, day_parts = store.times.months[frames], store.times.parts_of_day(parts)[frames]
    for month in range(_MONTHS):
        for part in range(parts):
            mine = frames[(months == month) & (day_parts == part)]
            # A variable at a time: a quantile takes all its amounts together.
            for column, (place, threshold) in enumerate(zip(places, thresholds, strict=True)):
                if mine.size:
                    amounts_THW = store.read(mine, [store.variables.index(variables[place])])[:, 0]
                    fraction[month, part, column], heavy[month, part, column] = _find_climate(amounts_THW, threshold)
    return PrecipitationClimate(places, thresholds, fraction, heavy)


def _find_climate(amounts_THW: Float32Array, dry_threshold: float) -> tuple[Float64Array, Float64Array]:
    """Return the share of dry amounts and the quantile of the wet ones that separates light from heavy, each [H, W]."""
    known_HW = (~np.isnan(amounts_THW)).sum(axis=0)
    wet_THW = amounts_THW > dry_threshold
    wet_HW = wet_THW.sum(axis=0)
    # Wet amounts first, in order: their number differs from point to point, which numpy's quantile has slow loops for.
    ordered_THW = np.sort(np.where(wet_THW, amounts_THW, np.inf), axis=0)
    at_HW = np.maximum(wet_HW - 1, 0) * _LIGHT_SHARE
    below_HW = np.floor(at_HW).astype(np.int64)
    above_HW = np.minimum(below_HW + 1, np.maximum(wet_HW - 1, 0))
    low_HW, high_HW = (np.take_along_axis(ordered_THW, row[None], axis=0)[0] for row in (below_HW, above_HW))
    wet = wet_HW > 0
    # Infinite where it was never wet: infinity less infinity would warn.
    low, high = (np.where(wet, one, np.nan).astype(np.float64) for one in (low_HW, high_HW))
    fraction = np.divide(known_HW - wet_HW, known_HW, out=np.full(known_HW.shape, np.nan), where=known_HW > 0)
    return fraction, low + (at_HW - below_HW) * (high - low)
