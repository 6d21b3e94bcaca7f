"""The schema of one kind of run as a table: every field with its type and bounds in words, its default and its description.

Error messages, the printed reference and shell completion all read this table, so none of them can disagree with what
is accepted.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from phalanx.config.document import show_value
from phalanx.config.schema import Run
from phalanx.config.section import Words
from phalanx.errors import nearest_names


@dataclass(frozen=True)
class Field:
    """One field of a run file."""

    name: str
    """Dotted, as in an override: `layout.microbatch`."""
    allowed: str
    """What it may be, in words that follow "must be"."""
    default: str | None
    """Value as written in a run file; None where the field must be given."""
    description: str
    choices: tuple[str, ...]
    """Words it accepts, where it accepts words."""
    is_text: bool
    """Whether it holds free text (or null) and nothing else."""

    @property
    def parent(self) -> str:
        """Name of the section or field that holds it."""
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        """Name of the field without its section."""
        return self.name.rpartition(".")[2]

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is None


@dataclass(frozen=True)
class SectionInfo:
    """One section of a run file."""

    name: str
    description: str
    required: bool
    fields: tuple[Field, ...]


@cache
def run_sections(kind: type[Run] = Run) -> tuple[SectionInfo, ...]:
    """Return all sections in the order of the schema of `kind`."""
    return tuple(
        SectionInfo(
            name=name,
            description=" ".join((_model_of(info.annotation).__doc__ or "").split()),
            required=info.is_required(),
            fields=tuple(_fields_of(_model_of(info.annotation), f"{name}.")),
        )
        for name, info in kind.model_fields.items()
    )


@cache
def all_fields(kind: type[Run] = Run) -> dict[str, Field]:
    """Return every field of `kind` by its dotted name, nested ones too: `training.profile.first`.

    Places in lists are called N (`data.sources.N.path`), names of the user's own NAME (`search.knobs.NAME.when`).
    """
    return {field.name: field for section in run_sections(kind) for field in section.fields}


def field_pattern(path: Sequence[str | int], kind: type[Run] = Run) -> str:
    """Return the name in `all_fields` of what stands at `path`."""
    found: tuple[str, ...] = ()
    for part in path:
        known = str(part)
        # An override writes the place in a list as a word.
        if isinstance(part, int) or part.isdecimal():
            known = "N"
        if (*found, known) not in _name_prefixes(kind) and (*found, "NAME") in _name_prefixes(kind):
            known = "NAME"
        found = (*found, known)
    return ".".join(found)


@cache
def _name_prefixes(kind: type[Run]) -> frozenset[tuple[str, ...]]:
    names = [tuple(name.split(".")) for name in all_fields(kind)]
    return frozenset(name[:length] for name in names for length in range(1, len(name) + 1))


def nearest_field(name: str, kind: type[Run] = Run) -> str | None:
    """Return the section or field a wrong dotted name most likely meant: mistyped, or in the wrong section."""
    parent, _, leaf = name.rpartition(".")
    if not parent and (matches := nearest_names(leaf, [section.name for section in run_sections(kind)])):
        return matches[0]
    # The first section that has such a field, before what is nested deeper: names are nearly unique over sections.
    by_leaf: dict[str, str] = {}
    for field in sorted(all_fields(kind).values(), key=lambda field: field.name.count(".")):
        # What stands under a name of the user's own is not meant by one that stands elsewhere.
        if "NAME" not in field.name.split("."):
            by_leaf.setdefault(field.leaf, field.name)
    if leaf not in by_leaf and (matches := nearest_names(leaf, fields_in(parent, kind))):
        return f"{parent}.{matches[0]}"
    matches = nearest_names(leaf, list(by_leaf))
    return by_leaf[matches[0]] if matches else None


def fields_in(parent: str, kind: type[Run] = Run) -> list[str]:
    """Return the names of the fields that a section or a nested mapping holds."""
    return [field.leaf for field in all_fields(kind).values() if field.parent == parent]


def _fields_of(model: type[BaseModel], prefix: str) -> Iterator[Field]:
    for name, info in model.model_fields.items():
        # Pydantic keeps a field's constraints apart from its type: joined again, they are read as nested ones are.
        hint = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
        yield Field(
            name=prefix + name,
            allowed=_in_words(hint),
            default=None
            if info.is_required()
            else show_value(info.get_default(call_default_factory=True, validated_data={})),
            description=" ".join((info.description or "").split()),
            choices=tuple(_word_choices(hint)),
            is_text=_is_text(hint),
        )
        for suffix, nested in _nested_models(hint):
            yield from _fields_of(nested, f"{prefix}{name}{suffix}.")


def _model_of(annotation: Any) -> type[BaseModel]:
    assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation


def _nested_models(hint: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the mappings a field holds: alone or beside null (path suffix ""), or as items of a list (path suffix ".N")."""
    base, _ = _unwrap_hint(hint)
    for part in _union_members(base):
        member, _ = _unwrap_hint(part)
        if isinstance(member, type) and issubclass(member, BaseModel):
            yield "", member
        elif get_origin(member) is list:
            yield from ((f".N{suffix}", item) for suffix, item in _nested_models(get_args(member)[0]))
        elif get_origin(member) is dict:
            yield from ((f".NAME{suffix}", item) for suffix, item in _nested_models(get_args(member)[1]))


def _unwrap_hint(hint: Any) -> tuple[Any, list[Any]]:
    """Return a type without its `Annotated` layers, and the constraints they held."""
    constraints: list[Any] = []
    while get_origin(hint) is Annotated:
        hint, *extra = get_args(hint)
        for item in extra:
            constraints += item.metadata if isinstance(item, FieldInfo) else [item]
    return hint, constraints


def _union_members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _word_choices(hint: Any) -> Iterator[str]:
    base, _ = _unwrap_hint(hint)
    if get_origin(base) is Literal:
        yield from (value for value in get_args(base) if isinstance(value, str))
    elif _union_members(base) != (base,):
        for part in _union_members(base):
            yield from _word_choices(part)


def _is_text(hint: Any) -> bool:
    base, constraints = _unwrap_hint(hint)
    # Such a field takes texts of a form, which the override's parser must not take for free text.
    if any(isinstance(item, Words) for item in constraints):
        return False
    return all(_unwrap_hint(part)[0] in (str, type(None)) for part in _union_members(base)) and base is not type(None)


def _in_words(hint: Any) -> str:
    return _join_phrases(_allowed_phrases(hint))


def _allowed_phrases(hint: Any) -> list[str]:
    """Return what a field of this type may be, in phrases that follow "must be": one a member of a union."""
    base, constraints = _unwrap_hint(hint)
    told = [item.text for item in constraints if isinstance(item, Words)]
    if told:
        return told
    # Before single types: `int | None` has the words of both.
    if _union_members(base) != (base,):
        # Of a union every member tells what it takes.
        return [phrase for part in _union_members(base) for phrase in _allowed_phrases(part)]
    origin = get_origin(base)
    if origin is Literal:
        return [show_value(value) for value in get_args(base)]
    if origin in (list, tuple):
        return [_sequence_in_words(base, constraints)]
    if origin is dict:
        keys, values = get_args(base)
        named = (
            f" of {_join_phrases(_allowed_phrases(keys), 'and')}"
            if get_origin(_unwrap_hint(keys)[0]) is Literal
            else ""
        )
        return [f"a mapping{named}, each {_in_words(values)}"]
    if isinstance(base, type) and issubclass(base, BaseModel):
        return ["a mapping with " + _join_phrases(list(base.model_fields), "and")]
    if base is bool:
        return ["true", "false"]
    # What is left are scalars; a type that is missing here has no words yet, and fails at once.
    plain = {int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return [plain[base] + _bounds_phrase(constraints)]


def _sequence_in_words(base: Any, constraints: list[Any]) -> str:
    items = get_args(base)
    item = _in_words(items[0])
    # tuple[int, int] has a length of its own; tuple[int, ...] and lists have bounds, if any.
    if get_origin(base) is tuple and items[-1] is not Ellipsis:
        return f"a list of {len(items)}, each {item}"
    least = next((item.min_length for item in constraints if hasattr(item, "min_length")), 0)
    most = next((item.max_length for item in constraints if hasattr(item, "max_length")), 0)
    size = f" of at least {least}" if least else f" of at most {most}" if most else ""
    return f"a list{size}, each {item}"


def _bounds_phrase(constraints: list[Any]) -> str:
    limit = {
        name: f"{getattr(item, name):,}".removesuffix(".0")
        for item in constraints
        for name in ("ge", "gt", "le", "lt")
        if hasattr(item, name)
    }
    if "ge" in limit and "le" in limit:
        return f" from {limit['ge']} to {limit['le']}"
    names = {"ge": "of at least", "gt": "greater than", "le": "of at most", "lt": "less than"}
    told = " and ".join(f"{names[name]} {value}" for name, value in limit.items())
    return f" {told}" if told else ""


def _join_phrases(parts: list[str], conjunction: str = "or") -> str:
    if len(parts) == 1:
        return parts[0]
    comma = "," if any(" " in part for part in parts) else ""
    return f"{', '.join(parts[:-1])}{comma} {conjunction} {parts[-1]}"
