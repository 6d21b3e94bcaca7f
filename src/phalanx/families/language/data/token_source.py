"""Streams of tokens that a run can read: one interface, whatever the format on disk.

A source is one split of one data set: a long stream of tokens in which documents follow each other. It is read by place,
in any order, and holds neither a position nor any state.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError
from phalanx.remote_files import RemoteFile, remote_file

Int64Array = npt.NDArray[np.int64]


class TokenSource(ABC):
    """One split of one data set."""

    path: Path
    """Where the data lie, for messages."""
    tokens: int
    """Length of the stream."""
    fingerprint: str
    """Changes whenever the same place would give another token."""
    vocab_size: int | None = None
    """One more than the largest id that can occur; None when the format does not say, then batches are checked."""
    documents: int | None = None
    """Documents of the split; None when the format does not say."""
    text_bytes: int | None = None
    """UTF-8 bytes of the raw text of the split; None when the format does not say."""
    tokenizer: Path | None = None
    """A tokenizer.json that decodes the tokens; None when the format comes without one."""
    end_of_document: int | None = None
    """Id that ends each document; None when the format does not say."""

    unchecked: str | None = None
    """What `verify` cannot tell, as the end of a sentence; None where it compares a checksum of every byte."""

    @abstractmethod
    def read(self, starts: Int64Array, length: int) -> Int64Array:
        """Return tokens [n, length]: row i is the stream from starts[i] on.

        starts: int64 [n]; starts[i] + length never exceeds `tokens`. Raises DataError for a file changed since opening.
        """

    @abstractmethod
    def document_of(self, places: Int64Array) -> Int64Array:
        """Return for each place in the stream the number of its document (any increasing numbering), same shape."""

    @abstractmethod
    def verify(self) -> None:
        """Read everything and compare checksums. Raises DataError naming the file, expected and found."""

    def samples(self, length: int) -> int:
        """Return the number of whole samples of `length` tokens, each with the token after its last as target.

        Samples do not overlap.
        """
        return max(0, (self.tokens - 1) // length)

    def require_samples(self, length: int) -> None:
        """Raise DataError where there is not one whole sample of `length` tokens."""
        if self.samples(length) == 0:
            raise DataError(
                f"{self.path} holds {self.tokens} tokens, too few for one sample of data.sequence_length={length} "
                "and its last target"
            )

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raise DataError where tokens may have ids that a model of `vocab_size` rows has none for, as far as is known."""
        if self.vocab_size is not None and self.vocab_size > vocab_size:
            raise DataError(
                f"{self.path}: its tokenizer has {self.vocab_size} tokens, model.vocab_size={vocab_size}; "
                f"raise model.vocab_size to at least {self.vocab_size}"
            )


class TokenFile:
    """Token ids of one file, from its first byte to its last.

    Read and not mapped: a mapped file that is cut short while a run reads it ends the process by a signal, without a word.
    """

    def __init__(self, path: Path, dtype: np.dtype[np.integer]) -> None:
        """Open the file. Raises DataError where that is not possible."""
        self.path = path
        self.dtype = dtype
        self.remote = remote_file(path)
        if self.remote is not None:
            self._length = self.remote.size // dtype.itemsize
            return
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        self._length = os.fstat(self._file.fileno()).st_size // dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def read(self, first: int, last: int) -> npt.NDArray[np.integer]:
        """Return the ids from `first` to before `last`, fewer at the end. Raises DataError for a file cut short since."""
        # The caller asks for a stretch that may go on in the next file.
        last = min(last, self._length)
        return np.frombuffer(self.read_bytes(first * self.dtype.itemsize, last * self.dtype.itemsize), self.dtype)

    def locate(self, first: int, last: int) -> tuple[RemoteFile, int, int]:
        """Return the remote file, and the bytes there of the ids from `first` to before `last`."""
        assert self.remote is not None
        return self.remote, first * self.dtype.itemsize, last * self.dtype.itemsize

    def read_bytes(self, first: int, last: int) -> bytes:
        """Return bytes from `first` to before `last`. Raises DataError for a file cut short since."""
        if self.remote is not None:
            return self.remote.read(first, last)
        return read_bytes(self._file.fileno(), self.path, first, last)


class SegmentedStream:
    """Several token files read as one stream."""

    def __init__(self, segments: list[TokenFile]) -> None:
        self.segments = segments
        self.ends = np.cumsum([len(segment) for segment in segments], dtype=np.int64)
        self.length = int(self.ends[-1]) if segments else 0

    def read(self, starts: Int64Array, length: int) -> Int64Array:
        """Return tokens [n, length] from each of `starts` on, as int64."""
        segments = np.searchsorted(self.ends, starts, side="right")
        if self.segments and self.segments[0].remote is not None:
            # All that is not kept on this machine is asked for at once.
            stretches: list[tuple[RemoteFile, int, int]] = []
            for start, first in zip(starts.tolist(), segments.tolist(), strict=True):
                segment = first
                offset, left = start - (int(self.ends[segment - 1]) if segment else 0), length
                while left:
                    file = self.segments[segment]
                    last = min(offset + left, len(file))
                    stretches.append(file.locate(offset, last))
                    left -= last - offset
                    segment, offset = segment + 1, 0
            found = b"".join(self.segments[0].remote.folder.read_ranges(stretches))
            return np.frombuffer(found, self.segments[0].dtype).reshape(len(starts), length).astype(np.int64)
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start, first in zip(out, starts.tolist(), segments.tolist(), strict=True):
            segment = first
            offset = start - (int(self.ends[segment - 1]) if segment else 0)
            filled = 0
            # A sample may begin in one file and end in the next.
            while filled < length:
                part = self.segments[segment].read(offset, offset + length - filled)
                row[filled : filled + len(part)] = part
                filled += len(part)
                segment, offset = segment + 1, 0
        return out


def read_bytes(descriptor: int, path: Path, first: int, last: int) -> bytes:
    """Return bytes from `first` to before `last` of an open file; `path` names it in messages.

    Raises DataError where they are not there or cannot be read.
    """
    parts = []
    # One call may return fewer bytes than were asked for.
    while first < last:
        try:
            part = os.pread(descriptor, last - first, first)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror} at byte {first}") from error
        # The operating system returns nothing at the end of a file: it has shrunk since it was opened.
        if not part:
            found = os.fstat(descriptor).st_size
            raise DataError(f"{path}: {found} bytes found, {last} expected; the file was cut short while it was read")
        parts.append(part)
        first += len(part)
    return b"".join(parts)
