"""How far preparing data is: a bar on a terminal, a line for each tenth elsewhere; on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from phalanx.printable_console import plain_console

Report = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is."""


@contextlib.contextmanager
def progress() -> Iterator[Report]:
    """Shows what is reported to it while the block runs."""
    console = plain_console(stderr=True)
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield report


def _lines(console: Console) -> Report:
    shown: dict[str, int] = {}

    def report(what: str, done: int, total: int) -> None:
        tenth = 10 * done // max(1, total)
        if tenth > shown.get(what, 0):
            shown[what] = tenth
            console.print(f"{what}: {10 * tenth}%", soft_wrap=True)

    return report
