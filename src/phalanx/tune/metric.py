"""The figure that is minimised, read from what an evaluation wrote into a run's event log."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError

_LOG = {"kind", "step", "time"}


def evaluation_at(run_dir: Path, step: int) -> dict[str, Any] | None:
    """The held-out evaluation after a step; None where there is none."""
    found = None
    for event in events(run_dir):
        if event["kind"] == "evaluation" and event["step"] == step:
            found = event
    return found


def events(run_dir: Path) -> list[dict[str, Any]]:
    """The events of a run; a last line torn by a kill is left out."""
    return _lines(run_dir / "events.jsonl")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The steps of a run; a last line torn by a kill is left out."""
    return _lines(run_dir / "metrics.jsonl")


def figure(evaluation: Mapping[str, Any], name: str) -> float:
    """The figure of that name: a field, or a field of those rows of a list that have the words before it.

    `loss` is a field; `errors.forces.mae` is the mean over the rows of `errors` that say forces; `errors.xtb.forces.mae`
    takes of these the rows that say xtb. Raises ConfigError, with the names there are, where there is none.
    """
    found = _numbers(evaluation, name)
    if not found:
        known = ", ".join(sorted({name for name in _names(evaluation) if name not in _LOG}))
        raise ConfigError(f"tune.metric={name}: an evaluation of this run has no such figure; it has {known}")
    return math.fsum(found) / len(found)


def _numbers(value: Any, rest: str) -> list[float]:
    if isinstance(value, Mapping):
        found = [_numbers(item, _after(rest, key)) for key, item in value.items() if _begins(rest, key)]
        return [number for numbers in found for number in numbers]
    if isinstance(value, list):
        rows = [row for row in value if isinstance(row, Mapping)]
        words = {word for row in rows for word in row.values() if isinstance(word, str) and _begins(rest, word)}
        if words:
            # Of names that begin alike the longest is meant.
            word = max(words, key=len)
            return _numbers([row for row in rows if word in row.values()], _after(rest, word))
        return [number for row in rows for number in _numbers(row, rest)]
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return [float(value)] if plain and rest == "" else []


def _begins(rest: str, word: str) -> bool:
    return rest == word or rest.startswith(f"{word}.")


def _after(rest: str, word: str) -> str:
    return rest[len(word) + 1 :]


def _names(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        words = ".".join(item for item in value.values() if isinstance(item, str))
        found = []
        for key, item in value.items():
            if isinstance(item, int | float) and not isinstance(item, bool):
                found.append(key)
            found += [f"{key}.{name}" for name in _names(item)] if isinstance(item, Mapping | list) else []
        return [f"{words}.{name}" for name in found] if words and "kind" not in value else found
    return [name for item in value for name in _names(item)] if isinstance(value, list) else []


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
