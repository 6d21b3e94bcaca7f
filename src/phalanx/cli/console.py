"""What the verbs print with: results go to stdout, everything else to stderr.

With `--json` a verb prints exactly one JSON object, through `print_json`, and nothing else on stdout.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from phalanx.errors import ConfigError, PhalanxError
from phalanx.files import finite, require_replaceable, write_atomically
from phalanx.printable import printable
from phalanx.printable_console import plain_console

UNWRAPPED = 1000
"""Columns for output that no terminal shows: lines stay whole for grep and for files."""


def output() -> Console:
    """A console for results on stdout; colours and line breaks are for terminals only."""
    return _console(stderr=False)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object. Numbers that JSON cannot hold (NaN, infinities) become null."""
    print(json.dumps(finite(value), indent=2, allow_nan=False))


def for_terminal(text: str) -> str:
    """What to write to stdout of a text that a model wrote: the text itself, or on a terminal what cannot act there."""
    return printable(text) if sys.stdout.isatty() else text


def write_file(file: Path, text: str) -> None:
    """Write what the command line asked for. Raises PhalanxError where the file cannot be written."""
    require_replaceable(file)
    try:
        write_atomically(file, text)
    except OSError as error:
        raise PhalanxError(f"cannot write {file}: {error.strerror}; name another file") from error


def require_folder(folder: Path, option: str) -> None:
    """Refuse a folder of the command line in which nothing could be written, before there is anything to write.

    Raises ConfigError."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"{option} {folder}: {there} is a file; name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {folder}: nothing may be written in {there}; name another folder")


def print_note(text: str) -> None:
    """Print what happened, and is no error, on stderr."""
    _console(stderr=True).print(Text(text), soft_wrap=True)


def print_error(text: str) -> None:
    """Print an error message on stderr, later lines aligned with the first: `error: ...`."""
    _print_labelled("error: ", "bold red", text)


def print_warning(text: str) -> None:
    """Print a warning on stderr, later lines aligned with the first: `warning: ...`."""
    _print_labelled("warning: ", "bold yellow", text)


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print labels and values in two columns, indented by two, long values wrapped within theirs."""
    console, pairs = output(), list(pairs)
    label_width = max((len(label) for label, _ in pairs), default=0) + 2
    for label, value in pairs:
        lines = wrapped(value, console.width - label_width - 2, hanging="")
        text = ("\n" + " " * (label_width + 2)).join(lines)
        console.print(Text.assemble((f"  {label:{label_width}}", "bold"), text), soft_wrap=True)


def short_count(number: float) -> str:
    """Three digits and a unit: 6,649,024,512 -> "6.65B"."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size * 0.9995:
            scaled = number / size
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f}{unit}"
    return f"{number:g}"


def wrapped(line: str, width: int, hanging: str = "  ") -> list[str]:
    """Return `line` in pieces of at most `width` columns, later ones indented by `hanging`; words and paths stay whole."""
    margin = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line,
        max(20, width),
        subsequent_indent=margin + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def _print_labelled(label: str, style: str, text: str) -> None:
    console = _console(stderr=True)
    lines = [piece for line in text.splitlines() for piece in wrapped(line, console.width - len(label))]
    console.print(Text.assemble((label, style), ("\n" + " " * len(label)).join(lines)), soft_wrap=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else UNWRAPPED
    return plain_console(stderr=stderr, width=width)
