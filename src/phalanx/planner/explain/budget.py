"""What a training run takes: time, device-hours, energy, and what failures and checkpoints cost of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from phalanx.planner.explain.reliability import Reliability
from phalanx.planner.rank.models import WAITING, Floats, Times

COMPUTING_SHARE, WAITING_SHARE = 0.75, 0.4
"""Shares of a device's board power that it draws while it works, and while it waits for others. Assumptions: on average
0.67 of it was drawn while FORGE-L was trained on 1,024 GCDs of Frontier (48.9 MWh for 15,300 steps of about 60 s; Yin et
al., SC 2023, power traces)."""
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
    """Of the job's time that is spent in steps that count."""


@dataclass(frozen=True)
class Budget:
    """A whole training run."""

    amount: int
    """What is trained on, in `unit`."""
    unit: str
    """tokens or samples."""
    steps: int
    seconds: float
    """Of steps alone."""
    elapsed_s: float
    """With failures, restarts and checkpoints."""
    device_hours: float
    """Of all devices, over `elapsed_s`."""
    energy_mwh: float | None
    """Of the devices, over `elapsed_s`; None where their power is not known."""
    goodput: Goodput


def power_w(times: Times, board_w: float) -> Floats:
    """Watts of one device, the mean over a step, [candidates]; see COMPUTING_SHARE."""
    waiting = sum((seconds for name, seconds in times.causes.items() if waits(name)), np.zeros(len(times.total)))
    share = np.clip(waiting / times.total, 0.0, 1.0)
    return np.asarray(board_w * (COMPUTING_SHARE + (WAITING_SHARE - COMPUTING_SHARE) * share))


def waits(cause: str) -> bool:
    """Whether a device computes nothing in the time that `cause` names."""
    return cause == WAITING or "exposed" in cause


def goodput(parameters: int, nodes: int, reliability: Reliability) -> Goodput:
    """What failures and checkpoints leave, with the checkpoint interval that loses least.

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


def budget(
    *,
    amount: int,
    unit: str,
    amount_per_step: int,
    step_s: float,
    devices: int,
    watts: float | None,
    losses: Goodput,
) -> Budget:
    """What training on `amount` tokens or samples takes; whole steps, the last one counted in full.

    watts: of a device, on average.
    """
    steps = -(-amount // amount_per_step)
    seconds = steps * step_s
    elapsed = seconds / losses.share
    hours = elapsed * devices / 3600
    return Budget(amount, unit, steps, seconds, elapsed, hours, None if watts is None else hours * watts / 1e6, losses)
