"""The budget of a training run: time, device-hours, energy, and what failures and checkpoints cost of it.

Help texts show the figures of `Reliability`, so this module imports nothing that takes time.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.hardware.reliability import MTBF_HOURS, RESTART_MINUTES, Goodput, find_goodput

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

    See `find_goodput`. parameters: of the model, of which each node writes an equal part.
    """
    write = parameters * STATE_BYTES / (nodes * reliability.checkpoint_gb_s * 1e9)
    return find_goodput(write, nodes, reliability.mtbf_hours, reliability.restart_minutes * 60)


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
