"""The manifest of a folder of token shards: what is in it, and how to tell that nothing was lost or altered.

    manifest.json               this file's content
    tokenizer.json              the tokenizer the tokens come from
    train-00000.bin, ...        token ids, little-endian uint16 or uint32, one document after the other
    train-00000.documents, ...  where each document of that shard begins, in tokens, little-endian int64
    validation-00000.bin, ...

Every document ends with the end-of-document token; no document crosses shards.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from phalanx.data.file_record import Count, FileRecord, Part
from phalanx.errors import DataError
from phalanx.files import write_atomically

MANIFEST = "manifest.json"
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


class Manifest(Part):
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

    def write(self, folder: Path) -> None:
        """Write it into `folder`; it comes last, so a folder with a manifest is complete."""
        write_atomically(folder / MANIFEST, self.model_dump_json(indent=1) + "\n")

    def fingerprint(self, split: Split) -> str:
        """A hash of all token data of a split and its tokenizer: equal exactly where a run would read the same."""
        shards = [shard.data.sha256 for shard in self.splits[split].shards]
        return hashlib.sha256(json.dumps([self.tokenizer.file.sha256, self.dtype, shards]).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of `folder`. Raises DataError naming the file and what is wrong with it."""
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; make it with: phalanx data prepare INPUT... --out {folder}"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "content"
        raise DataError(f"{path}: {where}: {first['msg']}; prepare the data again") from None
