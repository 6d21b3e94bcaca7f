"""A folder with a Hugging Face checkpoint: read and written one tensor at a time.

Folders come from strangers and are checked before any tensor is read: only safetensors are read (never pickle), names in the
index may not lead out of the folder, and every tensor must be one the architecture has, in the shape that `config.json`
gives it. A folder that is written is one that `transformers` loads; it appears whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, BinaryIO

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.config.model import LanguageModel
from phalanx.errors import CheckpointError, ConfigError, PhalanxError
from phalanx.families.language.huggingface.architecture import Architecture, TensorRule
from phalanx.families.language.huggingface.folder_files import (
    DEFAULT_SHARD_BYTES,
    SpecialTokens,
    TokenizerFiles,
    file_inside,
    read_json,
)
from phalanx.families.language.huggingface.gpt2 import GPT2
from phalanx.families.language.huggingface.llama import LLAMA
from phalanx.families.language.huggingface.mpt import MPT
from phalanx.files import whole_folder

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"

ARCHITECTURES = (LLAMA, GPT2, MPT)
_UNKNOWN_KEY = "what it changes is not known; if it is nothing, take it out of config.json"
_FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FORMAT_NAMES = {dtype: name for name, dtype in _FORMATS.items()}
_SHOWN = 5
_HEAD = "lm_head.weight"
_ROWS = 8192
"""Rows of a matrix that are compared at once."""


class HuggingFaceFolder:
    """An opened checkpoint folder; close it, or use it in a `with` statement."""

    def __init__(self, path: Path) -> None:
        """Read configuration and file headers. Raises CheckpointError for anything that does not fit, one line each."""
        self.path = path
        self.config = read_json(file_inside(path, "config.json"))
        self.architecture, self.model = read_config(self.config, str(path / "config.json"))
        self.special_tokens = self._read_special_tokens()
        # Weight files stay open and are closed together, also where a later check fails.
        self._files = ExitStack()
        try:
            self._open_weights()
            self._rules = {rule.ours: rule for rule in self.architecture.rules(self.model)}
            self._check_tensors()
            self._check_tied_head()
        except BaseException:
            self._files.close()
            raise

    def __enter__(self) -> HuggingFaceFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the weight files."""
        self._files.close()

    @property
    def names(self) -> list[str]:
        """Return our names of all tensors, in the decoder's order."""
        return list(self._rules)

    def format_of(self, name: str) -> torch.dtype:
        """Return the number format in which our tensor `name` is stored; one that holds all parts, where they differ."""
        stored = [self._stored_name(theirs) for theirs in self._rules[name].theirs]
        formats = (_FORMATS[self._tensors[part].get_slice(part).get_dtype()] for part in stored)
        return reduce(torch.promote_types, formats)

    def read(self, name: str) -> Tensor:
        """Read our tensor `name` on the CPU, in its stored format. Raises CheckpointError where it holds NaN or
        infinities."""
        rule = self._rules[name]
        parts = []
        for stored in map(self._stored_name, rule.theirs):
            part = self._tensors[stored].get_tensor(stored)
            broken = part.numel() - int(part.isfinite().sum())
            if broken:
                raise CheckpointError(
                    f"{self.path}: {broken:,} of {part.numel():,} numbers of tensor {stored} are NaN or infinite; "
                    f"nothing can be computed with them, fetch or save the model again"
                )
            parts.append(part)
        return rule.join(parts).contiguous()

    def _read_special_tokens(self) -> SpecialTokens:
        """Read the special tokens of the configuration, overruled by those of generation_config.json."""
        fields = {"bos_token_id": self.config.get("bos_token_id"), "eos_token_id": self.config.get("eos_token_id")}
        if (self.path / GENERATION).exists():
            settings = read_json(file_inside(self.path, GENERATION))
            fields |= {name: settings[name] for name in fields if settings.get(name) is not None}
        return SpecialTokens.from_config(fields)

    def _open_weights(self) -> None:
        self._tensors: dict[str, Any] = {}
        for file_name in weight_files(self.path):
            path = file_inside(self.path, file_name)
            try:
                opened = self._files.enter_context(safe_open(str(path), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is not a whole safetensors file: {error}; fetch it again") from None
            for tensor in opened.keys():  # noqa: SIM118
                if tensor in self._tensors:
                    raise CheckpointError(f"{self.path / file_name}: tensor {tensor} is in another weight file as well")
                self._tensors[tensor] = opened
        # Compared before rules are made for each layer: a forged config.json may ask for any number.
        if self.model.n_layers > len(self._tensors):
            raise CheckpointError(
                f"{self.path}: config.json asks for {self.model.n_layers} layers, but the weight files hold "
                f"{len(self._tensors)} tensors"
            )
        # Checkpoints of the bare model, without a head, leave the first part of every name out.
        prefix = self.architecture.prefix
        self._prefix_left_out = not any(name.startswith(prefix) for name in self._tensors)

    def _stored_name(self, theirs: str) -> str:
        return theirs.removeprefix(self.architecture.prefix) if self._prefix_left_out else theirs

    def _check_tensors(self) -> None:
        expected = {
            self._stored_name(name): shape
            for rule in self._rules.values()
            for name, shape in rule.their_shapes().items()
        }
        problems = [f"{self.path}: tensor {name} is missing" for name in expected if name not in self._tensors]
        for name in sorted(self._tensors):
            if name in expected:
                problems += self._check_tensor(name, expected[name])
            elif not (self.architecture.ignored.fullmatch(name) or (self.model.tied_head and name == _HEAD)):
                problems.append(f"{self.path}: {self.architecture.name} has no tensor {name}")
        if problems:
            more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
            raise CheckpointError("\n".join(problems[:_SHOWN] + more))

    def _check_tied_head(self) -> None:
        """Refuse a head of its own where the configuration ties the head to the embedding.

        A tied head is often written out a second time, so one that is equal is passed over."""
        if not self.model.tied_head or _HEAD not in self._tensors:
            return
        embedding = self._stored_name(self._rules["embedding.weight"].theirs[0])
        head, tied = (self._tensors[name].get_slice(name) for name in (_HEAD, embedding))
        # In slices, as both are widened to float64 to be compared.
        rows = tied.get_shape()[0]
        equal = head.get_shape() == tied.get_shape() and all(
            torch.equal(head[start : start + _ROWS].double(), tied[start : start + _ROWS].double())
            for start in range(0, rows, _ROWS)
        )
        if not equal:
            raise CheckpointError(
                f"{self.path}: config.json says tie_word_embeddings=true (or leaves it so), but {_HEAD} differs from "
                f"{embedding}; to use both, set tie_word_embeddings to false in config.json"
            )

    def _check_tensor(self, name: str, expected: tuple[int, ...]) -> list[str]:
        header = self._tensors[name].get_slice(name)
        shape, stored = tuple(header.get_shape()), header.get_dtype()
        problems = []
        if shape != expected:
            problems.append(
                f"{self.path}: tensor {name} has shape {list(shape)}, config.json asks for {list(expected)}"
            )
        if stored not in _FORMATS:
            problems.append(f"{self.path}: tensor {name} is stored as {stored}; read are {', '.join(_FORMATS)}")
        return problems


def weight_files(path: Path) -> list[str]:
    """Return the names of a checkpoint folder's weight files. Raises CheckpointError where none can be read safely."""
    if (path / INDEX).exists():
        weight_map = read_json(file_inside(path, INDEX)).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{path / INDEX}: weight_map is missing or not a table of file names")
        return sorted(set(weight_map.values()))
    if (path / WEIGHTS).exists():
        return [WEIGHTS]
    # Named, so that the message says why the weights that are there are not read.
    pickled = next((f.name for f in sorted(path.iterdir()) if f.suffix in (".bin", ".pt", ".pth", ".ckpt")), None)
    if pickled is not None:
        raise CheckpointError(
            f"{path / pickled} is a pickle, which can run code when it is read, so it is not; "
            f"save the model as safetensors (transformers: model.save_pretrained(folder)) and give that folder"
        )
    raise CheckpointError(f"{path} holds no weights: neither {WEIGHTS} nor {INDEX}")


def architecture_for(model: LanguageModel) -> Architecture:
    """Return the architecture that computes what `model` describes.

    Raises ConfigError naming every field without a counterpart in the nearest architecture of the same positions.
    """
    misfits = {a.name: a.config.misfits(model) for a in ARCHITECTURES}
    found = next((a for a in ARCHITECTURES if not misfits[a.name]), None)
    if found is None:
        alike = (a for a in ARCHITECTURES if a.config.needs["positions"] == model.positions)
        nearest = min(alike, key=lambda a: len(misfits[a.name]))
        raise ConfigError(
            f"model.positions={model.positions} makes this a {nearest.name} in Hugging Face's terms, "
            f"which has no counterpart for {'; '.join(misfits[nearest.name])}; such a model stays in Phalanx's own format"
        )
    return found


def read_config(values: Mapping[str, Any], where: str) -> tuple[Architecture, LanguageModel]:
    """Return the architecture and decoder that a parsed `config.json` describes; `where` names the file in messages.

    Raises CheckpointError for another architecture and for every setting the decoder has no counterpart for.
    """
    names, model_type = values.get("architectures") or [], values.get("model_type")
    found = next((a for a in ARCHITECTURES if {a.name, *a.aliases} & set(names)), None)
    if not names:
        found = next((a for a in ARCHITECTURES if a.model_type == model_type), None)
    if found is None:
        raise CheckpointError(
            f"{where}: architectures={names} model_type={model_type} is not read; "
            f"those that are: {', '.join(a.name for a in ARCHITECTURES)}"
        )
    if model_type not in (None, found.model_type):
        raise CheckpointError(
            f"{where}: architectures={names} is a model of type {found.model_type}, but model_type={model_type}, by which "
            f"transformers chooses what it computes; correct the one that is wrong"
        )
    if values.get("quantization_config") is not None:
        raise CheckpointError(
            f"{where}: quantization_config is set; only unquantised weights are read, use the original"
        )
    try:
        return found, found.config.model_validate(dict(values)).to_model()
    except ValidationError as error:
        problems = []
        for detail in error.errors():
            unknown = detail["type"] == "extra_forbidden"
            reason = _UNKNOWN_KEY if unknown else detail["msg"].removeprefix("Value error, ")
            value: Any = values
            for part in detail["loc"]:
                value = value.get(part) if isinstance(value, dict) else None
            field = ".".join(map(str, detail["loc"]))
            problems.append(f"{field}={value!r} has no counterpart in the decoder: {reason}" if field else reason)
        raise CheckpointError("\n".join(f"{where}: {problem}" for problem in problems)) from None


@dataclass(frozen=True)
class Export:
    """What is to be written, and in which form."""

    model: LanguageModel
    architecture: Architecture
    """One that `model` fits."""
    read: Callable[[str], Tensor]
    """Gives our tensor of a name."""
    dtype: torch.dtype
    """Number format of all tensors."""
    tokenizer: TokenizerFiles
    """Tokenizer and special tokens; may be empty."""
    shard_bytes: int = DEFAULT_SHARD_BYTES
    """Largest weight file in bytes; a single tensor that is larger gets a file of its own."""


def write_folder(path: Path, export: Export) -> None:
    """Write `export` as the new folder `path`. Raises as `new_folder` does."""
    with new_folder(path) as folder:
        _write_weights(folder, export)
        special_tokens = export.tokenizer.special.as_config()
        config = {
            **export.architecture.config_json(export.model),
            **special_tokens,
            "torch_dtype": str(export.dtype).removeprefix("torch."),
            "use_cache": True,
        }
        _write_json(folder / "config.json", config)
        _write_json(folder / GENERATION, special_tokens)
        export.tokenizer.write(folder, export.model.max_positions)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `path` at the end; nothing stays where that fails.

    Raises ConfigError if `path` is already in use, PhalanxError if it cannot be written.
    """
    refuse_used(path)
    path = path.absolute()
    try:
        with whole_folder(path) as folder:
            yield folder
    except OSError as error:
        raise PhalanxError(f"{path} cannot be written: {error.strerror}; nothing was left there") from error


def refuse_used(path: Path) -> None:
    """Raise ConfigError if there is something at `path` that could be lost."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path} already exists and is not an empty folder; give another name, or remove it first")


def _write_weights(folder: Path, export: Export) -> None:
    shards = _plan_shards(export.architecture.rules(export.model), export.dtype, export.shard_bytes)
    weight_map: dict[str, str] = {}
    # Hugging Face's own names, by which its libraries find the files.
    for number, rules in enumerate(shards, start=1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_safetensors(folder / name, rules, export)
        weight_map |= {theirs: name for rule in rules for theirs in rule.theirs}
    if len(shards) > 1:
        total = sum(_tensor_bytes(rule.shape, export.dtype) for rules in shards for rule in rules)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _plan_shards(rules: Sequence[TensorRule], dtype: torch.dtype, limit: int) -> list[list[TensorRule]]:
    shards: list[list[TensorRule]] = []
    room = 0
    for rule in rules:
        size = _tensor_bytes(rule.shape, dtype)
        # A tensor that is larger than the limit gets a file of its own.
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(rule)
        room -= size
    return shards


def _write_safetensors(file: Path, rules: Sequence[TensorRule], export: Export) -> None:
    """Write a safetensors file: length of the header (8 bytes, little-endian), header as JSON, then the bytes of all
    tensors.

    The safetensors package wants all tensors of a file in memory at once; this does not.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for rule in rules:
        for name, shape in rule.their_shapes().items():
            start, end = end, end + _tensor_bytes(shape, export.dtype)
            header[name] = {"dtype": _FORMAT_NAMES[export.dtype], "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # The format wants tensors aligned to 8 bytes, so the header is filled up with spaces.
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        # One tensor in memory at a time.
        for rule in rules:
            for part in rule.split(export.read(rule.ours)):
                # As bytes: numpy knows no bfloat16.
                bits = part.to(export.dtype).contiguous().flatten().view(torch.uint8)
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


def _tensor_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
