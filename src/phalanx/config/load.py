"""From a run file and command-line overrides to a `Run`, and back.

Layers, lowest first: the schema's defaults, the model preset, the run file, the overrides. Whatever is wrong with any
of them is a ConfigError that names the field, the value and what is allowed; nothing is allocated before.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from phalanx.config.check import check_run
from phalanx.config.document import (
    MAX_BYTES,
    FieldPath,
    Value,
    dotted_name,
    parse_document,
    parse_value,
    plain_scalar,
    show_value,
)
from phalanx.config.families import BUILT_IN, DEFAULT_FAMILY, FAMILIES, find_family
from phalanx.config.fields import all_fields, field_pattern
from phalanx.config.presets import find_preset, find_recipe, preset_names, recipe_names
from phalanx.config.problems import Problem, config_error, explain_errors, unknown_choice
from phalanx.config.schema import Run
from phalanx.errors import ConfigError, nearest_names
from phalanx.files import kind_in_words

RESOLVED_NAME = "run.yaml"
"""Name of the resolved run file in a run folder; the folder may be given in place of the file."""


def load_run(path: Path | str, overrides: Sequence[str] = (), *, trains: bool = True) -> Run:
    """Read a run file, the resolved one of a run folder, or a recipe, and apply `section.field=value` overrides.

    path: a file or folder, or the name of a recipe where there is neither. trains: whether data must be fit to train on, as
    those that a trained model is used on need not be. Raises ConfigError for anything a person can get wrong.
    """
    path = Path(path)
    file = path / RESOLVED_NAME if path.is_dir() else path
    if not file.exists() and (recipe := find_recipe(str(path))) is not None:
        file = path = recipe
    if file != path and not file.exists():
        raise ConfigError(f"folder {path} holds no {RESOLVED_NAME}; give a run file or a run folder")
    return parse_run(_read_text(file), str(file), overrides, trains=trains)


def parse_run(text: str, name: str, overrides: Sequence[str] = (), *, trains: bool = True) -> Run:
    """Return the run of a run file's text, as `load_run` does. name: stands for the file in messages."""
    document = parse_document(text, name)
    if not isinstance(document.value, dict):
        holds = "is empty" if document.value is None else f"holds {show_value(document.value)}"
        raise ConfigError(f"{name} {holds}; a run file holds sections (model, data, layout, optimizer, training)")
    # A section whose fields are all commented out reads as null
    values: dict[str, Value] = {section: {} if fields is None else fields for section, fields in document.value.items()}
    changes = parse_overrides(overrides)
    _switch_preset(values, changes)
    # To plain values, before the schema reads them: a mistake in either is explained in the same words.
    apply_overrides(values, changes)

    def locate(path: FieldPath) -> str | None:
        if any(change.path[: len(path)] == path[: len(change.path)] for change in changes):
            return None  # it comes from the command line, at least in part
        # A default has no line of its own: the section that it belongs to has.
        while path and path not in document.lines:
            path = path[:-1]
        return f"{name}:{document.lines[path]}" if path else name

    problems = _fill_from_preset(values)
    model = values.get("model")
    family = model.get("family", DEFAULT_FAMILY) if isinstance(model, dict) else DEFAULT_FAMILY
    known = FAMILIES.names()
    if not isinstance(family, str) or family not in known:
        path: FieldPath = ("model", "family")
        problem = unknown_choice(path, str(show_value(family)), f"a model family ({', '.join(known)})", known)
        raise config_error([problem], locate)
    kind = find_family(family).run
    try:
        # JSON mode: strict, yet a list may become a tuple
        run = kind.model_validate_json(json.dumps(values))
    except ValidationError as error:
        found = explain_errors(error, values, kind)
        # An unknown preset leaves the shape unfilled: that its fields are missing is no mistake of its own.
        if problems:
            found = [problem for problem in found if problem.path != ("model",)]
        raise config_error(problems + found, locate) from None
    problems += check_run(run, trains=trains)
    if problems:
        raise config_error(problems, locate)
    return run


def dump_run(run: Run) -> str:
    """Return the run file with every field written out; it loads back to an equal `Run`, whatever the presets say by then.

    Where a field of the model differs from its preset, a comment says what the preset has.
    """
    values = run.model_dump(mode="json")
    here = values.pop("model")
    # Presets may change: what the model was built of is written out, and a comment says where it departs from its preset.
    lines = to_yaml({"model": here}).splitlines()
    preset = None if run.model.preset is None else find_preset(run.model.preset)
    if preset is not None:
        there = preset.model().model_dump(mode="json")
        for field in (field for field in there if there[field] != here[field]):
            index = next(i for i, line in enumerate(lines) if line.startswith(f"  {field}:"))
            lines[index] += f"  # {preset.name}: {show_value(there[field])}"
    return "\n".join(lines) + "\n" + "".join(f"\n{to_yaml({key: value})}" for key, value in values.items())


def _read_text(file: Path) -> str:
    try:
        mode = file.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{show_value(str(file))} is {kind_in_words(mode)}; give a run file or a run folder")
        # One byte more than is allowed: a larger file is refused by its length, not read.
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        problem = Problem((), f"run file {file} does not exist", _nearest_file(file))
        raise config_error([problem]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"run file {file} is not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"run file {show_value(str(file))} cannot be read: {reason}") from None


def _nearest_file(file: Path) -> str | None:
    recipes = nearest_names(str(file), recipe_names())
    recipe = f"the recipe {recipes[0]}" if recipes else None
    if not file.parent.is_dir():
        return recipe
    candidates = [path.name for path in file.parent.iterdir() if path.suffix in (".yaml", ".yml") or path.is_dir()]
    matches = nearest_names(file.name, candidates)
    return str(file.parent / matches[0]) if matches else recipe


def _switch_preset(values: dict[str, Value], changes: Sequence[Override]) -> None:
    """Drop what the file took from its own preset where the command line names another one.

    Fields that say what the old preset says came from it (a resolved file writes them all out); fields that differ were
    chosen, and stay.
    """
    model = values.get("model")
    switched = [change.value for change in changes if change.path == ("model", "preset")]
    if not switched or not isinstance(model, dict):
        return
    old, new = model.get("preset"), switched[-1]
    if old is None and _whole_shape(model):
        text = f"model.preset={show_value(new)} would change nothing, since the run file gives the whole shape itself"
        raise config_error([Problem((), text, f"model={{preset: {show_value(new)}}} in place of that shape")])
    former_preset = find_preset(str(old))
    if former_preset is not None and old != new:
        former = former_preset.model().model_dump(mode="json")
        values["model"] = {name: value for name, value in model.items() if name not in former or value != former[name]}


def _whole_shape(model: dict[str, Value]) -> bool:
    """Return whether a model section gives all that its family needs."""
    family = model.get("family", DEFAULT_FAMILY)
    if not isinstance(family, str) or family not in FAMILIES.names():
        return False
    return all(name in model for name, info in find_family(family).model.model_fields.items() if info.is_required())


def _fill_from_preset(values: dict[str, Value]) -> list[Problem]:
    model = values.get("model")
    if not isinstance(model, dict) or not isinstance(name := model.get("preset"), str):
        return []
    preset = find_preset(name)
    if preset is None:
        return [unknown_choice(("model", "preset"), name, "a preset (phalanx config list shows them)", preset_names())]
    # Presets lie below the file: single fields of a named shape may be changed.
    values["model"] = merge_fields({"family": preset.family, **preset.fields}, model)
    return []


def merge_fields(lower: dict[str, Value], upper: dict[str, Value]) -> dict[str, Value]:
    """Return `lower` with the fields of `upper` over its own, in mappings within as well."""
    merged = dict(lower)
    for name, value in upper.items():
        below = lower.get(name)
        merged[name] = merge_fields(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


class _Dumper(yaml.SafeDumper):
    """Writes what `parse_document` reads back: no anchors, and quotes around text that looks like something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, None if plain_scalar(text) == text else '"')


def _represent_list(dumper: _Dumper, items: list[Any]) -> yaml.SequenceNode:
    # Short lists on one line, as a person writes them; lists of mappings one item a line.
    of_scalars = not any(isinstance(item, list | dict) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=of_scalars)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_list)


def to_yaml(values: Any) -> str:
    """Return `values` as the text of a run file: what `parse_document` reads back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False)


@dataclass(frozen=True)
class Override:
    """One change: the field and its new value."""

    path: FieldPath
    value: Value


def full_name(name: str) -> str:
    """Return the name of a field with its section, which fields of the layout need not have."""
    return f"layout.{name}" if f"layout.{name}" in all_fields() else name


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Read `section.field=value` arguments; fields of the layout need no section.

    Raises ConfigError for those that are not of that form.
    """
    parsed = [_parse_override(argument) for argument in arguments]
    problems = [item for item in parsed if isinstance(item, Problem)]
    if problems:
        raise config_error(problems)
    return [item for item in parsed if isinstance(item, Override)]


def apply_overrides(values: dict[str, Value], overrides: Sequence[Override]) -> None:
    """Write the changes into `values`, later ones over earlier ones; mappings on the way are created."""
    problems = [problem for override in overrides if (problem := _assign_value(values, override)) is not None]
    if problems:
        raise config_error(problems)


def _parse_override(argument: str) -> Override | Problem:
    name, equals, text = argument.partition("=")
    if any("\ud800" <= character <= "\udfff" for character in argument):
        return Problem((), f"{ascii(argument)[:80]} is not valid text in this terminal's encoding")
    if not equals:
        return Problem((), f"{show_value(argument)} is not an override; write section.field=value")
    if not text.strip():
        return Problem((), f"{argument.strip()} has no value; write {argument.strip()}null to unset a field")
    name = full_name(name)
    path = tuple(int(part) if part.isdecimal() and len(part) < 6 else part for part in name.split("."))
    # A name such as 007 stays text without quotes: the field says that it is text.
    # Overrides may yet change the family, so text is what any family of ours has as text. Those of installed packages are
    # left alone: one that cannot be imported must not break every command.
    kinds = [find_family(name).run for name in BUILT_IN]
    fields = [all_fields(kind).get(field_pattern(path, kind)) for kind in kinds]
    if any(field is not None and field.is_text for field in fields) and text.strip()[0] not in "'\"":
        return Override(path, None if plain_scalar(text) is None else text)
    try:
        return Override(path, parse_value(text))
    except ConfigError as error:
        return Problem(path, f"{dotted_name(path)}={show_value(text)} cannot be read: {error}")


def _assign_value(values: dict[str, Value], override: Override) -> Problem | None:
    *parents, last = override.path
    node: Value = values
    for depth, part in enumerate(parents):
        if isinstance(node, dict):
            child = node.get(str(part))
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            child = node[part]
        else:
            child = None
        # Mappings on the way are made; lists have the items that the file gives them.
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
    here = dotted_name(path[:depth])
    what = "does not exist in the list" if found is None else f"is {show_value(found)} and holds no fields"
    return Problem((), f"{dotted_name(path)}: {here} {what}")
