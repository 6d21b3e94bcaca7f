"""Printing of all subcommands: results go to stdout, everything else to stderr.

With `--json` a subcommand prints exactly one JSON object, through `print_json`, and nothing else on stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from phalanx.errors import ConfigError, PhalanxError
from phalanx.files import replace_nonfinite, require_replaceable, write_atomically
from phalanx.printable import make_printable, plain_console, wrap_line, write_stderr
from phalanx.report.table import Column, RowT, write_text_table

UNWRAPPED = 1000
"""Columns for output that no terminal shows: lines stay whole for grep and for files."""
Report = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is."""


# --- results, on stdout ------------------------------------------------------------------------------------------------


def open_output() -> Console:
    """Return a console for results on stdout; colours and line breaks are for terminals only."""
    return _open_console(stderr=False)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object. Numbers that JSON cannot hold (NaN, infinities) become null."""
    # not through rich, which might break lines
    print(json.dumps(replace_nonfinite(value), indent=2, allow_nan=False))


def print_lines(lines: Iterable[str], style: str = "") -> None:
    """Print lines as they are; none is broken, whatever the width of the terminal."""
    console = open_output()
    for line in lines:
        console.print(line, soft_wrap=True, style=style or None)


def print_table(
    columns: Sequence[Column[RowT]], rows: Sequence[RowT], *, indent: str = "  ", folded: bool = False
) -> None:
    """Print a table with its heads. folded: whether the last column is broken where the terminal is too narrow."""
    width = open_output().width if folded else None
    heads, *lines = write_text_table(columns, rows, width=width, indent=indent, folded=folded)
    print_lines([heads], style="bold")
    print_lines(lines)


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print labels and values in two columns, indented by two, long values wrapped within theirs."""
    console, pairs = open_output(), list(pairs)
    label_width = max((len(label) for label, _ in pairs), default=0) + 2
    for label, value in pairs:
        lines = wrap_line(value, console.width - label_width - 2, hanging="")
        text = ("\n" + " " * (label_width + 2)).join(lines)
        console.print(Text.assemble((f"  {label:{label_width}}", "bold"), text), soft_wrap=True)


def make_safe_for_terminal(text: str) -> str:
    """Return what to write to stdout of a text that a model wrote: on a terminal, what cannot act there."""
    return make_printable(text) if sys.stdout.isatty() else text


# --- what happens, on stderr -------------------------------------------------------------------------------------------


def show_examples(*commands: str) -> str:
    """Return help text that shows commands, one a line (the mark in front keeps the lines apart)."""
    return "\b\n" + "\n".join(["Examples:" if len(commands) > 1 else "Example:", *(f"  {line}" for line in commands)])


def print_error(text: str) -> None:
    """Print an error on stderr, later lines aligned with the first: `error: ...`."""
    _print_labelled("error: ", "bold red", text)


def print_warning(text: str) -> None:
    """Print a warning on stderr, later lines aligned with the first: `warning: ...`."""
    _print_labelled("warning: ", "bold yellow", text)


def _print_labelled(label: str, style: str, text: str) -> None:
    console = _open_console(stderr=True)
    lines = [piece for line in text.splitlines() for piece in wrap_line(line, console.width - len(label))]
    console.print(Text.assemble((label, style), ("\n" + " " * len(label)).join(lines)), soft_wrap=True)


@contextlib.contextmanager
def show_preparation() -> Iterator[Report]:
    """Show what is reported to it while the block runs: bars on a terminal, a line for each tenth elsewhere."""
    console = plain_console(stderr=True)
    if not console.is_terminal:
        tenths: dict[str, int] = {}

        def report_tenths(what: str, done: int, total: int) -> None:
            tenth = 10 * done // max(1, total)
            if tenth > tenths.get(what, 0):
                tenths[what] = tenth
                write_stderr(f"{what}: {10 * tenth}%")

        yield report_tenths
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, Any] = {}

        def report_to_bars(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield report_to_bars


def make_progress_bar() -> Progress:
    """Return a bar on stderr that disappears when it is done; nothing at all where stderr is no terminal."""
    console = plain_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


# --- files and text ----------------------------------------------------------------------------------------------------


def write_file(file: Path, text: str) -> None:
    """Write what the command line asked for. Raises PhalanxError where the file cannot be written."""
    require_replaceable(file)
    try:
        write_atomically(file, text)
    except OSError as error:
        raise PhalanxError(f"cannot write {file}: {error.strerror}; name another file") from error


def write_asked(**files: tuple[Path | None, Callable[[], str]]) -> dict[str, str]:
    """Write the files whose paths were asked for, and return these by their names. Raises as `write_file` does.

    files: by name a path, None where nobody asked, and what makes the text.
    """
    written = {}
    for name, (file, make_text) in files.items():
        if file is not None:
            write_file(file, make_text())
            written[name] = str(file)
    return written


def require_out_folder(folder: Path) -> None:
    """Refuse a folder of `--out` in which nothing could be written, before there is anything to write.

    Raises ConfigError."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"--out {folder}: {there} is a file; name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {folder}: nothing may be written in {there}; name another folder")


def short_count(number: float) -> str:
    """Write a count in three digits, trailing zeros kept, and a unit: 6,649,024,512 -> "6.65B"."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        # 999,999 would round to 1000K
        if number >= size * 0.9995:
            scaled = number / size
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f}{unit}"
    return f"{number:g}"


def _open_console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else UNWRAPPED
    return plain_console(stderr=stderr, width=width)
