"""Processes with a time limit, a log, and an end that no kill can prevent. Knows nothing of what they compute.

A trial's process ends with the study's process that started it, and its ranks end with it: each asks the system to be killed
when its parent is gone, for whatever reason.
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
from typing import Any, Protocol

from phalanx.hardware.host import KillCount
from phalanx.launch.parent import PARENT, die_with_parent
from phalanx.locks import process_exists

_DYING_S = 15.0
"""Seconds between asking processes to end and killing them."""
_POLL_S = 0.02


@dataclass(frozen=True)
class Worker:
    """A process on some host, told apart from a later one with the same process number."""

    host: str
    pid: int
    started: str
    """Start time as the system counts it, which tells the process from a later one of the same number; empty if unknown."""

    @classmethod
    def this_process(cls) -> Worker:
        """Return the worker that is this process."""
        return cls(socket.gethostname(), os.getpid(), _start_time(os.getpid()))

    def alive(self) -> bool:
        """Return whether the process runs; call on its own host."""
        return process_exists(self.pid) and _start_time(self.pid) == self.started

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return asdict(self)


def _start_time(pid: int) -> str:
    try:
        # The command's name, in brackets, may hold anything. Behind it state is the first field, the start the twentieth.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, IndexError):
        return ""
    return "" if fields[0] == "Z" else fields[19]


@dataclass(frozen=True)
class Ended:
    """End of a process."""

    code: int
    """Exit code; of a process that a signal ended the signal's negative number."""
    timed_out: bool
    seconds: float
    memory_ran_out: bool = False
    """Whether the kernel killed processes on this host meanwhile because memory ran out."""
    cause: str | None = None
    """Cause of the trial's failure where a scheduler ended it: a key of `study.trial.FAILURES`, or INTERRUPTED."""
    words: str = ""
    """What the scheduler says of that."""


class TrialProcess(Protocol):
    """Processes of a trial: a child of this process, or a job that a scheduler runs."""

    def poll(self) -> Ended | None:
        """Return how the trial ended; None while it runs or waits. Never waits long."""

    def ask_to_stop(self) -> None:
        """Ask the trial to stop in good order."""

    def kill(self) -> None:
        """End the trial now; do nothing where it has ended."""


class LimitedProcess:
    """A command that runs for `limit_s` seconds at most; all its output goes to `log`.

    Its processes end when this process ends, in any way. Must be started by a thread that lives as long: the system counts
    the end of that thread as the end of the parent.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, limit_s: float) -> None:
        self._start = time.monotonic()
        self._limit_s = limit_s
        self._quit_at: float | None = None
        # The count before the start: later growth is due to this trial or its neighbours.
        self._kills = KillCount()
        # Appended: a trial that moves or is retried keeps what its former processes wrote.
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                list(command),
                # A trial that asked for a terminal would wait forever.
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env, PARENT: str(os.getpid())},
                # A group of its own: all that the command starts can be killed together.
                process_group=0,
            )

    def poll(self) -> Ended | None:
        """Return how the command ended; None while it runs. Never waits long.

        At the time limit the command is told to write where it stands (SIGQUIT), and killed if that does not end it.
        """
        now = time.monotonic()
        running = self._process.poll() is None
        if running and self._quit_at is None and now - self._start > self._limit_s:
            self._process.send_signal(signal.SIGQUIT)
            self._quit_at = now
        if running and (self._quit_at is None or now - self._quit_at < _DYING_S):
            return None
        _kill_group(self._process)
        seconds = time.monotonic() - self._start
        return Ended(self._process.returncode, self._quit_at is not None, seconds, self._kills.grew())

    def ask_to_stop(self) -> None:
        """Ask the command to stop in good order (SIGTERM)."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the command and all that it started now; do nothing where it has ended."""
        if self._process.poll() is None:
            # SIGQUIT first: under srun the ranks on other nodes hear of the end through it alone.
            self._process.send_signal(signal.SIGQUIT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_DYING_S)
        _kill_group(self._process)


def run_limited(command: Sequence[str], env: Mapping[str, str], log: Path, limit_s: float) -> Ended:
    """Run a command until it ends, or for `limit_s` seconds, as `LimitedProcess` does.

    Its processes are killed as well when this one is interrupted.
    """
    running = LimitedProcess(command, env, log, limit_s)
    try:
        while (ended := running.poll()) is None:
            time.sleep(_POLL_S)
    finally:
        running.kill()
    return ended


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads its own group, and all that is in it."""
    # Often nothing of the group is left, or only zombies.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def guarded_command(command: Sequence[str]) -> list[str]:
    """Return `command`, a program that is not ours, changed to be sent SIGQUIT when this process is gone (Linux only)."""
    return [sys.executable, "-m", "phalanx.study.processes.process", *command]


if __name__ == "__main__":
    # What die_with_parent asks of the system outlives the change of program.
    die_with_parent(signal.SIGQUIT)
    os.environ[PARENT] = ""
    os.execvp(sys.argv[1], sys.argv[1:])
