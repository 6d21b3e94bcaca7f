"""Files of one JSON object a line, as runs write them, read in the one way that all readers share.

A file may end in half a line, which a kill left, and may hold lines that a crash or a faulty disk has damaged. Neither keeps
the sound lines from being read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.files import open_own_file

MAX_LINE_BYTES = 1 << 22
"""A longer line is damaged: no metrics or event, samples included, has as much to say."""
_TAIL_BYTES = 8192
"""Bytes that are read of a file of which only the last record is wanted."""
_SHOWN = 5
"""Damaged lines that a message names before it only counts them."""


@dataclass(frozen=True)
class SoundLine:
    """A line that holds a JSON object."""

    number: int
    """From 1."""
    text: bytes
    """Without its end."""
    record: dict[str, Any]


@dataclass(frozen=True)
class DamagedLine:
    """A line that does not hold one, or holds one that its file should not."""

    number: int
    text: bytes
    problem: str
    """What is wrong with it, as it follows "the line"."""


@dataclass(frozen=True)
class JsonLinesFile:
    """What a file of JSON lines holds."""

    path: Path
    sound: list[SoundLine]
    damaged: list[DamagedLine]
    torn: DamagedLine | None
    """A last line without its end that is no whole object, as a kill leaves it."""

    @property
    def records(self) -> list[dict[str, Any]]:
        """Return the objects, in the order of their lines."""
        return [line.record for line in self.sound]

    def describe_damage(self) -> str:
        """Return how many lines are damaged, which, and what is wrong with the first; at least one is."""
        count = len(self.damaged)
        numbers = ", ".join(f"{line.number:,}" for line in self.damaged[:_SHOWN])
        more = f" and {count - _SHOWN:,} more" if count > _SHOWN else ""
        words = f"{count:,} damaged line{'s' if count > 1 else ''} ({numbers}{more})"
        return f"{self.path.name}: {words}; {'the first' if count > 1 else 'it'} {self.damaged[0].problem}"


def read_json_lines(path: Path, problem_of: Callable[[dict[str, Any]], str | None] = lambda _: None) -> JsonLinesFile:
    """Read a file of JSON lines.

    problem_of: says what is wrong with an object that is not what such a file holds, or None. Raises PhalanxError for what
    is no regular file, and FileNotFoundError.
    """
    sound: list[SoundLine] = []
    damaged: list[DamagedLine] = []
    torn = None
    with open_own_file(path) as file:
        number = 0
        while text := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            whole = text.endswith(b"\n")
            if not whole and len(text) > MAX_LINE_BYTES:
                while part := file.readline(MAX_LINE_BYTES):
                    if part.endswith(b"\n"):
                        break
                damaged.append(DamagedLine(number, text[:1000], f"is longer than {MAX_LINE_BYTES:,} bytes"))
                continue
            found = _parse_object(text.rstrip(b"\n"))
            problem = found if isinstance(found, str) else problem_of(found)
            if not isinstance(found, str) and problem is None:
                sound.append(SoundLine(number, text.rstrip(b"\n"), found))
            elif whole or not isinstance(found, str):
                damaged.append(DamagedLine(number, text.rstrip(b"\n"), str(problem)))
            else:
                torn = DamagedLine(number, text, found)
    return JsonLinesFile(path, sound, damaged, torn)


def read_last_record(path: Path, problem_of: Callable[[dict[str, Any]], str | None]) -> dict[str, Any] | None:
    """Return the last sound record near the end of a file that may be growing; None where there is none.

    problem_of: as for `read_json_lines`.
    """
    with open_own_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        lines = file.read(_TAIL_BYTES).split(b"\n")
    # the last piece is empty, or a line that is being written; the first one may be torn by the seek
    for line in reversed(lines[:-1]):
        found = _parse_object(line)
        if not isinstance(found, str) and problem_of(found) is None:
            return found
    return None


def require_step(record: dict[str, Any]) -> str | None:
    """Return what is wrong with an object that must say of which step it is, or None."""
    step = record.get("step")
    if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53:
        return None
    return f"has step {step!r:.80}, not a whole number from 0"


def _parse_object(text: bytes) -> dict[str, Any] | str:
    """Return the JSON object that `text` holds, or what is wrong with it."""
    try:
        value = json.loads(text)
    except RecursionError:
        return "is nested too deeply"
    except ValueError:
        return "is not JSON"
    return value if isinstance(value, dict) else "is not a JSON object"
