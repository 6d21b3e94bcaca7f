"""A model ready to compute, with its tokenizer, from wherever it lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.families.language.config import LanguageRun
from phalanx.families.language.evaluation.text import TextTokenizer
from phalanx.families.language.evaluation.tokenizer import tokenizer_files
from phalanx.families.language.evaluation.weights import Weights, open_weights
from phalanx.families.language.model.decoder import Decoder
from phalanx.hardware.cpu_formats import require_cpu_format
from phalanx.precision import PRECISIONS

_CHUNK_LOGITS = 2**24
"""Logits that the loss holds at once, unless a single chunk of 128 tokens has more."""


@dataclass(frozen=True)
class LoadedModel:
    """A model on one device, in evaluation mode."""

    model: Decoder
    run: LanguageRun | None
    """The run that trained it; None for imported weights."""
    tokenizer: TextTokenizer | None
    """None where none was found."""
    where: Path
    """The checkpoint, or the Hugging Face folder."""
    step: int
    """Optimizer steps it was trained for; 0 for imported weights."""


def load_for_inference(
    path: Path, device: torch.device, *, dtype: torch.dtype | None = None, tokenizer: Path | None = None
) -> LoadedModel:
    """Load a run directory (its newest whole checkpoint), one checkpoint, or a Hugging Face folder.

    dtype: number format of weights and activations; by default that of the run, and for imported weights bfloat16 on
    accelerators and float32 on the CPU. tokenizer: a tokenizer.json, or a folder with one, in place of the one that
    belongs to the model. One block's tensors are held on the CPU beside the model.

    Raises CheckpointError where there is no sound checkpoint, or the tokenizer asked for is not there.
    """
    with open_weights(path) as weights:
        chosen = dtype or _usual_dtype(weights.run, device)
        require_cpu_format(chosen, device, "--precision")
        model = _build(weights, device, chosen)
        files = tokenizer_files(weights, tokenizer)
        found = TextTokenizer.from_files(files, weights.where) if files.files else None
        return LoadedModel(model, weights.run, found, weights.where, weights.step)


def _build(weights: Weights, device: torch.device, dtype: torch.dtype) -> Decoder:
    with torch.device("meta"):
        chunk = max(128, _CHUNK_LOGITS // weights.model.vocab_size)
        model = Decoder(weights.model, dtype=dtype, chunk_tokens=chunk)
    # Every layer casts its parameters to the activations' format, so keeping them in it changes no number.
    model.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name))
    return model.eval()


def _usual_dtype(run: LanguageRun | None, device: torch.device) -> torch.dtype:
    if run is not None:
        return PRECISIONS[run.layout.precision].compute_dtype
    return torch.float32 if device.type == "cpu" else torch.bfloat16
