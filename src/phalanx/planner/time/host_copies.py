"""Seconds of an update whose state comes from host memory and goes back there, a bucket at a time."""

from __future__ import annotations

import numpy as np

from phalanx.hardware.machine import Machine, host_of
from phalanx.optimizers import find_optimizer
from phalanx.optimizers.offloaded_state import BUCKET_BYTES
from phalanx.planner.time.operation_time import Floats
from phalanx.planner.time.profile import Profile
from phalanx.planner.time.step_parts import Steps
from phalanx.planner.time.step_time import most_trained
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
