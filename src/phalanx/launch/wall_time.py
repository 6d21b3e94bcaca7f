"""When the wall time that a scheduler or the command grants is over, and how long ranks have once they are told to stop.

Ranks are told by the time of day: those that are started again after a fault then have what is left of it. Only the first
rank reads that clock, once, since hosts may not agree about the time.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from phalanx.errors import ConfigError

END_TIME = "PHALANX_END_TIME"
"""Environment variable with the time at which the command is to have ended, in seconds since 1970."""
_SLURM_END_TIME = "SLURM_JOB_END_TIME"
"""The same of the job, which Slurm sets from version 22.05 on."""
GRACE = "PHALANX_GRACE"
"""Environment variable with the seconds in which ranks may save and stop; set by the process that started them."""
_DEFAULT_GRACE_S = 30.0
"""The same under torchrun (--shutdown-timeout) and Slurm (KillWait), unless somebody said otherwise: ranks are not told."""


@dataclass(frozen=True)
class Grace:
    """How long ranks may go on once they are told to stop."""

    seconds: float
    whose: str
    """Who ends them, as a message says it."""
    option: str | None
    """What grants more, to be followed by seconds; None where the user cannot."""


def granted_grace() -> Grace | None:
    """Return how long ranks have to save and stop; None where nobody limits it. Raises ConfigError as `granted_seconds`."""
    if text := os.environ.get(GRACE):
        try:
            return Grace(float(text), "phalanx train --nproc leaves", "--grace")
        except ValueError:
            raise ConfigError(f"{GRACE}={text} is no number of seconds; unset it") from None
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        return Grace(_DEFAULT_GRACE_S, "torchrun by default leaves", "torchrun --shutdown-timeout")
    if "SLURM_STEP_ID" in os.environ:
        return Grace(_DEFAULT_GRACE_S, "Slurm by default (KillWait) leaves, when it cancels or preempts a job,", None)
    return None


def set_time_limit(seconds: float) -> None:
    """Have this process, and those that it starts, end within `seconds`."""
    os.environ[END_TIME] = f"{time.time() + seconds:.3f}"


def granted_seconds() -> float | None:
    """Return the seconds that are left of the wall time; None where nobody limits it.

    The command's own limit counts before that of the job it runs in. Raises ConfigError for a variable that is no number.
    """
    name = END_TIME if END_TIME in os.environ else _SLURM_END_TIME
    text = os.environ.get(name)
    if not text:
        return None
    try:
        return float(text) - time.time()
    except ValueError:
        raise ConfigError(f"{name}={text} is no number of seconds; unset it, or give --time H:MM:SS") from None
