"""Closed forms of what a pipeline schedule takes: its time and the micro-batches it keeps in flight, for arrays of layouts.

They stand in for `planner.schedule.simulate` where millions of layouts are compared: every argument may be an array,
and arrays
broadcast. The tests hold them against the simulation of the tables that run. Sources: GPipe (arXiv:1811.06965), 1F1B and
interleaving (arXiv:2104.04473, section 2.2), zero bubble (arXiv:2401.10241) and ZB-V (arXiv:2405.15362). Those give the
bubble of one rank; here the ramps at both ends count, since the gradient norm joins all ranks, and forward pass, input
gradients and weight gradients need not take equally long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Numbers = Any
"""A number or an array of them; those of one call broadcast."""


@dataclass(frozen=True)
class MeanStage:
    """Seconds that one micro-batch takes in a stage of the busiest rank, the mean over its stages. Numbers or arrays."""

    forward: Numbers
    backward: Numbers
    """The whole backward pass: gradients of inputs and of weights."""
    weight: Numbers = 0.0
    """The part of it for gradients of weights."""
    transfer: Numbers = 0.0
    """Sending one micro-batch's activations, or their gradients, to the neighbouring stage."""
    others: Numbers = 1.0
    """What a mean stage of the other ranks takes, as a share of this one: 1 where all stages are alike."""


def makespan(
    schedule: str, pp: Numbers, stages_per_rank: Numbers, microbatches: Numbers, times: MeanStage
) -> FloatArray:
    """Seconds from the first action of a step to the last, broadcast over all arguments.

    The busiest rank computes all its micro-batches; while the pipeline fills and drains, it waits for the others.

    Equal to the simulation where stages are alike, but for: zero-bubble schedules with fewer micro-batches than fill the
    pipeline (`pp`; `zbv`: 2 pp - 1), within 15%; and transfers with several stages a rank, within 1% of the whole while
    one takes up to a twentieth of `forward`. For other stages within 5% where the last alone takes up to twice as long,
    within 10% (15%) where all differ at random by up to 10% (30%), and within a third of that on average.
    """
    forward, backward = np.asarray(times.forward, np.float64), np.asarray(times.backward, np.float64)
    pp, count = np.asarray(pp), np.asarray(microbatches)
    work = count * stages_per_rank * (forward + backward)
    ramp = _RAMPS[schedule](pp, stages_per_rank, count, forward, backward - times.weight, np.asarray(times.weight))
    exposed = times.transfer * _TRANSFERS[schedule](pp, stages_per_rank, count)
    return np.asarray(work + np.where(pp > 1, ramp * times.others + exposed, 0.0))


def in_flight(
    schedule: str, pp: Numbers, stages_per_rank: Numbers, microbatches: Numbers, rank: Numbers = 0
) -> IntArray:
    """The most micro-batches of all its stages together whose activations pipeline rank `rank` holds at a time.

    Equal to `ScheduleTable.peak_in_flight` for every legal number of micro-batches.
    """
    pp, per_rank, count, rank = np.broadcast_arrays(pp, stages_per_rank, microbatches, rank)
    wanted = np.where(pp > 1, _IN_FLIGHT[schedule](pp, per_rank, count, rank), 1)
    return np.asarray(np.minimum(wanted, count * per_rank))


def _round(pp: Numbers, count: Numbers) -> Numbers:
    """Micro-batches that pass through one stage of a rank before its next stage takes over, in PyTorch's interleaving."""
    return count // np.maximum(1, count // pp)


_IN_FLIGHT: dict[str, Callable[[Numbers, Numbers, Numbers, Numbers], Numbers]] = {
    "gpipe": lambda _pp, _per_rank, count, _rank: count,
    "1f1b": lambda pp, _per_rank, _count, rank: pp - rank,
    "interleaved_1f1b": lambda pp, per_rank, count, rank: (per_rank - 1) * _round(pp, count) + 2 * (pp - 1 - rank) + 1,
    "interleaved_zero_bubble": lambda pp, per_rank, count, _rank: (per_rank - 1) * _round(pp, count) + pp,
    "zbv": lambda pp, _per_rank, count, rank: np.minimum(count, 2 * pp - 1 - rank) + np.minimum(count, rank + 1),
}

_TRANSFERS: dict[str, Callable[[Numbers, Numbers, Numbers], Numbers]] = {
    # With one stage a rank no transfer is hidden: a rank between two others waits for two of them a micro-batch.
    "gpipe": lambda pp, _per_rank, count: 2 * (count + pp - 2),
    "1f1b": lambda pp, _per_rank, count: np.where(pp == 2, count + 1, np.maximum(2 * (count + pp) - 5, 2 * (pp - 1))),
    # With several, transfers show only while the pipeline fills and drains: in between they pass behind other work.
    "interleaved_1f1b": lambda pp, per_rank, _count: 2 * (pp * per_rank - 1),
    "interleaved_zero_bubble": lambda pp, per_rank, _count: 2 * (pp * per_rank - 1),
    "zbv": lambda pp, _per_rank, _count: 5 * pp - 7,
}
"""How many transfers lie on the longest way through the schedule."""


def _plain_ramp(
    pp: Numbers, _per_rank: Numbers, _count: Numbers, forward: Numbers, inputs: Numbers, weight: Numbers
) -> Numbers:
    return (pp - 1) * (forward + inputs + weight)


def _interleaved_ramp(
    pp: Numbers, per_rank: Numbers, count: Numbers, forward: Numbers, inputs: Numbers, weight: Numbers
) -> Numbers:
    # With fewer micro-batches than ranks each further stage of a rank waits for the first micro-batch to come round.
    rounds = (per_rank - 1) * np.maximum(0, pp - count)
    return (pp - 1 + rounds) * (forward + inputs + weight)


def _zero_bubble_ramp(
    pp: Numbers, per_rank: Numbers, count: Numbers, forward: Numbers, inputs: Numbers, weight: Numbers
) -> Numbers:
    ramp = (pp - 1) * np.maximum(np.maximum(forward, inputs), forward + inputs - weight)
    return _towards_one(ramp, pp, per_rank, np.maximum(0, pp - count) / np.maximum(1, pp - 1), forward + inputs, weight)


def _zbv_ramp(
    pp: Numbers, _per_rank: Numbers, count: Numbers, forward: Numbers, inputs: Numbers, weight: Numbers
) -> Numbers:
    """The longest of the ways through a schedule made for equal times: which it is depends on what takes longest."""
    hops = pp - 1
    ways = (
        hops * inputs,
        inputs + (hops - 1) * weight,
        forward + (hops - 1) * weight,
        (2 * hops - 1) * forward - (hops - 1) * inputs,
        2 * hops * forward - hops * inputs - weight,
        2 * hops * (inputs - weight),
        (2 * hops - 1) * forward + inputs - 2 * hops * weight,
        2 * hops * forward - (2 * hops + 1) * weight,
    )
    ramp = ways[0]
    for way in ways[1:]:
        ramp = np.maximum(ramp, way)
    missing = np.maximum(0, 2 * pp - 1 - count) / np.maximum(1, 2 * pp - 2)
    return _towards_one(ramp, pp, 2, missing, forward + inputs, weight)


def _towards_one(
    ramp: Numbers, pp: Numbers, per_rank: Numbers, missing: Numbers, there_and_back: Numbers, weight: Numbers
) -> Numbers:
    """The ramp where a share `missing` of the micro-batches that fill the pipeline is not there: in between `ramp` and
    that of a single micro-batch, which goes through all stages and back while every rank waits for it."""
    single = per_rank * (pp - 1) * there_and_back - (per_rank - 1) * weight
    return ramp + missing * (single - ramp)


_RAMPS: dict[str, Callable[..., Numbers]] = {
    "gpipe": _plain_ramp,
    "1f1b": _plain_ramp,
    "interleaved_1f1b": _interleaved_ramp,
    "interleaved_zero_bubble": _zero_bubble_ramp,
    "zbv": _zbv_ramp,
}
"""Seconds the busiest rank waits while the pipeline fills and drains, without transfers."""
