"""The metric of a study: the figure that is minimised, read from what an evaluation wrote into a run's event log."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phalanx.config.problems import Problem, config_error
from phalanx.errors import ConfigError, nearest_names
from phalanx.files import read_json_lines, require_step
from phalanx.training.inputs import ExpectedEvaluation

_LOG = {"kind", "step", "time"}
"""Fields of every event, which are no figures of an evaluation."""
_UNIT = "unit"
_SHOWN = 30
"""Names in a message, at most."""


def evaluation_at(run_dir: Path, step: int) -> dict[str, Any] | None:
    """Return the held-out evaluation after a step; None where there is none."""
    found = None
    for event in read_events(run_dir):
        # A run that resumed may have evaluated twice: the later one is of the weights that went on.
        if event["kind"] == "evaluation" and event["step"] == step:
            found = event
    return found


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events of a run; damaged lines, and a last one torn by a kill, are left out."""

    def event_problem(record: dict[str, Any]) -> str | None:
        return require_step(record) or (None if isinstance(record.get("kind"), str) else "has no kind")

    return _read_sound_lines(run_dir / "events.jsonl", event_problem)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the steps of a run; damaged lines, and a last one torn by a kill, are left out."""
    return _read_sound_lines(run_dir / "metrics.jsonl", step_problem)


def step_problem(record: dict[str, Any]) -> str | None:
    """Return what is wrong with a record of metrics.jsonl, of which step and seconds are read; None where nothing is."""
    seconds = record.get("step_seconds")
    return require_step(record) or (None if isinstance(seconds, int | float) else "has no step_seconds")


def check_metric(name: str, expected: ExpectedEvaluation | None) -> None:
    """Refuse a metric that evaluations of a run will not have, or of which less is not better, before anything trains.

    expected: of the run; see `training.inputs.TrainableModel`. Raises ConfigError with the metrics there will be, those
    that look most like `name` first.
    """
    if expected is None:
        raise ConfigError(
            f"tune.metric={name}: this run's data hold nothing out for validation, so that trials would have no score; "
            "give them a validation split"
        )
    there = bool(_find_numbers(expected.fields, name))
    if there and _last_word(name) in expected.less_is_better:
        return
    known = [one for one in _figure_names(expected.fields) if _last_word(one) in expected.less_is_better]
    near = nearest_names(name, known)
    what = "it is minimised, but less of it is not better" if there else "an evaluation of this run has no such figure"
    ordered = [*near, *(one for one in known if one not in near)]
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    text = f"tune.metric={name}: {what}; choose among {', '.join(ordered[:_SHOWN])}{more}"
    # Where a figure of that very name is there, none that looks like it is meant.
    meant = f"tune.metric={near[0]}" if near and not there else None
    raise config_error([Problem(("tune", "metric"), text, meant)])


def read_figure(evaluation: Mapping[str, Any], name: str) -> float:
    """Return the figure of that name: a field, or a field of those rows of a list that have the words before it.

    `loss` is a field; `errors.forces.mae` is the mean over the rows of `errors` that say forces; `errors.xtb.forces.mae`
    takes of these the rows that say xtb. Raises ConfigError, with the names there are, where there is none.
    """
    found = _find_numbers(evaluation, name)
    if not found:
        known = ", ".join(sorted(name for name in _figure_names(evaluation) if name not in _LOG))
        raise ConfigError(f"tune.metric={name}: an evaluation of this run has no such figure; it has {known}")
    # Exact, whatever the order of rows: two processes must agree on which trial is better.
    return math.fsum(found) / len(found)


def _find_numbers(value: Any, rest: str) -> list[float]:
    if isinstance(value, Mapping):
        found = [_find_numbers(item, _strip_word(rest, key)) for key, item in value.items() if _starts_with(rest, key)]
        return [number for numbers in found for number in numbers]
    if isinstance(value, list):
        rows = [row for row in value if isinstance(row, Mapping)]
        words = {word for row in rows for word in row.values() if isinstance(word, str) and _starts_with(rest, word)}
        if words:
            # Of names that begin alike the longest is meant.
            word = max(words, key=len)
            return _find_numbers([row for row in rows if word in row.values()], _strip_word(rest, word))
        return [number for row in rows for number in _find_numbers(row, rest)]
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return [float(value)] if plain and rest == "" else []


def _starts_with(rest: str, word: str) -> bool:
    return rest == word or rest.startswith(f"{word}.")


def _strip_word(rest: str, word: str) -> str:
    return rest[len(word) + 1 :]


def _last_word(name: str) -> str:
    return name.rpartition(".")[2]


def _figure_names(fields: Mapping[str, Any]) -> list[str]:
    """Return the names that `read_figure` takes, each once, means over rows of a list before those of single rows."""
    found: list[str] = []
    for key, value in fields.items():
        if isinstance(value, Mapping):
            found += [f"{key}.{name}" for name in _figure_names(value)]
        elif isinstance(value, list):
            rows = [row for row in value if isinstance(row, Mapping)]
            # The last word says what was measured, those before it of what; a unit is told apart by neither.
            words = [[word for name, word in row.items() if isinstance(word, str) and name != _UNIT] for row in rows]
            pairs = [(part, name) for part, row in zip(words, rows, strict=True) for name in _figure_names(row)]
            found += [".".join((key, *part[-1:], name)) for part, name in pairs]
            found += [".".join((key, *part, name)) for part, name in pairs]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append(key)
    return list(dict.fromkeys(found))


def _read_sound_lines(file: Path, problem_of: Callable[[dict[str, Any]], str | None]) -> list[dict[str, Any]]:
    return read_json_lines(file, problem_of).records if file.exists() else []
