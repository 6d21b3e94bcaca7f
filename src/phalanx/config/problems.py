"""Mistakes in a run file as a person should read them: one line each, with the field, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from phalanx.config.document import FieldPath, Scalar, Value, dotted, plain_scalar, show_value
from phalanx.config.fields import Field, all_fields, field_pattern, fields_in, nearest_field, nearest_names, sections
from phalanx.config.schema import Run
from phalanx.errors import ConfigError

MAX_SHOWN = 20
_PRESET = "model.preset (phalanx config list shows them)"


@dataclass(frozen=True)
class Problem:
    """One mistake: where it is, what is wrong with it, and what was probably meant."""

    path: FieldPath
    text: str
    nearest: str | None = None


def config_error(
    problems: Sequence[Problem], locate: Callable[[FieldPath], str | None] = lambda _: None
) -> ConfigError:
    """All problems as one ConfigError. `locate` gives the file and line of a path, or None if it stands in no file."""
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


def explain(error: ValidationError, values: Value, kind: type[Run] = Run) -> list[Problem]:
    """The mistakes pydantic found in `values`, in the words of the schema of `kind`; at most one for each field."""
    found: dict[FieldPath, Problem] = {}
    missing: dict[FieldPath, list[str]] = {}
    for item in error.errors(include_url=False, include_input=False):
        path = _existing_part(item["loc"], values)
        if item["type"] == "missing" and isinstance(item["loc"][-1], str):
            missing.setdefault(path, []).append(str(item["loc"][-1]))
        elif len(found) > MAX_SHOWN:
            found.setdefault(path, Problem(path, dotted(path)))
        else:
            problem = _explain_one(item, path, values, kind)
            found.setdefault(problem.path, problem)
    misspelt = {problem.nearest for problem in found.values()}
    return [*found.values(), *_missing_problems(missing, misspelt, values, kind)]


def unknown_choice(path: FieldPath, value: str, kind: str, known: Iterable[str]) -> Problem:
    """A name that is not one of the `known` ones; `kind` says what they are."""
    matches = nearest_names(value, list(known))
    nearest = f"{dotted(path)}={matches[0]}" if matches else None
    return Problem(path, f"{dotted(path)}={show_value(value)} is not {kind}", nearest)


def _explain_one(item: ErrorDetails, path: FieldPath, values: Value, kind: type[Run]) -> Problem:
    value = _value_at(values, path)
    if item["type"] == "extra_forbidden":
        return _unknown(path, value, kind)
    if item["type"] == "value_error":
        return Problem(path, f"{dotted(path)}: {item['ctx']['error']}")
    field_path, field = _field_around(path, kind)
    if field is None:
        return Problem(path, f"{dotted(path)}={show_value(value)} must be a mapping of fields")
    name, value = dotted(field_path), _value_at(values, field_path)
    meant = _meant(value, field)
    nearest = None if meant is None else f"{name}={show_value(meant)}"
    return Problem(field_path, f"{name}={show_value(value)} must be {field.allowed}", nearest)


def _meant(value: Value, field: Field) -> Scalar:
    """The allowed value that a wrong one most likely stands for: a misspelt word, a number in quotes, 1e3 for 1000."""
    if isinstance(value, str) and (matches := nearest_names(value, field.choices)):
        return matches[0]
    unquoted = plain_scalar(value) if isinstance(value, str) else value
    if isinstance(unquoted, float) and unquoted.is_integer() and "whole number" in field.allowed:
        return int(unquoted)
    return (
        unquoted if isinstance(value, str) and isinstance(unquoted, int | float) and "number" in field.allowed else None
    )


def _unknown(path: FieldPath, value: Value, kind: type[Run]) -> Problem:
    name, nearest = dotted(path), nearest_field(field_pattern(path, kind), kind)
    parent, _, leaf = (nearest or "").rpartition(".")
    if parent and parent == field_pattern(path[:-1], kind):
        nearest = dotted((*path[:-1], leaf))
    if len(path) > 1:
        known = "" if nearest else f"; {dotted(path[:-1])} has {_and(fields_in(field_pattern(path[:-1], kind), kind))}"
        return Problem(path, f"{name}={show_value(value)}: there is no such field{known}", nearest)
    if isinstance(value, dict):
        known = "" if nearest else f"; it has {_and([section.name for section in sections(kind)])}"
        return Problem(path, f"{name} is not a section of a run file{known}", nearest)
    return Problem(path, f"{name}={show_value(value)} is outside any section; fields are section.field", nearest)


def _missing_problems(
    missing: dict[FieldPath, list[str]], misspelt: set[str | None], values: Value, kind: type[Run]
) -> Iterator[Problem]:
    for parent, leaves in missing.items():
        paths = [path for leaf in leaves if dotted(path := (*parent, leaf)) not in misspelt]
        names = [dotted(path) for path in paths]
        if parent == ():
            yield from (Problem((), _missing_section(name, kind)) for name in names)
        elif names:
            verb = "is" if len(names) == 1 else "are"
            yield Problem(parent, f"{_and(names)} {verb} missing: {_advice(paths, values, kind)}")


def _missing_section(name: str, kind: type[Run]) -> str:
    needed = [field.name for field in all_fields(kind).values() if field.parent == name and field.required]
    return f"section {name} is missing: give at least {_PRESET if name == 'model' else _and(needed)}"


def _advice(missing: list[FieldPath], values: Value, kind: type[Run]) -> str:
    if missing[0][0] == "model" and _value_at(values, ("model", "preset")) is None:
        return f"give the whole shape, or {_PRESET}"
    if len(missing) > 1:
        return "they have no defaults"
    return f"it must be {all_fields(kind)[field_pattern(missing[0], kind)].allowed}"


def _field_around(path: FieldPath, kind: type[Run]) -> tuple[FieldPath, Field | None]:
    """The innermost field of the schema that holds `path`, and its own path."""
    for length in range(len(path), 1, -1):
        if (field := all_fields(kind).get(field_pattern(path[:length], kind))) is not None:
            return path[:length], field
    return path, None


def _existing_part(loc: FieldPath, values: Value) -> FieldPath:
    """`loc` without what pydantic adds to it: names of union members, and the name of a missing field."""
    path: list[str | int] = []
    for part in loc:
        if isinstance(values, dict) and part in values:
            values = values[str(part)]
        elif isinstance(values, list) and isinstance(part, int) and part < len(values):
            values = values[part]
        else:
            break
        path.append(part)
    return tuple(path)


def _value_at(values: Value, path: FieldPath) -> Value:
    for part in path:
        if isinstance(values, dict):
            values = values.get(str(part))
        elif isinstance(values, list) and isinstance(part, int):
            values = values[part]
    return values


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
