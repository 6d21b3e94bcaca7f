"""Writing files so that a reader, or a crash, never meets half of one, and what JSON files can hold."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY = ".writing-"
"""How the names of files begin that are not whole yet; a process that was killed may leave one."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to be written in here, which takes the place of `path` once it is whole; a crash leaves the old one."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def clear_halves(folder: Path) -> None:
    """Remove what processes left in `folder` that were ended while they wrote."""
    for left in folder.glob(f"{TEMPORARY}*"):
        left.unlink()


def user_cache() -> Path:
    """The folder of what this user's processes keep for later ones, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx"


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by a file holding `text`; a crash leaves the old file or the new one. Missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def finite(value: Any) -> Any:
    """The same plain value with null for numbers that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
