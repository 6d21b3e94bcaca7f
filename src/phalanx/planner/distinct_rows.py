"""Which rows of a table of whole numbers are alike: what many layouts share is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_TABLE = 100_000
"""Numbers up to which a table over all of them is quicker than sorting."""


def distinct_rows(columns: Sequence[npt.NDArray[Any]]) -> tuple[Ints, Ints]:
    """Return the positions of rows that differ from each other, and for every row which of those it is like.

    columns: numbers from 0, of one length. Quick for a million rows of small numbers; never wrong for large ones, since
    what has been read is numbered anew before a code of several columns could overflow.
    """
    code, span = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        number, size = column, int(column.max(initial=0)) + 1
        if span * size > _TABLE:
            first, code = _distinct_numbers(code)
            span = len(first)
        if span * size > _TABLE:
            first, number = _distinct_numbers(column)
            size = len(first)
        code, span = code * size + number, span * size
    return _distinct_numbers(code)


def _distinct_numbers(column: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    highest = int(column.max(initial=0))
    # a table over so many numbers would take longer than sorting them
    if highest > _TABLE:
        _, first, which = np.unique(column, return_index=True, return_inverse=True)
        return first, which
    place = np.full(highest + 1, -1, np.int64)
    column = column.astype(np.int64, copy=False)
    # of equal numbers the last position stays, and stands for all of them
    place[column] = np.arange(len(column))
    used = np.flatnonzero(place >= 0)
    first = place[used]
    place[used] = np.arange(len(used))
    return first, place[column]
