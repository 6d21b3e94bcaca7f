"""Files as a manifest lists them: by name, size and checksum."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from phalanx.errors import DataError

Count = Annotated[int, Field(ge=0)]
_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Part(BaseModel):
    """Part of a manifest: nothing unknown in it, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class FileRecord(Part):
    """One file: its name in the folder, its size and its checksum."""

    name: _FileName
    bytes: Count
    sha256: _Sha256


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


def check_still_whole(path: Path, length: int) -> None:
    """Check that a mapped file still has its `length` bytes, each time before it is read.

    Reading a map beyond the end of its file ends the process by a signal, without a word. Raises DataError.
    """
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; it was there when the run began") from error
    if found < length:
        raise DataError(f"{path}: {found} bytes found, {length} expected; the file was cut short while it was read")


def check_content(folder: Path, record: FileRecord) -> None:
    """Read a whole file of `folder`. Raises DataError when its checksum is not the manifest's."""
    path = check_size(folder, record)
    found = file_record(path).sha256
    if found != record.sha256:
        raise DataError(f"{path}: sha256 {found} found, {record.sha256} expected; the file was altered")
