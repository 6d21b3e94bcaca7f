"""Signals between a launcher and its ranks, and children that do not outlive their parent.

This module imports nothing that takes time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from phalanx.errors import ConfigError

PARENT = "PHALANX_PARENT"
"""Environment variable with the process number of the parent that a process must not outlive; empty for any parent."""

STORE_SOCKET = "PHALANX_STORE_SOCKET"
"""Environment variable of rank 0 with a descriptor that listens where the ranks meet."""

ONE_WISH_S = 1.0
"""Seconds within which a repeated signal counts as one request. `timeout` signals both the process and its group, and Linux
signals the end of a parent once for each of its threads."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask training to save and stop: Ctrl-C, the end of a job, a terminal that closes, and the two by which
schedulers warn of the end of a job (Slurm's `--signal=USR1@300`)."""

GRACE_S = 600.0
"""Seconds in which ranks may save and stop before they are killed: one of them may still write a checkpoint."""

_PR_SET_PDEATHSIG = 1
_WATCH_S = 0.2


def is_ignored(number: signal.Signals) -> bool:
    """Return whether `number` is SIGHUP and this process was started with it ignored, as by nohup."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Arrange that this process gets the signal `number` when its parent, which the variable PARENT names, ends.

    Without PARENT nothing happens. Raises ConfigError where PARENT is no number.
    """
    # Processes that this one starts must not take its parent for theirs.
    named = os.environ.pop(PARENT, None)
    if named is None:
        return
    if named and not (named.isascii() and named.isdecimal()):
        raise ConfigError(f"environment variable {PARENT} is {named!r}, no number of a process; unset it")
    parent = int(named) if named else os.getppid()
    # The kernel signals at once, however the parent ends; elsewhere a thread has to look.
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent, number), name="watch-parent", daemon=True).start()
    # The parent may have ended before the request was made.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch_parent(parent: int, number: signal.Signals) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os.kill(os.getpid(), number)


def interrupts_ignored() -> AbstractContextManager[None]:
    """Let processes that are started meanwhile ignore Ctrl-C from their first moment on: the parent alone decides."""
    return _interrupts_handled_by(signal.SIG_IGN)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C that comes meanwhile interrupt behind what is done here, of which no half may be left."""
    came: list[int] = []
    try:
        with _interrupts_handled_by(lambda number, _: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _interrupts_handled_by(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Have `handler` take Ctrl-C. Only the main thread may set one; others leave all as it is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
