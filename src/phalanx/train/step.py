"""One optimizer step: micro-batches forward and backward, gradient norm, update. Knows no files and prints nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from phalanx.config.schema import Run
from phalanx.data.batch import Batch
from phalanx.families.registry import bind
from phalanx.layout.apply import Applied
from phalanx.layout.execute import Executor
from phalanx.precision import PRECISIONS
from phalanx.torch_compat import common as compat
from phalanx.train.adamw import AdamW
from phalanx.train.optimizer import build_optimizer, clipped_update, global_gradient_norm


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave, over the whole global batch."""

    loss: float
    """Mean loss per target, summed over tasks; of text in nats (z-loss included)."""
    grad_norm: float
    """2-norm of the gradient before clipping."""
    updated: bool
    """False when non-finite gradients made the step leave the parameters alone."""

    @classmethod
    def of(cls, found: Sequence[float]) -> StepResult:
        """From what `TrainStep.enqueue` gives."""
        loss, norm = found
        return cls(loss, norm, math.isfinite(loss) and math.isfinite(norm))


def build_step(run: Run, applied: Applied, device: torch.device) -> TrainStep:
    """The training step that `run` asks for, with a fresh optimizer."""
    return TrainStep(
        applied,
        build_optimizer(applied.parameters, run.optimizer, bind(run).parameter_kind, applied.working),
        device=device,
        grad_clip=run.optimizer.grad_clip,
        scaler=GradScaler(device.type) if PRECISIONS[run.layout.precision].scales_loss else None,
    )


class TrainStep:
    """Runs optimizer steps of one model on this rank's share of each global batch."""

    def __init__(
        self,
        applied: Applied,
        optimizer: AdamW,
        *,
        device: torch.device,
        grad_clip: float | None,
        scaler: GradScaler | None = None,
    ) -> None:
        self.applied = applied
        self.executor = Executor(applied)
        self.optimizer = optimizer
        self.device = device
        self.grad_clip = grad_clip
        self.scaler = scaler

    def run(self, step: int, batch: Batch) -> StepResult:
        """Optimizer step `step` (from 1) on this rank's samples of the global batch.

        The update is left out, on all ranks alike, when the loss or the gradient norm is not finite.
        """
        return StepResult.of(self.enqueue(step, batch).tolist())

    def enqueue(self, step: int, batch: Batch) -> Tensor:
        """The same without waiting for the device: mean loss and gradient norm as they will be, float64 [2]."""
        batch = self.executor.cut(batch, self.executor.layout.accumulation).to(self.device)
        targets = self._targets(batch)
        scale = 1.0 / targets if self.scaler is None else self.scaler.scale(1.0 / targets)
        loss = self._sum_over_ranks(self.executor.forward_backward(step, batch, scale))
        return self._update((loss / targets).sum())

    def _targets(self, batch: Batch) -> Tensor:
        """Targets of the whole global batch, [tasks]; ranks that read the same samples count them once."""
        count = batch.target_counts()
        return self._sum_over_ranks(count if self.applied.mesh.reads_first else torch.zeros_like(count)).clamp(min=1)

    def relaid(self, executor: Executor) -> TrainStep:
        """Steps of the same optimizer on the same parameters, run by another executor: with other micro-batches, say."""
        step = TrainStep(
            executor.applied, self.optimizer, device=self.device, grad_clip=self.grad_clip, scaler=self.scaler
        )
        step.executor = executor
        return step

    def _update(self, loss: Tensor) -> Tensor:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
            if self.applied.mesh.world is not None:
                compat.share_overflow(self.scaler, self.optimizer, self.applied.mesh.world)
        norm = global_gradient_norm(self.applied)
        if self.scaler is None:
            clipped_update(self.optimizer, loss, norm, self.grad_clip)
        else:
            if self.grad_clip is not None:
                torch.nn.utils.clip_grads_with_norm_(self.applied.parameters.values(), self.grad_clip, norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.applied.refresh(self.optimizer.written)
        return torch.stack((loss.double(), norm.double()))

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if self.applied.mesh.world is not None:
            dist.all_reduce(value, group=self.applied.mesh.world)
        return value
