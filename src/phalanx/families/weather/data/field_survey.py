"""One look at every frame of a store: what is missing where, and moments from which any statistics follow exactly.

Mean and squared deviations are kept frame by frame in float64. Statistics of a period are merged from those of its frames,
so they always cover all of it, cost no further pass, and a file in other units stands out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from phalanx.data.sample_order import Int64Array
from phalanx.errors import DataError
from phalanx.families.weather.data.coordinates import BoolArray, Float32Array, Float64Array
from phalanx.families.weather.data.field_store import FieldStore

_BLOCK_BYTES = 64 * 2**20


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
    """What each frame holds. Arrays are [T, V] unless said otherwise; a frame without values has NaN moments."""

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
        """Add frames [n, H, W] of a variable from frame `first` on. Raises DataError for infinite values."""
        infinite = np.isinf(block).any(axis=(1, 2))
        # One infinity would make the mean and every loss infinite; unlike NaN it marks nothing.
        if infinite.any():
            raise DataError(
                f"{self._store.place(variable, first + int(np.flatnonzero(infinite)[0]))}: holds infinite values; "
                f"mark missing points as NaN"
            )
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
        # By file: one that is upside down or in other units then stands out.
        np.add.at(self._sums[:, variable], self._segment[rows], by_latitude)
        np.add.at(self._counts[:, variable], self._segment[rows], count_by_latitude)

    def finish(self) -> Survey:
        """Return the survey of all that was added."""
        profile = np.divide(self._sums, self._counts, out=np.full_like(self._sums, np.nan), where=self._counts > 0)
        lengths = np.array([segment.end - segment.first for segment in self._store.segments], dtype=np.int64)
        return Survey(self._valid, self._mean, self._squares, self._low, self._high, profile, lengths)


def survey_store(store: FieldStore) -> Survey:
    """Look at every frame of `store` once, in order. Raises DataError for infinite values and unreadable files."""
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
    """Merge statistics of several sets of frames. points: values behind each part, [V]."""
    with np.errstate(invalid="ignore"):
        # NaN for a variable that has no value anywhere.
        weights = np.stack(points) / np.sum(points, axis=0)
    means, stds = np.stack([part.mean for part in parts]), np.stack([part.std for part in parts])
    mean = (weights * means).sum(axis=0)
    variance = (weights * (stds**2 + (means - mean) ** 2)).sum(axis=0)
    return Moments(sum(part.frames for part in parts), mean, np.sqrt(variance))
