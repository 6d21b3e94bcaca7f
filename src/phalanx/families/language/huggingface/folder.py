"""Opening single files of a folder that comes from a stranger."""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from typing import Any

from phalanx.errors import CheckpointError

DEFAULT_SHARD_BYTES = 5 * 10**9
"""Largest weight file that is written."""


def is_huggingface_folder(path: Path) -> bool:
    """Whether `path` looks like a Hugging Face checkpoint."""
    return (path / "config.json").is_file()


def file_inside(path: Path, name: str) -> Path:
    """The file `name` of a checkpoint folder. Raises CheckpointError if it is missing or lies outside the folder.

    A link is followed within the folder and, for a snapshot of Hugging Face's download cache, into the `blobs` folder
    where that cache keeps its files.
    """
    pure = PurePath(name)
    if pure.is_absolute() or ".." in pure.parts or "\0" in name or not pure.parts:
        raise CheckpointError(f"{path}: the file name {name!r} leads out of the folder; refused")
    file = path / pure
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    root = path.resolve()
    target = file.resolve()
    cache = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    if root not in target.parents and target.parent != cache:
        raise CheckpointError(f"{file} is a link that leads out of the folder, to {target}; refused")
    return file


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises CheckpointError for anything else."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return values
