"""Rows of whole numbers that are alike."""

from __future__ import annotations

import numpy as np

from phalanx.planner.distinct_rows import distinct_rows


def test_rows_are_those_that_numpy_finds() -> None:
    random = np.random.default_rng(0)
    table = random.integers(0, [3, 2, 50_000, 7], (400, 4))
    table[100:] = table[random.integers(0, 100, 300)]
    first, which = distinct_rows(list(table.T))
    assert len(first) == len(np.unique(table, axis=0))
    assert np.array_equal(table[first][which], table)


def test_many_columns_of_large_numbers_are_told_apart() -> None:
    """Eight columns of 256 values make up 2^64 rows: a code in 64 bits would forget the ninth."""
    table = np.full((3, 9), 255)
    table[1:, 0] = 0, 7
    first, which = distinct_rows(list(table.T))
    assert len(first) == 3
    assert np.array_equal(table[first][which], table)
