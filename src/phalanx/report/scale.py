"""Scales of a chart: where a value lies between two ends, and which round values to write beside them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phalanx.report.run_log import FloatArray
from phalanx.report.text import duration, short

_DURATION_STEPS = [
    *(1, 2, 5, 10, 15, 20, 30),
    *(60 * minutes for minutes in (1, 2, 3, 5, 10, 15, 20, 30)),
    *(3600 * hours for hours in (1, 2, 3, 6, 12)),
    *(86400 * days for days in (1, 2, 5, 10, 20, 50)),
]


@dataclass(frozen=True)
class Tick:
    """A labelled position on a scale."""

    share: float
    """0 at the low end of the scale, 1 at its high end."""
    label: str


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic scale from `low` to `high`, with `low < high` (and `low > 0` when logarithmic)."""

    low: float
    high: float
    logarithmic: bool = False

    def share(self, values: FloatArray) -> FloatArray:
        """Where values lie, shape kept: 0 at `low`, 1 at `high`; NaN where the scale has no place for a value."""
        if not self.logarithmic:
            return np.where(np.isfinite(values), (values - self.low) / (self.high - self.low), np.nan)
        logs = np.log(values, out=np.full(values.shape, np.nan), where=np.isfinite(values) & (values > 0))
        return (logs - math.log(self.low)) / (math.log(self.high) - math.log(self.low))

    def ticks(self, values: list[float], label: Callable[[float], str]) -> list[Tick]:
        """The given values that lie on this scale, as ticks."""
        shares = self.share(np.asarray(values, dtype=np.float64))
        placed = zip(values, shares, strict=True)
        return [Tick(float(share), label(value)) for value, share in placed if -1e-9 <= share <= 1 + 1e-9]


def value_scale(values: FloatArray, *, logarithmic: bool, from_zero: bool) -> Scale:
    """A scale that shows every finite value (every positive one when logarithmic) with a little air around them."""
    shown = values[np.isfinite(values) & ((values > 0) | (not logarithmic))]
    low, high = (float(shown.min()), float(shown.max())) if shown.size else (1.0, 1.0)
    if logarithmic:
        air = max(math.exp(0.04 * (math.log(high) - math.log(low))), 1.05)
        limits = sys.float_info
        return Scale(max(low / air, limits.min), min(high * air, limits.max), logarithmic=True)
    air = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    if from_zero and low >= 0:
        return Scale(0.0, high + air if high > 0 else 1.0)
    return Scale(low - air, high + air)


def value_ticks(scale: Scale) -> list[Tick]:
    """Four to eight round values on a value scale."""
    if not scale.logarithmic:
        return scale.ticks(_linear_values(scale, wanted=5), short)
    decades = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    stride = math.ceil(len(decades) / 7)
    powers = [10.0**decade for decade in decades if decade % stride == 0]
    if stride > 1:
        return scale.ticks(powers, short)
    for multiples in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = scale.ticks([multiple * power for power in powers for multiple in multiples], short)
        if len(ticks) >= 4:
            return ticks
    return scale.ticks(_linear_values(scale, wanted=5), short)


def position_ticks(scale: Scale, axis: str) -> list[Tick]:
    """About five round positions on a horizontal scale of the axis "step", "tokens" or "time" (in seconds)."""
    span = scale.high - scale.low
    if axis == "time" and span >= 4:
        stride = next((step for step in _DURATION_STEPS if span / step <= 6), _DURATION_STEPS[-1])
        stride *= math.ceil(span / stride / 6)
        values = [float(stride * i) for i in range(math.ceil(scale.low / stride), math.floor(scale.high / stride) + 1)]
        return scale.ticks(values, duration)
    if axis == "time":
        return scale.ticks(_linear_values(scale, wanted=4), duration)
    values = [value for value in _linear_values(scale, wanted=5) if value == round(value)]
    return scale.ticks(values, short)


def _linear_values(scale: Scale, wanted: int) -> list[float]:
    rough = (scale.high - scale.low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    stride = power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= 0.85 * rough)
    first, last = math.ceil(scale.low / stride - 1e-9), math.floor(scale.high / stride + 1e-9)
    # a stride such as 0.1 is not exact in binary; rounding keeps 0.30000000000000004 off the page
    return [float(f"{i * stride:.10g}") for i in range(first, last + 1)]
