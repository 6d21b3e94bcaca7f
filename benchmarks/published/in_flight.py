"""What pipeline ranks hold of micro-batches in flight, read off a schedule's table action by action."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage_assignment import stage_layer_counts
from phalanx.planner.schedule.schedule_table import IntArray, Pass, ScheduleTable, table_of


def microbatches_in_flight(table: ScheduleTable) -> IntArray:
    """Return the micro-batches whose activations a rank holds during each action, by its stages in ascending order.

    [ranks, actions, stages_per_rank]. Activations are held from the forward pass through the whole backward pass; where
    that is split, through the gradients of weights, which read them too.
    """
    first = table.kind == Pass.FORWARD
    last = (table.kind == Pass.BACKWARD) | (table.kind == Pass.WEIGHT)
    change = first.astype(np.int64) - last
    held = np.stack(
        [np.cumsum(np.where(table.stage == mine[:, None], change, 0), axis=1) for mine in table.stages_of_rank.T],
        axis=-1,
    )
    # What an action frees is held until it ends.
    freed = np.where(last[..., None] & (table.stage[..., None] == table.stages_of_rank[:, None, :]), 1, 0)
    return np.asarray(held + freed)


def peak_in_flight(table: ScheduleTable) -> IntArray:
    """Return the largest number of micro-batches in flight on each rank, all its stages together, [ranks]."""
    return np.asarray(microbatches_in_flight(table).sum(axis=2).max(axis=1))


def peak_activations(table: ScheduleTable, per_microbatch: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the peak of the activations that each rank holds, [ranks], in the unit of `per_microbatch`.

    per_microbatch: what one micro-batch's activations take in each stage, [stages]: bytes, say. Exact where a rank's
    stages differ, since it weighs what is in flight at the same time.
    """
    weights = np.asarray(per_microbatch, dtype=np.float64)[table.stages_of_rank]
    return np.asarray((microbatches_in_flight(table) * weights[:, None, :]).sum(axis=2).max(axis=1))


def blocks_in_flight(layout: ResolvedLayout, n_layers: int, costs: tuple[float, float]) -> npt.NDArray[np.float64]:
    """Return the most blocks whose activations each pipeline rank holds at a time, each micro-batch counted, [ranks]."""
    return peak_activations(table_of(layout), stage_layer_counts(n_layers, layout.n_stages, *costs))
