"""The budget of a training run: time, device-hours, energy, and what failures and checkpoints cost of it.

Help texts show the figures of `Reliability`, so this module imports nothing that takes time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MTBF_HOURS = 6300.0
"""Mean time between failures that stop a job, of one node of eight devices: 419 interruptions in 54 days on 16,384 devices
(The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.4)."""
RESTART_MINUTES = 10.0
"""From a failure to the first new step: an assumption."""
CHECKPOINT_GB_S = 1.0
"""GB/s at which a node writes its part of a checkpoint to shared storage: an assumption."""


@dataclass(frozen=True)
class Reliability:
    """How often nodes fail, and what stopping and saving takes."""

    mtbf_hours: float = MTBF_HOURS
    restart_minutes: float = RESTART_MINUTES
    checkpoint_gb_s: float = CHECKPOINT_GB_S


STATE_BYTES = 12
"""Bytes a parameter of what a checkpoint holds: master weight and two moments of AdamW in float32."""


@dataclass(frozen=True)
class Goodput:
    """What is left of a job's time in which nodes fail and checkpoints are written."""

    failure_s: float
    """Seconds between failures of the job."""
    checkpoint_s: float
    """Seconds that training waits for a checkpoint."""
    interval_s: float
    """Seconds of training between checkpoints that lose least."""
    share: float
    """Share of the job's time that is spent in steps that count."""


@dataclass(frozen=True)
class Budget:
    """A whole training run."""

    amount: int
    """What is trained on, in `unit`."""
    unit: str
    """tokens or samples."""
    steps: int
    seconds: float
    """Seconds of steps alone."""
    elapsed_s: float
    """Seconds with failures, restarts and checkpoints."""
    device_hours: float
    """Hours of all devices, over `elapsed_s`."""
    energy_mwh: float | None
    """Energy of the devices over `elapsed_s`, MWh; None where their power is not known."""
    goodput: Goodput


def estimate_goodput(parameters: int, nodes: int, reliability: Reliability) -> Goodput:
    """Estimate what failures and checkpoints leave of a job's time, with the checkpoint interval that loses least.

    Both are Daly's (2006, Future Generation Computer Systems 22(3)): the elapsed time his complete model, equation 20, where
    failures strike at random, also during checkpoints and restarts; the interval its optimum, equation 37, whose first term
    is Young's (1974). parameters: of the model, of which each node writes an equal part.
    """
    failure = reliability.mtbf_hours * 3600 / nodes
    write = parameters * STATE_BYTES / (nodes * reliability.checkpoint_gb_s * 1e9)
    restart = reliability.restart_minutes * 60
    half = write / (2 * failure)
    interval = failure
    if half < 1:
        interval = math.sqrt(2 * write * failure) * (1 + math.sqrt(half) / 3 + half / 9) - write
    # A job that fails a hundred times before it is up again makes no headway: no need to overflow over it.
    elapsed = failure * math.exp(min(restart / failure, 100.0)) * math.expm1(min((interval + write) / failure, 100.0))
    return Goodput(failure, write, interval, interval / elapsed)


def estimate_budget(
    *,
    amount: int,
    unit: str,
    amount_per_step: int,
    step_s: float,
    devices: int,
    watts: float | None,
    losses: Goodput,
) -> Budget:
    """Estimate time, device-hours and energy of training on `amount` tokens or samples; whole steps, the last one in full.

    watts: of a device, on average.
    """
    steps = -(-amount // amount_per_step)
    seconds = steps * step_s
    elapsed = seconds / losses.share
    hours = elapsed * devices / 3600
    return Budget(amount, unit, steps, seconds, elapsed, hours, None if watts is None else hours * watts / 1e6, losses)
