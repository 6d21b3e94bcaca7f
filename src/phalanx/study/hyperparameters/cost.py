"""What a trial costs: seconds of a step and memory, from the family's own size and FLOPs, corrected by finished trials.

Both are linear regressions of a logarithm with a prior: before any trial has run they follow the model's size, and each
trial that ends corrects them. Beside the size they know what was chosen, so that they learn of a backbone that is slow for
its FLOPs, or of an option that needs memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.config.check import global_batch_samples
from phalanx.config.schema import Run
from phalanx.families.registry import bind
from phalanx.layout.resolve import one_rank_microbatch
from phalanx.study.space import Choices, Range, Scalar

Floats = npt.NDArray[np.float64]

_NOISE = 0.15
"""Standard deviation of what equal trials differ by, in logarithms."""
_RATE = {True: 2e12, False: 5e9}
"""FLOP/s that a step reaches before anything is measured: on an accelerator, on a CPU core."""
_SHARED = {True: 0.5, False: 1.0}
"""Exponent of the number of trials that share a device: on a CPU core k trials take k times as long each."""
_PROCESS = 0.7e9
"""Bytes of a process before it trains: libraries, and on an accelerator its context."""
_STATE = 16
"""Bytes of a parameter with its gradient and the optimizer's state."""
_ACTIVATION_WIDTHS = 12.0
"""Numbers that are kept for the backward pass of a matmul parameter's row of a block, in widths."""
_SPREAD = 1.3
"""Standard deviations of the memory's logarithm that are kept free."""


@dataclass(frozen=True)
class TrialSize:
    """How large a trial is, by its family's own functions."""

    flops: float
    """FLOPs of a step, forward and backward."""
    parameters: float
    bytes: float
    """Bytes of memory by a rule of thumb."""


def measure_size(run: Run) -> TrialSize:
    """Return the size of a run on one device. Raises DataError where the data that say so are not prepared."""
    model = bind(run)
    parameters = model.parameter_count()
    each = model.flops_per_sample()
    width = float(getattr(run.model, "d_model", 64))
    # 6 FLOPs a matmul parameter and row: a row of width w through w * w parameters keeps some widths of numbers.
    activations = each * one_rank_microbatch(model) / (6.0 * width) * _ACTIVATION_WIDTHS / 4.0
    return TrialSize(each * global_batch_samples(run), parameters, _PROCESS + _STATE * parameters + 4.0 * activations)


@dataclass
class BayesianRegression:
    """A linear function with a normal prior of its coefficients. Its cost does not grow with the observations."""

    mean: Floats
    """Prior mean of each coefficient."""
    spread: Floats
    """Prior standard deviation of each coefficient."""

    def __post_init__(self) -> None:
        self.observations = 0
        self._precision = np.diag(1.0 / self.spread**2)
        self._target = self.mean / self.spread**2

    def add(self, row: Floats, value: float) -> None:
        """Add an observation."""
        self.observations += 1
        self._precision += np.outer(row, row) / _NOISE**2
        self._target = self._target + row * value / _NOISE**2

    def predict(self, row: Floats) -> tuple[float, float]:
        """Return the expected value at a row, and the standard deviation of an observation there."""
        solved = np.linalg.solve(self._precision, np.stack([self._target, row], axis=1))
        return float(row @ solved[:, 0]), math.sqrt(float(row @ solved[:, 1]) + _NOISE**2)


class CostModel:
    """What trials of one space cost on one kind of device."""

    def __init__(self, ranges: Mapping[str, Range], reference: TrialSize, *, accelerator: bool) -> None:
        """reference: size of the run file as it stands."""
        self._ranges = dict(ranges)
        self._reference = reference
        self._rate = _RATE[accelerator]
        columns = self._columns({})
        extra_mean, extra_spread = np.zeros(len(columns)), np.full(len(columns), 0.5)
        self._seconds = BayesianRegression(
            np.concatenate([[0.0, 0.0, _SHARED[accelerator]], extra_mean]),
            np.concatenate([[3.0, 0.3, 0.3], extra_spread]),
        )
        self._memory = BayesianRegression(
            np.concatenate([[0.0, 0.0], extra_mean]), np.concatenate([[0.7, 0.3], extra_spread * 0.5])
        )

    def learn(
        self, size: TrialSize, values: Mapping[str, Scalar], step_s: float, memory: float | None, k: float
    ) -> None:
        """Take in a trial: seconds of a step with k trials on its device, and peak bytes; None is not known."""
        self._seconds.add(self._time_row(size, values, k), math.log(step_s) - self._first_guess(size))
        if memory is not None:
            self._memory.add(self._memory_row(size, values), math.log(memory) - math.log(size.bytes))

    def step_seconds(self, size: TrialSize, values: Mapping[str, Scalar], k: float = 1.0) -> float:
        """Return the expected seconds of a step with k trials on the device."""
        return math.exp(self._seconds.predict(self._time_row(size, values, k))[0] + self._first_guess(size))

    def memory(self, size: TrialSize, values: Mapping[str, Scalar]) -> float:
        """Return bytes that are probably enough."""
        mean, spread = self._memory.predict(self._memory_row(size, values))
        # Before any trial the spread is the prior's, and would more than double every trial.
        learned = self._memory.observations > 0
        return size.bytes * math.exp(mean + (_SPREAD * spread if learned else 0.0))

    def _first_guess(self, size: TrialSize) -> float:
        # A step takes some milliseconds however small the model is.
        return math.log(0.005 + size.flops / self._rate)

    def _time_row(self, size: TrialSize, values: Mapping[str, Scalar], k: float) -> Floats:
        known = [1.0, math.log(size.flops / self._reference.flops), math.log(max(k, 1.0))]
        return np.concatenate([known, self._columns(values)])

    def _memory_row(self, size: TrialSize, values: Mapping[str, Scalar]) -> Floats:
        return np.concatenate([[1.0, math.log(size.bytes / self._reference.bytes)], self._columns(values)])

    def _columns(self, values: Mapping[str, Scalar]) -> Floats:
        """Return what was chosen as numbers: a column for each number, and one for each of several values."""
        found: list[float] = []
        for name, given in self._ranges.items():
            if isinstance(given, Choices):
                found += [float(name in values and values[name] == one) for one in given.values]
            else:
                found.append(given.position(values[name]) - 0.5 if name in values else 0.0)
        return np.asarray(found)
