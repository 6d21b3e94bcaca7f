"""A terminal that shows text of others as it is and lets none of it act."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from phalanx.printable import printable


class PrintableConsole(Console):
    """See `rich.console.Console`; control characters in what is printed are written out (see `printable`)."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The parts of a text, table or other thing to print."""
        for segment in super().render(renderable, options):
            # Rich's own control codes, as of a progress bar, are marked as such.
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def plain_console(*, stderr: bool, **settings: Any) -> PrintableConsole:
    """A console that takes nothing in a text for markup, an emoji or something to highlight."""
    return PrintableConsole(stderr=stderr, highlight=False, emoji=False, markup=False, **settings)
