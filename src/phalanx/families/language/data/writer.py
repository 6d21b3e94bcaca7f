"""Writing the shards of one split."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.file_record import file_record
from phalanx.families.language.data.manifest import ShardRecord, Split, SplitRecord


class ShardWriter:
    """Takes documents one by one and writes them as shards of about `shard_tokens` tokens; documents stay whole."""

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
        if self._tokens and self._tokens + len(tokens) > self._shard_tokens:
            self._flush()
        self._documents.append(tokens.astype(self._dtype))
        self._tokens += len(tokens)
        self._text_bytes += text_bytes

    def close(self) -> SplitRecord:
        """Write what is left; returns the record of the whole split."""
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
        _write(data, np.concatenate(self._documents))
        _write(starts, np.cumsum([0, *lengths[:-1]]).astype("<i8"))
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


def _write(path: Path, values: npt.NDArray[Any]) -> None:
    with path.open("wb") as file:
        # Not tofile(), whose errors on a full disk do not say so.
        file.write(values.data)
        file.flush()
        os.fsync(file.fileno())
