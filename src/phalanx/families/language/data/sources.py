"""Bodies of tokens a run can read: one interface, whatever the format on disk.

A source is one split of one body: a long stream of tokens in which documents follow each other. It is read by place, in
any order; it holds no position and no state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from phalanx.families.language.data.token_file import TokenFile

Int64Array = npt.NDArray[np.int64]


class TokenSource(ABC):
    """One split of one body of tokens."""

    path: Path
    """Where it lies, for messages."""
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
        """Tokens [n, length]: row i is the stream from starts[i] on. starts[i] + length never exceeds `tokens`."""

    @abstractmethod
    def document_of(self, places: Int64Array) -> Int64Array:
        """For each place in the stream, the number of its document (any increasing numbering), same shape."""

    @abstractmethod
    def verify(self) -> None:
        """Read everything and compare checksums. Raises DataError naming the file, expected and found."""

    def samples(self, length: int) -> int:
        """Whole samples of `length` tokens, each with the token after its last as target; they do not overlap."""
        return max(0, (self.tokens - 1) // length)


class SegmentedStream:
    """Several files read as one stream."""

    def __init__(self, segments: list[TokenFile]) -> None:
        self.segments = segments
        self.ends = np.cumsum([len(segment) for segment in segments], dtype=np.int64)
        self.length = int(self.ends[-1]) if segments else 0

    def read(self, starts: Int64Array, length: int) -> Int64Array:
        """Tokens [n, length] from each of `starts` on, as int64."""
        out = np.empty((len(starts), length), dtype=np.int64)
        first = np.searchsorted(self.ends, starts, side="right")
        last = np.searchsorted(self.ends, starts + length - 1, side="right")
        for row, (start, a, b) in enumerate(zip(starts.tolist(), first.tolist(), last.tolist(), strict=True)):
            if a == b:
                offset = start - (int(self.ends[a - 1]) if a else 0)
                out[row] = self.segments[a].read(offset, offset + length)
            else:
                out[row] = self._across(start, length)
        return out

    def _across(self, start: int, length: int) -> npt.NDArray[np.generic]:
        parts, missing = [], length
        segment = int(np.searchsorted(self.ends, start, side="right"))
        offset = start - (int(self.ends[segment - 1]) if segment else 0)
        while missing:
            part = self.segments[segment].read(offset, offset + missing)
            parts.append(part)
            missing -= len(part)
            segment, offset = segment + 1, 0
        return np.concatenate(parts)
