"""What the pipelines of published runs take, in closed form: the constants in `profiles/` were fitted with it.

The planner simulates pipelines instead. The tests hold these formulas against the simulation of the tables that run.
Sources: GPipe (arXiv:1811.06965), 1F1B and interleaving (arXiv:2104.04473, section 2.2), zero bubble (arXiv:2401.10241) and
ZB-V (arXiv:2405.15362). Those give the bubble of one rank; here the ramps at both ends count, since the gradient norm joins
all ranks, and forward pass, input gradients and weight gradients need not take equally long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.hardware.collectives import Constants, send
from phalanx.layout.spec import SCHEDULES
from phalanx.planner.time.part_time import PartTimes, at
from phalanx.planner.time.pipeline_time import PipelineTimes
from phalanx.planner.time.profile import Profile
from phalanx.planner.time.step_parts import Steps
from phalanx.planner.time.step_time import busiest_rank

FloatArray = npt.NDArray[np.float64]
Numbers = Any
"""A number or an array of them; those of one call broadcast."""


def estimate_pipelines(steps: Steps, times: PartTimes, constants: Constants, _profile: Profile) -> PipelineTimes:
    """Estimate the seconds of every layout's pipeline in closed form, in place of simulating it.

    constants: of collectives beside everything else that a training step does.
    """
    layouts, busiest = steps.layouts, busiest_rank(steps, times)
    weight, mine = busiest.of_parts(steps, times.weight), busiest.forward + busiest.backward
    whole = times.seconds.sum(axis=(1, 2))
    pp, leading = layouts.pp, steps.leading_layers
    of_blocks = (steps.n_layers - leading) * whole[steps.block] + leading * whole[steps.leading]
    everything = of_blocks + whole[steps.embedding] + whole[steps.head]
    others = np.where(pp > 1, (everything - mine) / (np.maximum(pp - 1, 1) * mine), 1.0)
    found = PipelineTimes(*np.zeros((2, len(steps))))
    for number, schedule in enumerate(SCHEDULES):
        some = np.flatnonzero((layouts.schedule == number) & (pp > 1))
        if not len(some):
            continue
        per_rank, count = layouts.stages_per_rank[some], layouts.accumulation[some]
        sent = send(steps.hidden_bytes[some], at(steps.pipeline, some), constants)
        forward, backward = busiest.forward[some] / per_rank, busiest.backward[some] / per_rank
        stage = MeanStage(forward, backward, weight[some] / per_rank, 0.0, others[some])
        found.computing[some] = makespan(schedule, pp[some], per_rank, count, stage)
        waiting = MeanStage(0.0, 0.0, 0.0, sent, 1.0)
        found.whole[some] = found.computing[some] + makespan(schedule, pp[some], per_rank, count, waiting)
    return found


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
