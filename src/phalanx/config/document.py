"""YAML text to plain values, with the line each value stands on.

Reads the plain part of YAML 1.2 that a run file needs: mappings, sequences and scalars. It differs from
`yaml.safe_load` where that would surprise or harm: `3e-4` is a number and `no` is text (YAML 1.1 has both the other
way), a key given twice is an error, and anchors, aliases and tags do not exist, so a small file cannot grow into a
large one. Knows nothing of the schema.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import yaml

from phalanx.errors import ConfigError

MAX_BYTES = 256 * 1024
MAX_DEPTH = 20

Scalar = str | int | float | bool | None
Value = Scalar | list["Value"] | dict[str, "Value"]
FieldPath = tuple[str | int, ...]

# Bounded in length: no field wants more digits, Python refuses to convert very many, and products must fit a float.
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]{0,25}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,40}|[0-9]{1,40}(\.[0-9]{0,40})?)([eE][-+]?[0-9]{1,5})?")
_READ_OTHERWISE = re.compile("[\t!?|>\ufeff]")
"""Tabs and what begins tags, complex keys, block scalars and files: libyaml takes some that PyYAML's own parser refuses."""
_WORDS: dict[str, Scalar] = {"": None, "~": None, "null": None, "true": True, "false": False}


@dataclass(frozen=True)
class Document:
    """A parsed YAML document: its value, and the line (from 1) on which the value at each path begins."""

    value: Value
    lines: dict[FieldPath, int]


def parse_document(text: str, name: str) -> Document:
    """Read one YAML document. Raises ConfigError naming `name` and the line of the first mistake."""
    try:
        return _compose_document(text)
    except _UnreadableError as error:
        place = name if error.line is None else f"{name}:{error.line}"
        raise ConfigError(f"{error.reason} ({place})") from None


def parse_value(text: str) -> Value:
    """Read one value written in YAML, as after the `=` of an override. Raises ConfigError."""
    try:
        return _compose_document(text).value
    except _UnreadableError as error:
        raise ConfigError(error.reason) from None


def plain_scalar(text: str) -> Scalar:
    """Return the value of unquoted `text`: null, a truth value, a number, or else the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    # Underscores may group digits, as in 524_288; one at the end is more likely part of a name.
    if _INTEGER.fullmatch(text) and not text.endswith("_"):
        return int(text.replace("_", ""))
    # Text too large for a float stays text: infinity would pass a bound that the number itself breaks.
    number = float(text) if _FLOAT.fullmatch(text) else math.inf
    return number if math.isfinite(number) else text


def flatten_fields(value: Value, name: str = "") -> dict[str, Scalar]:
    """Return every scalar of a document by its dotted name; what is in a list is named by its place. name: of `value`."""
    if isinstance(value, dict):
        parts = [(f"{name}.{key}" if name else str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        parts = [(f"{name}.{number}", item) for number, item in enumerate(value)]
    else:
        return {name: value}
    return {path: scalar for part, item in parts for path, scalar in flatten_fields(item, part).items()}


def show_value(value: object, width: int = 60) -> str:
    """Return `value` as it would stand in a run file, on one line and cut to about `width` characters."""
    text = ""
    for piece in _flow_pieces(value):
        text += piece
        # A long list is told of once for each of its items: no more of it is written than is shown.
        if len(text) > width:
            return text[: width - 3] + "..."
    return text


class _UnreadableError(Exception):
    def __init__(self, reason: str, line: int | None) -> None:
        self.reason = reason
        self.line = line


def _compose_document(text: str) -> Document:
    # By events, not by `yaml.load`: they carry the line of each value, and aliases can be refused before they expand.
    if len(text) > MAX_BYTES:
        raise _UnreadableError(f"larger than {MAX_BYTES // 1024} KiB, which no run file is", None)
    if yaml.__with_libyaml__ and not _READ_OTHERWISE.search(text):
        # A tenth of the time. What it refuses is read again: the errors of the other parser say more.
        with contextlib.suppress(yaml.YAMLError, UnicodeError, _UnreadableError):
            return _Composer(yaml.parse(text, Loader=yaml.CSafeLoader)).document()
    try:
        return _Composer(yaml.parse(text, Loader=yaml.SafeLoader)).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = " ".join(str(part) for part in (error.problem, error.context) if part)
        raise _UnreadableError(f"not valid YAML: {reason}", None if mark is None else mark.line + 1) from None
    except yaml.YAMLError as error:
        raise _UnreadableError(f"not valid YAML: {' '.join(str(error).split())}", None) from None


def _line_number(event: yaml.Event) -> int:
    assert event.start_mark is not None
    return event.start_mark.line + 1


class _Composer:
    """Builds values from parser events, depth first."""

    def __init__(self, events: Iterator[yaml.Event]) -> None:
        self.events = events
        self.lines: dict[FieldPath, int] = {}

    def document(self) -> Document:
        value: Value = None
        documents = 0
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self.fail(event, "a run file holds one document, here a second one begins")
                value = self.value(next(self.events), ())
        return Document(value, self.lines)

    def value(self, event: yaml.Event, path: FieldPath) -> Value:
        self.lines[path] = _line_number(event)
        # A few nested aliases stand for billions of values: a small file could then fill any memory.
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            self.fail(event, "anchors and aliases (&name, *name) are not read in run files; write the value out")
        tag = getattr(event, "tag", None)
        if tag is not None and tag != "!":
            self.fail(event, f"tags ({tag}) are not read in run files")
        if len(path) > MAX_DEPTH:
            self.fail(event, f"nested more than {MAX_DEPTH} deep")
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(path)
        assert isinstance(event, yaml.ScalarEvent)
        return self.scalar(event)

    def mapping(self, path: FieldPath) -> dict[str, Value]:
        found: dict[str, Value] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self.fail(event, "a field name must be plain text")
            key: str = event.value
            # YAML's own loader keeps the last one, and the user would look at the first.
            if key in found:
                first = self.lines[(*path, key)]
                self.fail(event, f"{dotted_name((*path, key))} is given twice, first on line {first}")
            line = _line_number(event)
            found[key] = self.value(next(self.events), (*path, key))
            self.lines[(*path, key)] = line
        return found

    def sequence(self, path: FieldPath) -> list[Value]:
        found: list[Value] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            found.append(self.value(event, (*path, len(found))))
        return found

    def scalar(self, event: yaml.ScalarEvent) -> Scalar:
        text: str = event.value
        if any("\ud800" <= character <= "\udfff" for character in text):
            self.fail(event, "half of a surrogate pair is not text")
        # `implicit[0]`: the scalar is neither quoted nor tagged
        return plain_scalar(text) if event.implicit[0] else text

    def fail(self, event: yaml.Event, reason: str) -> NoReturn:
        raise _UnreadableError(reason, _line_number(event))


def dotted_name(path: FieldPath) -> str:
    """Return a path as it is written in messages and overrides: `data.sources.0.weight`."""
    return ".".join(_shorten_name(str(part)) for part in path)


def _shorten_name(part: str) -> str:
    text = part if part.isprintable() else ascii(part)
    return text if len(text) <= 60 else text[:57] + "..."


def _flow_pieces(value: object) -> Iterator[str]:
    """Yield the text of a value in YAML's flow style, piece by piece."""
    if isinstance(value, dict):
        yield "{"
        for place, (key, item) in enumerate(value.items()):
            yield ", " if place else ""
            yield from _flow_pieces(key)
            yield ": "
            yield from _flow_pieces(item)
        yield "}"
    elif isinstance(value, list | tuple):
        yield "["
        for place, item in enumerate(value):
            yield ", " if place else ""
            yield from _flow_pieces(item)
        yield "]"
    else:
        yield _flow_scalar(value)


def _flow_scalar(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        reads_back = value == value.strip() and value.isprintable() and plain_scalar(value) == value
        return value if reads_back else (ascii(value) if not value.isprintable() else f'"{value}"')
    return str(value)
