"""Seconds of copies to host memory and back: of state, a bucket of an update at a time, and of activations of blocks."""

from __future__ import annotations

import numpy as np

from phalanx.hardware.machine import Machine, host_of
from phalanx.optimizers import find_optimizer
from phalanx.optimizers.offloaded_state import BUCKET_BYTES
from phalanx.planner.memory.parts import ModelBytes
from phalanx.planner.time.operation_time import Direction, Floats
from phalanx.planner.time.part_time import PartTimes
from phalanx.planner.time.profile import Profile
from phalanx.planner.time.step_parts import Steps
from phalanx.planner.time.step_time import busiest_rank, most_trained
from phalanx.planner.trace.traced_model import TracedModel

LINK_SHARE = 0.8
"""Share of a host link's nominal rate that copies reach in each direction while both are busy. An assumption: the memory
of a host of eight devices may be slower than their links together."""


def offload_seconds(model: TracedModel, steps: Steps, machine: Machine, profile: Profile) -> Floats:
    """Return the seconds that copies of offloaded state add to an update, [layouts]; 0 where it stays on the device.

    Copies to the device and back go on together, and the update of a bucket, fifty times as fast, between them: all of one
    direction shows, and of the other what the first bucket takes. Nothing else runs then. State of many small parameters
    takes as long as the host takes to ask for its copies. Raises ConfigError where the machine's description says nothing of
    host memory.
    """
    _, trained = most_trained(steps)
    kind, width = find_optimizer(model.run.optimizer), model.precision.main_dtype.itemsize
    state = kind.state_values * width * trained
    first = np.minimum(state, kind.state_values * BUCKET_BYTES)
    copying = (state + first) / (LINK_SHARE * 1e9 * host_of(machine).gb_s)
    asking = 2 * np.ceil(kind.state_values) * steps.sum_trained_tensors().max(axis=1) * profile.host_s
    return np.where(steps.layouts.offload_optimizer, np.maximum(copying, asking), 0.0)


def activation_seconds(steps: Steps, times: PartTimes, parts: ModelBytes, machine: Machine, profile: Profile) -> Floats:
    """Return the seconds of a step that copies of activations add, [layouts]; 0 where these stay on the device.

    What a block keeps leaves behind the forward pass of the next one, and comes back behind the backward pass of that one:
    what takes longer than the pass shows, and the rest slows it as copies between devices do. A pipeline goes at the pace of
    its busiest rank also while it fills and drains. Raises ConfigError where the machine's description says nothing of host
    memory.
    """
    layouts, busiest, seconds = steps.layouts, busiest_rank(steps, times), times.seconds.sum(axis=2)
    copying = parts.leaving / (LINK_SHARE * 1e9 * host_of(machine).gb_s)
    shown = np.zeros(len(steps))
    for direction in Direction:
        passed = seconds[steps.block, direction]
        hidden = np.minimum(copying, passed)
        shown += copying - hidden + profile.copy_slowdown * hidden
    # The last block of each stage keeps its own.
    stages = np.where(layouts.pp > 1, layouts.stages_per_rank, 1)
    away = np.maximum(0.0, busiest.blocks + busiest.leading - stages)
    passes = steps.passes + np.where(layouts.pp > 1, (layouts.pp - 1) / stages, 0.0)
    return np.where(layouts.offload_activations, passes * away * shown, 0.0)
