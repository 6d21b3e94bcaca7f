"""Reading the native format: a folder of token shards with a manifest."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from phalanx.data.file_record import check_content, check_size
from phalanx.errors import DataError
from phalanx.families.language.data.manifest import Split, read_manifest
from phalanx.families.language.data.sources import Int64Array, SegmentedStream, TokenSource
from phalanx.families.language.data.token_file import TokenFile


class ShardSource(TokenSource):
    """One split of a folder written by `phalanx data prepare`."""

    def __init__(self, folder: Path, split: Split) -> None:
        """Open the split. Raises DataError for a missing, truncated or lengthened file, by name."""
        self.path = folder
        self._manifest = read_manifest(folder)
        if split not in self._manifest.splits:
            raise DataError(f"{folder} has no {split} split; it has {', '.join(self._manifest.splits)}")
        self._split = self._manifest.splits[split]
        dtype = np.dtype(self._manifest.dtype).newbyteorder("<")
        self._stream = SegmentedStream(
            [TokenFile(check_size(folder, s.data), dtype) for s in self._split.shards if s.tokens]
        )
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
        self.tokenizer = check_size(folder, self._manifest.tokenizer.file)
        self._starts: Int64Array | None = None

    def read(self, starts: Int64Array, length: int) -> Int64Array:
        """Tokens [n, length] from each of `starts` on."""
        return self._stream.read(starts, length)

    def document_of(self, places: Int64Array) -> Int64Array:
        """The number of the document that each place belongs to."""
        if self._starts is None:
            self._starts = self._read_starts()
        return np.searchsorted(self._starts, places, side="right") - 1

    def verify(self) -> None:
        """Compare the checksums of every file of the split and of the tokenizer."""
        check_content(self.path, self._manifest.tokenizer.file)
        for shard in self._split.shards:
            check_content(self.path, shard.data)
            check_content(self.path, shard.starts)

    def _read_starts(self) -> Int64Array:
        """Starts of all documents in the stream; 8 bytes a document."""
        parts, before = [], 0
        for shard in self._split.shards:
            parts.append(np.fromfile(check_size(self.path, shard.starts), "<i8") + before)
            before += shard.tokens
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
