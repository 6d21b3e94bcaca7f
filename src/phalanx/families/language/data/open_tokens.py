"""Opening a body of tokens whatever its format: told apart by what lies at the path, never by a setting."""

from __future__ import annotations

import difflib
import shlex
from pathlib import Path
from typing import Literal, overload

from phalanx.data.prepared_folder import check_size
from phalanx.errors import DataError
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.data.mds import INDEX, MdsSource, is_mds, mds_split
from phalanx.families.language.data.megatron import MegatronSource, megatron_prefix, megatron_split
from phalanx.families.language.data.token_shards import MANIFEST, ShardSource, Split, read_token_manifest
from phalanx.families.language.data.token_source import TokenSource
from phalanx.families.language.data.tokenizer import load_tokenizer
from phalanx.families.language.huggingface.folder_files import TOKENIZER, TOKENIZER_FOLDER

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
        return ShardSource(path, split) if split in read_token_manifest(path).splits else None
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


_SHOWN_INPUTS = 4


def check_same_tokenizer(run: LanguageRun) -> None:
    """Compare the tokenizers of the prepared folders that are there, and of the weights in training.init_from.

    Raises DataError naming two that differ and the command that prepares the second folder with the first's tokenizer.
    """
    folders = [Path(source.path) for source in run.data.sources]
    prepared = [folder for folder in folders if (folder / MANIFEST).is_file()]
    if not prepared:
        return
    known = _of_weights(Path(run.training.init_from)) if run.training.init_from is not None else None
    if known is not None:
        origin, tokenizer = f"the weights of training.init_from={run.training.init_from}", known
    else:
        origin, tokenizer = str(prepared[0]), _of_folder(prepared[0])
    for folder in prepared:
        if not _same_tokens(tokenizer, _of_folder(folder)):
            raise DataError(
                f"{folder} was prepared with another tokenizer than {origin}: the same id would mean different text\n"
                f"prepare it alike: {_command(folder, tokenizer)}"
            )


def _of_folder(folder: Path) -> Path:
    return check_size(folder, read_token_manifest(folder).tokenizer.file)


def _of_weights(path: Path) -> Path | None:
    """The tokenizer of the run directory that `path` is, or whose checkpoints/ folder or single checkpoint it is."""
    roots = [path]
    if path.name == "checkpoints" or path.name.startswith("step-"):
        roots.append(path.parent)
    if path.parent.name == "checkpoints":
        roots.append(path.parent.parent)
    files = (root / TOKENIZER_FOLDER / TOKENIZER for root in roots)
    return next((file for file in files if file.is_file()), None)


def _same_tokens(one: Path, other: Path) -> bool:
    if one == other or one.read_bytes() == other.read_bytes():
        return True
    mine, theirs = (load_tokenizer(file).get_vocab(with_added_tokens=True) for file in (one, other))
    return bool(mine == theirs)


def _command(folder: Path, tokenizer: Path) -> str:
    inputs = read_token_manifest(folder).inputs
    given = shlex.join(inputs) if len(inputs) <= _SHOWN_INPUTS else "INPUT..."
    return f"phalanx data prepare {given} --tokenizer {shlex.quote(str(tokenizer))} --out FOLDER"
