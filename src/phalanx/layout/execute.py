"""Runs a laid-out model on this rank's share of a global batch: forward, backward, and the sums of gradients over ranks.

What training and verification have in common. Knows no optimizer and no files.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.data.batch_stream import Batch
from phalanx.layout.apply import Applied
from phalanx.layout.mesh import Axis
from phalanx.layout.shard import prepare_microbatch


class Executor:
    """Runs `applied`. Every rank calls every method, in the same order."""

    def __init__(self, applied: Applied) -> None:
        self.applied = applied
        self.layout = applied.layout
        self.mesh = applied.mesh
        self._cold = {"train", "evaluate"} if applied.compiled and applied.pipeline is not None else set()
        """Kinds of pass whose programs are still to be compiled."""

    def cut(self, batch: Batch, microbatches: int) -> Batch:
        """What of a batch in host memory this rank needs on its device; see `Stage.cut`."""
        return self.applied.stages[0].cut(batch, microbatches)

    def forward_backward(self, step: int, batch: Batch, scale: Tensor | float) -> Tensor:
        """Gradients of scale * loss over the global batch, on every rank for its parameters.

        batch: the samples of this rank's data-parallel share, all micro-batches, as `cut` leaves them, on the device. step:
        the optimizer step, from 1. scale: one number, or one for each task. Returns this rank's part of the summed losses
        (float64, [tasks]): the parts of all ranks add up to the whole.
        """
        for stage in self.applied.stages:
            # Going through all modules takes the host time that a short step does not have.
            if not stage.training:
                stage.train()
            stage.step = step
            stage.scale = scale
            stage.alone = self.mesh.data is None and stage.working is None
        if "train" in self._cold:
            self._warm_up_training(next(iter(batch.split(self.layout.accumulation))))
        if self.applied.pipeline is not None:
            x, inputs = batch.inputs()
            total = self.applied.pipeline.forward_backward(x, inputs, batch.sample_indices, scale)
        else:
            total = self._accumulated(batch, scale)
        self._sum_gradients()
        return self._mine(total)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """This rank's part of the summed losses of one micro-batch, dropout off (float64, [tasks])."""
        x, inputs = batch.inputs()
        losses = self.infer(x, inputs, batch.sample_indices)
        if losses is None:
            return torch.zeros(1, dtype=torch.float64, device=batch.sample_indices.device)
        return self._mine(losses.double())

    @torch.no_grad()
    def infer(self, x: Tensor, inputs: dict[str, Any], sample_indices_B: Tensor) -> Tensor | None:
        """What the last stage gives for one micro-batch, dropout off; None on ranks that do not hold it. See `Stage`."""
        for stage in self.applied.stages:
            stage.eval()
            stage.step = None
        pipeline = self.applied.pipeline
        if pipeline is None:
            result: Tensor = self.applied.stages[0](x, sample_indices_B, **inputs)
            return result
        if "evaluate" in self._cold:
            self._cold.remove("evaluate")
            pipeline.warm_up(x, inputs, sample_indices_B)
        return pipeline.infer(x, inputs, sample_indices_B)

    def _warm_up_training(self, batch: Batch) -> None:
        """Compile on all ranks at once; `batch` is one micro-batch."""
        assert self.applied.pipeline is not None
        self._cold.remove("train")
        x, inputs = batch.inputs()
        self.applied.pipeline.warm_up(x, inputs, batch.sample_indices)
        running = [parameter for stage in self.applied.stages for parameter in stage.parameters()]
        for parameter in (*running, *self.applied.parameters.values()):
            parameter.grad = None

    def _mine(self, total: Tensor) -> Tensor:
        """What this rank counts of the losses that its tensor-parallel ranks hold."""
        stage = self.applied.stages[0]
        return torch.zeros_like(total) if stage.loss_is_whole and self.mesh.tp.rank else total

    def _accumulated(self, batch: Batch, scale: Tensor | float) -> Tensor:
        (stage,) = self.applied.stages
        total = torch.zeros((), dtype=torch.float64, device=batch.sample_indices.device)
        parts = list(batch.split(self.layout.accumulation))
        for number, part in enumerate(parts, 1):
            if self.mesh.data is not None:
                prepare_microbatch(stage, self.layout.zero, last=number == len(parts))
            x, inputs = part.inputs()
            losses = stage(x, part.sample_indices, **inputs)
            total = total + losses.detach().double()
            if not stage.gradients_added:
                (losses * scale).sum().backward()
        return total

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        """Add up what data parallelism does not: gradients of parameters that several ranks hold alike."""
        if self.applied.stream is not None:
            self.applied.stream.finish()
        alike = [p for name, p in self.applied.parameters.items() if name not in self.applied.splits]
        _sum_over(self.mesh.tp, alike)
        _sum_over(self.mesh.tie, [p for name, p in self.applied.parameters.items() if name in self.applied.tied])
        _sum_over(self.mesh.branch, [p for name, p in self.applied.parameters.items() if name in self.applied.branch])


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
