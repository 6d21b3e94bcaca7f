"""Finding the tokenizer that belongs to weights: beside them, or with the data that they were trained on."""

from __future__ import annotations

from pathlib import Path

from phalanx.errors import CheckpointError
from phalanx.evaluate.weights import Weights
from phalanx.models.language.huggingface.tokens import TOKENIZER, TokenizerFiles


def tokenizer_files(weights: Weights, override: Path | None = None) -> TokenizerFiles:
    """The tokenizer of `weights`, or the one at `override` (a tokenizer.json, or a folder with one); empty if none is found.

    Raises CheckpointError if there is none at `override`.
    """
    if override is not None:
        return _at(override, weights)
    if weights.tokenizer.files or weights.run is None:
        return weights.tokenizer
    return weights.tokenizer


def _at(path: Path, weights: Weights) -> TokenizerFiles:
    if path.is_dir():
        found = TokenizerFiles.read(path, weights.tokenizer.special)
        if not found.files:
            raise CheckpointError(f"--tokenizer={path} holds no {TOKENIZER}")
        return found
    if not path.is_file():
        raise CheckpointError(f"--tokenizer={path} does not exist; give a {TOKENIZER}, or a folder with one")
    return TokenizerFiles({TOKENIZER: path.read_bytes()}, weights.tokenizer.special)
