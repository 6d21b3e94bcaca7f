"""How often nodes fail, and what failures and checkpoints leave of a job's time.

Plans ask this before a run, and a run that chooses its own interval between checkpoints with what it measures; reports
divide the time of a run into parts of the same names. Imports nothing: run files and help texts show the figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

MTBF_HOURS = 6300.0
"""Mean time between failures that stop a job, of one node of eight devices: 419 interruptions in 54 days on 16,384 devices
(The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.4)."""
RESTART_MINUTES = 10.0
"""From a failure to the first new step: an assumption."""
CHECKPOINT_GB_S = 1.0
"""GB/s at which a node writes its part of a checkpoint to shared storage: an assumption."""

TRAINING, CHECKPOINTS, REDONE, STARTS = "training", "checkpoints", "steps done again", "start and restart"
"""Names of parts of a job's time."""


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
    parts: Mapping[str, float]
    """Shares of the job's time by what it goes to: `share` and what is lost."""


def find_goodput(
    checkpoint_s: float, nodes: int, mtbf_hours: float, restart_s: float, *, least_s: float = 0.0
) -> Goodput:
    """Return what failures and checkpoints leave of a job's time, with the checkpoint interval that loses least.

    Both are Daly's (2006, Future Generation Computer Systems 22(3)): the elapsed time his complete model, equation 20, where
    failures strike at random, also during checkpoints and restarts; the interval his optimum, equation 37, whose first term
    is Young's (1974).

    Args:
        checkpoint_s: seconds that training waits for a checkpoint.
        nodes: nodes of the job, any of which ends it.
        mtbf_hours: mean hours between failures of one node.
        restart_s: seconds from a failure to the first new step.
        least_s: shortest interval possible, seconds, such as the time that a save in the background takes.
    """
    failure = mtbf_hours * 3600 / nodes
    half = checkpoint_s / (2 * failure)
    interval = failure
    if half < 1:
        interval = math.sqrt(2 * checkpoint_s * failure) * (1 + math.sqrt(half) / 3 + half / 9) - checkpoint_s
    interval = max(interval, least_s)
    # A job that fails a hundred times before it is up again makes no headway: no need to overflow over it.
    waiting = math.expm1(min((interval + checkpoint_s) / failure, 100.0))
    elapsed = failure * math.exp(min(restart_s / failure, 100.0)) * waiting
    share = interval / elapsed if elapsed else 1.0
    saving = share * checkpoint_s / interval if interval else 0.0
    # Failures come at their rate in all of the time. Each begins a restart, which lasts restart_s or to the next failure.
    starting = -math.expm1(-restart_s / failure)
    again = max(0.0, 1.0 - share - saving - starting)
    parts = {TRAINING: share, CHECKPOINTS: saving, REDONE: again, STARTS: starting}
    return Goodput(failure, checkpoint_s, interval, share, parts)
