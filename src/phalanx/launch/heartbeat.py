"""Heartbeats: what a rank is doing, in a small file of shared memory that the process watching it reads at any time.

A rank notes each phase of a step as it enters it. That is one write to memory that both processes map: no message, no lock,
and what was noted last is still there when the rank is killed. This module imports nothing that takes time, and no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FOLDER = "PHALANX_HEARTBEAT"
"""Environment variable with the folder of the heartbeats of this node's ranks; set by the process that watches them."""

Phase = Literal["start", "data", "forward", "backward", "collective", "checkpoint", "evaluate", "compile", "end"]
PHASES: tuple[Phase, ...] = (
    "start",
    "data",
    "forward",
    "backward",
    "collective",
    "checkpoint",
    "evaluate",
    "compile",
    "end",
)
SLOW_PHASES = frozenset({"start", "checkpoint", "evaluate", "compile", "end"})
"""Phases with a budget of their own: nobody knows beforehand how long they take."""

STACK_SIGNAL = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else None
"""Signal at which a rank writes the stacks of all its threads. Not one of those that schedulers and users send."""

REPORT_S = 0.5
"""Seconds between two records of a rank's last collectives."""

_RECORD = struct.Struct("<QdddddqqqqqQ")
_NO_STEP = -1


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of a rank. Times are those of `time.monotonic`, which all processes of a host share."""

    since: float
    """When the rank entered its phase."""
    slowest: float
    """The longest that an ordinary phase has taken so far, in seconds, first step left out."""
    step_seconds: float
    """Time of the last step."""
    data_seconds: float
    """Part of it spent waiting for the batch."""
    progressed: float
    """When the last step was finished; 0 before."""
    step: int
    """Step that is being done; -1 before the first."""
    done: int
    """Last step finished by this process; -1 before."""
    resumed: int
    """Step of the checkpoint that this process began from; -1 before that is known."""
    phase_number: int
    pid: int
    """Number of the process."""

    @property
    def phase(self) -> Phase:
        """What the rank is doing. The first step of a process compiles, whatever part of it is under way."""
        noted = PHASES[self.phase_number]
        return "compile" if noted not in SLOW_PHASES and self.done < 0 else noted

    def limit_s(self, heartbeat_s: float, slow_s: float) -> float:
        """Return the seconds that the present phase may last before the rank counts as hung."""
        if self.phase in SLOW_PHASES:
            return slow_s
        # Micro-batches that take long by nature are no hang: those before tell how long they take.
        return max(heartbeat_s, 5.0 * self.slowest)


def beat_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's heartbeats."""
    return folder / f"rank-{rank}.beat"


def stack_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's stacks; it is there as soon as the rank answers to STACK_SIGNAL."""
    return folder / f"rank-{rank}.stacks"


def error_file(folder: Path, rank: int) -> Path:
    """Return the file in which a rank says what it failed of."""
    return folder / f"rank-{rank}.error"


def collectives_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's last collectives, as PyTorch's flight recorders write them."""
    return folder / f"rank-{rank}.collectives"


def read_beat(file: Path) -> Beat | None:
    """Return the heartbeat in `file`; None where there is none yet."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    for _ in range(3):
        if len(data) != _RECORD.size:
            return None
        before, *values, after = _RECORD.unpack(data)
        if before == after:
            return Beat(*values)
        # Read while it was being written.
        data = file.read_bytes()
    return None


class Heartbeat:
    """The heartbeat of this process: one for its life. Without a folder to keep it in it costs and does nothing."""

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        """Begin in the phase "start". folder: of the heartbeats of this node's ranks."""
        self.folder = folder
        self.rank = rank
        self.began = time.monotonic()
        """When this process began its part of the run."""
        self._memory: mmap.mmap | None = None
        self._writes = 0
        self._since = time.monotonic()
        self._phase: Phase = "start"
        self._slowest = self._step_seconds = self._data_seconds = self._data = self._progressed = 0.0
        self._step = self._done = self._resumed = _NO_STEP
        self._failed_at = 0.0
        """When this rank first said that it fails; 0 while it does not."""
        if folder is not None:
            descriptor = os.open(beat_file(folder, rank), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # The mapping stays when the descriptor is closed.
            try:
                os.ftruncate(descriptor, _RECORD.size)
                self._memory = mmap.mmap(descriptor, _RECORD.size)
            finally:
                os.close(descriptor)
            self._write()

    @property
    def phase(self) -> Phase:
        """What this rank is doing."""
        return self._phase

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """Note that this rank begins `phase`, of `step` where one begins."""
        if self._memory is None:
            return
        now = time.monotonic()
        lasted = now - self._since
        # Before the first step is done phases may compile, and say nothing of those to come.
        if self._phase not in SLOW_PHASES and self._done >= 0:
            self._slowest = max(self._slowest, lasted)
        if self._phase == "data":
            self._data += lasted
        if step is not None:
            self._step = step
        self._phase, self._since = phase, now
        self._write()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Note `phase` for the block, and the phase from before afterwards. Every rank of a run does the same."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def begin(self, resumed: int) -> None:
        """Note the step of the checkpoint that training begins from, 0 for none."""
        self._resumed = resumed
        self.enter("collective")

    def expect_compilation(self) -> None:
        """Note that what runs next is compiled anew, as in the first step of this process."""
        self._done = _NO_STEP

    def finish_step(self, step: int) -> None:
        """Note that `step` is done."""
        if self._memory is None:
            return
        now = time.monotonic()
        if self._progressed:
            self._step_seconds = now - self._progressed
        self._data_seconds, self._data = self._data, 0.0
        self._progressed, self._done = now, step
        self._write()

    def fail(self, kind: str, error: BaseException) -> None:
        """Say why this rank is about to end. kind: see `faults.CAUSES`."""
        if self.folder is None:
            return
        # Said again once it is explained, but of the same moment: ranks that fail of this one come after it.
        self._failed_at = self._failed_at or time.monotonic()
        lines = traceback.format_exception(error)
        said = {
            "kind": kind,
            "error": type(error).__name__,
            "message": str(error)[:2000],
            "time": self._failed_at,
            "traceback": "".join(lines)[-8000:],
        }
        # The folder may be gone with the process that watched.
        with contextlib.suppress(OSError):
            _replace_text(error_file(self.folder, self.rank), json.dumps(said))

    def answer(self, collectives: Callable[[], str | None]) -> None:
        """Answer from now on: write stacks at STACK_SIGNAL, and what `collectives` gives twice a second."""
        if self.folder is None:
            return
        if STACK_SIGNAL is not None and threading.current_thread() is threading.main_thread():
            # The file stays open as long as the process: the handler, in C, needs no lock of Python's.
            self._stacks = stack_file(self.folder, self.rank).open("w")
            faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=True)
        arguments = (collectives, collectives_file(self.folder, self.rank))
        threading.Thread(target=_report_collectives, args=arguments, name="heartbeat", daemon=True).start()

    def _write(self) -> None:
        self._writes += 1
        assert self._memory is not None
        # The count stands first and last: a reader that meets two counts has read while this was written.
        _RECORD.pack_into(
            self._memory,
            0,
            self._writes,
            self._since,
            self._slowest,
            self._step_seconds,
            self._data_seconds,
            self._progressed,
            self._step,
            self._done,
            self._resumed,
            PHASES.index(self._phase),
            os.getpid(),
            self._writes,
        )


SILENT = Heartbeat()
"""The heartbeat of a process that nobody watches."""


def heartbeat_of(rank: int) -> Heartbeat:
    """Return the heartbeat of this process where the process that started it watches, else a silent one; it begins now."""
    # Processes that this one starts are not watched under its number.
    folder = os.environ.pop(FOLDER, None)
    return Heartbeat(Path(folder), rank) if folder and Path(folder).is_dir() else Heartbeat()


def _replace_text(file: Path, text: str) -> None:
    """Write a file that no reader meets half of."""
    # Without the sync to disk of other replaced files: this folder does not outlive the processes.
    temporary = file.with_name(f"{file.name}.part")
    temporary.write_text(text)
    temporary.replace(file)


def _report_collectives(collectives: Callable[[], str | None], file: Path) -> None:
    """Write a rank's last collectives again and again, until the process ends or the folder is gone."""
    while True:
        # In a file, since a rank that hangs answers nobody: what it wrote last is what can be read.
        time.sleep(REPORT_S)
        try:
            text = collectives()
            if text is None or sys.is_finalizing():
                return
            _replace_text(file, text)
        # The folder is gone, or the device has failed and answers no question: what was written last stays.
        except (OSError, RuntimeError):
            return
