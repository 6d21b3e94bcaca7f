"""Opening the data of a run: whatever the format, and all of it prepared with one tokenizer.

The format is told apart by what lies at the path, never by a setting.
"""

from __future__ import annotations

import difflib
import shlex
from pathlib import Path
from typing import Literal, TypeVar, overload

from phalanx.data.prepared_folder import MANIFEST, check_size
from phalanx.errors import ConfigError, DataError
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.data.mds import INDEX, MdsSource, find_remote_mds, is_mds, mds_split
from phalanx.families.language.data.megatron import (
    MegatronSource,
    find_remote_megatron,
    megatron_prefix,
    megatron_split,
)
from phalanx.families.language.data.token_shards import Manifest, ShardSource, Split, read_token_manifest
from phalanx.families.language.data.token_source import TokenSource
from phalanx.families.language.data.tokenizer import load_tokenizer
from phalanx.families.language.huggingface.folder_files import (
    TOKENIZER,
    TOKENIZER_FOLDER,
    SpecialTokens,
    TokenizerFiles,
)
from phalanx.remote_files import is_remote, local_copy, local_path, open_store, opened_folder, weights_path

Found = TypeVar("Found")

_SHOWN = 6
_SHOWN_INPUTS = 4


@overload
def open_source(path: Path, split: Literal["train"]) -> TokenSource: ...
@overload
def open_source(path: Path, split: Split) -> TokenSource | None: ...


def open_source(path: Path, split: Split) -> TokenSource | None:
    """Open the `split` of the data at `path`; None where it has no validation split.

    `path` is a folder written by `phalanx data prepare`, a folder of MDS shards, or the prefix of a Megatron pair.

    Raises:
        DataError: nothing readable is there, no train split is, or a file is missing, truncated or malformed.
    """
    source: TokenSource | None = None
    prefix = megatron_prefix(path)
    # Told apart by what lies there, never by a setting that could contradict it.
    if (path / MANIFEST).exists():
        if split in read_token_manifest(path).splits:
            source = ShardSource(path, split)
    elif is_mds(path):
        folder = mds_split(path, split)
        source = None if folder is None else MdsSource(folder)
    elif prefix is not None:
        place = megatron_split(prefix, split)
        source = None if place is None else MegatronSource(place)
    else:
        raise DataError(_describe_folder(path) if path.is_dir() else _describe_absence(path))
    if source is None and split == "train":
        raise DataError(f"{path} has no train split; name data to train on")
    return source


def open_training(run: LanguageRun) -> list[TokenSource]:
    """Open the train split of every source of a run. Raises DataError for those that do not suit it."""
    training = [open_source(token_path(source.path), "train") for source in run.data.sources]
    for source in training:
        source.require_samples(run.data.sequence_length)
        source.require_vocabulary(run.model.vocab_size)
    check_same_tokenizer(run)
    return training


def describe_tokens(training: list[TokenSource]) -> str:
    """Return in words how much text there is."""
    return f"{sum(source.tokens for source in training):,} tokens"


def tokenizer_files(sources: list[TokenSource]) -> TokenizerFiles:
    """Return the tokenizer of the first source that has one; without files where none has."""
    for source in sources:
        if source.tokenizer is not None:
            end = () if source.end_of_document is None else (source.end_of_document,)
            return TokenizerFiles({TOKENIZER: source.tokenizer.read_bytes()}, SpecialTokens(begin=None, end=end))
    return TokenizerFiles({}, SpecialTokens())


def require_tokenizer(found: Found | None, training: list[TokenSource]) -> Found:
    """Return `found`, which a source's tokenizer gave. Raises ConfigError where none has any, as tasks need one."""
    if not found:
        paths = " and ".join(str(source.path) for source in training)
        raise ConfigError(
            f"evaluation.tasks needs a tokenizer, and {paths} came without one; leave evaluation.tasks out"
        )
    return found


def token_path(address: str) -> Path:
    """Return the path that stands for the token data at `address`, in any format; itself where it is local.

    Raises DataError where the store does not answer, or holds nothing readable there.
    """
    if not is_remote(address):
        return local_path(address)
    opened = opened_folder(address)
    if opened is not None:
        return opened
    if open_store(address).find_file(MANIFEST) is not None:
        return local_path(address)
    path = find_remote_mds(address) or find_remote_megatron(address)
    if path is None:
        raise DataError(
            f"{address}: no {MANIFEST} (prepared text), no {INDEX} (MDS) and no .idx (Megatron) there; name a folder or "
            "prefix that was copied whole to the store"
        )
    return path


def _describe_absence(path: Path) -> str:
    """Say what is wrong with a `path` that is no folder, and what may have been meant."""
    if path.is_file():
        return (
            f"{path} is a file of no known format; raw text is tokenized with: phalanx data prepare {path} --out FOLDER"
        )
    # The nearest folder that exists may hold a name that was mistyped.
    there = next(parent for parent in path.parents if parent.exists())
    wanted = path.relative_to(there).parts[0]
    children = [child for child in there.iterdir() if not child.name.startswith(".")] if there.is_dir() else []
    names = sorted({child.stem if child.suffix in (".bin", ".idx") else child.name for child in children})
    near = difflib.get_close_matches(wanted, names, n=1)
    hint = (
        f"did you mean {there / near[0]}?"
        if near
        else f"{there} holds {_list_some(names)}; text is tokenized with: phalanx data prepare TEXT --out {path}"
    )
    return f"{path}: nothing there, neither a folder nor a Megatron .bin/.idx pair; {hint}"


def _describe_folder(folder: Path) -> str:
    """Say why `folder` cannot be read, and what in it could be."""
    pairs = sorted(str(child.with_suffix("")) for child in folder.glob("*.idx"))
    if pairs:
        return f"{folder} holds Megatron data; name the prefix of one pair: {_list_some(pairs)}"
    prepared = sorted(
        str(child) for child in folder.iterdir() if child.is_dir() and ((child / MANIFEST).exists() or is_mds(child))
    )
    if prepared:
        return f"{folder} holds no tokens itself; name one of: {_list_some(prepared)}"
    return (
        f"{folder}: no {MANIFEST} (prepared text), no {INDEX} (MDS) and no .idx (Megatron) there; it holds "
        f"{_list_some(sorted(child.name for child in folder.iterdir()))}; "
        f"raw text is tokenized with: phalanx data prepare {folder} --out FOLDER"
    )


def _list_some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return (", ".join(names[:_SHOWN]) or "nothing") + (f" and {rest} more" if rest > 0 else "")


def check_same_tokenizer(run: LanguageRun) -> None:
    """Compare the tokenizers of the prepared folders that are there, and of the weights in training.init_from.

    The same id must mean the same text everywhere. Only what comes with a tokenizer can be compared: prepared folders, and
    the run directory that weights come from; Megatron and MDS data name none. Raises DataError naming two that differ and
    the command that prepares the second folder with the first's tokenizer.
    """
    manifests, tokenizers = _prepared_tokenizers(run)
    if not tokenizers:
        return
    origin, first = next((str(folder), file) for folder, file in tokenizers.items())
    # Weights whose rows are matched by the text of tokens may come with any tokenizer.
    if run.training.init_from is not None and not run.training.transfer.resize:
        known = _tokenizer_of_weights(weights_path(run.training.init_from))
        if known is not None:
            origin, first = f"the weights of training.init_from={run.training.init_from}", known
    for folder, file in tokenizers.items():
        # Equal files need no parsing; others may still name the same tokens, in another order or layout.
        if file == first or file.read_bytes() == first.read_bytes():
            continue
        mine, theirs = (load_tokenizer(one).get_vocab(with_added_tokens=True) for one in (first, file))
        if mine != theirs:
            inputs = manifests[folder].inputs
            given = shlex.join(inputs) if len(inputs) <= _SHOWN_INPUTS else "INPUT..."
            raise DataError(
                f"{folder} was prepared with another tokenizer than {origin}: the same id would mean different text\n"
                f"prepare it alike: phalanx data prepare {given} --tokenizer {shlex.quote(str(first))} --out FOLDER"
            )


def _prepared_tokenizers(run: LanguageRun) -> tuple[dict[Path, Manifest], dict[Path, Path]]:
    """Return the manifests and the tokenizer files of the prepared folders that are there, by folder."""
    folders = [token_path(source.path) for source in run.data.sources]
    manifests = {folder: read_token_manifest(folder) for folder in folders if (folder / MANIFEST).is_file()}
    return manifests, {
        folder: local_copy(check_size(folder, manifest.tokenizer.file)) for folder, manifest in manifests.items()
    }


def token_names(run: LanguageRun, weights: Path, vocab_size: int) -> tuple[list[str], list[str]]:
    """Return what the rows of two vocabularies stand for: that of weights with `vocab_size` rows, and that of `run`.

    The text of tokens, where the weights and the prepared data both come with a tokenizer; else their numbers.
    """
    sizes = vocab_size, run.model.vocab_size
    files = _tokenizer_of_weights(weights), next(iter(_prepared_tokenizers(run)[1].values()), None)
    texts: list[dict[int, str]] = [{}, {}]
    if all(files):
        texts = [
            {number: text for text, number in load_tokenizer(file).get_vocab(with_added_tokens=True).items()}
            for file in files
            if file is not None
        ]
    # Rows that no token has are told apart by their number; no token begins with a NUL.
    before, after = (
        [of_id.get(number, f"\0{number}") for number in range(size)] for of_id, size in zip(texts, sizes, strict=True)
    )
    return before, after


def _tokenizer_of_weights(path: Path) -> Path | None:
    """Find the tokenizer of the run directory that `path` is, or whose checkpoints/ folder or single checkpoint it is."""
    # The folder may be a run, its checkpoints/ or one checkpoint: the tokenizer lies in the run's own folder.
    roots = [path]
    if path.name == "checkpoints" or path.name.startswith("step-"):
        roots.append(path.parent)
    if path.parent.name == "checkpoints":
        roots.append(path.parent.parent)
    files = (root / TOKENIZER_FOLDER / TOKENIZER for root in roots)
    return next((file for file in files if file.is_file()), None)
