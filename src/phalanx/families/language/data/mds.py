"""Reading token shards in MosaicML's MDS format as they lie: a folder with an index.json and .mds files.

    index.json  for each shard: its columns, how each is encoded, its samples, its file's name, size and maybe hashes
    .mds        samples (u32), offsets[samples + 1] (u32, from the file's start), columns as JSON, the samples
    sample      the size (u32) of each column without a fixed one, then the bytes of all columns in order

Everything is little-endian. One column holds the tokens (`mds_columns`); the others are stepped over, never decoded.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import importlib
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, cast

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, field_validator

from phalanx.data.prepared_folder import Count, read_checked
from phalanx.errors import DataError
from phalanx.families.language.data.mds_columns import TokenColumn
from phalanx.families.language.data.token_shards import Split
from phalanx.families.language.data.token_source import Int64Array, TokenSource, read_bytes
from phalanx.object_store import StoredFile
from phalanx.remote_files import is_file, keep_file, local_copy, open_store, remote_file, remote_folder

INDEX = "index.json"
SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "validation": ("validation", "valid", "val")}
"""Names a split's subfolder may have; the first that exists is taken."""

_OPEN_SHARDS = 16384
_HASH_NAMES = {name for name in hashlib.algorithms_guaranteed if not name.startswith("shake_")}
_XXHASH_NAMES = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
"""Hashes that Streaming can write too, which the package xxhash computes."""
_UNPACKED_PART = 2**20
"""Bytes that are decompressed at a time."""


class _FileRecord(BaseModel):
    basename: str
    bytes: Count
    hashes: dict[str, str] = {}

    @field_validator("basename")
    @classmethod
    def _inside(cls, name: str) -> str:
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
            raise ValueError(f"{name!r} does not stay inside the folder")
        return name


class _ShardRecord(BaseModel):
    format: Literal["mds"]
    version: Literal[2]
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[Count | None]
    samples: Count
    raw_data: _FileRecord
    zip_data: _FileRecord | None = None
    compression: str | None = None


class _Index(BaseModel):
    version: Literal[2]
    shards: list[_ShardRecord]


def mds_split(folder: Path, split: Split) -> Path | None:
    """Return the folder of a split: a subfolder of its name; without any, `folder` itself is train and validation is
    None."""
    divided = {s: [folder / n for n in names if (folder / n / INDEX).is_file()] for s, names in SPLIT_FOLDERS.items()}
    if divided[split]:
        return divided[split][0]
    return folder if split == "train" and (folder / INDEX).is_file() else None


def is_mds(folder: Path) -> bool:
    """Return whether `folder`, or a split's subfolder of it, holds MDS shards."""
    return mds_split(folder, "train") is not None or mds_split(folder, "validation") is not None


def find_remote_mds(address: str) -> Path | None:
    """Return the path that stands for the folder of MDS shards at `address`; None where it holds none.

    Of shards that the index lists as compressed the compressed files are read. Raises DataError where the store does not
    answer, for an index that cannot be read, and for a shard that is not as long as the index says.
    """
    store = open_store(address)
    texts: dict[str, bytes] = {}
    for folder in ("", *(f"{name}/" for names in SPLIT_FOLDERS.values() for name in names)):
        with suppress(FileNotFoundError):
            texts[f"{folder}{INDEX}"] = store.read(f"{folder}{INDEX}")
    if not texts:
        return None
    path = remote_folder(address, texts, {})
    sizes = {
        f"{index.removesuffix(INDEX)}{file.basename}": file.bytes
        for index in texts
        for record in _read_index(path / index).shards
        for file in (record.zip_data or record.raw_data,)
    }
    # Where the store lists no files, those of the index are taken to be there.
    listed = store.list_files()
    files = {name: StoredFile(size) for name, size in sizes.items()} if listed is None else listed
    for name in sizes.keys() & files.keys():
        if files[name].size != sizes[name]:
            raise DataError(
                f"{address}/{name}: {files[name].size} bytes found, {sizes[name]} expected; the file is truncated or altered"
            )
    return remote_folder(address, {}, {name: files[name] for name in sizes if name in files})


def _read_index(path: Path) -> _Index:
    return read_checked(
        path, _Index, missing="an MDS folder has one", malformed="only MDS shards of version 2 can be read"
    )


class MdsSource(TokenSource):
    """The samples of a folder of MDS shards as one stream; each sample counts as one document.

    Opening reads the index and the table of offsets of each shard; 8 bytes a sample stay in memory. `fingerprint`
    covers the index (with the hashes it may hold), each sample's length and the beginning of each shard up to the end
    of its first sample: other data is told apart, ids changed in place further on are not.
    """

    def __init__(self, folder: Path, *, bytes_dtype: str = "int64") -> None:
        """Open all shards; a token column of encoding `bytes` holds ids of type `bytes_dtype`.

        Raises:
            DataError: a file that is missing, truncated, lengthened, malformed, compressed, or holds no tokens.
        """
        self.path = folder
        self._shards = [record for record in _read_index(folder / INDEX).shards if record.samples]
        without = [record for record in self._shards if not any(map(_can_compute, record.raw_data.hashes))]
        if without:
            missing = sorted({name for record in without for name in record.raw_data.hashes})
            why = f"in {INDEX}: an id changed in place is not noticed"
            if any(name in _XXHASH_NAMES for name in missing):
                why = f"but {', '.join(missing)}, which needs the package xxhash (pip install xxhash)"
            elif missing:
                why = f"but {', '.join(missing)}, which is not known"
            self.unchecked = f"{len(without)} of {len(self._shards)} shards have no hash {why}"
        self._bytes_dtype = bytes_dtype
        self._first_samples = np.cumsum([0] + [record.samples for record in self._shards], dtype=np.int64)
        # Open files are limited; those read longest ago are closed and opened again when needed.
        self._shard = lru_cache(maxsize=_OPEN_SHARDS)(self._open_shard)
        digest = hashlib.sha256((folder / INDEX).read_bytes() + bytes_dtype.encode())
        # The stream is read by place, so the length of every sample must be known.
        lengths = [self._shard(number).summarise(digest) for number in range(len(self._shards))]
        self._ends: Int64Array = np.cumsum(np.concatenate([np.empty(0, np.int64), *lengths]), dtype=np.int64)
        self.tokens = int(self._ends[-1]) if len(self._ends) else 0
        self.fingerprint = digest.hexdigest()

    def read(self, starts: Int64Array, length: int) -> Int64Array:
        """Return tokens [n, length] from each of `starts` on. Raises DataError for a sample changed since opening."""
        out = np.empty((len(starts), length), dtype=np.int64)
        samples = np.searchsorted(self._ends, starts, side="right").tolist()
        for row, start, first in zip(out, starts.tolist(), samples, strict=True):
            sample = first
            offset = start - (int(self._ends[first - 1]) if first else 0)
            filled = 0
            while filled < length:
                part = self._sample(sample)[offset : offset + length - filled]
                row[filled : filled + len(part)] = part
                filled += len(part)
                sample, offset = sample + 1, 0
        return out

    def document_of(self, places: Int64Array) -> Int64Array:
        """Return the number of the MDS sample that each place belongs to."""
        return np.searchsorted(self._ends, places, side="right")

    def verify(self) -> None:
        """Compare the hashes that the index holds and this machine can compute; where there are none, decode every sample
        and refuse negative ids."""
        for number, record in enumerate(self._shards):
            path = _check_size(self.path, record)
            known = {name: value for name, value in record.raw_data.hashes.items() if _can_compute(name)}
            for name, expected in known.items():
                new = getattr(_import_xxhash(), name) if name in _XXHASH_NAMES else partial(hashlib.new, name)
                with path.open("rb") as file:
                    found = str(hashlib.file_digest(file, new).hexdigest())
                if found != expected:
                    raise DataError(f"{path}: {name} {found} found, {expected} expected; the file was altered")
            # Without a hash, decoding finds at least what cannot be tokens.
            first, last = self._first_samples[number : number + 2].tolist()
            for sample in range(first, last) if not known else ():
                ids = self._sample(sample)
                if len(ids) and int(ids.min()) < 0:
                    raise DataError(f"{path}: sample {sample - first} holds token id {ids.min()}; the file was altered")

    def _sample(self, number: int) -> npt.NDArray[np.integer]:
        """Return token ids of a sample, counted over all shards."""
        shard = int(np.searchsorted(self._first_samples, number, side="right")) - 1
        local = number - int(self._first_samples[shard])
        opened = self._shard(shard)
        ids = opened.tokens(local)
        expected = int(self._ends[number]) - (int(self._ends[number - 1]) if number else 0)
        # Lengths were derived from sizes alone, without decoding: checked here as each sample is decoded.
        if len(ids) != expected:
            raise DataError(
                f"{opened.path}: sample {local} holds {len(ids)} tokens, {expected} expected from its size; the file "
                "is altered, or its arrays are not of one dimension and one type, which cannot be read"
            )
        return ids

    def _open_shard(self, number: int) -> _Shard:
        record = self._shards[number]
        column = TokenColumn.find(
            record.column_names, record.column_encodings, record.column_sizes, self.path / INDEX, self._bytes_dtype
        )
        return _Shard(_check_size(self.path, record), record.samples, column)


@cache
def _import_xxhash() -> Any:
    """Return the package xxhash, None where it is not installed."""
    try:
        return importlib.import_module("xxhash")
    except ImportError:
        return None


def _can_compute(name: str) -> bool:
    return name in _HASH_NAMES or (name in _XXHASH_NAMES and _import_xxhash() is not None)


class _Shard:
    """One .mds file, open; not mapped for the reason that `TokenFile` gives."""

    def __init__(self, path: Path, samples: int, column: TokenColumn) -> None:
        """Open it. Raises DataError where its table of offsets cannot be."""
        self.path = path
        self._column = column
        table_end = 4 * (samples + 2)
        self._file = path.open("rb", buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        if size < table_end:
            raise DataError(f"{path}: {size} bytes found, {table_end} expected for the offsets of {samples} samples")
        table = self._bytes(0, table_end)
        count, *_ = np.frombuffer(table, "<u4", 1)
        # Twice written, in the index and in the shard: where they differ one of the two belongs to other data.
        if count != samples:
            raise DataError(f"{path}: says it holds {count} samples, {INDEX} says {samples}; one of the two is altered")
        self._offsets = np.frombuffer(table, "<u4", samples + 1, 4)
        steps = np.diff(self._offsets.astype(np.int64))
        if self._offsets[0] < table_end or self._offsets[-1] != size or (steps < column.smallest_sample).any():
            raise DataError(
                f"{path}: offsets of samples must rise from {table_end} or more to {size}, the size of the file, in "
                f"steps of at least {column.smallest_sample}, and do not; the file is altered"
            )

    def summarise(self, digest: hashlib._Hash) -> Int64Array:
        """Return the number of tokens of each sample (samples,), from sizes alone; they and the first sample go into
        `digest`."""
        # Only heads of samples are looked at, spread over the whole file.
        content = np.memmap(self.path, np.uint8, mode="r")
        try:
            lengths = self._column.lengths(content, self._offsets.astype(np.int64))
        except ValueError as error:
            raise DataError(f"{self.path}: {error}") from None
        digest.update(self._bytes(0, int(self._offsets[1])))
        digest.update(lengths.tobytes())
        first = self.tokens(0)
        # Bytes of one type read as another give absurd ids, which a first look shows.
        if len(first) and not 0 <= int(first.min()) <= int(first.max()) < 2**32:
            wrong = int(first[(first < 0) | (first >= 2**32)][0])
            raise DataError(
                f"{self.path}: sample 0 holds token id {wrong} when read as {first.dtype.name}; ids of another type "
                "must be written with the encoding that names it, such as ndarray:uint16"
            )
        return lengths

    def tokens(self, sample: int) -> npt.NDArray[np.integer]:
        """Return token ids of one sample of this shard. Raises DataError for a malformed one."""
        start, end = self._offsets[sample : sample + 2].tolist()
        try:
            return self._column.decode(np.frombuffer(self._bytes(start, end), np.uint8))
        except ValueError as error:
            raise DataError(f"{self.path}: sample {sample}: {error}; the file is altered") from None

    def _bytes(self, first: int, last: int) -> bytes:
        return read_bytes(self._file.fileno(), self.path, first, last)


def _check_size(folder: Path, record: _ShardRecord) -> Path:
    """Return path of a shard, decompressed where need be.

    Raises DataError when it is missing or not as long as indexed, and for a method of compression that is not known here.
    """
    path = folder / record.raw_data.basename
    try:
        # Samples lie at random places, and all their sizes are read when the shard is opened: a remote one is copied whole.
        copy = local_copy(path)
        found = copy.stat().st_size
    except OSError as error:
        if record.zip_data is None or not is_file(folder / record.zip_data.basename):
            raise DataError(f"{path}: {error.strerror}; {INDEX} lists it with {record.raw_data.bytes} bytes") from error
        packed, size = folder / record.zip_data.basename, record.raw_data.bytes
        method = (record.compression or "unknown").partition(":")[0]
        if method not in ("zstd", "gz", "bz2"):
            raise DataError(
                f"{packed}: compressed ({method}); zstd, gz and bz2 can be read: decompress the shards once, each beside "
                "its original"
            ) from error
        remote = remote_file(packed)
        if remote is None:
            status = packed.stat()
            version = f"{packed.resolve()} {status.st_size} {status.st_mtime_ns}"
        else:
            version = remote.key
        key = hashlib.sha256(f"{version} {size}".encode()).hexdigest()
        # Decompressed once, into the cache: samples at random places need all of it.
        return keep_file(key, packed.stem, size, lambda: _decompress(local_copy(packed), method, size))
    if found != record.raw_data.bytes:
        raise DataError(
            f"{path}: {found} bytes found, {record.raw_data.bytes} expected; the file is truncated or altered"
        )
    return copy


def _decompress(packed: Path, method: str, size: int) -> Iterator[bytes]:
    """Yield the content of a compressed file, part by part. Raises DataError unless it is `size` bytes."""
    found = 0
    try:
        opener: Any = {"gz": gzip.open, "bz2": bz2.open}.get(method) or importlib.import_module("zstandard").open
        with cast(IO[bytes], opener(packed)) as stream:
            while part := stream.read(_UNPACKED_PART):
                found += len(part)
                # Not further: a few kilobytes can unpack to terabytes.
                if found > size:
                    break
                yield part
    except ImportError:
        raise DataError(f'{packed} needs zstandard: pip install "phalanx-train[data]"') from None
    # Each package has an error of its own.
    except Exception as error:
        raise DataError(f"{packed}: cannot be decompressed ({error}); it is damaged: get it again") from error
    if found != size:
        more = "more than " if found > size else ""
        raise DataError(
            f"{packed}: unpacks to {more}{min(found, size)} bytes, {size} expected; it is truncated or altered"
        )
