"""How long an optimizer step of a run takes in each of many layouts on a machine: the way in to the time model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phalanx.hardware.collectives import Constants, default_constants
from phalanx.hardware.machine import Machine
from phalanx.layout.spec import LayoutTable, ResolvedLayout
from phalanx.optimizers import find_optimizer, updates_whole_matrices
from phalanx.planner.memory.parts import model_bytes
from phalanx.planner.time.framework import COMPILED, EAGER, FrameworkProfile
from phalanx.planner.time.host_copies import activation_seconds, offload_seconds
from phalanx.planner.time.part_time import part_times
from phalanx.planner.time.pipeline_time import PipelineModel, simulate_pipelines
from phalanx.planner.time.profile import Profile
from phalanx.planner.time.step_parts import Steps, steps_of
from phalanx.planner.time.step_time import StepBreakdown, StepTimes, time_steps
from phalanx.planner.time.whole_update import whole_update_seconds
from phalanx.planner.trace.traced_model import Kernel, TracedModel


def step_times(
    model: TracedModel,
    candidates: LayoutTable,
    machine: Machine,
    profile: Profile,
    *,
    constants: Constants | None = None,
    attention: Kernel | None = None,
    pipelines: PipelineModel = simulate_pipelines,
) -> StepTimes:
    """Return the seconds of a step of `model` in each of `candidates` on `machine`, and what they go to.

    constants: of the machine's collectives, alone; its defaults where None. attention: the kernel; the likely one where
    None. pipelines: see `time_steps`. Raises ConfigError where the machine lacks the links or the network that a layout
    needs.
    """
    framework = our_framework(model, machine)
    steps = steps_of_run(model, candidates, machine, framework, attention)
    constants = default_constants(machine) if constants is None else constants
    times = part_times(steps.parts, machine, constants, profile)
    found = time_steps(steps, times, profile, constants, framework, pipelines=pipelines)
    if updates_whole_matrices(model.run.optimizer):
        found.seconds[:, StepBreakdown.OPTIMIZER] += whole_update_seconds(model, steps, machine, profile, constants)
    if candidates.offload_optimizer.any():
        found.seconds[:, StepBreakdown.OPTIMIZER] += offload_seconds(model, steps, machine, profile)
    if candidates.offload_activations.any():
        kernel = attention or likely_kernel(model, machine)
        parts = model_bytes(model, candidates, attention=kernel, compiled=framework.compiled)
        found.seconds[:, StepBreakdown.OFFLOAD] = activation_seconds(steps, times, parts, machine, profile)
    return found


def our_framework(model: TracedModel, machine: Machine) -> FrameworkProfile:
    """Return the profile of our own framework for training `model` on `machine`."""
    switched = machine.links is not None and machine.links.switch is not None
    run, wanted = model.run, model.run.layout.peer_copies
    framework = (COMPILED if run.training.compile is not False else EAGER).computing_in(run.layout.precision)
    framework = framework.updating_with(find_optimizer(run.optimizer).value_passes)
    copies = wanted is True or (wanted == "auto" and switched)
    return replace(framework, copy_engines=copies, overlaps_products=copies)


def likely_kernel(model: TracedModel, machine: Machine) -> Kernel:
    """Return the attention kernel that `model` is likely to run on `machine`."""
    return model.likely_kernel(rocm=machine.node.device.startswith("MI"))


def steps_of_run(
    model: TracedModel,
    candidates: LayoutTable,
    machine: Machine,
    framework: FrameworkProfile,
    attention: Kernel | None = None,
) -> Steps:
    """Return the steps of `candidates`. attention: the kernel; the likely one where None."""
    kernel = attention or likely_kernel(model, machine)
    # What a candidate's fields change is put in for each: beginning at one of them would leave traces of it in others.
    setting = model.setting_of(ResolvedLayout(global_batch=1), attention=kernel, compiled=framework.compiled)
    chunks = {tp: model.chunk_tokens(tp) for tp in np.unique(candidates.tp).tolist()}
    return steps_of(setting, candidates, machine, framework, chunks, model.run.layout.gather_blocks)
