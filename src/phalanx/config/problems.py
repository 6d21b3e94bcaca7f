"""Mistakes in a run file as a person should read them: one line each, with the field, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from phalanx.config.document import FieldPath, Scalar, Value, dotted_name, plain_scalar, show_value
from phalanx.config.fields import (
    Field,
    all_fields,
    field_pattern,
    fields_in,
    nearest_field,
    nearest_names,
    run_sections,
)
from phalanx.config.schema import Run
from phalanx.errors import ConfigError

MAX_SHOWN = 20
_PRESET = "model.preset (phalanx config list shows them)"


@dataclass(frozen=True)
class Problem:
    """A mistake in a run file: where it is, what is wrong with it, and what was probably meant."""

    path: FieldPath
    text: str
    nearest: str | None = None


def config_error(
    problems: Sequence[Problem], locate: Callable[[FieldPath], str | None] = lambda _: None
) -> ConfigError:
    """Return all problems as one ConfigError. locate: gives the file and line of a path, or None if it stands in no file."""
    alone = len(problems) == 1
    lines: list[str] = []
    for problem in problems[:MAX_SHOWN]:
        place = locate(problem.path)
        lines.append(problem.text if place is None else f"{problem.text} ({place})")
        if problem.nearest is not None:
            lines.append(f"{'' if alone else '  '}nearest: {problem.nearest}")
    if len(problems) > MAX_SHOWN:
        lines.append(f"and {len(problems) - MAX_SHOWN} more")
    return ConfigError("\n".join(lines))


def explain_errors(error: ValidationError, values: Value, kind: type[Run] = Run) -> list[Problem]:
    """Return the mistakes pydantic found in `values`, in the words of the schema of `kind`; at most one for each field."""
    found: dict[FieldPath, Problem] = {}
    missing: dict[FieldPath, list[str]] = {}
    for item in error.errors(include_url=False, include_input=False):
        path = _existing_part(item["loc"], values)
        if item["type"] == "missing" and isinstance(item["loc"][-1], str):
            missing.setdefault(path, []).append(str(item["loc"][-1]))
        # A hostile file may hold a million mistakes: those beyond what is shown are only counted.
        elif len(found) > MAX_SHOWN:
            found.setdefault(path, Problem(path, dotted_name(path)))
        else:
            problem = _explain_mistake(item, path, values, kind)
            # A mapping that was read and does not fit together says more than that it is no list and no number either.
            if item["type"] == "value_error" and isinstance(_value_at(values, path), dict):
                found[problem.path] = problem
            found.setdefault(problem.path, problem)
    # A field that is written wrongly is reported once: as misspelt, and not as missing too.
    misspelt = {problem.nearest for problem in found.values()}
    return [*found.values(), *_missing_problems(missing, misspelt, values, kind)]


def _existing_part(loc: FieldPath, values: Value) -> FieldPath:
    """Return `loc` without what pydantic adds to it: names of union members, and the name of a missing field."""
    path: FieldPath = ()
    for part in loc:
        if isinstance(values, dict) and part in values:
            values = values[str(part)]
        elif isinstance(values, list) and isinstance(part, int) and part < len(values):
            values = values[part]
        else:
            break
        path = (*path, part)
    return path


def _explain_mistake(item: ErrorDetails, path: FieldPath, values: Value, kind: type[Run]) -> Problem:
    """Return one mistake that pydantic found at `path`, in the words of the schema."""
    value = _value_at(values, path)
    if item["type"] == "extra_forbidden":
        return _unknown_field(path, value, kind)
    if item["type"] == "value_error":
        return Problem(path, f"{dotted_name(path)}: {item['ctx']['error']}")
    field_path, field = _field_around(path, kind)
    if field is None:
        return Problem(path, f"{dotted_name(path)}={show_value(value)} must be a mapping of fields")
    name, value = dotted_name(field_path), _value_at(values, field_path)
    # What it likely stands for is offered, never taken: a run must not depend on a guess.
    meant = _likely_value(value, field)
    nearest = None if meant is None else f"{name}={show_value(meant)}"
    return Problem(field_path, f"{name}={show_value(value)} must be {field.allowed}", nearest)


def unknown_choice(path: FieldPath, value: str, kind: str, known: Iterable[str]) -> Problem:
    """Return the problem of a name that is not one of the `known` ones; `kind` says what they are."""
    matches = nearest_names(value, list(known))
    nearest = f"{dotted_name(path)}={matches[0]}" if matches else None
    return Problem(path, f"{dotted_name(path)}={show_value(value)} is not {kind}", nearest)


def _likely_value(value: Value, field: Field) -> Scalar:
    """Return the allowed value that a wrong one likely stands for: a misspelt word, a number in quotes, 1e3 for 1000."""
    if isinstance(value, str) and (matches := nearest_names(value, field.choices)):
        return matches[0]
    # A number in quotes, or 1e3 where a whole number is wanted: what was meant is clear.
    unquoted = plain_scalar(value) if isinstance(value, str) else value
    if isinstance(unquoted, float) and unquoted.is_integer() and "whole number" in field.allowed:
        return int(unquoted)
    return (
        unquoted if isinstance(value, str) and isinstance(unquoted, int | float) and "number" in field.allowed else None
    )


def _unknown_field(path: FieldPath, value: Value, kind: type[Run]) -> Problem:
    name, nearest = dotted_name(path), nearest_field(field_pattern(path, kind), kind)
    # A pattern says N for a place in a list: the user reads the place that was meant.
    parent, _, leaf = (nearest or "").rpartition(".")
    if parent and parent == field_pattern(path[:-1], kind):
        nearest = dotted_name((*path[:-1], leaf))
    if len(path) > 1:
        siblings = fields_in(field_pattern(path[:-1], kind), kind)
        place = dotted_name(path[:-1])
        # A line that a person reads names no forty fields.
        listed = (
            f"has {_join_names(siblings)}" if len(siblings) <= 30 else f"has those of phalanx config fields {path[0]}"
        )
        known = "" if nearest else f"; {place} {listed}"
        return Problem(path, f"{name}={show_value(value)}: there is no such field{known}", nearest)
    if isinstance(value, dict):
        known = "" if nearest else f"; it has {_join_names([section.name for section in run_sections(kind)])}"
        return Problem(path, f"{name} is not a section of a run file{known}", nearest)
    return Problem(path, f"{name}={show_value(value)} is outside any section; fields are section.field", nearest)


def _missing_problems(
    missing: dict[FieldPath, list[str]], misspelt: set[str | None], values: Value, kind: type[Run]
) -> Iterator[Problem]:
    for parent, leaves in missing.items():
        paths = [path for leaf in leaves if dotted_name(path := (*parent, leaf)) not in misspelt]
        names = [dotted_name(path) for path in paths]
        if parent == ():
            # At the top stand sections, of which each is a mistake of its own.
            for name in names:
                needed = [field.name for field in all_fields(kind).values() if field.parent == name and field.required]
                least = _PRESET if name == "model" else _join_names(needed)
                yield Problem((), f"section {name} is missing: give at least {least}")
        elif names:
            if paths[0][0] == "model" and _value_at(values, ("model", "preset")) is None:
                advice = f"give the whole shape, or {_PRESET}"
            elif len(paths) > 1:
                advice = "they have no defaults"
            else:
                advice = f"it must be {all_fields(kind)[field_pattern(paths[0], kind)].allowed}"
            verb = "is" if len(names) == 1 else "are"
            yield Problem(parent, f"{_join_names(names)} {verb} missing: {advice}")


def _field_around(path: FieldPath, kind: type[Run]) -> tuple[FieldPath, Field | None]:
    """Return the path of the innermost field of the schema that holds `path`, and that field."""
    for length in range(len(path), 1, -1):
        if (field := all_fields(kind).get(field_pattern(path[:length], kind))) is not None:
            return path[:length], field
    return path, None


def _value_at(values: Value, path: FieldPath) -> Value:
    for part in path:
        if isinstance(values, dict):
            values = values.get(str(part))
        elif isinstance(values, list) and isinstance(part, int):
            values = values[part]
    return values


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
