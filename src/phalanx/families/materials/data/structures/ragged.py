"""Index arithmetic of ragged arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def ragged_ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """The ranges starts[i] .. starts[i] + lengths[i] - 1, one after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total, dtype=np.int64)


def offsets(lengths: Int64Array) -> Int64Array:
    """Where each of several runs of these lengths begins, and where the last one ends [n+1]."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)))
