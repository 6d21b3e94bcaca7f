"""The log of a run, read from its directory: metrics, events, the resolved run file, the machine, and headline figures.

Every subcommand that looks back at a run reads it through `RunLog`. This module must not know how a run is trained or shown;
of Phalanx it imports only what reads files, so any module may use it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from phalanx.errors import ConfigError, PhalanxError
from phalanx.files import open_own_file, read_json_lines, require_step
from phalanx.hardware.reliability import CHECKPOINTS, REDONE, STARTS, TRAINING

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
    "step_joules",
    "joules_per_token",
    "gradient_square",
    "gradient_variance",
    "critical_batch",
)


LARGEST = 1e60
"""Larger figures count as infinite, and as small ones as 0: nobody measures them, and sums of them leave the range."""
SAVE_EVENT = "checkpoint_written"
"""Kind of the event that says how long a checkpoint took from the copy of the state until it was published."""
SLOW_LINK_EVENT = "slow_link"
"""Kind of the event that names ranks whose link is slow."""
LESS_MEMORY_EVENT = "less_memory"
"""Kind of the event that a run goes on in a layout that takes less memory than its run file says, or than before."""
EVALUATED_EVENT = "evaluated"
"""Kind of the event that says how long evaluations after a step took."""
EXPERT_WINDOW = 100
"""Last records whose use of experts is read: what a router does changes as training goes on."""
_SMALL_BYTES = 1 << 20
"""Most that a run file or a description of a machine has."""


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
    """Time in UTC; a log time without a zone is taken as UTC."""
    fields: Mapping[str, Any]
    """Whatever else the line holds, for example `loss` of an evaluation."""

    def number(self, name: str) -> float:
        """Return the field `name` as a float; NaN where it is absent or not a number."""
        value = self.fields.get(name)
        number = None if isinstance(value, bool) else _number_or_none(value)
        return float("nan") if number is None else float(_measurable(np.array(number)))


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
    """Events in the order they were written."""
    config: Mapping[str, Any] | None
    """The resolved run file, parsed; None where `run.yaml` is missing."""
    config_text: str | None
    """The resolved run file as it was written."""
    machine: Mapping[str, Any] | None
    """Description of the machine; None where `machine.json` is missing."""
    notes: tuple[str, ...]
    """Sentences about what is missing, cut off, repeated or left out in this log."""
    experts: tuple[Any, ...] = ()
    """Use of experts of the last records, as `metrics.jsonl` has it; empty for a model without."""

    @classmethod
    def read(cls, run_dir: Path) -> RunLog:
        """Read a run directory, finished or not.

        Only `metrics.jsonl` must be there. A last line without its end, as a killed run leaves it, and lines that are no
        records, as a crash or a faulty disk leaves them, are left out and noted.

        Raises:
            ConfigError: `run_dir` is not a directory.
            RunLogError: `metrics.jsonl` is missing or holds no record, or a file of the log cannot be understood.
        """
        if not run_dir.is_dir():
            raise ConfigError(f"{run_dir} is not a directory: give the run directory that `phalanx train` printed")
        notes: list[str] = []
        steps, columns, experts = _read_metrics(run_dir / "metrics.jsonl", notes)
        events = read_events(run_dir / "events.jsonl", notes)
        config_text, config = _read_config(run_dir / "run.yaml", notes)
        machine = _read_machine(run_dir / "machine.json", notes)
        return cls(run_dir, steps, columns, events, config, config_text, machine, tuple(notes), experts)

    @property
    def family(self) -> str:
        """The model's family, as the run file names it; language where it cannot be told."""
        model = (self.config or {}).get("model")
        return str(model.get("family", "language")) if isinstance(model, Mapping) else "language"

    @property
    def unit(self) -> str:
        """Name of what `tokens` counts, in the plural."""
        return "structures" if self.family == "materials" else "tokens"

    def column(self, name: str) -> FloatArray:
        """Return the column `name` of shape (records,): NaN where a record lacks it, all NaN where no record has it."""
        return self.columns.get(name, np.full(len(self.steps), np.nan))

    def of_kind(self, kind: str) -> list[Event]:
        """Return the events of one kind, in the order they were written."""
        return [event for event in self.events if event.kind == kind]

    @property
    def planned_steps(self) -> int | None:
        """Optimizer steps that the run is to make; None where the run file does not tell."""
        training = (self.config or {}).get("training")
        planned = training.get("steps") if isinstance(training, Mapping) else None
        return planned if isinstance(planned, int) else None

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


def _read_metrics(path: Path, notes: list[str]) -> tuple[IntArray, dict[str, FloatArray], tuple[Any, ...]]:
    """Return steps, columns and the use of experts of the last records."""
    if not path.exists():
        raise RunLogError(f"{path} is missing: give a run directory in which `phalanx train` has finished a step")
    records = _read_lines(path, metrics_problem, notes)
    if not records:
        damage = f" ({notes[-1]})" if notes else ""
        raise RunLogError(
            f"{path} holds no whole record: let `phalanx train` finish a step in this directory first{damage}"
        )
    names = {name: None for record in records for name in record}
    columns = {name: np.full(len(records), np.nan) for name in names}
    for row, record in enumerate(records):
        for name, value in record.items():
            # Columns of others may hold anything; only ours are sure to be numbers.
            if (number := _number_or_none(value)) is not None:
                columns[name][row] = number
    columns = {name: values if name == "step" else _measurable(values) for name, values in columns.items()}
    steps = columns["step"].astype(np.int64)
    # A resumed run repeats steps, and the last record of each counts. np.unique finds first occurrences: of the reversed
    # steps these are the last ones.
    unique, last_from_end = np.unique(steps[::-1], return_index=True)
    repeats, gaps = len(steps) - len(unique), int(unique[-1] - unique[0]) + 1 - len(unique)
    if repeats:
        notes.append(f"{path.name}: {repeats:,} steps are recorded more than once; the last record of each counts.")
    if gaps:
        first = int(unique[:-1][np.diff(unique) > 1][0]) + 1
        notes.append(f"{path.name}: {gaps:,} steps have no record, the first of them step {first:,}.")
    rows = len(steps) - 1 - last_from_end
    experts = tuple(records[row]["experts"] for row in rows[-EXPERT_WINDOW:] if "experts" in records[row])
    return unique, {name: values[rows] for name, values in columns.items()}, experts


def _measurable(values: FloatArray) -> FloatArray:
    """Return the values with infinities for magnitudes beyond `LARGEST` and 0 for those below its inverse."""
    values = np.where(np.abs(values) > LARGEST, np.copysign(np.inf, values), values)
    return np.where(np.abs(values) < 1.0 / LARGEST, 0.0, values)


def metrics_problem(record: dict[str, Any]) -> str | None:
    """Return what is wrong with a record of metrics.jsonl; None where nothing is."""
    for name in REQUIRED_COLUMNS:
        if name not in record:
            return f"has no {name!r}"
    if problem := require_step(record):
        return problem
    for name in (*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS):
        value = record.get(name)
        if isinstance(value, bool) or _number_or_none(value) is None:
            return f"has {name} {value!r:.80}, not a number"
    return None


def read_events(path: Path, notes: list[str]) -> tuple[Event, ...]:
    """Return the events of a run in the order they were written; add to `notes` what was left out."""
    if not path.exists():
        notes.append(f"{path.name} is missing: no validation loss, samples, checkpoints or resumes are shown.")
        return ()
    events = []
    for record in _read_lines(path, event_problem, notes):
        moment = datetime.fromisoformat(record.pop("time"))
        in_utc = moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
        events.append(Event(record.pop("kind"), record.pop("step"), in_utc, record))
    return tuple(events)


def event_problem(record: dict[str, Any]) -> str | None:
    """Return what is wrong with a record of events.jsonl; None where nothing is."""
    kind, time = record.get("kind"), record.get("time")
    if not isinstance(kind, str):
        return f'has kind {kind!r:.80}, not a name such as "evaluation"'
    if problem := require_step(record):
        return problem
    try:
        datetime.fromisoformat(time).astimezone(UTC)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return f"has time {time!r:.80}, not an ISO 8601 date and time"
    return None


def _read_lines(
    path: Path, problem_of: Callable[[dict[str, Any]], str | None], notes: list[str]
) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines; add to `notes` what was left out."""
    found = read_json_lines(path, problem_of)
    if found.damaged:
        notes.append(f"{found.describe_damage()}; left out.")
    if found.torn is not None:
        notes.append(f"{path.name}: its last line, {found.torn.number:,}, is cut off as by a kill, and is left out.")
    return found.records


def _read_config(path: Path, notes: list[str]) -> tuple[str | None, Mapping[str, Any] | None]:
    if not path.exists():
        notes.append(f"{path.name} is missing: the configuration of this run is unknown.")
        return None, None
    try:
        text = _read_small(path).decode("utf-8")
        config = yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
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
        machine = json.loads(_read_small(path))
    except (ValueError, RecursionError) as error:
        raise RunLogError(f"{path} is not JSON ({error}): restore it, or move it away to leave it out") from error
    if not isinstance(machine, dict):
        raise RunLogError(f"{path} is not a JSON object: restore it, or move it away to leave it out")
    return machine


def _read_small(path: Path) -> bytes:
    with open_own_file(path) as file:
        content = file.read(_SMALL_BYTES + 1)
    if len(content) > _SMALL_BYTES:
        raise RunLogError(f"{path} is larger than {_SMALL_BYTES >> 20} MiB, which no such file is: move it away")
    return content


def _number_or_none(value: object) -> float | None:
    """Return a JSON value as a float, None where it is no number: null is NaN, true is 1, and "NaN" and "Infinity" may be
    strings, as strict writers have them."""
    if type(value) is float:
        return value
    if value is None:
        return float("nan")
    if isinstance(value, int) or (isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity")):
        try:
            return float(value)
        except OverflowError:
            return None
    return None


# --- headline figures --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """Figures of one run; NaN where the log does not tell."""

    steps: int
    """The last optimizer step recorded."""
    records: int
    """Steps with a record in `metrics.jsonl`."""
    finished: bool
    """Whether the last event, samples and warnings aside, is the end of the run."""
    family: str
    """The model's family."""
    unit: str
    """Name of what `tokens` counts, in the plural."""
    tokens: int
    """Tokens or structures trained on: the largest count recorded."""
    final_loss: float
    """Training loss of the last step: a mean over targets, of tokens in nats."""
    lowest_loss: float
    """The lowest finite training loss of any step."""
    nonfinite_losses: int
    """Steps whose loss is NaN, infinite or null."""
    skipped_updates: int
    """Steps that left the parameters alone because the gradient was not finite."""
    validation_step: int | None
    """The step of the last evaluation."""
    validation_loss: float
    """Held-out loss of the last evaluation."""
    perplexity: float
    """Perplexity a token of the last evaluation."""
    bits_per_byte: float
    """Bits a byte of held-out text of the last evaluation."""
    median_step_seconds: float
    median_tokens_per_second: float
    """Median over the steps, all devices together."""
    median_mfu: float
    """Model FLOPs utilisation against the nominal peak, a share of one, median over the steps."""
    median_mfu_measured: float
    """The same against the measured matmul peak."""
    flops_convention: str | None
    """Convention by which model FLOPs were counted, as `machine.json` names it."""
    wall_seconds: float
    """Seconds from the first start to the last step or event, pauses between a kill and a resume included; at least
    `step_seconds`."""
    step_seconds: float
    """Sum of the seconds of all steps."""
    redone_seconds: float
    """Seconds of steps that were done again after a restart or a rewind; what the steps dropped from the log took."""
    start_seconds: float
    """Seconds that ranks took to join, build the model and load what they begin from, over all starts."""
    compile_seconds: float
    """Seconds that the first step behind each start took beyond the median step: compilation, and what else comes once."""
    evaluation_seconds: float
    save_seconds: float
    """Seconds that training stood still for checkpoints, the last one of each start included."""
    data_wait_share: float
    """Share of `step_seconds` spent waiting for data."""
    checkpoint_stall_share: float
    """Share of `step_seconds` that training stood still for checkpoints."""
    rank_wait_share: float
    """Share of `step_seconds` that ranks waited for the slowest, mean over ranks, where their shares are uneven."""
    resumes: int
    energy_joules: float
    """Energy of all devices in all steps that tell."""
    joules_per_token: float
    """The same over what `tokens` counts, median over the steps."""
    device_watts: float
    """Power of one device in steps, median."""
    critical_batch: float
    """Samples of the critical batch, by the last estimate."""


def summarise_run(log: RunLog) -> Summary:
    """Return the headline figures of a run."""
    loss, seconds = log.columns["loss"], log.columns["step_seconds"]
    finite = loss[np.isfinite(loss)]
    evaluations = log.of_kind("evaluation")
    # The furthest step: a run that went back evaluates earlier ones again.
    last = max(evaluations, key=lambda event: event.step, default=None)
    # evaluations, samples and warnings do not say whether the run came to its end
    states = [event.kind for event in log.events if event.kind in ("start", "resume", "checkpoint", "end")]
    convention = (log.machine or {}).get("flops_convention")
    count = (log.machine or {}).get("device_count")
    devices = float(count) if isinstance(count, int) and 0 < count < 1e9 else math.nan
    return Summary(
        steps=int(log.steps[-1]),
        records=len(log.steps),
        finished=states[-1:] == ["end"],
        family=log.family,
        unit=log.unit,
        tokens=int(np.max(log.columns["tokens"], where=np.isfinite(log.columns["tokens"]), initial=0.0)),
        final_loss=float(loss[-1]),
        lowest_loss=float(finite.min()) if finite.size else math.nan,
        nonfinite_losses=int(loss.size - finite.size),
        skipped_updates=int(np.count_nonzero(log.column("updated") == 0)),
        validation_step=last.step if last else None,
        validation_loss=last.number("loss") if last else math.nan,
        perplexity=last.number("perplexity") if last else math.nan,
        bits_per_byte=last.number("bits_per_byte") if last else math.nan,
        median_step_seconds=median_of_finite(seconds),
        median_tokens_per_second=median_of_finite(log.tokens_per_second),
        median_mfu=median_of_finite(log.column("mfu")),
        median_mfu_measured=median_of_finite(log.column("mfu_measured")),
        flops_convention=str(convention) if convention is not None else None,
        wall_seconds=_measure_wall_time(log),
        step_seconds=_sum_finite(seconds),
        redone_seconds=_sum_of_events(log, "redone_seconds"),
        start_seconds=_sum_of_events(log, "start_seconds"),
        compile_seconds=_sum_finite(np.maximum(0.0, seconds[_first_steps(log)] - median_of_finite(seconds))),
        evaluation_seconds=_sum_of_events(log, "evaluation_seconds"),
        save_seconds=_sum_of_events(log, "stall_seconds", "checkpoint"),
        data_wait_share=_share_of(log.column("data_wait_seconds"), seconds),
        checkpoint_stall_share=_share_of(log.column("checkpoint_stall_seconds"), seconds),
        rank_wait_share=_share_of(log.column("rank_wait_seconds"), seconds),
        resumes=len(log.of_kind("resume")),
        energy_joules=_sum_finite(log.column("step_joules")),
        joules_per_token=median_of_finite(log.column("joules_per_token")),
        device_watts=median_of_finite(log.column("step_joules") / seconds) / devices,
        critical_batch=last_finite(log.column("critical_batch")),
    )


def split_wall_time(summary: Summary) -> dict[str, float]:
    """Return the seconds that the wall time of a run went to, by name; the share of "training" is its goodput.

    Names are those of `hardware.reliability.Goodput.parts` where a plan knows the part.
    """
    stall, wait = (
        summary.step_seconds * (share if math.isfinite(share) else 0.0)
        for share in (summary.checkpoint_stall_share, summary.data_wait_share)
    )
    # A step counts what training stood still for before it, so the last checkpoint of a start is in none.
    saving = max(stall, summary.save_seconds)
    known = {
        TRAINING: summary.step_seconds - stall - wait - summary.compile_seconds,
        "waiting for data": wait,
        CHECKPOINTS: saving,
        "evaluation": summary.evaluation_seconds,
        "compilation": summary.compile_seconds,
        REDONE: summary.redone_seconds,
        STARTS: summary.start_seconds,
    }
    # Clocks of two logs: what is left is never below nothing.
    return {**known, "idle": max(0.0, summary.wall_seconds - sum(known.values()))}


def _first_steps(log: RunLog) -> IntArray:
    """Return the rows of the first steps behind each start of the run."""
    starts = [event.step + 1 for event in log.events if event.kind in ("start", "resume")]
    return np.flatnonzero(np.isin(log.steps, starts))


def _sum_of_events(log: RunLog, name: str, kind: str | None = None) -> float:
    """Return the sum of a field over the events of a kind, or over all, as far as they have it."""
    return sum(
        s for event in log.events if (kind is None or event.kind == kind) and math.isfinite(s := event.number(name))
    )


def _measure_wall_time(log: RunLog) -> float:
    seconds = log.columns["step_seconds"]
    in_steps = _sum_finite(seconds)
    if not log.events:
        return in_steps
    # Events and not file times, which change when a run is copied.
    first: Event = min(log.events, key=lambda event: event.time)
    last: Event = max(log.events, key=lambda event: event.time)
    # a killed run trains on after its last event; those steps are only known by their length
    after = _sum_finite(seconds[log.steps > last.step])
    # The first start began before it was told of.
    before = first.number("start_seconds")
    passed = (last.time - first.time).total_seconds() + (before if math.isfinite(before) else 0.0)
    return max(in_steps, passed + after)


def _sum_finite(values: FloatArray) -> float:
    return float(values[np.isfinite(values)].sum())


def median_of_finite(values: FloatArray) -> float:
    """Return the median of what is finite among `values`; NaN where nothing is."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else math.nan


def last_finite(values: FloatArray) -> float:
    """Return the last of `values` that is finite; NaN where none is."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if finite.size else math.nan


def _share_of(part: FloatArray, whole: FloatArray) -> float:
    """Return the sum of `part` over the sum of `whole`, over the records that have both."""
    both = np.isfinite(part) & np.isfinite(whole)
    total = float(whole[both].sum())
    return float(part[both].sum()) / total if total > 0 else math.nan
