"""Opening a body of tokens whatever its format."""

from __future__ import annotations

from pathlib import Path

from phalanx.data.language.manifest import MANIFEST, Split, read_manifest
from phalanx.data.language.shards import ShardSource
from phalanx.data.language.sources import TokenSource
from phalanx.errors import DataError


def open_source(path: Path, split: Split) -> TokenSource | None:
    """The `split` of the data at `path`, or None where it has no such split."""
    if not (path / MANIFEST).exists():
        raise DataError(f"{path}: no {MANIFEST} there; make it with: phalanx data prepare INPUT... --out {path}")
    if split not in read_manifest(path).splits:
        return None
    return ShardSource(path, split)
