"""Which rows of a table of whole numbers are alike: what many layouts share is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def distinct_rows(columns: Sequence[npt.NDArray[Any]]) -> tuple[Ints, Ints]:
    """Return the positions of rows that differ from each other, and for every row which of those it is like.

    columns: numbers of one length, a column each.
    """
    _, first, which = np.unique(np.stack(columns, axis=1), axis=0, return_index=True, return_inverse=True)
    # numpy 2.0 gives the second as a column.
    return first, which.reshape(-1)
