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

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phalanx.errors import DataError
from phalanx.files import write_atomically

MANIFEST = "manifest.json"
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
_Count = Annotated[int, Field(ge=0)]
_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class FileRecord(_Part):
    """One file: its name in the folder, its size and its checksum."""

    name: _FileName
    bytes: _Count
    sha256: _Sha256


class ShardRecord(_Part):
    """One shard of a split."""

    tokens: _Count
    documents: _Count
    text_bytes: _Count
    """UTF-8 bytes of the raw text behind the tokens."""
    data: FileRecord
    starts: FileRecord


class SplitRecord(_Part):
    """One split: the sums of its shards, in order."""

    tokens: _Count
    documents: _Count
    text_bytes: _Count
    shards: list[ShardRecord]


class TokenizerRecord(_Part):
    """Which tokenizer made the tokens."""

    file: FileRecord
    vocab_size: Annotated[int, Field(ge=1)]
    """One more than the largest id it can give."""
    end_of_document: _Count
    """Id that ends every document."""


class Manifest(_Part):
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


def file_record(path: Path) -> FileRecord:
    """Name, size and checksum of a file just written."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(name=path.name, bytes=path.stat().st_size, sha256=digest)


def check_size(folder: Path, record: FileRecord) -> Path:
    """The path of a file of `folder`. Raises DataError when it is missing or not as long as the manifest says."""
    path = folder / record.name
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; the manifest lists it with {record.bytes} bytes") from error
    if found != record.bytes:
        raise DataError(f"{path}: {found} bytes found, {record.bytes} expected; the file is truncated or altered")
    return path


def check_content(folder: Path, record: FileRecord) -> None:
    """Read a whole file of `folder`. Raises DataError when its checksum is not the manifest's."""
    path = check_size(folder, record)
    found = file_record(path).sha256
    if found != record.sha256:
        raise DataError(f"{path}: sha256 {found} found, {record.sha256} expected; the file was altered")
