"""The budget of a training run: time, device-hours, energy, and what failures and checkpoints cost of it.

Help texts show the figures of `Reliability`, so this module imports nothing that takes time.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.hardware.reliability import CHECKPOINT_GB_S, MTBF_HOURS, RESTART_MINUTES, Goodput, find_goodput


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
    working_w: float | None = None
    """Watts of a device that works, by which the energy was counted."""


@dataclass(frozen=True)
class LargeBatch:
    """What a global batch costs in samples, beside one far below the critical batch."""

    samples: int
    """Samples of the global batch."""
    critical: float
    """Samples of the critical batch."""
    factor: float
    """Samples to a loss over those that a small batch needs to it."""
    amount: int
    """Tokens or samples to the loss that a small batch reaches after the budget's amount."""
    elapsed_s: float
    """Seconds to that loss, with failures and checkpoints."""


def judge_batch(budget: Budget, samples: int, critical: float) -> LargeBatch:
    """Judge a global batch of `samples` by the critical batch.

    Steps S and samples E to a loss follow (S / S_min - 1) (E / E_min - 1) = 1, where E_min / S_min is the critical batch:
    E / E_min = 1 + samples / critical (McCandlish et al., arXiv:1812.06162, section 2.3).
    """
    factor = 1.0 + samples / critical
    return LargeBatch(samples, critical, factor, round(budget.amount * factor), budget.elapsed_s * factor)


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
    working_w: float | None = None,
) -> Budget:
    """Estimate time, device-hours and energy of training on `amount` tokens or samples; whole steps, the last one in full.

    watts: of a device, on average. working_w: of one that works, for the reader.
    """
    steps = -(-amount // amount_per_step)
    seconds = steps * step_s
    # Goodput is the share of the time that steps get.
    elapsed = seconds / losses.share
    hours = elapsed * devices / 3600
    energy = None if watts is None else hours * watts / 1e6
    return Budget(amount, unit, steps, seconds, elapsed, hours, energy, losses, working_w)
