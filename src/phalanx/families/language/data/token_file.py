"""One file of token ids, read by place."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError


class TokenFile:
    """Token ids of one file, from its first byte to its last.

    Read and not mapped: a mapped file that is cut short while a run reads it ends the process by a signal, without a word.
    """

    def __init__(self, path: Path, dtype: np.dtype[np.integer]) -> None:
        """Open it. Raises DataError where that is not possible."""
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        self.path = path
        self._dtype = dtype
        self._length = os.fstat(self._file.fileno()).st_size // dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def read(self, first: int, last: int) -> npt.NDArray[np.integer]:
        """Return the ids from `first` to before `last`, fewer at the end. Raises DataError for a file cut short since."""
        last = min(last, self._length)
        return np.frombuffer(self.read_bytes(first * self._dtype.itemsize, last * self._dtype.itemsize), self._dtype)

    def read_bytes(self, first: int, last: int) -> bytes:
        """Return bytes from `first` to before `last`. Raises DataError for a file cut short since."""
        return read_bytes(self._file.fileno(), self.path, first, last)


def read_bytes(descriptor: int, path: Path, first: int, last: int) -> bytes:
    """Return bytes from `first` to before `last` of a file. Raises DataError where they are not there or cannot be read."""
    parts = []
    while first < last:
        try:
            part = os.pread(descriptor, last - first, first)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror} at byte {first}") from error
        if not part:
            found = os.fstat(descriptor).st_size
            raise DataError(f"{path}: {found} bytes found, {last} expected; the file was cut short while it was read")
        parts.append(part)
        first += len(part)
    return b"".join(parts)
