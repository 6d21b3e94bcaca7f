"""Opening a body of tokens whatever its format: told apart by what lies at the path, never by a setting."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal, overload

from phalanx.errors import DataError
from phalanx.families.language.data.manifest import MANIFEST, Split, read_manifest
from phalanx.families.language.data.mds import INDEX, MdsSource, is_mds, mds_split
from phalanx.families.language.data.megatron import MegatronSource, megatron_prefix, megatron_split
from phalanx.families.language.data.shards import ShardSource
from phalanx.families.language.data.sources import TokenSource

_SHOWN = 6


@overload
def open_source(path: Path, split: Literal["train"]) -> TokenSource: ...
@overload
def open_source(path: Path, split: Split) -> TokenSource | None: ...


def open_source(path: Path, split: Split) -> TokenSource | None:
    """The `split` of the data at `path`; None where it has no validation split.

    `path` is a folder written by `phalanx data prepare`, a folder of MDS shards, or the prefix of a Megatron pair.

    Raises:
        DataError: nothing readable is there, no train split is, or a file is missing, truncated or malformed.
    """
    source = _open(path, split)
    if source is None and split == "train":
        raise DataError(f"{path} has no train split; name data to train on")
    return source


def _open(path: Path, split: Split) -> TokenSource | None:
    if (path / MANIFEST).exists():
        return ShardSource(path, split) if split in read_manifest(path).splits else None
    if is_mds(path):
        folder = mds_split(path, split)
        return None if folder is None else MdsSource(folder)
    prefix = megatron_prefix(path)
    if prefix is not None:
        place = megatron_split(prefix, split)
        return None if place is None else MegatronSource(place)
    raise DataError(_nothing_at(path))


def _nothing_at(path: Path) -> str:
    """What was looked for at `path`, and what is there instead."""
    if path.is_file():
        return (
            f"{path} is a file of no known format; raw text is tokenized with: phalanx data prepare {path} --out FOLDER"
        )
    if path.is_dir():
        return _nothing_in(path)
    there = path.parent
    while not there.exists():
        there = there.parent
    wanted = path.relative_to(there).parts[0]
    children = there.iterdir() if there.is_dir() else ()
    names = sorted({_without_ending(child) for child in children if not child.name.startswith(".")})
    near = difflib.get_close_matches(wanted, names, n=1)
    hint = (
        f"did you mean {there / near[0]}?"
        if near
        else f"{there} holds {_listed(names)}; text is tokenized with: phalanx data prepare TEXT --out {path}"
    )
    return f"{path}: nothing there, neither a folder nor a Megatron .bin/.idx pair; {hint}"


def _nothing_in(folder: Path) -> str:
    pairs = sorted(str(child.with_suffix("")) for child in folder.glob("*.idx"))
    if pairs:
        return f"{folder} holds Megatron data; name the prefix of one pair: {_listed(pairs)}"
    prepared = sorted(
        str(child) for child in folder.iterdir() if child.is_dir() and ((child / MANIFEST).exists() or is_mds(child))
    )
    if prepared:
        return f"{folder} holds no tokens itself; name one of: {_listed(prepared)}"
    return (
        f"{folder}: no {MANIFEST} (prepared text), no {INDEX} (MDS) and no .idx (Megatron) there; it holds "
        f"{_listed(sorted(child.name for child in folder.iterdir()))}; "
        f"raw text is tokenized with: phalanx data prepare {folder} --out FOLDER"
    )


def _without_ending(child: Path) -> str:
    return child.stem if child.suffix in (".bin", ".idx") else child.name


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return (", ".join(names[:_SHOWN]) or "nothing") + (f" and {rest} more" if rest > 0 else "")
