"""Scores on in-context tasks in a run's log: as a table of the last ones, and as what a chart draws."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.formatting import format_number, format_percent
from phalanx.report.run_log import Event, RunLog
from phalanx.report.table import Column

LONGEST_NAME = 60
"""Characters of a task's name that are shown."""


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
