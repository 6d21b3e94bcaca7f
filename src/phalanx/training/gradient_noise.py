"""The gradient noise scale: how large a batch may grow before more samples in it no longer save steps.

Estimated as in appendix A.1 of McCandlish et al. (arXiv:1812.06162), from gradient norms at two batch sizes: that of the
first half of a global batch, which stands in the gradients half way through a step, and that of all of it, which clipping
needs anyway. So an estimate costs a norm, and one more reduction of gradients where these are reduced once a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from phalanx.data.batch_stream import Batch
from phalanx.layout.apply import ParallelModel
from phalanx.layout.execute import Executor

KEPT = 0.95
"""Share of the moving averages that each estimate keeps: one estimate alone says little."""
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class NoiseState(BaseModel):
    """Moving averages of the estimates so far."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    square: _Finite = 0.0
    """Squared norm of the true gradient."""
    variance: _Finite = 0.0
    """Trace of the covariance of a sample's gradient."""
    weight: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Sum of the weights of all estimates in these averages."""


@dataclass(frozen=True)
class NoiseFigures:
    """What one step says of the noise of gradients, and what all so far say of the critical batch."""

    gradient_square: float
    """Estimate of the squared norm of the true gradient, by this step alone; it may be below 0."""
    gradient_variance: float
    """Estimate of the trace of the covariance of a sample's gradient, by this step alone; it may be below 0."""
    critical_batch: float | None
    """Samples of the critical batch: averaged variance over averaged square; None where an average is not above 0."""


class GradientNoise:
    """Measures the gradient noise scale of a model every so many steps."""

    def __init__(self, applied: ParallelModel, every: int) -> None:
        """Measure `applied`, whose micro-batches can be halved (see `layout.legality`). All ranks call it together."""
        self.every = every
        self.batch = applied.layout.global_batch
        self.relay(applied)
        self.state = NoiseState()

    def relay(self, applied: ParallelModel) -> None:
        """Measure the same model with other micro-batches from now on."""
        self.executor = Executor(applied.with_global_batch(self.batch // 2))

    def is_due(self, step: int) -> bool:
        """Return whether `step` is measured."""
        return step % self.every == 0

    def run_halves(self, step: int, batch: Batch, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Form the gradients of `batch` as `Executor.forward_backward` does, in two halves.

        scale: the losses' factor, 1 over the targets of the whole batch. Returns this rank's part of the summed losses, and
        the norm of the gradient of the first half's mean loss (0-dim), times whatever `scale` has beside.
        """
        executor = self.executor
        first, second = batch.split(2)
        # Both halves have about as many targets, but not to the last one.
        counts = torch.stack((first.target_counts().sum(), batch.target_counts().sum())).double()
        if executor.mesh.world is not None:
            counts = counts if executor.mesh.reads_first else torch.zeros_like(counts)
            dist.all_reduce(counts, group=executor.mesh.world)
        loss = executor.forward_backward(step, first, scale)
        norm = executor.applied.gradient_norm() * counts[1] / counts[0].clamp(min=1.0)
        # The second half adds to these gradients, and what ranks hold alike is then summed over them once more.
        executor.count_sums_once()
        return loss + executor.forward_backward(step, second, scale), norm

    def add(self, half_norm: float, norm: float) -> NoiseFigures:
        """Take one step into account. half_norm: norm of the gradient of half of its batch. norm: of all of it."""
        small, large = half_norm**2, norm**2
        # |G_B|^2 is |G|^2 + tr(S) / B on average: two equations for two unknowns.
        square, variance = 2.0 * large - small, self.batch * (small - large)
        state = self.state
        self.state = NoiseState(
            square=KEPT * state.square + (1.0 - KEPT) * square,
            variance=KEPT * state.variance + (1.0 - KEPT) * variance,
            weight=KEPT * state.weight + (1.0 - KEPT),
        )
        known = self.state.square > 0.0 and self.state.variance > 0.0
        return NoiseFigures(square, variance, self.state.variance / self.state.square if known else None)
