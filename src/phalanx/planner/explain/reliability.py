"""How often nodes fail and what stopping and saving takes, as plans assume it. Light: help texts show these figures."""

from __future__ import annotations

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
