"""Writing a folder with a Hugging Face checkpoint, one tensor at a time: one that `transformers` loads.

It appears whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from phalanx.config.model import LanguageModel
from phalanx.families.language.huggingface.architecture import Architecture
from phalanx.families.language.huggingface.folder_files import (
    DEFAULT_SHARD_BYTES,
    GENERATION,
    INDEX,
    WEIGHTS,
    TokenizerFiles,
)
from phalanx.families.language.huggingface.tensor_rules import FORMATS, TensorRule
from phalanx.files import new_folder

_FORMAT_NAMES = {dtype: name for name, dtype in FORMATS.items()}


class ReadRows(Protocol):
    """Reads tensors of ours."""

    def __call__(self, name: str, rows: slice) -> Tensor:
        """Return some rows of the tensor `name`."""


@dataclass(frozen=True)
class Export:
    """What is to be written, and in which form."""

    model: LanguageModel
    architecture: Architecture
    """One that `model` fits."""
    read: ReadRows
    """Gives rows of our tensor of a name."""
    dtype: torch.dtype
    """Number format of all tensors, but for those that Hugging Face keeps in float32."""
    tokenizer: TokenizerFiles
    """Tokenizer and special tokens; may be empty."""
    shard_bytes: int = DEFAULT_SHARD_BYTES
    """Largest weight file in bytes; a single tensor that is larger gets a file of its own."""


def write_folder(path: Path, export: Export) -> None:
    """Write `export` as the new folder `path`. Raises as `new_folder` does."""
    with new_folder(path) as folder:
        shards: list[list[TensorRule]] = []
        room = total = 0
        for rule in export.architecture.rules(export.model):
            size = torch.Size(rule.shape).numel() * rule.dtype(export.dtype).itemsize
            # A tensor that is larger than the limit gets a file of its own.
            if not shards or size > room:
                shards.append([])
                room = export.shard_bytes
            shards[-1].append(rule)
            room, total = room - size, total + size
        weight_map: dict[str, str] = {}
        # Hugging Face's own names, by which its libraries find the files.
        for number, rules in enumerate(shards, start=1):
            name = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            _write_safetensors(folder / name, rules, export)
            weight_map |= {theirs: name for rule in rules for theirs in rule.theirs}
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            _write_json(folder / INDEX, index)
        special_tokens = export.tokenizer.special.as_config()
        config = {
            **export.architecture.config_json(export.model),
            **special_tokens,
            "torch_dtype": str(export.dtype).removeprefix("torch."),
            "use_cache": True,
            # Left out, it would be a token that some architectures choose, which the vocabulary may not have.
            "pad_token_id": None,
        }
        _write_json(folder / "config.json", config)
        _write_json(folder / GENERATION, special_tokens)
        export.tokenizer.write(folder, export.model.max_positions)


def _write_safetensors(file: Path, rules: Sequence[TensorRule], export: Export) -> None:
    """Write a safetensors file: length of the header (8 bytes, little-endian), header as JSON, then the bytes of all
    tensors.

    The safetensors package wants all tensors of a file in memory at once; this does not.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for rule in rules:
        for name, shape in rule.their_shapes().items():
            dtype = rule.dtype(export.dtype)
            start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": _FORMAT_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # The format wants tensors aligned to 8 bytes, so the header is filled up with spaces.
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        # One tensor in memory at a time.
        for rule in rules:
            for part in rule.split(export.read(rule.ours, rule.rows)):
                # As bytes: numpy knows no bfloat16.
                bits = part.to(rule.dtype(export.dtype)).contiguous().flatten().view(torch.uint8)
                stream.write(bits.numpy().data)
        _flush_to_disk(stream)


def _write_json(file: Path, values: dict[str, Any]) -> None:
    with file.open("wb") as stream:
        stream.write(json.dumps(values, indent=2).encode() + b"\n")
        _flush_to_disk(stream)


def _flush_to_disk(stream: BinaryIO) -> None:
    stream.flush()
    # On disk before the folder gets its name: a crash must not leave a whole folder with empty files.
    os.fsync(stream.fileno())
