"""Weights from one form into the other: Hugging Face folders and checkpoints of ours. Exact, and sparing with memory.

A Hugging Face folder is written tensor by tensor. A checkpoint is written from a scratch file that holds the tensors in
our order, so it needs room for the weights on disk twice, and in memory for about a gigabyte of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import torch
import yaml
from torch import Tensor

from phalanx.checkpoint import CheckpointStore
from phalanx.errors import ConfigError
from phalanx.families.language.evaluation.load_weights import (
    Weights,
    imported_state,
    open_weights,
    tokenizer_files,
)
from phalanx.families.language.huggingface.export_folder import (
    Export,
    write_folder,
)
from phalanx.families.language.huggingface.find_architecture import architecture_for
from phalanx.families.language.huggingface.folder_files import (
    DEFAULT_SHARD_BYTES,
    TOKENIZER,
    TOKENIZER_FOLDER,
    TokenizerFiles,
)
from phalanx.families.language.huggingface.tensor_rules import LOADS
from phalanx.families.language.sizes import parameter_count
from phalanx.files import new_folder, refuse_used
from phalanx.nn.precision import PRECISIONS
from phalanx.training.transfer import MODEL

Form = Literal["huggingface", "phalanx"]


Progress = Callable[[int, int], None]
"""Called with the weights done and the weights in all."""


@dataclass(frozen=True)
class Conversion:
    """What was written."""

    source: Path
    target: Path
    form: Form
    architecture: str | None
    """Hugging Face's name of the model, where the target is in that form."""
    parameters: int
    dtype: str
    """Number format of the weights, by its run-file name."""
    tokenizer: bool
    """Whether a tokenizer went along."""


def convert_weights(
    source: Path,
    target: Path,
    *,
    to: Form | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    architecture: str | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    ema: bool = False,
    progress: Progress = lambda done, total: None,
) -> Conversion:
    """Write the weights at `source` (see `open_weights`) as the new folder `target`.

    to: the form to write; by default the one `source` is not in. dtype: number format; by default float32 for a
    checkpoint, which is what training keeps, and the stored one for a Hugging Face folder. tokenizer: a tokenizer.json,
    or a folder with one, in place of the tokenizer that belongs to `source`. architecture: Hugging Face's name of the model
    to write, where more than one computes the same. ema: whether to take the moving averages of the weights.

    Raises ConfigError for a model that no Hugging Face architecture can express and for a `target` in use,
    CheckpointError for a `source` that cannot be read.
    """
    # Asked before anything is read, and again as the folder is made.
    refuse_used(target)
    with open_weights(source, ema=ema) as weights:
        form: Form = to or ("huggingface" if weights.kind == "phalanx" else "phalanx")
        if architecture is not None and form == "phalanx":
            raise ConfigError(f"--architecture={architecture} counts for Hugging Face folders alone; leave it out")
        written = architecture_for(weights.model, architecture) if form == "huggingface" else None
        files = tokenizer_files(weights, tokenizer)
        if written is not None:
            chosen = dtype or weights.widest_format()
            # Those that Hugging Face has no counterpart for are never asked for.
            total = sum(prod(shape) for name, shape in weights.shapes.items() if not LOADS.fullmatch(name))
            done = 0

            def read(name: str, rows: slice) -> Tensor:
                nonlocal done
                tensor = weights.read(name, rows)
                done += tensor.numel()
                progress(done, total)
                return tensor

            write_folder(target, Export(weights.model, written, read, chosen, files, shard_bytes))
        else:
            chosen = dtype or torch.float32
            _write_checkpoint(target, weights, files, chosen, progress)
    return Conversion(
        source=source,
        target=target,
        form=form,
        architecture=written.name if written else None,
        parameters=parameter_count(weights.model),
        dtype=next(name for name, value in PRECISIONS.items() if value.compute_dtype == chosen),
        tokenizer=TOKENIZER in files.files,
    )


def _write_checkpoint(
    target: Path, weights: Weights, files: TokenizerFiles, dtype: torch.dtype, progress: Progress
) -> None:
    """Write a folder that `training.init_from`, `generate` and `evaluate` take: checkpoints/, tokenizer/ and model.yaml."""
    with new_folder(target) as folder:
        scratch = folder / ".weights"
        # A checkpoint is written by one call that takes all tensors, which may be more than fits into memory.
        # What routers count is never rounded.
        formats = {name: torch.float32 if name in weights.state else dtype for name in weights.shapes}
        sizes = {name: prod(shape) * formats[name].itemsize for name, shape in weights.shapes.items()}
        # Aligned, so that tensors of different formats lie where their numbers may.
        total = sum(map(_aligned, sizes.values()))
        with scratch.open("wb") as file:
            # Without the blocks reserved, a full disk would end the process instead of raising.
            reserve = getattr(os, "posix_fallocate", lambda descriptor, _start, size: os.truncate(descriptor, size))
            reserve(file.fileno(), 0, total)
        # Shared memory of a file: the system writes it back under pressure instead of running out.
        memory = torch.from_file(str(scratch), shared=True, size=total, dtype=torch.uint8)
        tensors: dict[str, Tensor] = {}
        numbers = sum(map(prod, weights.shapes.values()))
        start = done = 0
        for name, shape in weights.shapes.items():
            tensor = memory[start : start + sizes[name]].view(formats[name]).view(shape)
            weights.read_into(name, tensor)
            tensors[MODEL + name] = tensor
            start += _aligned(sizes[name])
            done += tensor.numel()
            progress(done, numbers)
        state = imported_state(weights.model, files.special, weights.where)
        with CheckpointStore(folder / "checkpoints", keep_last=1) as store:
            store.save(0, tensors, state)
        # The checkpoint holds its own copy of what the scratch file held.
        scratch.unlink()
        if files.files:
            (folder / TOKENIZER_FOLDER).mkdir()
            files.write(folder / TOKENIZER_FOLDER, weights.model.max_positions)
        given = weights.model.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        (folder / "model.yaml").write_text(
            "# The model section of a run file. To train from these weights, put it into one and add\n"
            f"#   training: {{init_from: {target}}}\n" + yaml.safe_dump({"model": given}, sort_keys=False)
        )


def _aligned(size: int) -> int:
    """Return `size` bytes, filled up to a multiple of what any number format is aligned to."""
    return -(-size // 8) * 8
