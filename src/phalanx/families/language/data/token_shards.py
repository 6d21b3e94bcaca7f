"""The native format of tokens: a folder of shards with a manifest, its reader and its writer.

    manifest.json               what is in the folder, with checksums
    tokenizer.json              the tokenizer the tokens come from
    train-00000.bin, ...        token ids, little-endian uint16 or uint32, one document after the other
    train-00000.documents, ...  where each document of that shard begins, in tokens, little-endian int64
    validation-00000.bin, ...

Every document ends with the end-of-document token; no document crosses shards.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from phalanx.data.prepared_folder import (
    MANIFEST,
    Count,
    FileRecord,
    FolderManifest,
    Part,
    check_content,
    check_size,
    file_record,
    read_checked,
)
from phalanx.errors import DataError
from phalanx.families.language.data.token_source import Int64Array, SegmentedStream, TokenFile, TokenSource
from phalanx.remote_files import local_copy

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")


class ShardRecord(Part):
    """One shard of a split."""

    tokens: Count
    documents: Count
    text_bytes: Count
    """UTF-8 bytes of the raw text behind the tokens."""
    data: FileRecord
    starts: FileRecord


class SplitRecord(Part):
    """One split: the sums of its shards, in order."""

    tokens: Count
    documents: Count
    text_bytes: Count
    shards: list[ShardRecord]


class TokenizerRecord(Part):
    """Which tokenizer made the tokens."""

    file: FileRecord
    vocab_size: Annotated[int, Field(ge=1)]
    """One more than the largest id it can give."""
    end_of_document: Count
    """Id that ends every document."""


class PassedOver(Part):
    """What of the inputs is not among the tokens."""

    documents: Count
    """Documents without text: empty, null, or Python source in no known encoding."""
    files: Count
    """Files of folders whose ending is not one of text."""


class Manifest(FolderManifest):
    """Everything a reader needs to know about a folder of token shards."""

    format: Literal["phalanx-tokens"] = "phalanx-tokens"
    version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerRecord
    validation_fraction: Annotated[float, Field(ge=0.0, le=1.0)]
    """A document belongs to the validation split when the hash of its text falls below this share."""
    inputs: list[str]
    """What was tokenized, as given to `phalanx data prepare`."""
    plan: str = ""
    """A hash of the inputs' names, sizes and samples of their content and of the options: the same work is known by it."""
    passed_over: PassedOver | None = None
    """None in folders written before this was counted."""
    splits: dict[Split, SplitRecord]

    def fingerprint(self, split: Split) -> str:
        """Return a hash of all token data of a split and its tokenizer: equal exactly where a run would read the same."""
        # Starts of documents follow from the tokens, so their checksums add nothing.
        shards = [shard.data.sha256 for shard in self.splits[split].shards]
        return hashlib.sha256(json.dumps([self.tokenizer.file.sha256, self.dtype, shards]).encode()).hexdigest()


def read_token_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of `folder`. Raises DataError naming the file and what is wrong with it."""
    make = f"make it with: phalanx data prepare INPUT... --out {folder}"
    return read_checked(folder / MANIFEST, Manifest, missing=make, malformed="prepare the data again")


class ShardSource(TokenSource):
    """One split of a folder written by `phalanx data prepare`."""

    def __init__(self, folder: Path, split: Split) -> None:
        """Open the split. Raises DataError for a missing, truncated or lengthened file, by name."""
        self.path = folder
        self._manifest = read_token_manifest(folder)
        if split not in self._manifest.splits:
            raise DataError(f"{folder} has no {split} split; it has {', '.join(self._manifest.splits)}")
        self._split = self._manifest.splits[split]
        dtype = np.dtype(self._manifest.dtype).newbyteorder("<")
        self._stream = SegmentedStream(
            [TokenFile(check_size(folder, s.data), dtype) for s in self._split.shards if s.tokens]
        )
        # Sizes of files were compared one by one; this is about the manifest itself.
        if self._stream.length != self._split.tokens:
            raise DataError(
                f"{folder}: {split} shards hold {self._stream.length} tokens, {self._split.tokens} expected"
            )
        self.tokens = self._split.tokens
        self.documents = self._split.documents
        self.text_bytes = self._split.text_bytes
        self.fingerprint = self._manifest.fingerprint(split)
        self.vocab_size = self._manifest.tokenizer.vocab_size
        self.end_of_document = self._manifest.tokenizer.end_of_document
        self.tokenizer = local_copy(check_size(folder, self._manifest.tokenizer.file))
        self._starts: Int64Array | None = None

    def read(self, starts: Int64Array, length: int) -> Int64Array:
        """Return tokens [n, length] from each of `starts` on."""
        return self._stream.read(starts, length)

    def document_of(self, places: Int64Array) -> Int64Array:
        """Return the number of the document that each place belongs to."""
        if self._starts is None:
            # Read when first needed: 8 bytes a document, which only runs with a document mask want.
            parts, before = [np.empty(0, dtype=np.int64)], 0
            for shard in self._split.shards:
                parts.append(np.fromfile(local_copy(check_size(self.path, shard.starts)), "<i8") + before)
                before += shard.tokens
            self._starts = np.concatenate(parts)
        return np.searchsorted(self._starts, places, side="right") - 1

    def verify(self) -> None:
        """Compare the checksums of every file of the split and of the tokenizer."""
        check_content(self.path, self._manifest.tokenizer.file)
        for shard in self._split.shards:
            check_content(self.path, shard.data)
            check_content(self.path, shard.starts)


class ShardWriter:
    """Writes documents, one by one, as shards of about `shard_tokens` tokens; documents stay whole."""

    def __init__(self, folder: Path, split: Split, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self._folder = folder
        self._split = split
        self._dtype = dtype.newbyteorder("<")
        self._shard_tokens = shard_tokens
        self._documents: list[npt.NDArray[Any]] = []
        self._tokens = 0
        self._text_bytes = 0
        self._shards: list[ShardRecord] = []

    def add(self, tokens: npt.NDArray[np.uint32], text_bytes: int) -> None:
        """Add one document, its end-of-document token included; text_bytes: UTF-8 bytes of its text."""
        # A document longer than a shard gets one of its own.
        if self._tokens and self._tokens + len(tokens) > self._shard_tokens:
            self._flush()
        self._documents.append(tokens.astype(self._dtype))
        self._tokens += len(tokens)
        self._text_bytes += text_bytes

    def close(self) -> SplitRecord:
        """Write what is left and return the record of the whole split."""
        if self._tokens:
            self._flush()
        return SplitRecord(
            tokens=sum(shard.tokens for shard in self._shards),
            documents=sum(shard.documents for shard in self._shards),
            text_bytes=sum(shard.text_bytes for shard in self._shards),
            shards=self._shards,
        )

    def _flush(self) -> None:
        name = f"{self._split}-{len(self._shards):05d}"
        lengths = [len(document) for document in self._documents]
        data, starts = self._folder / f"{name}.bin", self._folder / f"{name}.documents"
        contents: dict[Path, npt.NDArray[Any]] = {
            data: np.concatenate(self._documents),
            starts: np.cumsum([0, *lengths[:-1]]).astype("<i8"),
        }
        for path, values in contents.items():
            with path.open("wb") as file:
                # Not tofile(), whose errors on a full disk do not say so.
                file.write(values.data)
                file.flush()
                os.fsync(file.fileno())
        self._shards.append(
            ShardRecord(
                tokens=self._tokens,
                documents=len(lengths),
                text_bytes=self._text_bytes,
                data=file_record(data),
                starts=file_record(starts),
            )
        )
        self._documents, self._tokens, self._text_bytes = [], 0, 0
