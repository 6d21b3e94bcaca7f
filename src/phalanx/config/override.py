"""Changes on the command line: `section.field=value`, the value written as in a run file; `tp=2` is `layout.tp=2`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.config.document import FieldPath, Value, dotted, parse_value, plain_scalar, show_value
from phalanx.config.families import BUILT_IN, find_family
from phalanx.config.fields import all_fields, field_pattern
from phalanx.config.problems import Problem, config_error
from phalanx.errors import ConfigError


@dataclass(frozen=True)
class Override:
    """One change: the field and its new value."""

    path: FieldPath
    value: Value


def full_name(name: str) -> str:
    """The name of a field with its section, which fields of the layout need not have."""
    return f"layout.{name}" if f"layout.{name}" in all_fields() else name


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Read `section.field=value` arguments; fields of the layout need no section.

    Raises ConfigError for those that are not of that form.
    """
    parsed = [_parse(argument) for argument in arguments]
    problems = [item for item in parsed if isinstance(item, Problem)]
    if problems:
        raise config_error(problems)
    return [item for item in parsed if isinstance(item, Override)]


def apply_overrides(values: dict[str, Value], overrides: Sequence[Override]) -> None:
    """Write the changes into `values`, later ones over earlier ones; mappings on the way are created."""
    problems = [problem for override in overrides if (problem := _assign(values, override)) is not None]
    if problems:
        raise config_error(problems)


def _parse(argument: str) -> Override | Problem:
    name, equals, text = argument.partition("=")
    if any("\ud800" <= character <= "\udfff" for character in argument):
        return Problem((), f"{ascii(argument)[:80]} is not valid text in this terminal's encoding")
    if not equals:
        return Problem((), f"{show_value(argument)} is not an override; write section.field=value")
    if not text.strip():
        return Problem((), f"{argument.strip()} has no value; write {argument.strip()}null to unset a field")
    name = full_name(name)
    path = tuple(int(part) if part.isdecimal() and len(part) < 6 else part for part in name.split("."))
    if _is_text(path) and text.strip()[0] not in "'\"":
        return Override(path, None if plain_scalar(text) is None else text)
    try:
        return Override(path, parse_value(text))
    except ConfigError as error:
        return Problem(path, f"{dotted(path)}={show_value(text)} cannot be read: {error}")


def _is_text(path: FieldPath) -> bool:
    """Whether text stands at `path`, in whichever kind of run has it: which kind this one is, overrides may yet change.

    Families of installed packages are left alone: one that cannot be imported must not break every command.
    """
    kinds = [find_family(name).run for name in BUILT_IN]
    fields = [all_fields(kind).get(field_pattern(path, kind)) for kind in kinds]
    return any(field is not None and field.is_text for field in fields)


def _assign(values: dict[str, Value], override: Override) -> Problem | None:
    *parents, last = override.path
    node: Value = values
    for depth, part in enumerate(parents):
        child = _get(node, part)
        if child is None and isinstance(node, dict):
            child = node[str(part)] = {}
        if not isinstance(child, dict | list):
            return _no_such_place(override.path, depth + 1, child)
        node = child
    if isinstance(node, dict):
        node[str(last)] = override.value
    elif isinstance(node, list) and isinstance(last, int) and last < len(node):
        node[last] = override.value
    else:
        return _no_such_place(override.path, len(parents) + 1, None)
    return None


def _no_such_place(path: FieldPath, depth: int, found: Value) -> Problem:
    here = dotted(path[:depth])
    what = "does not exist in the list" if found is None else f"is {show_value(found)} and holds no fields"
    return Problem((), f"{dotted(path)}: {here} {what}")


def _get(node: Value, part: str | int) -> Value:
    if isinstance(node, dict):
        return node.get(str(part))
    if isinstance(node, list) and isinstance(part, int) and part < len(node):
        return node[part]
    return None
