"""Runs a laid-out model on this rank's share of a global batch: forward, backward, and the sums of gradients over ranks.

What training and verification have in common. Knows no optimizer and no files.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.data.batch_stream import Batch
from phalanx.launch.heartbeat import SILENT, Heartbeat
from phalanx.layout.apply import ParallelModel
from phalanx.layout.data_parallel.gradients import local_gradient, sum_gradients
from phalanx.layout.layout_model import TrainingPass
from phalanx.layout.mesh import Axis
from phalanx.layout.pipeline import SampleShape


class Executor:
    """Runs `applied`. Every rank calls every method, in the same order."""

    def __init__(self, applied: ParallelModel) -> None:
        self.applied = applied
        self.layout = applied.layout
        self.mesh = applied.mesh
        self.heartbeat: Heartbeat = SILENT
        """Told of each micro-batch's passes."""
        self._warm: set[tuple[str, SampleShape]] = set()
        """Kinds of pass, and shapes of samples, whose programs a pipeline has compiled."""

    def cut(self, batch: Batch, microbatches: int) -> Batch:
        """Return what of a batch in host memory this rank needs on its device; see `Stage.cut`."""
        return self.applied.stages[0].cut(batch, microbatches)

    def forward_backward(self, step: int, batch: Batch, scale: Tensor | float) -> Tensor:
        """Form the gradients of scale * loss over the global batch, on every rank for its parameters.

        batch: the samples of this rank's data-parallel share, all micro-batches, as `cut` leaves them, on the device. step:
        the optimizer step, from 1. scale: one number, or one for each task. Returns this rank's part of the summed losses
        (float64, [tasks]): the parts of all ranks add up to the whole.
        """
        for stage in self.applied.stages:
            # Going through all modules takes the host time that a short step does not have.
            if not stage.training:
                stage.train()
        training = TrainingPass(step, scale, adds_gradients=not self.applied.gradients_followed)
        self.applied.begin_sums()
        if self.applied.pipeline is not None:
            x, inputs = batch.inputs()
            if self._is_cold("train", x, inputs):
                # Blocks compile on all ranks at once, by one micro-batch. Its gradients are formed too, so that backward
                # programs are compiled; they mean nothing, and go.
                first = next(iter(batch.split(self.layout.accumulation)))
                self.applied.pipeline.warm_up(*first.inputs(), first.sample_indices, training)
                self.discard_gradients()
                self.applied.begin_sums()
            # A schedule mixes the passes of many micro-batches.
            self.heartbeat.enter("forward")
            total = self.applied.pipeline.forward_backward(x, inputs, batch.sample_indices, training)
        else:
            total = self._run_microbatches(batch, training)
        self.applied.end_sums()
        self.heartbeat.enter("collective")
        self._sum_gradients()
        return self._count_once(total)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Return this rank's part of the summed losses of one micro-batch, dropout off (float64, [tasks])."""
        x, inputs = batch.inputs()
        losses = self.infer(x, inputs, batch.sample_indices)
        if losses is None:
            return torch.zeros(1, dtype=torch.float64, device=batch.sample_indices.device)
        return self._count_once(losses.double())

    @torch.no_grad()
    def infer(self, x: Tensor, inputs: dict[str, Any], sample_indices_B: Tensor) -> Tensor | None:
        """Return what the last stage gives for one micro-batch, dropout off; None on ranks without it. See `Stage`."""
        for stage in self.applied.stages:
            stage.eval()
        pipeline = self.applied.pipeline
        if pipeline is None:
            result: Tensor = self.applied.stages[0](x, sample_indices_B, **inputs)
            return result
        if self._is_cold("evaluate", x, inputs):
            pipeline.warm_up(x, inputs, sample_indices_B, training=None)
        return pipeline.infer(x, inputs, sample_indices_B)

    def _is_cold(self, kind: str, x: Tensor, inputs: dict[str, Any]) -> bool:
        """Return whether ranks of a pipeline have yet to compile their programs for samples of this shape, and take note.

        kind: of pass. Without a pipeline no rank waits for another one's compiler, so nothing is gained by compiling
        beforehand.
        """
        if not self.applied.compiled or self.applied.pipeline is None:
            return False
        program = kind, self.applied.pipeline.sample_shape(x, inputs)
        cold = program not in self._warm
        self._warm.add(program)
        return cold

    def discard_gradients(self) -> None:
        """Drop whatever passes since the last step have left: they are to be done again, or were none of training."""
        self.applied.end_sums()
        running = [parameter for stage in self.applied.stages for parameter in stage.parameters()]
        for parameter in (*running, *self.applied.parameters.values()):
            parameter.grad = None
        for stage in self.applied.stages:
            stage.discard_counts()

    def _run_microbatches(self, batch: Batch, training: TrainingPass) -> Tensor:
        """Run the one stage of a model without a pipeline, forward and backward; returns the summed losses (float64)."""
        (stage,) = self.applied.stages
        total = torch.zeros((), dtype=torch.float64, device=batch.sample_indices.device)
        microbatches = list(batch.split(self.layout.accumulation))
        for number, microbatch in enumerate(microbatches, 1):
            x, inputs = microbatch.inputs()
            passes = stage.training_passes(x, microbatch.sample_indices, training, inputs)
            for place, run_forward in enumerate(passes, 1):
                last = number == len(microbatches) and place == len(passes)
                self.applied.sharding.prepare_microbatch(stage, last=last)
                self.heartbeat.enter("forward")
                losses = run_forward()
                # Float64: thousands of micro-batches are added up, and layouts are compared to the last few bits.
                total = total + losses.detach().double()
                self.heartbeat.enter("backward")
                if losses.requires_grad:
                    (losses * training.scale).sum().backward()
                else:
                    # A captured program forms the gradients with the losses, and has added them (see `Stage.forward`).
                    assert training.adds_gradients
        return total

    def _count_once(self, total: Tensor) -> Tensor:
        """Return the losses that this rank counts of those that its tensor-parallel ranks may all hold."""
        stage = self.applied.stages[0]
        return torch.zeros_like(total) if stage.loss_is_whole and self.mesh.tp.rank else total

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        """Add up what data parallelism does not: gradients of parameters that several ranks hold alike."""
        # First of all: streamed gradients may still be on their way.
        self.applied.sharding.finish_gradients()
        for axis, parameters in self._held_alike():
            sum_gradients(axis, parameters)

    @torch.no_grad()
    def count_sums_once(self) -> None:
        """Zero the gradients that ranks hold alike on all of them but the first: further ones may be added, and summed."""
        for axis, parameters in self._held_alike():
            grads = [grad for parameter in parameters if (grad := local_gradient(parameter)) is not None]
            if axis.rank and grads:
                torch._foreach_zero_(grads)

    def _held_alike(self) -> list[tuple[Axis, list[nn.Parameter]]]:
        """Return the parameters that the ranks of an axis hold alike, each of them with a part of their gradient."""
        applied, named = self.applied, self.applied.parameters.items()
        return [
            # Each tensor-parallel rank has run a part of the positions or features through what is not split.
            (self.mesh.tp, [p for name, p in named if name not in applied.splits]),
            (self.mesh.tie, [p for name, p in named if name in applied.tied]),
            (self.mesh.branch, [p for name, p in named if name in applied.branch]),
        ]
