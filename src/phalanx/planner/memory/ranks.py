"""What the pipeline ranks of a layout hold of the model, and which of them may need most memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

import numpy as np
import numpy.typing as npt

from phalanx.layout.spec import SCHEDULES, ZERO_BUBBLE, LayoutTable, ResolvedLayout
from phalanx.layout.stage_assignment import count_leading, stage_layer_counts, stages_of_rank
from phalanx.planner.distinct_rows import distinct_rows

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RankParts:
    """Parts of the model on pipeline ranks; arrays, one entry for each rank or candidate."""

    layers: FloatArray
    """Blocks of both kinds."""
    leading: FloatArray
    """Leading blocks of the model among them."""
    stage_layers: FloatArray
    """Blocks of its largest stage."""
    embedding: FloatArray
    """1 for a rank with the embedding."""
    head: FloatArray


@cache
def rank_parts(
    schedule: str, pp: int, stages_per_rank: int, n_layers: int, costs: tuple[float, float], leading: int = 0
) -> RankParts:
    """Return what every pipeline rank holds, arrays of [ranks].

    costs: what the embedding and the head cost beside one block, see `layout.stage_assignment.split_layers`. leading:
    leading blocks of the model.
    """
    layout = ResolvedLayout(global_batch=1, pp=pp, schedule=schedule, stages_per_rank=stages_per_rank)
    counts = stage_layer_counts(n_layers, layout.n_stages, *costs)
    layers, first_blocks = (np.asarray(each, np.float64) for each in (counts, count_leading(counts, leading)))
    stage = np.asarray([stages_of_rank(layout, rank) for rank in range(pp)])
    held = layers[stage]
    first, last = (stage == 0).any(1), (stage == layout.n_stages - 1).any(1)
    return RankParts(
        held.sum(1), first_blocks[stage].sum(1), held.max(1), first.astype(np.float64), last.astype(np.float64)
    )


def parts_at(
    candidates: LayoutTable, ranks: npt.NDArray[np.int64], n_layers: int, costs: tuple[float, float], leading: int
) -> RankParts:
    """Return what one rank of each candidate holds. ranks: which. costs, leading: see `rank_parts`."""
    columns = [candidates.schedule, candidates.pp, candidates.stages_per_rank, ranks]
    first, inverse = distinct_rows(columns)
    # Many layouts share a pipeline.
    rows = []
    for name, pp, stages_per_rank, rank in np.stack(columns, axis=1)[first].tolist():
        every = rank_parts(SCHEDULES[name], pp, stages_per_rank, n_layers, costs, leading)
        rows.append([getattr(every, field.name)[rank] for field in fields(RankParts)])
    return RankParts(*np.asarray(rows)[inverse].T)


@cache
def ranks_that_may_be_worst(
    schedule: str, pp: int, stages_per_rank: int, n_layers: int, costs: tuple[float, float], leading: int = 0
) -> list[int]:
    """Return the pipeline ranks of which one needs most memory.

    leading: leading blocks of the model. Of two ranks with stages of as many layers of each kind and the same ends of the
    model the earlier one has more micro-batches in flight. Where gradients of weights come later than those of inputs, a
    later rank may hold more: all ranks are looked at.
    """
    if schedule in ZERO_BUBBLE:
        return list(range(pp))
    stage = np.arange(pp * stages_per_rank).reshape(stages_per_rank, pp)
    layers = stage_layer_counts(n_layers, pp * stages_per_rank, *costs)
    kinds = np.stack([layers, count_leading(layers, leading)])[:, stage].reshape(-1, pp)
    ends = np.stack([stage == 0, stage == stage.max()]).any(axis=1)
    _, first = np.unique(np.concatenate([kinds, ends]), axis=1, return_index=True)
    return [int(rank) for rank in np.sort(first)]
