"""Runs a laid-out model on this rank's share of a global batch: forward, backward, and the sums of gradients over ranks.

What training and verification have in common. Knows no optimizer and no files.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.data.language.batches import TokenBatch
from phalanx.layout.apply import Applied
from phalanx.layout.mesh import Axis
from phalanx.layout.shard import prepare_microbatch


class Executor:
    """Runs `applied`. Every rank calls every method, in the same order."""

    def __init__(self, applied: Applied) -> None:
        self.applied = applied
        self.layout = applied.layout
        self.mesh = applied.mesh

    def forward_backward(self, step: int, batch: TokenBatch, scale: Tensor | float) -> Tensor:
        """Gradients of scale * loss over the global batch, on every rank for its parameters.

        batch: the samples of this rank's data-parallel share, all micro-batches, on the device. step: the optimizer step,
        from 1. Returns this rank's part of the summed loss (float64, 0-dim): the parts of all ranks add up to the whole.
        """
        for stage in self.applied.stages:
            stage.train()
            stage.step = step
        if self.applied.pipeline is not None:
            total = self._pipelined(batch, scale)
        else:
            total = self._accumulated(batch, scale)
        self._sum_gradients()
        # Tensor-parallel ranks all hold the whole loss of their positions.
        return total if self.mesh.tp.rank == 0 else torch.zeros_like(total)

    @torch.no_grad()
    def evaluate(self, batch: TokenBatch) -> Tensor:
        """This rank's part of the summed loss of one micro-batch, dropout off (float64, 0-dim)."""
        for stage in self.applied.stages:
            stage.eval()
            stage.step = None
        if self.applied.pipeline is not None:
            total = self.applied.pipeline.evaluate(batch.tokens, **_arguments(batch))
        else:
            total = self.applied.stages[0](batch.tokens, **_arguments(batch)).double().sum()
        return total if self.mesh.tp.rank == 0 else torch.zeros_like(total)

    def _accumulated(self, batch: TokenBatch, scale: Tensor | float) -> Tensor:
        (stage,) = self.applied.stages
        total = torch.zeros((), dtype=torch.float64, device=batch.tokens.device)
        parts = list(batch.split(self.layout.microbatch))
        for number, part in enumerate(parts, 1):
            if self.mesh.data is not None:
                prepare_microbatch(stage, self.layout.zero, last=number == len(parts))
            loss = stage(part.tokens, **_arguments(part)).sum()
            total += loss.detach()
            (loss * scale).backward()
        return total

    def _pipelined(self, batch: TokenBatch, scale: Tensor | float) -> Tensor:
        assert self.applied.pipeline is not None
        return self.applied.pipeline.forward_backward(batch.tokens, scale=scale, **_arguments(batch))

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        """Add up what data parallelism does not: gradients of parameters that several ranks hold alike."""
        alike = [p for name, p in self.applied.parameters.items() if name not in self.applied.splits]
        _sum_over(self.mesh.tp, alike)
        _sum_over(self.mesh.tie, [p for name, p in self.applied.parameters.items() if name in self.applied.tied])


def _arguments(batch: TokenBatch) -> dict[str, Any]:
    arguments: dict[str, Any] = {"targets_BS": batch.targets, "sample_indices_B": batch.sample_indices}
    if batch.document_ids is not None:
        arguments["document_ids_BS"] = batch.document_ids
    return arguments


def _sum_over(axis: Axis, parameters: list[nn.Parameter]) -> None:
    """Sum the gradients over the ranks of `axis`, in one exchange."""
    grads = [local_gradient(p) for p in parameters]
    found = [grad for grad in grads if grad is not None and grad.numel()]
    if axis.group is None or not found:
        return
    flat = torch.cat([grad.flatten() for grad in found])
    dist.all_reduce(flat, group=axis.group)
    parts = flat.split([grad.numel() for grad in found])
    torch._foreach_copy_(found, [part.view_as(grad) for part, grad in zip(parts, found, strict=True)])


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """This rank's elements of the gradient; the memory itself."""
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad
