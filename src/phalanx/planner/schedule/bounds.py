"""What a pipeline schedule takes at least, without simulating it: its time, and the micro-batches it keeps in flight.

Plans compare tens of thousands of layouts; these bounds say which of them need no simulation and no replay. The tests hold
them against both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.layout.spec import ZERO_BUBBLE, ResolvedLayout
from phalanx.planner.schedule.simulate import StageTimes

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Numbers = Any
"""A number or an array of them; those of one call broadcast."""


def bound_makespan(layout: ResolvedLayout, times: StageTimes) -> FloatArray:
    """Return seconds that no simulation of the layout's pipeline stays below, [candidates].

    Pipeline rank r waits until the first micro-batch has come through the stages before its own, computes all its passes,
    and then the last gradient of an input goes back through those stages. No rank, and no micro-batch on its way through all
    stages and back, can be done earlier. Without transfers equal to the simulation for even stages of `gpipe`, `1f1b`, and
    `interleaved_1f1b` with at least `pp` micro-batches.

    times: arrays of [candidates, stages]; `transfer` of [candidates, 1].
    """
    pp, count, stages = layout.pp, layout.accumulation, layout.n_stages
    forward, backward, sent = (np.atleast_2d(part) for part in (times.forward, times.backward, times.transfer))
    inputs, last_weights = backward, np.zeros(len(backward))
    if layout.schedule in ZERO_BUBBLE:
        inputs = backward - np.atleast_2d(0.0 if times.weight is None else times.weight)
        # The first stage computes nothing until its weights' gradients are due, and then all of them.
        inputs[:, 0], last_weights = 0.0, backward[:, 0]
    # The first stage of rank r is stage r; a transfer lies before each but the first.
    hops = sent * np.arange(pp)
    arrival = _sums_before(forward)[:, :pp] + hops
    return_trip = _sums_before(inputs)[:, :pp] + hops + last_weights[:, None]
    ranks = np.arange(stages) % pp
    if layout.schedule == "zbv":
        ranks = np.minimum(np.arange(stages), stages - 1 - np.arange(stages))
    on_rank = (ranks == np.arange(pp)[:, None]).T.astype(np.float64)
    until_gradients = count * ((forward + inputs) @ on_rank)
    everything = count * ((forward + backward) @ on_rank)
    if layout.stages_per_rank == 1:
        # A rank computes nothing while it receives; the first of its transfers has been counted in `arrival`.
        neighbours = np.full(pp, 2.0)
        neighbours[[0, -1]] = 1.0
        received = sent * (count * neighbours - (np.arange(pp) > 0))
        until_gradients, everything = until_gradients + received, everything + received
    ranks_done = arrival + np.maximum(until_gradients + return_trip, everything)
    between_ranks = stages - 1 - (layout.schedule == "zbv")
    round_trip = (forward + inputs).sum(axis=1) + last_weights + 2 * between_ranks * sent[:, 0]
    return np.asarray(np.maximum(ranks_done.max(axis=1), round_trip))


def _sums_before(stages: FloatArray) -> FloatArray:
    """Return the sum over the stages before each one, [candidates, stages]."""
    return np.cumsum(stages, axis=1) - stages


def in_flight(
    schedule: str, pp: Numbers, stages_per_rank: Numbers, microbatches: Numbers, rank: Numbers = 0
) -> IntArray:
    """Return the most micro-batches of all its stages together whose activations pipeline rank `rank` holds at a time.

    That of the schedule's table, for every legal number of micro-batches.
    """
    pp, per_rank, count, rank = np.broadcast_arrays(pp, stages_per_rank, microbatches, rank)
    wanted = np.where(pp > 1, _IN_FLIGHT[schedule](pp, per_rank, count, rank), 1)
    return np.asarray(np.minimum(wanted, count * per_rank))


def _microbatches_per_round(pp: Numbers, count: Numbers) -> Numbers:
    """Return the micro-batches that PyTorch's interleaving has one stage compute before the rank's next stage takes over."""
    return count // np.maximum(1, count // pp)


_IN_FLIGHT: dict[str, Callable[[Numbers, Numbers, Numbers, Numbers], Numbers]] = {
    "gpipe": lambda _pp, _per_rank, count, _rank: count,
    "1f1b": lambda pp, _per_rank, _count, rank: pp - rank,
    "interleaved_1f1b": lambda pp, per_rank, count, rank: (
        (per_rank - 1) * _microbatches_per_round(pp, count) + 2 * (pp - 1 - rank) + 1
    ),
    "interleaved_zero_bubble": lambda pp, per_rank, count, _rank: (
        (per_rank - 1) * _microbatches_per_round(pp, count) + pp
    ),
    "zbv": lambda pp, _per_rank, count, rank: np.minimum(count, 2 * pp - 1 - rank) + np.minimum(count, rank + 1),
}
