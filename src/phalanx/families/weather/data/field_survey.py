"""One look at every frame of a store: what is missing where, moments from which any statistics follow, and what is refused.

Mean and squared deviations are kept frame by frame in float64. Statistics of a period are merged from those of its frames,
so they always cover all of it, cost no further pass, and a file in other units stands out. Holes in time, other units and
latitudes turned upside down are refused before a store is read for training: normalisation would hide the last two, and a
model would train on them without complaint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from phalanx.data.sample_order import Int64Array
from phalanx.errors import DataError
from phalanx.families.weather.data.coordinates import HOUR, BoolArray, Float32Array, Float64Array
from phalanx.families.weather.data.field_store import FieldStore

_BLOCK_BYTES = 64 * 2**20
"""Memory for the frames that are looked at together."""
LEAST_ABSURD = 1e20
"""Magnitude from which on a number is no field's but stands for a missing value: 1e20 in CMIP, 9.97e36 in netCDF."""


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation of variables over some frames."""

    frames: int
    mean: Float64Array
    """[V]: over all points that have a value, each counted once; NaN where none has."""
    std: Float64Array
    """[V]: divided by the number of points."""


@dataclass(frozen=True)
class Survey:
    """Content of each frame. Arrays are [T, V] unless said otherwise; a frame without values has NaN moments."""

    valid: Int64Array
    """Points that have a value."""
    mean: Float64Array
    squares: Float64Array
    """Summed squared deviations from `mean`."""
    low: Float32Array
    high: Float32Array
    profile: Float64Array
    """[segments, V, H]: mean by latitude over the frames of each file, south to north."""
    segment_frames: Int64Array
    """[segments]: frames of each file."""

    def moments(self, frames: Int64Array) -> Moments:
        """Return statistics over `frames`, int64 [n], less what is blank in them."""
        count, mean = self._counted[frames], np.nan_to_num(self.mean[frames])
        total = count.sum(axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            overall = (count * mean).sum(axis=0) / total
            squares = np.where(count > 0, np.nan_to_num(self.squares[frames]), 0.0) + count * (mean - overall) ** 2
            return Moments(len(frames), overall, np.sqrt(squares.sum(axis=0) / total))

    def whole_profile(self) -> Float64Array:
        """Return the mean by latitude over all frames, [V, H]."""
        there = np.isfinite(self.profile)
        weights = there * self.segment_frames[:, None, None]
        total = weights.sum(axis=0)
        sums = np.where(there, self.profile * weights, 0.0).sum(axis=0)
        whole: Float64Array = np.divide(sums, total, out=np.full(sums.shape, np.nan), where=total > 0)
        return whole

    def select(self, columns: Sequence[int], scale: Float64Array, offset: Float64Array) -> Survey:
        """Return the survey of some variables, each number multiplied by scale [V] and shifted by offset [V]."""
        chosen = list(columns)
        # A negative scale swaps the lowest and the highest value.
        ends = [(end[:, chosen] * scale + offset).astype(np.float32) for end in (self.low, self.high)]
        return Survey(
            valid=self.valid[:, chosen],
            mean=self.mean[:, chosen] * scale + offset,
            squares=self.squares[:, chosen] * scale**2,
            low=np.minimum(*ends),
            high=np.maximum(*ends),
            profile=self.profile[:, chosen] * scale[:, None] + offset[:, None],
            segment_frames=self.segment_frames,
        )

    def spread(self, columns: Sequence[int], count: int) -> Survey:
        """Return the survey of `count` variables, of which these are at `columns` and the others have no value anywhere."""

        def place(known: np.ndarray, rest: float) -> np.ndarray:
            shape = (len(known), count, *known.shape[2:])
            made = np.full(shape, rest, dtype=known.dtype)
            made[:, list(columns)] = known
            return made

        nothing = {"valid": 0, "mean": np.nan, "squares": 0, "low": np.nan, "high": np.nan, "profile": np.nan}
        arrays = {name: place(getattr(self, name), rest) for name, rest in nothing.items()}
        return Survey(**arrays, segment_frames=self.segment_frames)

    def points(self, frames: Int64Array) -> Float64Array:
        """Return the number of values behind `moments` of the same frames, [V]."""
        count: Float64Array = self._counted[frames].sum(axis=0).astype(np.float64)
        return count

    @cached_property
    def _counted(self) -> Int64Array:
        """Return the number of points with a value in frames that were written."""
        # What was never written must not pull means towards its fill value.
        return np.where(self.blank, 0, self.valid)

    @property
    def usual(self) -> Int64Array:
        """Return the most points with a value that any frame has, [V]."""
        most: Int64Array = self.valid.max(axis=0)
        return most

    @property
    def blank(self) -> BoolArray:
        """Return frames that hold one number throughout where others vary and none is as low: a chunk that was never
        written."""
        varies = (self.high > self.low) & (self.valid > 0)
        constant = (self.high == self.low) & (self.valid > 1)
        lowest = np.where(varies, self.low, np.inf).min(axis=0)
        blank: BoolArray = constant & varies.any(axis=0) & (self.low != lowest)
        return blank

    @property
    def incomplete(self) -> BoolArray:
        """Return frames with fewer values than usual, or blank."""
        incomplete: BoolArray = (self.valid < self.usual) | self.blank
        return incomplete

    @property
    def empty(self) -> BoolArray:
        """Return frames without any value, or blank."""
        empty: BoolArray = (self.valid == 0) | self.blank
        return empty


class Surveyor:
    """Makes a survey of blocks of frames handed over in order."""

    def __init__(self, store: FieldStore) -> None:
        frames, variables = len(store.times), len(store.variables)
        shape = (frames, variables)
        self._store = store
        self._valid = np.zeros(shape, dtype=np.int64)
        self._mean, self._squares = np.full(shape, np.nan), np.full(shape, np.nan)
        self._low, self._high = (np.full(shape, np.nan, dtype=np.float32) for _ in range(2))
        rows = store.grid.shape[0]
        self._sums = np.zeros((len(store.segments), variables, rows))
        self._counts = np.zeros_like(self._sums)
        self._segment = np.repeat(
            np.arange(len(store.segments)), [segment.end - segment.first for segment in store.segments]
        )

    def add(self, first: int, variable: int, block: Float32Array) -> None:
        """Add frames [n, H, W] of a variable from frame `first` on. Raises DataError for infinite and absurd values."""
        absurd = np.abs(block) >= LEAST_ABSURD
        # One infinity would make the mean and every loss infinite; one number of this size makes the spread so large that
        # all others are normalised to the same. Unlike NaN they mark nothing.
        if absurd.any():
            frame = int(np.flatnonzero(absurd.any(axis=(1, 2)))[0])
            value = float(block[frame][absurd[frame]][0])
            what = "infinite values" if np.isinf(value) else f"the value {value:g}, which no field has"
            raise DataError(f"{self._store.place(variable, first + frame)}: holds {what}; mark missing points as NaN")
        there = ~np.isnan(block)
        values = np.where(there, block, 0.0).astype(np.float64)
        rows = slice(first, first + len(block))
        by_latitude, count_by_latitude = values.sum(axis=2), there.sum(axis=2)
        count = count_by_latitude.sum(axis=1)
        some = count > 0
        mean = np.divide(by_latitude.sum(axis=1), count, out=np.full(len(block), np.nan), where=some)
        # From the frame's own mean: sums of squares of large numbers, such as geopotential, would cancel.
        deviations = np.where(there, values - mean[:, None, None], 0.0)
        self._valid[rows, variable] = count
        self._mean[rows, variable] = mean
        self._squares[rows, variable] = np.where(some, (deviations**2).sum(axis=(1, 2)), np.nan)
        self._low[rows, variable] = np.where(some, np.where(there, block, np.inf).min(axis=(1, 2)), np.nan)
        self._high[rows, variable] = np.where(some, np.where(there, block, -np.inf).max(axis=(1, 2)), np.nan)
        # By file: one that is upside down or in other units then stands out. Not by +=, which would add just one frame
        # of all those of a block that lie in one file.
        np.add.at(self._sums[:, variable], self._segment[rows], by_latitude)
        np.add.at(self._counts[:, variable], self._segment[rows], count_by_latitude)

    def finish(self) -> Survey:
        """Return the survey of all that was added."""
        profile = np.divide(self._sums, self._counts, out=np.full_like(self._sums, np.nan), where=self._counts > 0)
        lengths = np.array([segment.end - segment.first for segment in self._store.segments], dtype=np.int64)
        return Survey(self._valid, self._mean, self._squares, self._low, self._high, profile, lengths)


def survey_store(store: FieldStore) -> Survey:
    """Look at every frame of `store` once, in order. Raises DataError for absurd values and unreadable files."""
    surveyor = Surveyor(store)
    rows, columns = store.grid.shape
    # float64 copies of a block are made on the way, hence 8 bytes a value.
    size = max(1, _BLOCK_BYTES // (8 * rows * columns))
    for variable in range(len(store.variables)):
        for first in range(0, len(store.times), size):
            frames = np.arange(first, min(first + size, len(store.times)), dtype=np.int64)
            surveyor.add(first, variable, store.read(frames, [variable])[:, 0])
    return surveyor.finish()


def merge_moments(parts: Sequence[Moments], points: Sequence[Float64Array]) -> Moments:
    """Return the statistics of several sets of frames together. points: values behind each part, [V]."""
    with np.errstate(invalid="ignore"):
        # NaN for a variable that has no value anywhere.
        weights = np.stack(points) / np.sum(points, axis=0)
    # A source without a variable has no mean of it, and no weight.
    means, stds = (
        np.where(np.stack(points) > 0, np.stack([getattr(part, name) for part in parts]), 0.0)
        for name in ("mean", "std")
    )
    mean = (weights * means).sum(axis=0)
    variance = (weights * (stds**2 + (means - mean) ** 2)).sum(axis=0)
    return Moments(sum(part.frames for part in parts), mean, np.sqrt(variance))


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
"""Latitudes that a comparison of means by latitude needs."""
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
    """Statistics of the variables in one file or source."""

    names: Sequence[str]
    """[V]: path of each variable, for messages."""
    moments: Moments
    profile: Float64Array | None
    """[V, H]: mean by latitude, south to north; None where unknown."""
    days: frozenset[int]
    """Days of the year that it has frames of."""


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
        factor = max(ratio, 1 / ratio)
        if factor > std_ratio or distance > _MEAN_DISTANCE:
            causes = [
                f"off by a factor of about {known:g}, as between {what}"
                for known, what in _UNITS
                if 0.6 < factor / known < 1.6
            ]
            if factor < _STD_RATIO and abs(abs(mean_b - mean_a) - _ZERO[0]) < 30:
                causes.append(f"off by about {_ZERO[0]}, as between {_ZERO[1]}")
            cause = causes[0] if causes else "these are not the same units"
            raise DataError(
                f"{variable} has mean {mean_b:.4g} and standard deviation {std_b:.4g} in {second.names[index]}, "
                f"but {mean_a:.4g} and {std_a:.4g} in {first.names[index]}: {cause}; "
                f"give scale and offset under names of the source, or set data.check_units to false"
            )
    # Between seasons, means by latitude differ by nature; of few rows, they say nothing.
    if not same_season or first.profile is None or second.profile is None or first.profile.shape[1] < _LEAST_ROWS:
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
    """Return the correlation of two means by latitude [H] over the rows that both have; NaN where there are too few."""
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
    # Both ends of a step may be off by the tolerance, hence twice.
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
