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

PARENT = "PHALANX_PARENT"
"""Variable of a process: the number of the parent it must not outlive; empty stands for whoever that is."""

ONE_WISH_S = 1.0
"""Seconds within which a signal that comes again is the same wish. `timeout` sends it to the process and to its group, and
the end of a parent is told once for each of its threads."""

_PR_SET_PDEATHSIG = 1
_WATCH_S = 0.2


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have this process get the signal `number` when its parent, which PARENT names, is gone. Nothing without PARENT."""
    # For this process alone, not for those that it starts.
    named = os.environ.pop(PARENT, None)
    if named is None:
        return
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
