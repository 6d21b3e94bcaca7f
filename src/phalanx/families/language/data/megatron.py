"""Reading Megatron-LM data as it lies: PREFIX.bin with token ids and PREFIX.idx that says where sequences begin.

    .idx  magic, version, type of the ids, number of sequences, number of document indices;
          length of each sequence (int32), its byte in .bin (int64), first sequence of each document and the end (int64)
    .bin  the ids of all sequences, one after the other

Everything is little-endian. The files hold no checksum, no split and no tokenizer; `docs/reference/data_formats.md`
says what is made of that.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError
from phalanx.families.language.data.token_shards import Split
from phalanx.families.language.data.token_source import Int64Array, SegmentedStream, TokenFile, TokenSource
from phalanx.remote_files import is_file, local_copy, open_store, remote_file, remote_folder

ENDINGS = (".idx", ".bin")
"""Of the two files of a pair."""
VALIDATION_ENDINGS = ("_validation", "_valid", "_val")
"""What follows a prefix in the name of its validation data; the first that exists is taken."""

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_ID_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_OTHER_TYPES = {6: "float64", 7: "float32"}
_AT_ONCE = 2**20
_PROBES = 256
_PROBE_BYTES = 4096


def megatron_prefix(path: Path) -> Path | None:
    """Return the prefix that `path` means, given with or without .bin or .idx; None where neither file is there."""
    prefix = path.with_suffix("") if path.suffix in ENDINGS else path
    return prefix if any(is_file(_with_ending(prefix, ending)) for ending in ENDINGS) else None


def find_remote_megatron(address: str) -> Path | None:
    """Return the path that stands for the pair at `address`, a prefix with or without .bin or .idx, and for its validation
    data; None where no pair is there. Raises DataError where the store does not answer."""
    folder, _, name = address.rstrip("/").rpartition("/")
    name = name.removesuffix(".bin").removesuffix(".idx")
    store = open_store(folder)
    names = [f"{name}{middle}{ending}" for middle in ("", *VALIDATION_ENDINGS) for ending in ENDINGS]
    # A folder of a store may hold a million files: these few are asked for by name.
    found = {one: stored for one in names if (stored := store.find_file(one)) is not None}
    return remote_folder(folder, {}, found) / name if f"{name}.idx" in found else None


def megatron_split(prefix: Path, split: Split) -> Path | None:
    """Return the prefix of a split: `prefix` itself is train; validation is its sibling with a known ending, or None."""
    if split == "train":
        return prefix
    siblings = (_with_ending(prefix, ending) for ending in VALIDATION_ENDINGS)
    return next((sibling for sibling in siblings if megatron_prefix(sibling)), None)


class MegatronSource(TokenSource):
    """The sequences of one .bin/.idx pair as one stream.

    `fingerprint` covers the whole .idx, the length of .bin and 256 stretches of 4 KiB spread evenly over it, so that
    opening stays cheap: other data is told apart, a few ids changed in place are not.
    """

    def __init__(self, prefix: Path) -> None:
        """Open the pair at `prefix`. Raises DataError for a missing, truncated, lengthened or malformed file."""
        self.path = _with_ending(prefix, ".bin")
        self.unchecked = "Megatron files hold no checksums: an id changed in place is not noticed"
        # Sequences and documents are looked up all over the index: a remote one is copied whole.
        self._index = _Index.read(local_copy(_with_ending(prefix, ".idx")))
        self.tokens = self._index.count_tokens()
        self.documents = len(self._index.documents) - 1
        self._check_size()
        self._ids = TokenFile(self.path, self._index.dtype)
        self._stream = SegmentedStream([self._ids])
        digest = hashlib.sha256(self._index.content.data)
        size = len(self._ids) * self._index.dtype.itemsize
        # Spread over the file: hashing all of a terabyte would take longer than opening may.
        for start in np.linspace(0, max(0, size - _PROBE_BYTES), _PROBES, dtype=np.int64).tolist():
            digest.update(self._ids.read_bytes(start, min(size, start + _PROBE_BYTES)))
        self.fingerprint = digest.hexdigest()
        self._starts: Int64Array | None = None

    def read(self, starts: Int64Array, length: int) -> Int64Array:
        """Return tokens [n, length] from each of `starts` on."""
        return self._stream.read(starts, length)

    def document_of(self, places: Int64Array) -> Int64Array:
        """Return the number of the document that each place belongs to."""
        if self._starts is None:
            self._starts = self._index.document_starts(self.tokens)
        return np.searchsorted(self._starts, places, side="right") - 1

    def verify(self) -> None:
        """Check again that .bin is whole, and that no id is negative; the format has no checksums to compare."""
        self._check_size()
        # An unsigned id cannot be negative, and there is nothing else to compare.
        if self._index.dtype.kind == "u":
            return
        for first in range(0, self.tokens, _AT_ONCE):
            ids = self._ids.read(first, first + _AT_ONCE)
            negative = np.flatnonzero(ids < 0)
            if negative.size:
                place = first + int(negative[0])
                raise DataError(f"{self.path}: token {place} is {ids[negative[0]]}, below 0; the file was altered")

    def _check_size(self) -> None:
        remote = remote_file(self.path)
        try:
            found = self.path.stat().st_size if remote is None else remote.size
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror}; {self._index.path.name} lies beside it") from error
        expected = self.tokens * self._index.dtype.itemsize
        if found != expected:
            raise DataError(
                f"{self.path}: {found} bytes found, {expected} expected by {self._index.path.name}; "
                "one of the two is truncated or altered"
            )


@dataclass(frozen=True)
class _Index:
    """The content of an .idx file, left on disk."""

    path: Path
    content: npt.NDArray[np.uint8]
    dtype: np.dtype[np.integer]
    lengths: npt.NDArray[np.int32]
    """Tokens of each sequence."""
    pointers: Int64Array
    """Byte of .bin at which each sequence begins."""
    documents: Int64Array
    """First sequence of each document; the last entry is the number of sequences."""

    @classmethod
    def read(cls, path: Path) -> _Index:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; Megatron data is a .bin and an .idx side by side") from error
        if size < _HEADER.size:
            raise DataError(f"{path}: {size} bytes found, at least {_HEADER.size} expected; the file is truncated")
        # Mapped: an index of a large data set has gigabytes, which need not stay in memory.
        content = np.memmap(path, np.uint8, mode="r")
        magic, version, code, sequences, documents = _HEADER.unpack(content[: _HEADER.size].tobytes())
        # Each field is checked before the next is trusted: a wrong count would map beyond the end of the file.
        if magic != _MAGIC:
            raise DataError(f"{path}: begins with {magic!r}, {_MAGIC!r} expected; this is no Megatron index")
        if version != _VERSION:
            raise DataError(f"{path}: version {version} found, {_VERSION} expected")
        if code not in _ID_TYPES:
            found = _OTHER_TYPES.get(code, "unknown")
            raise DataError(f"{path}: type code {code} ({found}) found; token ids are {', '.join(_ID_TYPES.values())}")
        expected = _HEADER.size + 12 * sequences + 8 * documents
        if size != expected:
            raise DataError(
                f"{path}: {size} bytes found, {expected} expected for {sequences} sequences and {documents} document "
                "indices; the file is truncated, altered, or of a multimodal dataset, which cannot be read"
            )
        pointers_at = _HEADER.size + 4 * sequences
        starts = np.frombuffer(content, "<i8", documents, pointers_at + 8 * sequences)
        whole = starts.size and starts[0] == 0 and starts[-1] == sequences
        if not whole or (np.diff(starts) < 0).any():
            raise DataError(
                f"{path}: document indices must rise from 0 to {sequences}, the number of sequences, "
                "and do not; the file is altered"
            )
        return cls(
            path,
            content,
            np.dtype(_ID_TYPES[code]).newbyteorder("<"),
            np.frombuffer(content, "<i4", sequences, _HEADER.size),
            np.frombuffer(content, "<i8", sequences, pointers_at),
            starts,
        )

    def count_tokens(self) -> int:
        """Return the number of tokens of all sequences. Raises DataError unless each sequence begins where the one
        before it ends."""
        tokens = 0
        # In stretches: sums of the whole index would take several times its size in memory.
        for first in range(0, len(self.lengths), _AT_ONCE):
            lengths = self.lengths[first : first + _AT_ONCE].astype(np.int64)
            starts = tokens + np.cumsum(lengths) - lengths
            expected = starts * self.dtype.itemsize
            found = self.pointers[first : first + _AT_ONCE]
            wrong = np.flatnonzero((lengths < 0) | (found != expected))
            if wrong.size:
                at = int(wrong[0])
                raise DataError(
                    f"{self.path}: sequence {first + at} has {lengths[at]} tokens from byte {found[at]}, byte "
                    f"{expected[at]} expected; sequences must follow each other without gaps: "
                    "write the data again with Megatron's tools"
                )
            tokens += int(lengths.sum())
        return tokens

    def document_starts(self, tokens: int) -> Int64Array:
        """Return the place in the stream at which each document begins, and the end; 8 bytes a document."""
        starts = np.full(len(self.documents), tokens, dtype=np.int64)
        # The last entry, and those of empty documents at the end, point behind the last sequence.
        inner = self.documents < len(self.pointers)
        starts[inner] = self.pointers[self.documents[inner]] // self.dtype.itemsize
        return starts


def _with_ending(prefix: Path, ending: str) -> Path:
    return prefix.with_name(prefix.name + ending)
