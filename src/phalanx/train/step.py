"""One optimizer step: micro-batches forward and backward, gradient norm, update. Knows no files and prints nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from phalanx.counter_random import DropoutContext
from phalanx.data.language.batches import TokenBatch
from phalanx.layout.apply import Applied
from phalanx.models.language.loss import IGNORED, LossSum
from phalanx.train.optimizer import clipped_update, gradient_norm


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave, over the whole global batch."""

    loss: float
    """Mean loss per target, in nats (z-loss included)."""
    grad_norm: float
    """2-norm of the gradient before clipping."""
    updated: bool
    """False when non-finite gradients made the step leave the parameters alone."""


class TrainStep:
    """Runs optimizer steps of one model on this rank's share of each global batch."""

    def __init__(
        self,
        applied: Applied,
        optimizer: torch.optim.AdamW,
        *,
        device: torch.device,
        microbatch: int,
        seed: int,
        grad_clip: float | None,
        scaler: GradScaler | None = None,
    ) -> None:
        self.applied = applied
        self.model = applied.model
        self.optimizer = optimizer
        self.device = device
        self.microbatch = microbatch
        self.seed = seed
        self.grad_clip = grad_clip
        self.scaler = scaler

    def run(self, step: int, batch: TokenBatch) -> StepResult:
        """Optimizer step `step` (from 1) on this rank's samples of the global batch.

        The update is left out, on all ranks alike, when the loss or the gradient norm is not finite.
        """
        self.model.train()
        batch = batch.to(self.device)
        targets = self._sum_over_ranks((batch.targets != IGNORED).sum())
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in batch.split(self.microbatch):
            loss = self._loss(step, part).total
            total += loss.detach()
            mean = loss / targets
            (mean if self.scaler is None else self.scaler.scale(mean)).backward()
        loss_sum = self._sum_over_ranks(total)
        return self._update(loss_sum / targets)

    def _loss(self, step: int, part: TokenBatch) -> LossSum:
        dropout = None
        if self.model.config.dropout:
            positions = torch.arange(part.tokens.shape[1], device=self.device)
            dropout = DropoutContext.of_step(self.seed, step, part.sample_indices, positions)
        loss: LossSum = self.model(part.tokens, part.targets, document_ids_BS=part.document_ids, dropout=dropout)
        return loss

    def _update(self, loss: Tensor) -> StepResult:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        masters = list(self.applied.masters.parameters())
        norm = gradient_norm(masters)
        if self.scaler is None:
            clipped_update(self.optimizer, loss, norm, self.grad_clip)
        else:
            if self.grad_clip is not None:
                torch.nn.utils.clip_grads_with_norm_(masters, self.grad_clip, norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.applied.refresh()
        loss_value, norm_value = torch.stack((loss.double(), norm.double())).tolist()
        return StepResult(loss_value, norm_value, math.isfinite(loss_value) and math.isfinite(norm_value))

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if dist.is_initialized():
            dist.all_reduce(value)
        return value
