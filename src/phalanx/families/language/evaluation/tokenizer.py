"""Finding the tokenizer that belongs to weights: beside them, or with the data that they were trained on."""

from __future__ import annotations

from pathlib import Path

from phalanx.data.file_record import check_size
from phalanx.errors import CheckpointError
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.data.manifest import MANIFEST, read_manifest
from phalanx.families.language.evaluation.weights import Weights
from phalanx.families.language.huggingface.tokens import TOKENIZER, SpecialTokens, TokenizerFiles


def tokenizer_files(weights: Weights, override: Path | None = None) -> TokenizerFiles:
    """The tokenizer of `weights`, or the one at `override` (a tokenizer.json, or a folder with one); empty if none is found.

    Raises CheckpointError if there is none at `override`, DataError if the run's data is there but damaged.
    """
    beside = weights.tokenizer
    if not beside.files and weights.run is not None:
        beside = _of_data(weights.run) or beside
    return beside if override is None else _at(override, beside.special)


def _at(path: Path, special: SpecialTokens) -> TokenizerFiles:
    if path.is_dir():
        found = TokenizerFiles.read(path, special)
        if not found.files:
            raise CheckpointError(f"--tokenizer={path} holds no {TOKENIZER}")
        return found
    if not path.is_file():
        raise CheckpointError(f"--tokenizer={path} does not exist; give a {TOKENIZER}, or a folder with one")
    return TokenizerFiles({TOKENIZER: path.read_bytes()}, special)


def _of_data(run: LanguageRun) -> TokenizerFiles | None:
    """The tokenizer in the first of the run's data folders that is still there and has one."""
    for source in run.data.sources:
        folder = Path(source.path)
        if (folder / MANIFEST).is_file():
            record = read_manifest(folder).tokenizer
            content = check_size(folder, record.file).read_bytes()
            return TokenizerFiles({TOKENIZER: content}, SpecialTokens(end=(record.end_of_document,)))
    return None
