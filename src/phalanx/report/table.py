"""Tables: columns are declared once, and written as text for a terminal, as Markdown or, by `pieces.html`, as HTML."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

RowT = TypeVar("RowT")
BEGINNING = 24
"""Characters of the last column for which others give way where lines are cut."""


@dataclass(frozen=True)
class Column(Generic[RowT]):
    """A column of a table: its head, and what stands below it for each row."""

    head: str
    cell: Callable[[RowT], object]
    align: Literal["left", "right"] = "right"
    gives_way: int = 0
    """Rank in which columns are left out on a narrow terminal: the highest first, those of 0 never."""
    narrow: Column[RowT] | None = None
    """Column that takes its place once it is left out."""
    style: Callable[[RowT], str] | None = None
    """Class of a cell on a page, by the row."""

    def classes(self, row: RowT) -> str:
        """Return the classes of the cell of a row on a page."""
        return " ".join(filter(None, (self.align, self.style(row) if self.style is not None else "")))


def write_text_table(
    columns: Sequence[Column[RowT]],
    rows: Sequence[RowT],
    *,
    width: int | None = None,
    indent: str = "",
    heads: bool = True,
    numbered: bool = False,
    folded: bool = False,
    cut: bool = False,
) -> list[str]:
    """Return the lines of a table for a terminal, the heads first.

    Args:
        columns: what is written of a row.
        rows: the rows, in order.
        width: columns of the terminal; those of the table that matter least give way until it fits. None leaves all.
        indent: what each line begins with.
        heads: whether the first line names the columns.
        numbered: whether rows are numbered from 1.
        folded: whether cells of the last column are broken into several lines where the table is too wide still.
        cut: whether lines end at `width`; then other columns give way only to the beginning of the last one.
    """
    # Numbers of rows are a column like any other, without a head.
    first = [["", *(str(number + 1) for number in range(len(rows)))]] if numbered else []
    # from the whole table to the narrowest: the first that fits, or else the narrowest
    for limit in sorted({column.gives_way for column in columns}, reverse=True):
        narrowed = [column if column.gives_way <= limit else column.narrow for column in columns]
        shown = [column for column in narrowed if column is not None]
        texts = [[column.head, *(str(column.cell(row)) for row in rows)] for column in shown]
        sides = [*("right" for _ in first), *(column.align for column in shown)]
        padded: list[list[str]] = []
        for cells, side in zip([*first, *texts], sides, strict=True):
            size = max(map(len, cells))
            padded.append([cell.ljust(size) if side == "left" else cell.rjust(size) for cell in cells])
        lines = [(indent + "  ".join(parts)).rstrip() for parts in zip(*padded, strict=True)]
        start = len(indent) + sum(len(parts[0]) + 2 for parts in padded[:-1])
        longest = max(map(len, lines))
        if width is None or (min(longest, start + BEGINNING) if cut else longest) <= width:
            break
    if cut and width is not None:
        lines = [cut_line(line, width) for line in lines]
    elif folded and width is not None:
        unfolded, lines = lines, []
        for line in unfolded:
            # the pieces of the last cell stand below each other, under its head
            pieces = textwrap.wrap(line[start:], max(20, width - start)) or [""]
            lines += [line[:start] + pieces[0], *(" " * start + piece for piece in pieces[1:])]
    return lines if heads else lines[1:]


def cut_line(line: str, width: int) -> str:
    """Return a line cut to `width` characters, with a mark at its end where something is missing."""
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"


def write_markdown_table(columns: Sequence[Column[RowT]], rows: Sequence[RowT]) -> Iterator[str]:
    """Yield the lines of a Markdown table, the heads first."""
    yield f"| {' | '.join(column.head for column in columns)} |"
    yield f"| {' | '.join('---:' if column.align == 'right' else '---' for column in columns)} |"
    for row in rows:
        yield f"| {' | '.join(str(column.cell(row)) for column in columns)} |"
