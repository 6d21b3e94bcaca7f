"""The stages of a pipeline: which layers make a stage, and which stages a rank has. Knows nothing of how they are run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.splits import ModelChunk

TORCH_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
"""PyTorch's name of each schedule."""


def split_layers(n_layers: int, n_stages: int, first_cost: float, last_cost: float) -> list[range]:
    """Return consecutive layers for each stage such that the costliest stage costs least; at least one layer each.

    first_cost, last_cost: what the first and the last stage compute besides, in layers.
    """
    assert 1 <= n_stages <= n_layers
    extra = [0.0] * n_stages
    extra[0] += first_cost
    extra[-1] += last_cost

    limit = _least_limit(n_layers, extra)

    @cache
    def best(stage: int, start: int) -> tuple[float, float, tuple[int, ...]]:
        """Return costliest stage, sum of squared costs and ends, for layers from `start` on in stages from `stage` on."""
        if stage == n_stages - 1:
            cost = n_layers - start + extra[stage]
            return cost, cost * cost, (n_layers,)
        choices = []
        # What goes beyond the limit is costlier than the best split as a whole.
        furthest = min(n_layers - (n_stages - 1 - stage), start + _layers_within(limit, extra[stage]))
        for end in range(start + 1, furthest + 1):
            worst, squares, ends = best(stage + 1, end)
            cost = end - start + extra[stage]
            choices.append((max(cost, worst), squares + cost * cost, (end, *ends)))
        # Among equally good splits the most even one, then the one with the early stages shorter: they hold more
        # micro-batches' activations.
        return min(choices)

    ends = _fill_stages(n_layers, limit, extra) if n_layers > _EXACT else best(0, 0)[2]
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


@cache
def stage_layer_counts(n_layers: int, n_stages: int, first_cost: float, last_cost: float) -> tuple[int, ...]:
    """Return the number of layers of each stage, as `split_layers` assigns them; computed once for all cost models."""
    return tuple(len(layers) for layers in split_layers(n_layers, n_stages, first_cost, last_cost))


def count_leading(layers: Sequence[int], leading: int) -> list[int]:
    """Return how many of the first `leading` layers of a model each stage holds. layers: of each stage."""
    starts = accumulate(layers, initial=0)
    return [min(max(leading - start, 0), held) for start, held in zip(starts, layers, strict=False)]


_EXACT = 160
"""Layers up to which every split is compared; beyond, stages are filled up to a common limit."""
_ROUNDING = 1e-9
"""Far below any cost, far above the rounding of one."""


def _least_limit(n_layers: int, extra: list[float]) -> float:
    """Return what the costliest stage costs at least: the smallest limit that filling the stages one after another keeps."""
    # The costliest stage costs a whole number of layers and what one of the ends adds: no other limit can be least.
    for limit in sorted({layers + more for layers in range(1, n_layers + 1) for more in extra}):
        ends = _fill_stages(n_layers, limit, extra)
        starts = (0, *ends)
        if ends[-1] >= n_layers and all(
            b - a + more <= limit + _ROUNDING for a, b, more in zip(starts, ends, extra, strict=False)
        ):
            return limit
    raise AssertionError("the largest limit holds everything")


def _fill_stages(n_layers: int, limit: float, extra: list[float]) -> tuple[int, ...]:
    """Return the layer at which each stage ends where stages are filled one after another, at least one layer each."""
    ends, end = [], 0
    for stage, more in enumerate(extra):
        end += min(_layers_within(limit, more), n_layers - end - (len(extra) - 1 - stage))
        ends.append(end)
    return tuple(ends)


def _layers_within(limit: float, more: float) -> int:
    """Return the layers that a stage has room for if it computes `more` besides.

    Rounding must not cost it the layer that the limit was made for.
    """
    return max(1, int(limit - more + _ROUNDING))


def stages_of_rank(layout: ResolvedLayout, rank: int) -> list[int]:
    """Return indices of the stages that pipeline rank `rank` holds: every pp-th one, or there and back again for `zbv`."""
    if layout.schedule == "zbv" and layout.pp > 1:
        return [rank, 2 * layout.pp - 1 - rank]
    return [rank + turn * layout.pp for turn in range(layout.stages_per_rank)]


def from_other_ranks(layout: ResolvedLayout, rank: int, way: int) -> list[bool]:
    """Return of each stage of `rank`, whether the one before it (`way` -1) or behind it (1) is on another rank.

    A stage whose neighbour is on the same rank hands its result over as it is.
    """
    mine = stages_of_rank(layout, rank)
    return [0 <= stage + way < layout.n_stages and stage + way not in mine for stage in mine]


def rank_of_stage(layout: ResolvedLayout, stage: int) -> int:
    """Return the pipeline rank that holds `stage`."""
    # Stages go round the ranks again and again; those of ZBV come back the way they went.
    turn, place = divmod(stage, layout.pp)
    return layout.pp - 1 - place if layout.schedule == "zbv" and turn == 1 else place


def model_chunks(layout: ResolvedLayout, rank: int, n_layers: int, costs: tuple[float, float]) -> dict[int, ModelChunk]:
    """Return the parts of a model that pipeline rank `rank` holds, by stage. costs: see `split_layers`."""
    ranges = split_layers(n_layers, layout.n_stages, *costs)
    last = layout.n_stages - 1
    return {
        stage: ModelChunk(ranges[stage], first=stage == 0, last=stage == last) for stage in stages_of_rank(layout, rank)
    }
