"""What a run directory says about its run: metrics, events, the resolved run file and the machine.

Every verb that looks back at a run reads it through `RunLog`. This module must not know how a run is trained or shown;
of Phalanx it imports only the errors, so any module may use it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from phalanx.errors import ConfigError, PhalanxError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

REQUIRED_COLUMNS = ("step", "loss", "grad_norm", "lr", "tokens", "step_seconds")
OPTIONAL_COLUMNS = (
    "tokens_per_second",
    "model_tflops",
    "mfu",
    "mfu_measured",
    "memory_now_gib",
    "memory_peak_gib",
    "data_wait_seconds",
    "checkpoint_stall_seconds",
    "rank_wait_seconds",
    "imbalance",
    "imbalance_expected",
)


class RunLogError(PhalanxError):
    """A run directory's log is missing, empty or altered."""


@dataclass(frozen=True)
class Event:
    """One line of `events.jsonl`."""

    kind: str
    """start, resume, checkpoint, evaluation, sample, warning or end; other kinds are kept as they are."""
    step: int
    """Optimizer steps done when it happened."""
    time: datetime
    """When it happened, in UTC; a log time without a zone is taken as UTC."""
    fields: Mapping[str, Any]
    """Whatever else the line holds, for example `loss` of an evaluation."""

    def number(self, name: str) -> float:
        """The field `name` as a float; NaN where it is absent or not a number."""
        try:
            return _number(self.fields.get(name))
        except ValueError:
            return float("nan")


@dataclass(frozen=True)
class RunLog:
    """A run as its directory tells it. Steps increase strictly; a step recorded twice keeps its later record."""

    run_dir: Path
    steps: IntArray
    """Optimizer steps that were recorded, shape (records,)."""
    columns: Mapping[str, FloatArray]
    """Every column of `metrics.jsonl` by name, each of shape (records,): NaN where a record has no number, 1 and 0 for
    true and false."""
    events: tuple[Event, ...]
    """In the order they were written."""
    config: Mapping[str, Any] | None
    """The resolved run file, parsed; None where `run.yaml` is missing."""
    config_text: str | None
    """The resolved run file as it was written."""
    machine: Mapping[str, Any] | None
    """What the run ran on; None where `machine.json` is missing."""
    notes: tuple[str, ...]
    """What is missing, cut off, repeated or left out in this log, one sentence each."""

    @classmethod
    def read(cls, run_dir: Path) -> RunLog:
        """Read a run directory, finished or not.

        Only `metrics.jsonl` must be there. A last line without its end, as a killed run leaves it, is left out and
        noted; any other line that is not a record raises.

        Raises:
            ConfigError: `run_dir` is not a directory.
            RunLogError: `metrics.jsonl` is missing or holds no record, or a file of the log cannot be understood.
        """
        if not run_dir.is_dir():
            raise ConfigError(f"{run_dir} is not a directory: give the run directory that `phalanx train` printed")
        notes: list[str] = []
        steps, columns = _read_metrics(run_dir / "metrics.jsonl", notes)
        events = _read_events(run_dir / "events.jsonl", notes)
        config_text, config = _read_config(run_dir / "run.yaml", notes)
        machine = _read_machine(run_dir / "machine.json", notes)
        return cls(run_dir, steps, columns, events, config, config_text, machine, tuple(notes))

    @property
    def family(self) -> str:
        """The model's family, as the run file names it; language where it cannot be told."""
        model = (self.config or {}).get("model")
        return str(model.get("family", "language")) if isinstance(model, Mapping) else "language"

    @property
    def unit(self) -> str:
        """What `tokens` counts, in the plural."""
        return "structures" if self.family == "materials" else "tokens"

    def column(self, name: str) -> FloatArray:
        """The column `name` of shape (records,): NaN where a record lacks it, all NaN where no record has it."""
        return self.columns.get(name, np.full(len(self.steps), np.nan))

    def of_kind(self, kind: str) -> list[Event]:
        """The events of one kind, in the order they were written."""
        return [event for event in self.events if event.kind == kind]

    @property
    def tokens_per_second(self) -> FloatArray:
        """Tokens a second of each step over all devices, as recorded or, failing that, new tokens over step time."""
        tokens, seconds = (np.where(np.isfinite(v), v, np.nan) for v in map(self.column, ("tokens", "step_seconds")))
        derived = np.diff(tokens, prepend=np.nan)
        # the step before a missing one is unknown, so its tokens cannot be told apart from those of the gap
        derived[1:][np.diff(self.steps) != 1] = np.nan
        if self.steps[0] == 1:
            derived[0] = tokens[0]
        derived = np.divide(derived, seconds, out=np.full(len(seconds), np.nan), where=seconds > 0)
        recorded = self.column("tokens_per_second")
        return np.where(np.isfinite(recorded), recorded, derived)


def _read_metrics(path: Path, notes: list[str]) -> tuple[IntArray, dict[str, FloatArray]]:
    if not path.exists():
        raise RunLogError(f"{path} is missing: give a run directory in which `phalanx train` has finished a step")
    records = _json_lines(path, notes)
    if not records:
        raise RunLogError(f"{path} holds no whole record: let `phalanx train` finish a step in this directory first")
    names = {name: None for _, record in records for name in record}
    columns = {name: np.full(len(records), np.nan) for name in names}
    for row, (line, record) in enumerate(records):
        for name in REQUIRED_COLUMNS:
            if name not in record:
                raise _bad_line(path, line, f"has no {name!r}")
        if not _is_count(record["step"]):
            raise _bad_line(path, line, f"has step {record['step']!r}, not a whole number from 0")
        for name, value in record.items():
            ours = name in REQUIRED_COLUMNS or name in OPTIONAL_COLUMNS
            try:
                columns[name][row] = float(value) if isinstance(value, bool) and not ours else _number(value)
            except ValueError:
                # columns of others may hold anything; only ours must be numbers
                if ours:
                    raise _bad_line(path, line, f"has {name} {value!r}, not a number") from None
    return _in_step_order(path, columns, notes)


def _in_step_order(
    path: Path, columns: dict[str, FloatArray], notes: list[str]
) -> tuple[IntArray, dict[str, FloatArray]]:
    """Sort the records by step and keep the last one of each; note repeats and gaps."""
    steps = columns["step"].astype(np.int64)
    unique, last_from_end = np.unique(steps[::-1], return_index=True)
    repeats, gaps = len(steps) - len(unique), int(unique[-1] - unique[0]) + 1 - len(unique)
    if repeats:
        notes.append(f"{path.name}: {repeats:,} steps are recorded more than once; the last record of each counts.")
    if gaps:
        first = int(unique[:-1][np.diff(unique) > 1][0]) + 1
        notes.append(f"{path.name}: {gaps:,} steps have no record, the first of them step {first:,}.")
    rows = len(steps) - 1 - last_from_end
    return unique, {name: values[rows] for name, values in columns.items()}


def _read_events(path: Path, notes: list[str]) -> tuple[Event, ...]:
    if not path.exists():
        notes.append(f"{path.name} is missing: no validation loss, samples, checkpoints or resumes are shown.")
        return ()
    events = []
    for line, record in _json_lines(path, notes):
        kind, step, time = record.pop("kind", None), record.pop("step", None), record.pop("time", None)
        if not isinstance(kind, str):
            raise _bad_line(path, line, f'has kind {kind!r}, not a name such as "evaluation"')
        if not _is_count(step):
            raise _bad_line(path, line, f"has step {step!r}, not a whole number from 0")
        try:
            moment = datetime.fromisoformat(time)
        except (TypeError, ValueError):
            raise _bad_line(path, line, f"has time {time!r}, not an ISO 8601 date and time") from None
        in_utc = moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
        events.append(Event(kind, step, in_utc, record))
    return tuple(events)


def _read_config(path: Path, notes: list[str]) -> tuple[str | None, Mapping[str, Any] | None]:
    if not path.exists():
        notes.append(f"{path.name} is missing: the configuration of this run is unknown.")
        return None, None
    try:
        text = path.read_text(encoding="utf-8")
        config = yaml.safe_load(text)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise RunLogError(f"{path} is not YAML ({reason}): restore it, or move it away to leave it out") from error
    if not isinstance(config, dict):
        raise RunLogError(f"{path} holds no sections: restore the resolved run file, or move it away to leave it out")
    return text, config


def _read_machine(path: Path, notes: list[str]) -> Mapping[str, Any] | None:
    if not path.exists():
        notes.append(f"{path.name} is missing: the machine and the FLOPs convention of this run are unknown.")
        return None
    try:
        machine = json.loads(path.read_bytes())
    except ValueError as error:
        raise RunLogError(f"{path} is not JSON ({error}): restore it, or move it away to leave it out") from error
    if not isinstance(machine, dict):
        raise RunLogError(f"{path} is not a JSON object: restore it, or move it away to leave it out")
    return machine


def _json_lines(path: Path, notes: list[str]) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSON-lines file with their line numbers (from 1), without a torn last line."""
    lines: Sequence[bytes] = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        unterminated = number == len(lines)
        if unterminated and not line:
            break
        try:
            record = json.loads(line)
        except ValueError:
            if unterminated:
                notes.append(f"{path.name}: its last line, {number:,}, is cut off as by a kill, and is left out.")
                break
            raise _bad_line(path, number, "is not JSON") from None
        if not isinstance(record, dict):
            raise _bad_line(path, number, "is not a JSON object")
        records.append((number, record))
    return records


def _bad_line(path: Path, line: int, problem: str) -> RunLogError:
    return RunLogError(f"{path}, line {line}: the line {problem}; mend or remove this line")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _number(value: object) -> float:
    """A JSON value as a float: null is NaN, and "NaN" and "Infinity" may be strings, as strict writers have them."""
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(value)
    if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
        raise ValueError(value)
    return float(value)
