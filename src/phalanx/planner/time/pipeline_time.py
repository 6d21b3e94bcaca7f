"""How long the pipelines of many layouts take: simulated, or bounded from below where it is asked which to simulate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from phalanx.hardware.collectives import Constants, send
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage_assignment import count_leading, stage_layer_counts
from phalanx.planner.distinct_rows import distinct_rows
from phalanx.planner.schedule.bounds import bound_makespan
from phalanx.planner.schedule.schedule_table import table_of
from phalanx.planner.schedule.simulate import StageTimes, makespans
from phalanx.planner.time.operation_time import Direction, Floats, Ints
from phalanx.planner.time.part_time import PartTimes
from phalanx.planner.time.profile import Profile
from phalanx.planner.time.step_parts import Steps


@dataclass(frozen=True)
class PipelineTimes:
    """Seconds from the first pass of a step to the last, [layouts]; 0 where there is no pipeline."""

    computing: Floats
    """Seconds if transfers between stages took no time."""
    whole: Floats


PipelineModel = Callable[[Steps, PartTimes, Constants, Profile], PipelineTimes]
"""Returns the times of all layouts' pipelines. The constants are of collectives beside all else that a step does."""


def simulate_pipelines(steps: Steps, times: PartTimes, constants: Constants, _profile: Profile) -> PipelineTimes:
    """Simulate the pipeline of every layout; see `PipelineModel`."""
    return _time_pipelines(steps, times, constants, lambda layout, stages: makespans(table_of(layout), stages))


def bound_pipelines(steps: Steps, times: PartTimes, constants: Constants, profile: Profile) -> PipelineTimes:
    """Return times by which no step takes longer than it does with simulated pipelines; see `PipelineModel`."""
    found = _time_pipelines(steps, times, constants, bound_makespan)
    # A ramp below 1 counts waiting for computation less than waiting for transfers. Where the bound takes one for the
    # other, the step would come out longer than it is.
    transfers = min(1.0, profile.pipeline_ramp) * (found.whole - found.computing)
    return replace(found, whole=found.computing + transfers)


def _time_pipelines(
    steps: Steps,
    times: PartTimes,
    constants: Constants,
    find_makespans: Callable[[ResolvedLayout, StageTimes], Floats],
) -> PipelineTimes:
    """find_makespans: seconds of a pipeline, for many candidates."""
    layouts = steps.layouts
    found = PipelineTimes(*np.zeros((2, len(steps))))
    pipelined = np.flatnonzero(layouts.pp > 1)
    if not len(pipelined):
        return found
    sent = send(steps.hidden_bytes, steps.pipeline, constants)
    shape = [layouts.schedule, layouts.pp, layouts.stages_per_rank, layouts.accumulation]
    _, alike_sent = np.unique(sent, return_inverse=True)
    # Layouts that differ in how data-parallel ranks shard have the same pipeline, which is timed once.
    first, pipeline_of = distinct_rows([column[pipelined] for column in (*shape, steps.block, alike_sent)])
    timed = pipelined[first]
    _, shape_of = distinct_rows([column[timed] for column in shape])
    seconds = np.zeros((2, len(timed)))
    for number in range(int(shape_of.max()) + 1):
        group = np.flatnonzero(shape_of == number)
        stages = stage_times(steps, timed[group], times)
        # Each pipeline twice, without transfers and with them: what transfers add is told apart.
        forward, backward, weight = (
            np.concatenate([part, part]) for part in (stages.forward, stages.backward, stages.weight)
        )
        transfer = np.concatenate([np.zeros(len(group)), sent[timed[group]]])[:, None]
        both = find_makespans(layouts.row(int(timed[group[0]])), StageTimes(forward, backward, weight, transfer))
        seconds[:, group] = both.reshape(2, -1)
    found.computing[pipelined], found.whole[pipelined] = seconds[:, pipeline_of]
    return found


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch in each stage, [layouts, stages]."""

    forward: Floats
    backward: Floats
    """The whole backward pass."""
    weight: Floats
    """The part of it that makes gradients of weights."""


def stage_times(steps: Steps, which: Ints, times: PartTimes) -> StageSeconds:
    """Return the times of the stages of these layouts, all of which have equally many stages."""
    n_stages = int(steps.layouts.n_stages[which[0]])
    models = zip(steps.n_layers[which].tolist(), steps.end_costs[which].tolist(), strict=True)
    counts = [stage_layer_counts(n_layers, n_stages, *costs) for n_layers, costs in models]
    blocks = np.asarray(counts, np.float64)
    leading = [count_leading(*one) for one in zip(counts, steps.leading_layers[which].tolist(), strict=True)]
    both = times.seconds.sum(axis=2)
    columns = []
    for column in (both[:, Direction.FORWARD], both[:, Direction.BACKWARD], times.weight):
        block, first = column[steps.block[which]][:, None], column[steps.leading[which]][:, None]
        stages = block * blocks + (first - block) * leading
        stages[:, 0] += column[steps.embedding[which]]
        stages[:, -1] += column[steps.head[which]]
        columns.append(stages)
    return StageSeconds(*columns)
