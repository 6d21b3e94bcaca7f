"""The run directory: one folder that holds everything a run leaves behind.

    run.yaml        resolved run file          metrics.jsonl   one object a step
    machine.json    where it ran               events.jsonl    starts, resumes, checkpoints, evaluations, samples
    checkpoints/    see train.checkpoint       tokenizer/      of the data, where it has one
    tensorboard/  profile/  memory/            when asked for
    trackers.json   who it is to W&B and MLflow, where it logs to them
    statistics.json, elements.json, balance.json   what a family says of its data, see `Inputs.write`

A resumed run continues metrics.jsonl without a gap or a repeat: lines past the checkpoint it starts from are dropped.
"""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from phalanx import __version__
from phalanx.cluster.cores import available_cores
from phalanx.cluster.device import device_kind, device_name
from phalanx.errors import PhalanxError
from phalanx.files import write_atomically
from phalanx.train.metrics import GIB, Peaks


class JsonLines:
    """A file of one JSON object a line, written line by line.

    A line that the disk has no room for waits in memory and is written before the next one: training is worth more than its
    log. Any thread may append.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: OSError | None = None
        """Why lines wait; None while there are none."""
        self._file: FileIO | None = None
        self._waiting = b""
        self._lock = threading.Lock()

    def drop_after(self, step: int) -> None:
        """Forget objects of later steps than `step`, and a last line torn by a kill."""
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        if kept != lines:
            write_atomically(self.path, "".join(kept))

    def append(self, record: dict[str, Any]) -> None:
        """Add one object; it has reached the operating system when this returns, unless `failure` says why not."""
        with self._lock:
            self._waiting += json.dumps(record).encode() + b"\n"
            self._write()

    def sync(self) -> None:
        """Force what was appended onto the disk, so that no checkpoint is newer than its metrics. Raises OSError."""
        with self._lock:
            self._write()
            if self.failure is not None:
                raise self.failure
            if self._file is not None:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._write()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self) -> None:
        """Write what waits, as far as it goes."""
        try:
            while self._waiting:
                if self._file is None:
                    # Without a buffer of Python's, which would lose or repeat what it could not write.
                    self._file = FileIO(self.path, "a")
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self.failure = None
        except OSError as error:
            self.failure = error


class RunDirectory:
    """Paths and small files of one run directory. Only the first rank writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = JsonLines(path / "metrics.jsonl")
        self.events = JsonLines(path / "events.jsonl")

    @property
    def run_file(self) -> Path:
        """The resolved run file."""
        return self.path / "run.yaml"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints' folder."""
        return self.path / "checkpoints"

    def create(self) -> None:
        """Make the folder. Raises PhalanxError when it cannot be made or written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PhalanxError(
                f"run directory {self.path} cannot be made: {error.strerror}; choose another --run-dir"
            ) from error
        if not os.access(self.path, os.W_OK):
            raise PhalanxError(f"run directory {self.path} is not writable; choose another --run-dir")

    @contextmanager
    def written(self) -> Iterator[None]:
        """Write to the folder in here. Raises PhalanxError for what the system refuses: a full disk, a quota."""
        try:
            yield
        except OSError as error:
            raise PhalanxError(
                f"run directory {self.path} cannot be written: {error.strerror}; make room, or choose another --run-dir"
            ) from error

    def rewind(self, step: int) -> None:
        """Make the logs end at `step`, the step of the checkpoint that the run goes on from; 0 begins them anew."""
        for log in (self.metrics, self.events):
            log.drop_after(step if step else -1)

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Add an event with the present time."""
        self.events.append(
            {"kind": kind, "step": step, "time": datetime.now(UTC).isoformat(timespec="seconds"), **fields}
        )

    def close(self) -> None:
        """Close the log files."""
        self.metrics.close()
        self.events.close()


def describe_machine(device: torch.device, world_size: int, peaks: Peaks, flops_convention: str) -> dict[str, Any]:
    """What machine.json holds: device, host and versions, and the peaks that MFU figures refer to."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "device": _cpu_name() if device.type == "cpu" else device_name(device),
        "device_type": device.type,
        "device_kind": device_kind(device_name(device)),
        "device_count": world_size,
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": available_cores(),
        "memory_gib": round(pages / GIB, 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "phalanx": __version__,
        "peak_tflops_nominal": peaks.nominal,
        "peak_tflops_measured": peaks.measured,
        "flops_convention": flops_convention,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
