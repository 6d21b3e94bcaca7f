"""Parents and children among processes: children that do not outlive their parent, and one wish that comes several times.

Loads nothing that takes time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from phalanx.errors import ConfigError

PARENT = "PHALANX_PARENT"
"""Variable of a process: the number of the parent it must not outlive; empty stands for whoever that is."""

ONE_WISH_S = 1.0
"""Seconds within which a signal that comes again is the same wish. `timeout` sends it to the process and to its group, and
the end of a parent is told once for each of its threads."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask training to save and stop: Ctrl-C, whoever ends jobs, a terminal that closes, and the two by which
schedulers warn of the end of a job (Slurm's `--signal=USR1@300`)."""

GRACE_S = 600.0
"""Seconds that ranks have to save and stop once they were told to: one of them may still write the checkpoint."""

_PR_SET_PDEATHSIG = 1
_WATCH_S = 0.2


def ignored(number: signal.Signals) -> bool:
    """Return whether this process was started with SIGHUP ignored, as by nohup; the other signals ask all the same."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have this process get the signal `number` when its parent, which PARENT names, is gone. Nothing without PARENT.

    Raises ConfigError where PARENT is no number.
    """
    # For this process alone, not for those that it starts.
    named = os.environ.pop(PARENT, None)
    if named is None:
        return
    if named and not (named.isascii() and named.isdecimal()):
        raise ConfigError(f"environment variable {PARENT} is {named!r}, no number of a process; unset it")
    parent = int(named) if named else os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent, number), name="watch-parent", daemon=True).start()
    # It may have gone before the system was asked.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int, number: signal.Signals) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os.kill(os.getpid(), number)
