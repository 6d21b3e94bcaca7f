"""How long an optimizer step of a run takes in each of many layouts on a machine: the way in to the time model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.hardware.collectives import Constants, default_constants, send
from phalanx.hardware.machine import Machine
from phalanx.layout.spec import LayoutTable, ResolvedLayout
from phalanx.layout.stage_assignment import stage_layer_counts
from phalanx.optimizers import find_optimizer
from phalanx.planner.schedule.simulate import StageTimes, makespans_together
from phalanx.planner.schedule.table import ScheduleTable, table_of
from phalanx.planner.time.framework import COMPILED, EAGER, FrameworkProfile
from phalanx.planner.time.operation_time import Floats, Way
from phalanx.planner.time.part_time import PartTimes, in_training, part_times
from phalanx.planner.time.profile import Profile
from phalanx.planner.time.step_parts import Steps, steps_of
from phalanx.planner.time.step_time import StepCause, StepTimes, closed_form
from phalanx.planner.trace.traced_model import Kernel, TracedModel


def step_times(
    model: TracedModel,
    candidates: LayoutTable,
    machine: Machine,
    profile: Profile,
    *,
    constants: Constants | None = None,
    attention: Kernel | None = None,
    exact: bool = False,
) -> StepTimes:
    """Return the seconds of a step of `model` in each of `candidates` on `machine`, by cause.

    constants: of the machine's collectives, alone; its defaults where None. attention: the kernel; the likely one where
    None. exact: simulate the pipelines instead of the closed form, some milliseconds each. Raises ConfigError where the
    machine lacks the links or the network that a layout needs.
    """
    framework = our_framework(model, machine)
    steps = steps_of_run(model, candidates, machine, framework, attention)
    constants = default_constants(machine) if constants is None else constants
    times = part_times(steps.parts, machine, constants, profile)
    found = closed_form(steps, times, profile, constants, framework)
    if not exact:
        return found
    return with_simulated_pipelines(model, steps, times, found, profile, constants)


def our_framework(model: TracedModel, machine: Machine) -> FrameworkProfile:
    """What our training does on `machine`."""
    switched = machine.links is not None and machine.links.switch is not None
    run, wanted = model.run, model.run.layout.peer_copies
    framework = (COMPILED if run.training.compile is not False else EAGER).computing_in(run.layout.precision)
    framework = framework.updating_with(find_optimizer(run.optimizer).value_passes)
    return replace(framework, copy_engines=wanted is True or (wanted == "auto" and switched))


def steps_of_run(
    model: TracedModel,
    candidates: LayoutTable,
    machine: Machine,
    framework: FrameworkProfile,
    attention: Kernel | None = None,
) -> Steps:
    """The steps of `candidates`. attention: the kernel; the likely one where None."""
    kernel = attention or model.likely_kernel(rocm=machine.node.device.startswith("MI"))
    setting = model.setting_of(candidates.row(0), attention=kernel, compiled=framework.compiled)
    chunks = {tp: model.chunk_tokens(tp) for tp in np.unique(candidates.tp).tolist()}
    return steps_of(setting, candidates, machine, framework, chunks, model.run.layout.gather_blocks)


def with_simulated_pipelines(
    model: TracedModel, steps: Steps, times: PartTimes, found: StepTimes, profile: Profile, constants: Constants
) -> StepTimes:
    """`found` with the bubbles and transfers of simulated pipelines. constants: of collectives, alone."""
    seconds = found.seconds.copy()
    layouts = steps.layouts
    sent = send(steps.hidden_bytes, steps.pipeline, in_training(constants, profile))
    both = times.seconds.sum(axis=2)
    columns = (both[:, Way.FORWARD], both[:, Way.BACKWARD], times.weight)
    alike: dict[tuple[int, ...], list[int]] = {}
    for row in np.flatnonzero(layouts.pp > 1).tolist():
        sizes = (layouts.schedule[row], layouts.pp[row], layouts.stages_per_rank[row], layouts.accumulation[row])
        alike.setdefault(tuple(map(int, sizes)), []).append(row)
    pipelines: list[_Pipelines] = []
    for rows in alike.values():
        layout = layouts.row(rows[0])
        blocks = stage_layer_counts(model.config.n_layers, layout.n_stages, *model.block_costs())
        forward, backward, weight = (_of_stages(steps, rows, column, blocks) for column in columns)
        pipelines.append(_Pipelines(layout, rows, forward, backward, weight, sent[rows]))
    for one, (ramp, transfer) in zip(pipelines, _simulated(pipelines), strict=True):
        seconds[one.rows, StepCause.BUBBLE] = ramp * profile.pipeline_ramp
        seconds[one.rows, StepCause.TRANSFER] = transfer
    return StepTimes(seconds)


@dataclass(frozen=True)
class _Pipelines:
    """Pipelines of one kind."""

    layout: ResolvedLayout
    """Of one of them."""
    rows: list[int]
    """Which layouts they are."""
    forward: Floats
    """Seconds of each stage, [rows, stages]; so the next two."""
    backward: Floats
    weight: Floats
    sent: Floats
    """Seconds of a transfer, [rows]."""


def _simulated(every: Sequence[_Pipelines]) -> list[tuple[Floats, Floats]]:
    """(seconds in which pipelines fill and drain, those of transfers), [rows], of each kind."""
    tables = [table_of(pipelines.layout) for pipelines in every]
    found = makespans_together(list(zip(tables, map(_stage_times, every), strict=True)))
    return list(map(_ramp_and_transfer, every, tables, found))


def _stage_times(pipelines: _Pipelines) -> StageTimes:
    """Each layout twice, without transfers and with them."""
    stages = (pipelines.forward, pipelines.backward, pipelines.weight)
    forward, backward, weight = (np.concatenate([stage, stage]) for stage in stages)
    transfer = np.concatenate([np.zeros(len(pipelines.rows)), pipelines.sent])[:, None]
    return StageTimes(forward, backward, weight, transfer)


def _ramp_and_transfer(pipelines: _Pipelines, table: ScheduleTable, seconds: Floats) -> tuple[Floats, Floats]:
    """See `_simulated`. seconds: of the layouts, and then of the same with transfers."""
    alone, together = np.split(seconds, 2)
    each = pipelines.forward + pipelines.backward
    busiest = each[:, table.stages_of_rank].sum(axis=2).max(axis=1)
    return alone - pipelines.layout.accumulation * busiest, together - alone


def _of_stages(steps: Steps, rows: list[int], column: Floats, blocks: Sequence[int]) -> Floats:
    """Seconds of each stage for these layouts, [rows, stages]. column: of each part. blocks: of each stage."""
    stages = column[steps.block[rows]][:, None] * np.asarray(blocks, np.float64)
    stages[:, 0] += column[steps.embedding[rows]]
    stages[:, -1] += column[steps.head[rows]]
    return np.asarray(stages)
