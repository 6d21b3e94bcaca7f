"""Losses and gradient norms that stand out from those of the steps before, by a scale that single outliers do not move.

The limit is a number of robust standard deviations above the median of a window (Rousseeuw and Croux, 1993, section 1).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from phalanx.training.metrics import StepMetrics
from phalanx.training.step import NO_LIMITS, StepLimits

WINDOW = 64
"""Steps that median and deviation are taken over."""
FEWEST = 8
"""Steps that make a scale worth comparing with."""
MAD_TO_DEVIATION = 1.4826
"""Standard deviation of normal numbers over their median absolute deviation."""
LEAST_LOSS_DEVIATION = 0.01
"""Standard deviation of the loss that is assumed at least, over its median: a plateau must not make noise a spike."""
LEAST_NORM_DEVIATION = 0.5
"""The same for gradient norms. Those of healthy runs stay within a few times their median; hard samples reach ten."""

_Figures = Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(max_length=WINDOW)]


class RecentFigures(BaseModel):
    """Losses and gradient norms of the last steps, as a checkpoint keeps them: a resumed run decides as if never stopped."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    losses: _Figures = Field(default_factory=list)
    norms: _Figures = Field(default_factory=list)


@dataclass(frozen=True)
class Spike:
    """A figure of a step that stands out."""

    figure: str
    value: float
    median: float
    limit: float

    def __str__(self) -> str:
        name = self.figure.replace("grad_norm", "gradient norm")
        return f"{name} {self.value:.4g} is above {self.limit:.4g}; the median of the steps before is {self.median:.4g}"


class RunningScale:
    """Median and robust deviation of the last values of one figure."""

    def __init__(self, deviations: float, least: float) -> None:
        """Set the limit `deviations` above the median; a deviation is at least `least` times the median."""
        self.values: deque[float] = deque(maxlen=WINDOW)
        self._deviations, self._least = deviations, least

    def limit(self) -> float:
        """Return the value above which the next one is a spike; infinite while too little is known."""
        if len(self.values) < FEWEST:
            return math.inf
        median = self.median()
        deviation = MAD_TO_DEVIATION * statistics.median(abs(value - median) for value in self.values)
        return median + self._deviations * max(deviation, self._least * abs(median))

    def median(self) -> float:
        """Return the median of the values so far."""
        return statistics.median(self.values)

    def add(self, value: float) -> None:
        """Take one more value; one that is not finite is left out, since it would make every later median so."""
        # A spike counts as well: a higher level that stays becomes the median, and is no spike any more.
        if math.isfinite(value):
            self.values.append(value)


class SpikeWatch:
    """Compares the loss and the gradient norm of each step with those of the steps before. The same on all ranks."""

    def __init__(self, deviations: float, recent: RecentFigures) -> None:
        self._scales = {
            "loss": RunningScale(deviations, LEAST_LOSS_DEVIATION),
            "grad_norm": RunningScale(deviations, LEAST_NORM_DEVIATION),
        }
        self.restore(recent)

    def limits(self) -> StepLimits:
        """Return what the next step's figures are compared with."""
        return StepLimits(**{name: scale.limit() for name, scale in self._scales.items()})

    def judge(self, metrics: StepMetrics, limits: StepLimits = NO_LIMITS) -> Spike | None:
        """Return the figure that stands out in a step, if one does, and take its figures up. limits: as it was launched."""
        found = None
        for name, scale in self._scales.items():
            value, limit = getattr(metrics, name), getattr(limits, name)
            if math.isfinite(value) and value > limit and found is None:
                found = Spike(name, value, scale.median(), limit)
            scale.add(value)
        return found

    def recent(self) -> RecentFigures:
        """Return what a checkpoint keeps."""
        return RecentFigures(losses=list(self._scales["loss"].values), norms=list(self._scales["grad_norm"].values))

    def restore(self, recent: RecentFigures) -> None:
        """Continue from what a checkpoint kept."""
        kept: Sequence[tuple[str, list[float]]] = (("loss", recent.losses), ("grad_norm", recent.norms))
        for name, values in kept:
            self._scales[name].values.clear()
            self._scales[name].values.extend(values)
