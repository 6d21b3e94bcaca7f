"""Pipeline parallelism: torch's schedules run on the stages of this rank, which `stage_assignment` gives it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from phalanx.layout.layout_model import Stage, TrainingPass
from phalanx.layout.mesh import Axis
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage_assignment import TORCH_SCHEDULES, rank_of_stage
from phalanx.torch_compat.pipeline_stage import LeanStage, gather_stages_once, run_microbatches

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
SampleShape = tuple[int, torch.Size, torch.dtype]
"""Positions of a sample; shape and number format of what the first stage takes of it."""


class Pipeline:
    """Runs the stages of this rank together with those of the other pipeline ranks."""

    def __init__(self, stages: list[Stage], layout: ResolvedLayout, pp: Axis, device: torch.device) -> None:
        assert pp.group is not None
        self.stages = stages
        self.layout = layout
        self.pp = pp
        self.device = device
        self._scale: Tensor | float = 1.0
        self._schedules: dict[SampleShape, Schedule] = {}
        """Made when samples of a shape first come: on every rank in the same step."""

    def forward_backward(
        self, x: Tensor, inputs: dict[str, Any], sample_indices_B: Tensor, training: TrainingPass
    ) -> Tensor:
        """Run all micro-batches, forward and backward; gradients are those of `training.scale` * loss.

        x, inputs, sample_indices: see `Stage`, of all micro-batches. Returns the summed losses (float64), zero on ranks
        without the last stage.
        """
        # The schedule was made with a loss function that takes an output and a target alone.
        self._scale = training.scale
        losses: list[Tensor] = []
        first = [x] if any(stage.part.part.first for stage in self.stages) else []
        called_with = {"sample_indices_B": sample_indices_B, "training": training, **inputs}
        shape = self.sample_shape(x, inputs)
        if shape not in self._schedules:
            self._schedules[shape] = self._make_schedule(x, shape)
        self._schedules[shape].step(*first, target=sample_indices_B, losses=losses, return_outputs=False, **called_with)
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        # The schedule holds the scaled losses; a sum of one micro-batch's losses is exact to scale back.
        for loss in losses:
            total += loss.detach().double() / torch.as_tensor(training.scale, dtype=torch.float64)
        return total

    def warm_up(
        self, x: Tensor, inputs: dict[str, Any], sample_indices_B: Tensor, training: TrainingPass | None
    ) -> None:
        """Let every rank compile its stages at the same time: in the pipeline each would wait for those before it.

        Run one micro-batch forward and, where gradients are on, backward, with zeros in place of what other ranks would
        send. Leaves gradients behind.
        """
        for stage in self.stages:
            given = x
            if not stage.part.part.first:
                # Shapes and formats matter to the compiler, values do not.
                shape = stage.hidden_shape(len(sample_indices_B), stage.sample_length(inputs))
                given = torch.zeros(shape, dtype=stage.part.dtype, device=self.device, requires_grad=True)
            output = stage(given, sample_indices_B, training=training, **inputs)
            if torch.is_grad_enabled():
                output.sum().backward()

    def _loss(self, output: Tensor, _target: Tensor) -> Tensor:
        # The last stage gives losses already: PyTorch asks for a function that makes one number of its output.
        loss: Tensor = (output * self._scale).sum()
        return loss

    @torch.no_grad()
    def infer(self, x: Tensor, inputs: dict[str, Any], sample_indices_B: Tensor) -> Tensor | None:
        """Run one micro-batch forward alone and return what the last stage gives, None on ranks without it."""
        mine = {stage.index: stage for stage in self.stages}
        for index in range(self.layout.n_stages):
            here, before = rank_of_stage(self.layout, index), rank_of_stage(self.layout, max(0, index - 1))
            if index and before != here:
                receiver = mine.get(index)
                if self.pp.rank == before:
                    dist.send(x.contiguous(), self.pp.ranks[here], group=self.pp.group)
                elif self.pp.rank == here:
                    assert receiver is not None
                    shape = receiver.hidden_shape(len(sample_indices_B), receiver.sample_length(inputs))
                    x = torch.empty(shape, dtype=receiver.part.dtype, device=self.device)
                    dist.recv(x, self.pp.ranks[before], group=self.pp.group)
            if index in mine:
                x = mine[index](x, sample_indices_B, **inputs)
        return x if self.layout.n_stages - 1 in mine else None

    def sample_shape(self, x: Tensor, inputs: dict[str, Any]) -> SampleShape:
        """Return what tells samples of different shapes apart. x, inputs: see `Stage`."""
        return self.stages[0].sample_length(inputs), x.shape[1:], x.dtype

    def _make_schedule(self, x: Tensor, shape: SampleShape) -> Schedule:
        """Return the schedule that runs micro-batches of samples of this shape, of which x are some."""
        layout, schedule = self.layout, get_schedule_class(TORCH_SCHEDULES[self.layout.schedule])
        # With shapes given, stages need no round of messages to ask each other for them.
        built = [self._torch_stage(stage, x, shape[0]) for stage in self.stages]
        # Losses are sums: no division by the number of micro-batches.
        options = {"n_microbatches": layout.accumulation, "loss_fn": self._loss, "scale_grads": False}
        if issubclass(schedule, PipelineScheduleSingle):
            # Of the two schedules with one stage a rank GPipe's alone may have fewer micro-batches than stages.
            options["n_microbatches"] = max(layout.accumulation, layout.n_stages)
            single: PipelineScheduleSingle = schedule(built[0], **options)
            run_microbatches(single, layout.accumulation)
            return single
        several: PipelineScheduleMulti = schedule(built, **options)
        # PyTorch's schedules would gather a stage's parameters again for every micro-batch.
        if not layout.reshard_after_forward:
            gather_stages_once(several)
        return several

    def _torch_stage(self, stage: Stage, x: Tensor, length: int) -> LeanStage:
        """Return a stage as PyTorch's schedules take it. x: samples as the first stage takes them. length: positions of
        each."""
        samples = self.layout.microbatch
        shape = stage.hidden_shape(samples, length)
        hidden = torch.empty(shape, dtype=stage.part.dtype, device="meta", requires_grad=True)
        first = torch.empty((samples, *x.shape[1:]), dtype=x.dtype, device="meta")
        # Losses are added up in at least float32.
        loss = torch.empty(
            1, dtype=torch.promote_types(stage.part.dtype, torch.float32), device="meta", requires_grad=True
        )
        built = LeanStage(
            stage,
            stage.index,
            self.layout.n_stages,
            self.device,
            input_args=(first if stage.part.part.first else hidden,),
            output_args=(loss if stage.part.part.last else hidden,),
            group=self.pp.group,
        )
        if stage.low_precision is not None:
            built.collect = stage.low_precision.collect
        if self.pp.links:
            built.link_of = self._link
        return built

    def _link(self, sender: int, kind: str) -> dist.ProcessGroup:
        """Return the group over which stage `sender` sends its activations or gradients."""
        return self.pp.links[2 * (kind == "gradients") + rank_of_stage(self.layout, sender) % 2]
