"""What planning asks of the time and the memory model, and how it reads their answers. Knows no model family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from phalanx.config.schema import Run
from phalanx.planner.layouts.candidates import Candidates

Floats = npt.NDArray[np.float64]

WAITING = "pipeline bubble"
"""The cause of a step's time that is no work of any device."""


@dataclass(frozen=True)
class Times:
    """Seconds of an optimizer step. Arrays of [candidates]."""

    total: Floats
    causes: dict[str, Floats]
    """By name; they add up to `total`."""
    spread: Floats
    """One standard deviation of the natural logarithm of `total`: how far such predictions are off."""

    def take(self, which: Any) -> Times:
        """Those at these positions."""
        causes = {name: values[which] for name, values in self.causes.items()}
        return Times(self.total[which], causes, self.spread[which])


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors on the rank of a layout that needs most, and of the buffers that peers read: what a run logs as its
    peak. Arrays of [candidates]."""

    peak: Floats
    p_fits: Floats
    """Probability that all ranks have room for them and for what lies beside tensors."""

    def take(self, which: Any) -> Memory:
        """Those at these positions."""
        return Memory(self.peak[which], self.p_fits[which])


@dataclass(frozen=True)
class Bar:
    """What one pipeline rank does at a time, for a picture."""

    rank: int
    kind: str
    """forward, backward, input or weight."""
    stage: int
    microbatch: int
    start: float
    """Seconds from the start of the step."""
    end: float


class Models(Protocol):
    """The cost models, for one machine."""

    @property
    def device_bytes(self) -> int:
        """Memory of a device."""

    @property
    def profile_words(self) -> str:
        """How fast the device is taken to be, and where that is from."""

    def times(self, run: Run, candidates: Candidates, *, exact: bool) -> Times:
        """Of each candidate; `exact` simulates the pipeline's schedule, which closed forms stand in for otherwise."""

    def memory(self, run: Run, candidates: Candidates) -> Memory:
        """Of each candidate."""

    def stage_memory(self, run: Run, candidate: Candidates) -> Sequence[dict[str, float]]:
        """Bytes by cause at the peak of each pipeline rank of a single candidate."""

    def timeline(self, run: Run, candidate: Candidates) -> Sequence[Bar]:
        """What the pipeline ranks of a single candidate do in a step."""
