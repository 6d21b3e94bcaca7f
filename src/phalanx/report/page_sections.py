"""Sections of a run's page beside its charts: use of experts, scores on tasks, errors by quantity, the coordinate check.

Each is read from what a run left behind; what is damaged or was never written gives no section.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from phalanx.formatting import format_count, format_number, format_percent
from phalanx.report.drawing import Drawing, HeatScale, Plot, draw_heat_map, fit_scale
from phalanx.report.run_log import Event, FloatArray, RunLog
from phalanx.report.table import Column

# --- use of experts ----------------------------------------------------------------------------------------------------


_FIGURES = ("entropy", "violation", "dropped", "balance_loss", "z_loss")
_RELATIVE_LOAD = HeatScale(
    (0.0, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0),
    tuple(f"heat-{number}" for number in range(8)),
    ("no token", "up to 1/4 of the mean", "1/2", "4/5", "mean, 4/5 to 5/4", "up to 2", "up to 4", "more"),
)
"""Colours of an expert's load over the mean of its layer."""


@dataclass(frozen=True)
class LayerUse:
    """Use of the experts of one layer, mean over the last recorded steps."""

    layer: int
    load: FloatArray
    """Share of the choices of each expert."""
    figures: Mapping[str, float]
    """The figures of `training.expert_use.ExpertUse` by name."""

    @property
    def unused(self) -> int:
        """Experts that no token went to."""
        return int((self.load == 0.0).sum())


@dataclass(frozen=True)
class ExpertSection:
    """What the page says of the experts of a run."""

    drawing: Drawing
    layers: list[LayerUse]
    steps: int
    """Recorded steps that the figures are means over."""


LAYER_COLUMNS: list[Column[LayerUse]] = [
    Column("layer", lambda use: use.layer),
    Column("largest load / mean", lambda use: format_number(1.0 + use.figures["violation"])),
    Column("least load / mean", lambda use: format_number(float(use.load.min()) * len(use.load))),
    Column("unused", lambda use: use.unused),
    Column("entropy of the load", lambda use: format_percent(use.figures["entropy"])),
    Column("dropped", lambda use: format_percent(use.figures["dropped"])),
    Column("balance loss", lambda use: format_number(use.figures["balance_loss"])),
    Column("z loss", lambda use: format_number(use.figures["z_loss"])),
]


def describe_experts(records: Sequence[Any]) -> ExpertSection | None:
    """Return the section for the experts fields of a log's last records; None where they tell of no experts."""
    found: dict[int, list[tuple[FloatArray, Mapping[str, float]]]] = {}
    for record in records:
        for layer, load, figures in _read_layers(record):
            found.setdefault(layer, []).append((load, figures))
    if not found:
        return None
    layers = []
    for layer, seen in sorted(found.items()):
        # A log that was joined of two runs may hold two numbers of experts: the last one counts.
        same = [(load, figures) for load, figures in seen if len(load) == len(seen[-1][0])]
        means = {name: float(np.mean([figures[name] for _, figures in same])) for name in _FIGURES}
        layers.append(LayerUse(layer, np.mean([load for load, _ in same], axis=0), means))
    steps = max(len(seen) for seen in found.values())
    rows = [(str(use.layer), (use.load * len(use.load)).tolist()) for use in layers]
    words = (
        f"Load of each expert over the mean of its layer, in the last {steps:,} recorded steps: a row a layer, a column an "
        f"expert. {sum(use.unused for use in layers):,} of {sum(len(use.load) for use in layers):,} experts got no token."
    )
    drawing = draw_heat_map(
        rows, _RELATIVE_LOAD, words, lambda name, number, value: f"layer {name}, expert {number}: {value:.2f} x mean"
    )
    return ExpertSection(drawing, layers, steps)


def list_loads(records: Sequence[Any]) -> list[list[float]]:
    """Return the loads of the experts of each layer in each of a log's last records: rows of shares."""
    return [load.tolist() for record in records for _, load, _ in _read_layers(record)]


def _read_layers(record: Any) -> list[tuple[int, FloatArray, Mapping[str, float]]]:
    """Return layer, load and figures of each whole entry of a record; a damaged one is left out."""
    entries = record if isinstance(record, list) else []
    found: list[tuple[int, FloatArray, Mapping[str, float]]] = []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("layer"), int):
            continue
        load = entry.get("load")
        # A layer with fewer than two experts has no balance to tell of.
        numbers = load if isinstance(load, list) and len(load) > 1 else [math.nan]
        if not all(isinstance(share, int | float) and 0.0 <= share <= 1.0 for share in numbers):
            continue
        figures = {name: value for name in _FIGURES if isinstance(value := entry.get(name), int | float)}
        if len(figures) == len(_FIGURES):
            found.append((entry["layer"], np.asarray(numbers, dtype=np.float64), figures))
    return found


# --- in-context tasks --------------------------------------------------------------------------------------------------


LONGEST_NAME = 60
"""Characters of the name of a task, a data set or a quantity that are shown."""


class Scored(Protocol):
    """Scores of one task; shares from 0 to 1, None where the kind of task has no such figure."""

    @property
    def task(self) -> str: ...  # noqa: D102
    @property
    def shots(self) -> int: ...  # noqa: D102
    @property
    def questions(self) -> int: ...  # noqa: D102
    @property
    def accuracy(self) -> float: ...  # noqa: D102
    @property
    def accuracy_sum(self) -> float | None: ...  # noqa: D102
    @property
    def accuracy_per_character(self) -> float | None: ...  # noqa: D102
    @property
    def perplexity(self) -> float | None: ...  # noqa: D102


SCORE_COLUMNS: tuple[Column[Any], ...] = (
    Column[Scored]("task", lambda score: score.task, align="left"),
    Column[Scored]("examples", lambda score: score.shots),
    Column[Scored]("questions", lambda score: f"{score.questions:,}"),
    Column[Scored]("accuracy", lambda score: _write_share(score.accuracy)),
    Column[Scored]("by sum", lambda score: _write_share(score.accuracy_sum), gives_way=1),
    Column[Scored]("by character", lambda score: _write_share(score.accuracy_per_character), gives_way=1),
    Column[Scored](
        "perplexity", lambda score: "" if score.perplexity is None else format_number(score.perplexity), gives_way=2
    ),
)


def _write_share(value: float | None) -> str:
    return "" if value is None else f"{100.0 * value:.2f}%"


@dataclass(frozen=True)
class TaskRow:
    """Scores of one task at the last evaluation; see `Scored`."""

    task: str
    shots: int
    questions: int
    accuracy: float
    accuracy_sum: float | None
    accuracy_per_character: float | None
    perplexity: float | None
    first_accuracy: float
    """Accuracy at the first evaluation."""


@dataclass(frozen=True)
class TaskSection:
    """What a run's page says of tasks."""

    step: int
    """Step of the last evaluation."""
    rows: list[TaskRow]


TASK_COLUMNS: tuple[Column[Any], ...] = (
    *SCORE_COLUMNS[:4],
    Column[TaskRow]("at first", lambda row: format_percent(row.first_accuracy)),
    *SCORE_COLUMNS[4:],
)


def accuracy_by_task(log: RunLog) -> dict[int, dict[str, float]]:
    """Return the accuracy of each task at each evaluated step, tasks by name and number of examples, in order."""
    found = {
        event.step: {name: entry["accuracy"] for name, entry in _read_tasks(event)} for event in log.of_kind("tasks")
    }
    return {step: tasks for step, tasks in sorted(found.items()) if tasks}


def describe_tasks(log: RunLog) -> TaskSection | None:
    """Return the section for the last evaluation on tasks; None where the log tells of none."""
    evaluated = accuracy_by_task(log)
    if not evaluated:
        return None
    last = max(evaluated)
    first: dict[str, float] = {}
    for tasks in evaluated.values():
        # What an earlier evaluation says stays: tasks may be added while a run goes on.
        first = tasks | first
    # A step that was done again has its later event.
    event = next(event for event in reversed(log.of_kind("tasks")) if event.step == last)
    rows = [
        TaskRow(
            entry["task"][:LONGEST_NAME],
            entry["shots"],
            entry["questions"],
            entry["accuracy"],
            _number_or_none(entry.get("accuracy_sum")),
            _number_or_none(entry.get("accuracy_per_character")),
            _number_or_none(entry.get("perplexity")),
            first[name],
        )
        for name, entry in _read_tasks(event)
    ]
    return TaskSection(last, rows)


def _read_tasks(event: Event) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and figures of each whole entry of an event; a damaged one is left out."""
    entries = event.fields.get("tasks")
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict) or not isinstance(entry.get("task"), str):
            continue
        if type(entry.get("shots")) is int and type(entry.get("questions")) is int:
            accuracy = _number_or_none(entry.get("accuracy"))
            if accuracy is not None:
                yield f"{entry['task'][:LONGEST_NAME]} {entry['shots']}-shot", entry | {"accuracy": accuracy}


def _number_or_none(value: object) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(float(value)) else None  # type: ignore[arg-type]


# --- errors by quantity ------------------------------------------------------------------------------------------------


class QuantityErrors(NamedTuple):
    """Errors of one quantity of a data set at one evaluation; see `families.materials.evaluation.prediction_errors`."""

    unit: str
    mae: float
    rmse: float
    accuracy: float | None
    """Of classes, as f1."""
    f1: float | None

    def write_number(self, value: float) -> str:
        """Return an error with its unit."""
        return f"{format_number(value)} {self.unit}".rstrip()


@dataclass(frozen=True)
class QuantityRow:
    """One quantity of a data set."""

    source: str
    quantity: str
    now: QuantityErrors
    """At the last evaluation."""
    best: float
    """The least MAE of all evaluations, or the highest F1 of classes."""
    best_step: int


@dataclass(frozen=True)
class ErrorSection:
    """What a run's page says of errors."""

    step: int
    """Step of the last evaluation."""
    rows: list[QuantityRow]


ERROR_COLUMNS: tuple[Column[QuantityRow], ...] = (
    Column("data set", lambda row: row.source, align="left"),
    Column("quantity", lambda row: row.quantity, align="left"),
    Column("MAE", lambda row: row.now.write_number(row.now.mae) if row.now.f1 is None else ""),
    Column("RMSE", lambda row: row.now.write_number(row.now.rmse) if row.now.f1 is None else ""),
    Column("accuracy", lambda row: _write_share(row.now.accuracy)),
    Column("F1", lambda row: _write_share(row.now.f1)),
    Column(
        "best MAE or F1",
        lambda row: row.now.write_number(row.best) if row.now.f1 is None else _write_share(row.best),
    ),
    Column("at step", lambda row: f"{row.best_step:,}"),
)


def describe_errors(log: RunLog) -> ErrorSection | None:
    """Return the section for the errors of the last evaluation that has any; None where the log tells of none."""
    # A step that was done again has its later event.
    evaluated = {event.step: found for event in log.of_kind("evaluation") if (found := _read_errors(event))}
    if not evaluated:
        return None
    last = max(evaluated)
    rows = []
    for name, now in evaluated[last].items():
        known = {step: found[name] for step, found in evaluated.items() if name in found}
        # Of equally good ones the first.
        if now.f1 is None:
            best, step = min((one.mae, step) for step, one in known.items())
        else:
            least, step = min((-(one.f1 or 0.0), step) for step, one in known.items())
            best = -least
        rows.append(QuantityRow(*name, now, best, step))
    return ErrorSection(last, rows)


def _read_errors(event: Event) -> dict[tuple[str, str], QuantityErrors]:
    """Return the errors of an event by data set and quantity; a damaged entry is left out."""
    found: dict[tuple[str, str], QuantityErrors] = {}
    entries = event.fields.get("errors")
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict):
            continue
        source, quantity, unit = (entry.get(name) for name in ("source", "quantity", "unit"))
        mae, rmse, accuracy, f1 = (_number_or_none(entry.get(name)) for name in ("mae", "rmse", "accuracy", "f1"))
        if not (isinstance(source, str) and isinstance(quantity, str) and isinstance(unit, str)):
            continue
        if mae is not None and rmse is not None:
            found[source[:LONGEST_NAME], quantity[:LONGEST_NAME]] = QuantityErrors(
                unit[:LONGEST_NAME], mae, rmse, accuracy, f1
            )
    return found


# --- coordinate check over widths --------------------------------------------------------------------------------------


CHECK_FILE = "coordinate_check.json"
"""File of a run directory that `phalanx verify RUN --widths` writes."""
_CURVES = ("muP", "usual")
_MOST_WIDTHS = 32


@dataclass(frozen=True)
class WidthSection:
    """What the page says of widths."""

    drawing: Drawing
    words: str


def describe_widths(run_dir: Path) -> WidthSection | None:
    """Return the section for the coordinate check in a run directory; None where there is none that can be read."""
    try:
        found = json.loads((run_dir / CHECK_FILE).read_text("utf-8"))
        widths = [_require_positive(width) for width in found["widths"]]
        changes = {name: [_require_positive(value) for value in found["changes"][name]["logits"]] for name in _CURVES}
        growth = {name: float(found["growth"][name]["logits"]) for name in _CURVES}
        steps, lr = int(found["steps"]), _require_positive(found["lr"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if not 2 <= len(widths) <= _MOST_WIDTHS or any(len(values) != len(widths) for values in changes.values()):
        return None
    across = fit_scale(np.asarray(widths), logarithmic=True)
    plot = Plot(across, fit_scale(np.asarray([v for values in changes.values() for v in values]), logarithmic=True))
    plot.label_up()
    plot.label_across(widths, format_count, apart=60)
    for number, name in enumerate(_CURVES, 1):
        plot.add_curve(widths, changes[name], number)
    words = (
        f"What {steps} steps at a rate of {format_number(lr)} change of the logits, root mean square, over the width"
    )
    drawing = plot.finish(words, (("dot-1", "muP"), ("dot-2", "without")))
    return WidthSection(
        drawing,
        f"{words}, of small decoders of this kind. It goes as width^{growth['muP']:.2f} under muP, where it should stay the "
        f"same, and as width^{growth['usual']:.2f} without.",
    )


def _require_positive(value: Any) -> float:
    """Return a number above 0. Raises ValueError for anything else."""
    # To Python true is a number.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30 or math.isnan(value):
        raise ValueError(f"{value!r:.40} is no number above 0")
    return float(value)
