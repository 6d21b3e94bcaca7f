"""The run directory: one folder that holds everything a run leaves behind.

    run.yaml        resolved run file          metrics.jsonl   one object a step
    machine.json    where it ran               events.jsonl    starts, resumes, checkpoints, evaluations, samples
    checkpoints/    see phalanx.checkpoint     tokenizer/      of the data, where it has one
    tensorboard/  profile/  memory/            when asked for
    memory.json     micro-batch to take after memory ran out
    copies.id       names the copies of its state in memory (`phalanx.node_memory`)
    bad_batches/    samples of steps that went wrong
    trackers.json   its identity in W&B and MLflow, where it logs to them
    coordinate_check.json   of `phalanx verify --widths`
    statistics.json, elements.json, balance.json   what a family says of its data, see `Inputs.write`

A resumed run continues metrics.jsonl without a gap or a repeat: lines past the checkpoint it starts from are dropped.
Damaged lines move to metrics.jsonl.damaged and events.jsonl.damaged.
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from phalanx import __version__
from phalanx.config.document import show_value
from phalanx.config.load import dump_run, load_run
from phalanx.config.schema import Run
from phalanx.errors import ConfigError, PhalanxError
from phalanx.files import JsonLines, read_json_lines, require_own, write_atomically
from phalanx.hardware.device import device_name
from phalanx.hardware.device_facts import device_kind
from phalanx.hardware.host import available_cores
from phalanx.launch.restart import MEMORY_FILE
from phalanx.node_memory import IDENTITY_FILE
from phalanx.printable import make_printable
from phalanx.report.run_log import LESS_MEMORY_EVENT, SAVE_EVENT
from phalanx.training.metrics import GIB, Peaks

OWN_FILES = (
    "run.yaml",
    "machine.json",
    "metrics.jsonl",
    "events.jsonl",
    "trackers.json",
    "statistics.json",
    "elements.json",
    "balance.json",
    MEMORY_FILE,
    IDENTITY_FILE,
)
"""Files that a run writes into its folder."""
OWN_FOLDERS = ("checkpoints", "tokenizer", "tensorboard", "profile", "memory", "bad_batches")
"""Folders that it writes there."""

_COMPARED = ("device", "device_count", "host", "torch", "python", "phalanx")
"""Of machine.json: what may make another start compute other numbers."""
_OF_ONE_START = ("training.resume",)
"""Fields of the run file that say how one start begins."""


class RunDirectory:
    """Paths and small files of one run directory. Only the first rank writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None
        """Device and inode of the folder that was made or found."""
        self.redone_seconds = 0.0
        """Seconds of the steps that the last `rewind` dropped: they are done again."""
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
        """Make the folder. Raises PhalanxError when it cannot be made or written, and for a link or anything else in the
        place of what a run writes there."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PhalanxError(
                f"run directory {self.path} cannot be made: {error.strerror}; choose another --run-dir"
            ) from error
        if not os.access(self.path, os.W_OK):
            raise PhalanxError(f"run directory {self.path} is not writable; choose another --run-dir")
        # Before anything is written: a link in there could lead a run to overwrite files of others.
        for name in OWN_FILES:
            require_own(self.path / name, folder=False)
        for name in OWN_FOLDERS:
            require_own(self.path / name, folder=True)
        if (self.path / "tokenizer").is_dir():
            for file in (self.path / "tokenizer").iterdir():
                require_own(file, folder=False)
        self._identity = _identify_folder(self.path)

    def is_gone(self) -> bool:
        """Return whether the folder was removed, renamed or unmounted since `create`."""
        try:
            # By device and inode: a folder of the same name that somebody made since is another one.
            return self._identity is not None and _identify_folder(self.path) != self._identity
        except OSError as error:
            # What else may fail, such as a server that does not answer, may pass.
            return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)

    def make_again(self) -> bool:
        """Make a folder that is gone once more, empty; return whether that is possible.

        It is not where something else has its place, or where the new one would lie on another file system.
        """
        assert self._identity is not None
        # Whatever has the name now is somebody else's.
        if self.path.exists():
            return False
        # After an unmount the path leads to the disk below, which nobody chose and which may be small.
        if self._device_above() != self._identity[0]:
            return False
        # Open files belong to the folder that is gone.
        self.close()
        self.create()
        return True

    def _device_above(self) -> int:
        """Return the file system of the nearest folder above that is there."""
        return next(folder for folder in self.path.absolute().parents if folder.exists()).stat().st_dev

    def rewind(self, step: int) -> list[str]:
        """Make the logs end at `step`, that of the checkpoint which the run resumes from; 0 begins them anew.

        Events that the run took less memory stay: they are no step's, and what it was left to take stands in memory.json.
        Returns warnings of damaged lines that were set aside.
        """
        # A new run has no event of step 0 before its own start, not even one that an earlier attempt wrote.
        last = step if step else -1
        self.redone_seconds = _sum_step_seconds(self.metrics.path, step)
        with self.written():
            warnings = [self.metrics.drop_after(last), self.events.drop_after(last, keep=LESS_MEMORY_EVENT)]
        return [text for text in warnings if text is not None]

    def describe_run(self, run: Run, machine: dict[str, Any], write_inputs: Callable[[Path], None]) -> None:
        """Write what this run is: its resolved run file, its machine, and by `write_inputs` what it keeps of its data."""
        with self.written():
            write_atomically(self.run_file, dump_run(run))
            write_atomically(self.path / "machine.json", json.dumps(machine, indent=1) + "\n")
            write_inputs(self.path)

    def changes_since(self, run: Run, machine: dict[str, Any]) -> list[str]:
        """Return what differs from the last start in this folder, each as `field: before -> now`; nothing without one.

        Call before `describe_run`, which replaces what the last start wrote. Where that is not to be read, one line says so.
        """
        if not self.run_file.exists():
            return []
        try:
            known = json.loads((self.path / "machine.json").read_text())
            before = load_run(self.run_file).model_dump(mode="json")
        except (OSError, ValueError, ConfigError) as error:
            return [f"since the last start: not known, {make_printable(str(error)).partition(chr(10))[0]}"]
        fields = [*_compare_fields("", before, run.model_dump(mode="json"))]
        hardware = {} if not isinstance(known, dict) else {name: known.get(name) for name in _COMPARED}
        return [*fields, *_compare_fields("", hardware, {name: machine[name] for name in hardware})]

    @contextmanager
    def written(self) -> Iterator[None]:
        """Write to the folder in here. Raises PhalanxError for what the system refuses: a full disk, a quota."""
        try:
            yield
        except OSError as error:
            raise PhalanxError(
                f"run directory {self.path} cannot be written: {error.strerror}; make room, or choose another --run-dir"
            ) from error

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Add an event with the present time."""
        self.events.append(
            {"kind": kind, "step": step, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}
        )

    def close(self) -> None:
        """Close the log files."""
        self.metrics.close()
        self.events.close()


def _compare_fields(name: str, before: Any, now: Any) -> Iterator[str]:
    """Yield `field: before -> now` for each field of two nested descriptions that differs. name: of the field they are."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*before, *now)):
            yield from _compare_fields(f"{name}.{key}" if name else str(key), before.get(key), now.get(key))
    elif before != now and name not in _OF_ONE_START:
        yield f"{name}: {show_value(before)} -> {show_value(now)}"


def measured_save_seconds(run_dir: Path) -> float | None:
    """Return the longest time that a checkpoint of the run in `run_dir` took; None where none was measured."""
    try:
        events = read_json_lines(run_dir / "events.jsonl").records
    except OSError:
        return None
    taken = [event.get("seconds") for event in events if event.get("kind") == SAVE_EVENT]
    return max((float(one) for one in taken if isinstance(one, int | float)), default=None)


def _sum_step_seconds(metrics: Path, after: int) -> float:
    """Return the seconds of the logged steps after step `after`; damaged lines count nothing."""
    try:
        rows = read_json_lines(metrics).records
    except OSError:
        return 0.0
    taken = [row.get("step_seconds") for row in rows if isinstance(row.get("step"), int) and row["step"] > after]
    return sum(float(one) for one in taken if isinstance(one, int | float) and math.isfinite(one))


def _identify_folder(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def describe_machine(device: torch.device, world_size: int, peaks: Peaks, flops_convention: str) -> dict[str, Any]:
    """Return the contents of machine.json: device, host and versions, and the peaks that MFU figures refer to."""
    # The host's memory, not what is free now: two runs on one machine say the same.
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
