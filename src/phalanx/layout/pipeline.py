"""Pipeline parallelism: which layers make a stage, which stages a rank has, and torch's schedules run on them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from phalanx.compat_pipeline import LeanStage
from phalanx.layout.mesh import Axis
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage import Stage
from phalanx.models.splits import ModelPart

TORCH_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
"""PyTorch's name of each schedule."""


def split_layers(n_layers: int, n_stages: int, first_cost: float, last_cost: float) -> list[range]:
    """Consecutive layers for each stage such that the costliest stage costs least; at least one layer each.

    first_cost, last_cost: what the first and the last stage compute besides, in layers.
    """
    assert 1 <= n_stages <= n_layers
    extra = [0.0] * n_stages
    extra[0] += first_cost
    extra[-1] += last_cost

    limit = _least_limit(n_layers, n_stages, extra)

    @cache
    def best(stage: int, start: int) -> tuple[float, float, tuple[int, ...]]:
        """Costliest stage, sum of squared costs and ends, for the layers from `start` on in the stages from `stage` on."""
        if stage == n_stages - 1:
            cost = n_layers - start + extra[stage]
            return cost, cost * cost, (n_layers,)
        choices = []
        # What goes beyond the limit is costlier than the best split as a whole.
        furthest = min(n_layers - (n_stages - 1 - stage), start + _room(limit, extra[stage]))
        for end in range(start + 1, furthest + 1):
            worst, squares, ends = best(stage + 1, end)
            cost = end - start + extra[stage]
            choices.append((max(cost, worst), squares + cost * cost, (end, *ends)))
        # Among equally good splits the most even one, then the one with the early stages shorter: they hold more
        # micro-batches' activations.
        return min(choices)

    ends = _filled(n_layers, limit, extra) if n_layers > _EXACT else best(0, 0)[2]
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


_EXACT = 160
"""Layers up to which every split is compared; beyond, stages are filled up to a common limit."""
_ROUNDING = 1e-9
"""Far below any cost, far above the rounding of one."""


def _least_limit(n_layers: int, n_stages: int, extra: list[float]) -> float:
    """What the costliest stage costs at least: the smallest limit that filling the stages one after another keeps."""
    for limit in sorted({layers + more for layers in range(1, n_layers + 1) for more in extra}):
        ends = _filled(n_layers, limit, extra)
        starts = (0, *ends)
        if ends[-1] >= n_layers and all(
            b - a + more <= limit + _ROUNDING for a, b, more in zip(starts, ends, extra, strict=False)
        ):
            return limit
    raise AssertionError("the largest limit holds everything")


def _filled(n_layers: int, limit: float, extra: list[float]) -> tuple[int, ...]:
    """The layer at which each stage ends where stages are filled one after another, at least one layer each."""
    ends, end = [], 0
    for stage, more in enumerate(extra):
        end += min(_room(limit, more), n_layers - end - (len(extra) - 1 - stage))
        ends.append(end)
    return tuple(ends)


def _room(limit: float, more: float) -> int:
    """Layers of a stage that computes `more` besides. Rounding must not cost it the layer that the limit was made for."""
    return max(1, int(limit - more + _ROUNDING))


def stages_of_rank(layout: ResolvedLayout, rank: int) -> list[int]:
    """Indices of the stages that pipeline rank `rank` holds: every pp-th one, or there and back again for `zbv`."""
    if layout.schedule == "zbv" and layout.pp > 1:
        return [rank, 2 * layout.pp - 1 - rank]
    return [rank + turn * layout.pp for turn in range(layout.stages_per_rank)]


def from_other_ranks(layout: ResolvedLayout, rank: int, way: int) -> list[bool]:
    """Of each stage of `rank`, whether the one before it (`way` -1) or behind it (1) is on another rank.

    A stage whose neighbour is on the same rank hands its result over as it is.
    """
    mine = stages_of_rank(layout, rank)
    return [0 <= stage + way < layout.n_stages and stage + way not in mine for stage in mine]


def rank_of_stage(layout: ResolvedLayout, stage: int) -> int:
    """The pipeline rank that holds `stage`."""
    turn, place = divmod(stage, layout.pp)
    return layout.pp - 1 - place if layout.schedule == "zbv" and turn == 1 else place


def model_parts(layout: ResolvedLayout, rank: int, n_layers: int, costs: tuple[float, float]) -> dict[int, ModelPart]:
    """The parts of a model that pipeline rank `rank` holds, by stage. costs: see `split_layers`."""
    ranges = split_layers(n_layers, layout.n_stages, *costs)
    last = layout.n_stages - 1
    return {
        stage: ModelPart(ranges[stage], first=stage == 0, last=stage == last) for stage in stages_of_rank(layout, rank)
    }


class Pipeline:
    """Runs the stages of this rank together with those of the other pipeline ranks."""

    def __init__(self, stages: list[Stage], layout: ResolvedLayout, pp: Axis, device: torch.device) -> None:
        assert pp.group is not None
        self.stages = stages
        self.layout = layout
        self.pp = pp
        self.device = device
        self._scale: Tensor | float = 1.0
        schedule = get_schedule_class(TORCH_SCHEDULES[layout.schedule])
        built = [self._torch_stage(stage) for stage in stages]
        # Losses are sums: no division by the number of micro-batches.
        options = {"n_microbatches": layout.accumulation, "loss_fn": self._loss, "scale_grads": False}
        self._schedule: PipelineScheduleSingle | PipelineScheduleMulti
        if issubclass(schedule, PipelineScheduleSingle):
            self._schedule = schedule(built[0], **options)
        else:
            self._schedule = schedule(built, **options)

    def forward_backward(
        self, x: Tensor, inputs: dict[str, Any], sample_indices_B: Tensor, scale: Tensor | float
    ) -> Tensor:
        """Run all micro-batches; gradients are those of scale * loss. Returns the summed losses, zero without last stage.

        x, inputs, sample_indices: see `Stage`, of all micro-batches.
        """
        self._scale = scale
        losses: list[Tensor] = []
        first = [x] if any(stage.part.part.first for stage in self.stages) else []
        called_with = {"sample_indices_B": sample_indices_B, **inputs}
        self._schedule.step(*first, target=sample_indices_B, losses=losses, return_outputs=False, **called_with)
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        # The schedule holds the scaled losses; a sum of one micro-batch's losses is exact to scale back.
        for loss in losses:
            total += loss.detach().double() / torch.as_tensor(scale, dtype=torch.float64)
        return total

    def warm_up(self, x: Tensor, inputs: dict[str, Any], sample_indices_B: Tensor) -> None:
        """Let every rank compile its stages at the same time: in the pipeline each would wait for those before it.

        One micro-batch, forward and, where gradients are on, backward, with zeros in place of what other ranks would send.
        Leaves gradients behind.
        """
        for stage in self.stages:
            given = x
            if not stage.part.part.first:
                shape = stage.hidden_shape(len(sample_indices_B))
                given = torch.zeros(shape, dtype=stage.part.dtype, device=self.device, requires_grad=True)
            output = stage(given, sample_indices_B, **inputs)
            if torch.is_grad_enabled():
                output.sum().backward()

    def _loss(self, output: Tensor, _target: Tensor) -> Tensor:
        loss: Tensor = (output * self._scale).sum()
        return loss

    @torch.no_grad()
    def infer(self, x: Tensor, inputs: dict[str, Any], sample_indices_B: Tensor) -> Tensor | None:
        """What the last stage gives for one micro-batch, None on ranks without it; forward alone."""
        mine = {stage.index: stage for stage in self.stages}
        for index in range(self.layout.n_stages):
            here, before = rank_of_stage(self.layout, index), rank_of_stage(self.layout, max(0, index - 1))
            if index and before != here:
                x = self._hand_over(x, before, here, mine.get(index), len(sample_indices_B))
            if index in mine:
                x = mine[index](x, sample_indices_B, **inputs)
        return x if self.layout.n_stages - 1 in mine else None

    def _hand_over(self, x: Tensor, source: int, target: int, stage: Stage | None, samples: int) -> Tensor:
        if self.pp.rank == source:
            dist.send(x.contiguous(), self.pp.ranks[target], group=self.pp.group)
        elif self.pp.rank == target:
            assert stage is not None
            x = torch.empty(stage.hidden_shape(samples), dtype=stage.part.dtype, device=self.device)
            dist.recv(x, self.pp.ranks[source], group=self.pp.group)
        return x

    def _torch_stage(self, stage: Stage) -> LeanStage:
        samples = self.layout.microbatch
        hidden = torch.empty(stage.hidden_shape(samples), dtype=stage.part.dtype, device="meta", requires_grad=True)
        with torch.device("meta"):
            first = stage.example_input(samples)
        loss = torch.empty(
            1, dtype=torch.promote_types(stage.part.dtype, torch.float32), device="meta", requires_grad=True
        )
        lean = LeanStage(
            stage,
            stage.index,
            self.layout.n_stages,
            self.device,
            input_args=(first if stage.part.part.first else hidden,),
            output_args=(loss if stage.part.part.last else hidden,),
            group=self.pp.group,
        )
        if stage.working is not None:
            lean.collect = stage.working.collect
        if self.pp.links:
            lean.link_of = self._link
        return lean

    def _link(self, sender: int, kind: str) -> dist.ProcessGroup:
        """The group over which stage `sender` sends its activations or gradients."""
        return self.pp.links[2 * (kind == "gradients") + rank_of_stage(self.layout, sender) % 2]
