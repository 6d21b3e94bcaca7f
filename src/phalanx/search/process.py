"""Processes of trials: with a time limit, a log and an end that no kill can prevent. Knows not what they compute.

A trial's process ends with the search that started it, and its ranks end with it: each asks the system to be killed when
its parent is gone, however that went.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PARENT = "PHALANX_TRIAL_PARENT"
"""Variable of a trial's process: the parent it must not outlive; empty stands for whoever that is."""

_PR_SET_PDEATHSIG = 1
_DYING_S = 15.0
"""Seconds that processes have to end once they were told to."""
_WATCH_S = 0.2


@dataclass(frozen=True)
class Worker:
    """A process on some host, told apart from later ones with the same number."""

    host: str
    pid: int
    started: str
    """When it started, as the system counts; empty where it does not say."""

    @classmethod
    def this_process(cls) -> Worker:
        """This one."""
        return cls(socket.gethostname(), os.getpid(), _started(os.getpid()))

    def alive(self) -> bool:
        """Whether it runs; to be asked on its own host."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return _started(self.pid) == self.started

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def _started(pid: int) -> str:
    try:
        # Behind the command's name, which may hold anything: state is the first field, the start the twentieth.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, IndexError):
        return ""
    return "" if fields[0] == "Z" else fields[19]


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    """Exit code; of a process that a signal ended the signal's negative number."""
    timed_out: bool
    seconds: float


def run_limited(command: Sequence[str], env: Mapping[str, str], log: Path, limit_s: float) -> Ended:
    """Run a command until it ends, or for `limit_s` seconds; all it says goes to `log`.

    The processes are told to say where they stand (SIGQUIT) when time is up, then killed. They are killed as well when this
    process is interrupted, or ends in any way.
    """
    start = time.monotonic()
    with log.open("ab") as file:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env, PARENT: str(os.getpid())},
            process_group=0,
        )
        timed_out = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            end_group(process)
    return Ended(process.returncode, timed_out, time.monotonic() - start)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads its own group, and all that is in it."""
    if process.poll() is None:
        process.send_signal(signal.SIGQUIT)
        try:
            process.wait(_DYING_S)
        except subprocess.TimeoutExpired:
            process.kill()
    # Often nothing of the group is left, or only what is dead and not yet buried.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have this process get the signal `number` when its parent, which PARENT names, is gone. Nothing without PARENT."""
    named = os.environ.get(PARENT)
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


def guarded(command: Sequence[str]) -> list[str]:
    """`command`, a program that is not ours, so that it is told to quit when this process is gone (Linux only)."""
    return [sys.executable, "-m", "phalanx.search.process", *command]


if __name__ == "__main__":
    # What was asked of the system outlives the change of program.
    die_with_parent(signal.SIGQUIT)
    os.environ[PARENT] = ""
    os.execvp(sys.argv[1], sys.argv[1:])
