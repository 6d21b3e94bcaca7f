"""Processes of trials: with a time limit, a log and an end that no kill can prevent. Knows not what they compute.

A trial's process ends with the search that started it, and its ranks end with it: each asks the system to be killed when
its parent is gone, however that went.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.hardware.host import KillCount
from phalanx.launch.parent import PARENT, die_with_parent
from phalanx.locks import process_exists

_DYING_S = 15.0
"""Seconds that processes have to end once they were told to."""
_POLL_S = 0.02


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
        return process_exists(self.pid) and _started(self.pid) == self.started

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
    memory_ran_out: bool = False
    """Whether the kernel killed processes on this host meanwhile because memory ran out."""


class Limited:
    """A command that runs, for `limit_s` seconds at most; all it says goes to `log`.

    Its processes end when this process ends, in any way. To be started by a thread that lives as long: the system counts the
    end of that thread as the end of the parent.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, limit_s: float) -> None:
        self._start = time.monotonic()
        self._limit_s = limit_s
        self._told: float | None = None
        self._kills = KillCount()
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env, PARENT: str(os.getpid())},
                process_group=0,
            )

    def poll(self) -> Ended | None:
        """How it ended; None while it runs. Never waits long.

        When time is up the processes are told to say where they stand (SIGQUIT), and killed if that does not end them.
        """
        now = time.monotonic()
        running = self._process.poll() is None
        if running and self._told is None and now - self._start > self._limit_s:
            self._process.send_signal(signal.SIGQUIT)
            self._told = now
        if running and (self._told is None or now - self._told < _DYING_S):
            return None
        _kill_group(self._process)
        seconds = time.monotonic() - self._start
        return Ended(self._process.returncode, self._told is not None, seconds, self._kills.grew())

    def ask(self) -> None:
        """Ask it to stop in good order (SIGTERM)."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """End it, and all that it started, now; nothing where it has ended."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_DYING_S)
        _kill_group(self._process)


def run_limited(command: Sequence[str], env: Mapping[str, str], log: Path, limit_s: float) -> Ended:
    """Run a command until it ends, or for `limit_s` seconds, as `Limited` does.

    Its processes are ended as well when this one is interrupted.
    """
    running = Limited(command, env, log, limit_s)
    try:
        while (ended := running.poll()) is None:
            time.sleep(_POLL_S)
    finally:
        running.end()
    return ended


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads its own group, and all that is in it."""
    # Often nothing of the group is left, or only what is dead and not yet buried.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def guarded(command: Sequence[str]) -> list[str]:
    """`command`, a program that is not ours, so that it is told to quit when this process is gone (Linux only)."""
    return [sys.executable, "-m", "phalanx.study.trials.process", *command]


if __name__ == "__main__":
    # What was asked of the system outlives the change of program.
    die_with_parent(signal.SIGQUIT)
    os.environ[PARENT] = ""
    os.execvp(sys.argv[1], sys.argv[1:])
