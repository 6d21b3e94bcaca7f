"""Whether everything a run reads was prepared with one tokenizer: the same id must mean the same text everywhere.

Only what comes with a tokenizer can be compared: prepared folders, and the run directory that weights come from. Megatron
and MDS data name none.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from phalanx.data.file_record import check_size
from phalanx.errors import DataError
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.data.manifest import MANIFEST, read_manifest
from phalanx.families.language.data.tokenizer import load_tokenizer
from phalanx.families.language.huggingface.tokens import TOKENIZER, TOKENIZER_FOLDER

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
    return check_size(folder, read_manifest(folder).tokenizer.file)


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
    inputs = read_manifest(folder).inputs
    given = shlex.join(inputs) if len(inputs) <= _SHOWN_INPUTS else "INPUT..."
    return f"phalanx data prepare {given} --tokenizer {shlex.quote(str(tokenizer))} --out FOLDER"
