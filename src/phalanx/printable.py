"""Text that others chose made fit to print: names of files, fields, samples, messages of libraries.

Whatever this program writes to a terminal goes through here, through a console or as a line on stderr.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but line ends and tabs, marks that turn the direction of text around, and halves of characters, which
have no bytes."""


def make_printable(text: str) -> str:
    """Return `text` with symbols (U+2400 on) or codes in place of characters that act on a terminal or page."""
    return _UNPRINTABLE.sub(_choose_symbol, text)


def _choose_symbol(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"


def wrap_line(line: str, width: int, hanging: str = "  ") -> list[str]:
    """Return `line` in pieces of at most `width` columns, later ones indented by `hanging`; words and paths stay whole."""
    # wrap drops the margin of later lines
    margin = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line,
        max(20, width),
        subsequent_indent=margin + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def write_stderr(text: str) -> None:
    """Write a line to stderr, at once and in one piece: several ranks may write to the same terminal."""
    sys.stderr.write(make_printable(text) + "\n")
    sys.stderr.flush()


class PrintableConsole(Console):
    """See `rich.console.Console`; control characters in what is printed are written out (see `make_printable`)."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the parts of a text, table or other thing to print."""
        for segment in super().render(renderable, options):
            # rich's own control codes, as of a progress bar, are marked as such
            yield segment if segment.control else Segment(make_printable(segment.text), segment.style)


def plain_console(*, stderr: bool, **settings: Any) -> PrintableConsole:
    """Return a console that takes nothing in a text for markup, an emoji or something to highlight."""
    return PrintableConsole(stderr=stderr, highlight=False, emoji=False, markup=False, **settings)
