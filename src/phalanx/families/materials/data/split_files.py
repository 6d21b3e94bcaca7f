"""Splits that others published: files that list which structures of a source are for training, validation and test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError
from phalanx.families.materials.config import SplitFiles
from phalanx.families.materials.data.array_files import Int64Array
from phalanx.families.materials.data.graph_shards import SPLITS

LEFT_OUT = len(SPLITS)
"""In place of a split's number: no list names the structure."""


def list_files(files: SplitFiles) -> list[Path]:
    """Return the files that are named. Raises DataError where there is no such file."""
    found = [Path(file) for file in (getattr(files, name) for name in SPLITS) if file is not None]
    for path in found:
        if not path.is_file():
            raise DataError(f"{path}: no such file; split of a source names files that list structures")
    return found


def read_splits(files: SplitFiles, structures: int) -> npt.NDArray[np.uint8]:
    """Return the number of the split of each of a source's structures, in `SPLITS`, or `LEFT_OUT`.

    Raises DataError for numbers that are none or beyond the last structure, for a structure that is listed twice, and for no
    structure to train on.
    """
    splits = np.full(structures, LEFT_OUT, dtype=np.uint8)
    for number, name in enumerate(SPLITS):
        file: str | None = getattr(files, name)
        if file is None:
            continue
        listed = _read_numbers(Path(file))
        outside = listed[(listed < 0) | (listed >= structures)]
        if len(outside):
            raise DataError(
                f"{file}: it lists structure {outside[0]}, and the source has 0 to {structures - 1}; numbers count from 0 "
                "through all files of the source, in the order of their names"
            )
        unique, counts = np.unique(listed, return_counts=True)
        if (counts > 1).any():
            raise DataError(f"{file}: it lists structure {unique[counts > 1][0]} twice; list each once")
        taken = unique[splits[unique] != LEFT_OUT]
        if len(taken):
            other = getattr(files, SPLITS[splits[taken[0]]])
            raise DataError(
                f"{file}: it lists structure {taken[0]}, as {other} does ({len(taken):,} in both); a structure has one split"
            )
        splits[unique] = number
    if not (splits == SPLITS.index("train")).any():
        raise DataError(f"{files.train}: it lists no structure, so there is nothing to train on")
    return splits


def check_groups(splits: npt.NDArray[np.uint8], groups: Int64Array, files: SplitFiles, group_by: str) -> None:
    """Refuse splits that part structures of one group. groups: equal where structures belong together. Raises DataError."""
    pairs = np.unique(np.stack((groups, splits.astype(np.int64))), axis=1)
    group, counts = np.unique(pairs[0], return_counts=True)
    parted = group[counts > 1]
    if len(parted):
        one, other = (getattr(files, SPLITS[number]) for number in pairs[1][pairs[0] == parted[0]][:2])
        raise DataError(
            f"{one} and {other} part structures of the same {group_by} ({len(parted):,} of {len(group):,} groups), which "
            "group_by keeps in one split; list them in one file, or leave group_by out"
        )


def _read_numbers(path: Path) -> Int64Array:
    """Return the whole numbers in a text or JSON list, separated by blanks, commas or new lines."""
    try:
        words = path.read_text("utf-8").translate(str.maketrans(",[]", "   ")).split()
        # numpy.savetxt writes whole numbers as 1.000e+00 where nobody tells it otherwise.
        numbers = np.array(words, dtype=np.float64)
    except ValueError as error:
        raise DataError(f"{path}: it is no list of whole numbers ({error})") from None
    strange = numbers[~np.isfinite(numbers) | (numbers != np.floor(numbers))]
    if len(strange):
        raise DataError(f"{path}: it lists {strange[0]}, which is no whole number")
    return numbers.astype(np.int64)
