"""The weights of a model and its tokenizer, wherever they lie: a run directory, one checkpoint of it, or Hugging Face's.

Opening reads what the model is; tensors come one at a time, by the decoder's own names, whole and on the CPU. A tokenizer
is found beside the weights, or with the data that they were trained on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, reduce
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import ValidationError
from torch import Tensor

from phalanx.checkpoint import TensorReader, open_checkpoints, read_state
from phalanx.config.load import parse_run
from phalanx.config.model import LanguageModel
from phalanx.data.prepared_folder import MANIFEST, check_size
from phalanx.errors import CheckpointError, ConfigError
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.data.open_tokens import token_path
from phalanx.families.language.data.token_shards import read_token_manifest
from phalanx.families.language.decoder import Decoder
from phalanx.families.language.evaluation.text_tokenizer import TextTokenizer
from phalanx.families.language.huggingface.checkpoint_folder import HuggingFaceFolder
from phalanx.families.language.huggingface.folder_files import (
    TOKENIZER,
    TOKENIZER_FOLDER,
    SpecialTokens,
    TokenizerFiles,
    is_huggingface_folder,
)
from phalanx.hardware.device import require_cpu_format
from phalanx.nn.adapters import Adapters, adapter_names, merged_weight
from phalanx.nn.experts import Router
from phalanx.nn.precision import PRECISIONS
from phalanx.training.transfer import MODEL
from phalanx.training.weight_average import AVERAGES

_VERBS = {"weather": "`phalanx forecast` scores it", "materials": "`phalanx errors` scores it"}
"""What does for other families what `phalanx evaluate` does for text."""
_WINDOW_BYTES = 2**28
"""Rows of a tensor that are read at once, though fewer were asked for: each stored chunk is then read about once."""
_CHUNK_LOGITS = 2**24
"""Logits that the loss holds at once, unless a single chunk of 128 tokens has more."""


class Weights(ABC):
    """An opened source of weights; close it, or use it in a `with` statement."""

    where: Path
    """What was opened: the folder of one checkpoint, or a Hugging Face folder."""
    kind: str
    """The form the weights are in: phalanx or huggingface."""
    model: LanguageModel
    """The decoder they belong to."""
    tokenizer: TokenizerFiles
    """The tokenizer that lies beside them, if any, and the special tokens."""
    run: LanguageRun | None = None
    """The run that trained them; None for imported weights."""
    step: int = 0
    """Optimizer steps they were trained for; 0 for imported weights."""

    @abstractmethod
    def format_of(self, name: str) -> torch.dtype:
        """Return number format in which the tensor `name` is stored."""

    @abstractmethod
    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Read the tensor `name`, or some of its rows. Raises CheckpointError where it is damaged."""

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out` with the tensor `name`, on any device and in any format. Raises as `read` does."""
        out.copy_(self.read(name))

    @abstractmethod
    def close(self) -> None:
        """Let go of the files."""

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shape of every tensor by name, parameters and the state of routers, in the decoder's order."""
        return {name: tuple(tensor.shape) for name, tensor in self._empty.state_dict().items()}

    @cached_property
    def state(self) -> frozenset[str]:
        """Return the names of tensors that are no parameters; they are kept in float32 beside weights of fewer bits."""
        return frozenset(self.shapes) - {name for name, _ in self._empty.named_parameters()}

    @cached_property
    def _empty(self) -> Decoder:
        with torch.device("meta"):
            return Decoder(self.model)

    def widest_format(self) -> torch.dtype:
        """Return the number format that holds every parameter exactly."""
        return reduce(torch.promote_types, {self.format_of(name) for name in self.shapes.keys() - self.state})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_weights(path: Path, *, ema: bool = False) -> Weights:
    """Open a run directory or its checkpoints/ folder (the newest whole checkpoint), one checkpoint, or a Hugging Face
    folder.

    ema: whether to take the moving averages of the weights. Raises CheckpointError if `path` is none of these, or damaged,
    or has no averages where they are asked for."""
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder; give a run directory, a checkpoint in it, or a Hugging Face folder"
        )
    if not is_huggingface_folder(path):
        return PhalanxWeights(path, ema=ema)
    if ema:
        raise CheckpointError(
            f"--ema: {path} is a Hugging Face folder, which holds no moving averages; leave --ema out"
        )
    return HuggingFaceWeights(path)


class HuggingFaceWeights(Weights):
    """Weights in a Hugging Face folder."""

    kind = "huggingface"

    def __init__(self, path: Path) -> None:
        self.where = path
        self._folder = HuggingFaceFolder(path)
        self.model = self._folder.model
        self.tokenizer = TokenizerFiles.read(path, self._folder.special_tokens)

    def format_of(self, name: str) -> torch.dtype:
        """Return number format in which the tensor `name` is stored."""
        return self._folder.format_of(name)

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Read the tensor `name`, or some of its rows."""
        return self._folder.read(name, rows)

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out` with the tensor `name`, holding no more of it than one expert."""
        self._folder.read_into(name, out)

    def close(self) -> None:
        """Let go of the files."""
        self._folder.close()


class PhalanxWeights(Weights):
    """Weights in a checkpoint of ours."""

    kind = "phalanx"

    def __init__(self, path: Path, *, ema: bool = False) -> None:
        """Open the newest checkpoint at `path`. ema: whether to take the moving averages of the weights."""
        newest = open_checkpoints(path).newest()
        if newest is None:
            raise CheckpointError(
                f"{path} holds neither a whole checkpoint of Phalanx nor the config.json of a Hugging Face folder"
            )
        self.where = newest.path
        self.step = newest.step
        state = read_state(newest.path)
        self.run, self.model = _parse_state(state, newest.path)
        self._reader = TensorReader(newest.path)
        records = self._reader.records
        if ema and not any(name.startswith(AVERAGES) for name in records):
            raise CheckpointError(
                f"--ema: {newest.path} holds no moving averages of its weights; train with training.ema.decay=0.999, say"
            )
        self._names = {name.removeprefix(MODEL): name for name in records if name.startswith(MODEL)}
        if ema:
            # What routers keep beside parameters has no average.
            self._names |= {name.removeprefix(AVERAGES): name for name in records if name.startswith(AVERAGES)}
        stored = {name: records[saved_as] for name, saved_as in self._names.items()}
        self._adapters = None if self.run is None else Adapters.of(self.run.training.lora)
        self._formats = {name: record.torch_dtype for name, record in stored.items()}
        # Before anything is built for each layer.
        if self.model.n_layers > len(stored):
            raise CheckpointError(f"{self.where}: {self.model.n_layers} layers, but {len(stored)} tensors of a model")
        # A state.json and tensors of two models, copied together, would load into nonsense.
        shapes = {name: tuple(record.shape) for name, record in stored.items()}
        wrong = [name for name, shape in self.shapes.items() if shapes.get(name) != shape]
        if wrong:
            found = f"is {list(shapes[wrong[0]])}" if wrong[0] in shapes else "is missing"
            raise CheckpointError(
                f"{self.where}: {len(wrong)} tensors do not fit the model it describes; {wrong[0]} {found}, "
                f"but should be {list(self.shapes[wrong[0]])}"
            )
        stored_tokens = state.get("special_tokens")
        special = SpecialTokens.from_config(stored_tokens) if isinstance(stored_tokens, dict) else SpecialTokens()
        # The run's folder holds checkpoints/; a checkpoint that was copied elsewhere has its own parent.
        root = newest.path.parent.parent if newest.path.parent.name == "checkpoints" else newest.path.parent
        self.tokenizer = TokenizerFiles.read(root / TOKENIZER_FOLDER, special)
        self._held: tuple[str, int, Tensor] | None = None
        """Rows that were read last: of which tensor, and from where on."""

    def format_of(self, name: str) -> torch.dtype:
        """Return number format in which the tensor `name` is stored."""
        return self._formats[name]

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Read the tensor `name`, or some of its rows, its adapter merged, and verify their checksums."""
        shape = self.shapes[name]
        if rows == slice(None) or not shape:
            tensor = self._reader.read(self._names[name])
        else:
            start, stop, _ = rows.indices(shape[0])
            held_name, first, held = self._held or ("", 0, torch.empty(0))
            if held_name != name or start < first or stop > first + len(held):
                # Let go of first, so that two windows are never held at once.
                self._held = None
                del held
                row_bytes = prod(shape[1:]) * self._formats[name].itemsize
                last = min(shape[0], max(stop, start + _WINDOW_BYTES // max(row_bytes, 1)))
                first, held = start, self._reader.read(self._names[name], start, last)
                self._held = name, first, held
            tensor = held[start - first : stop - first]
        down, up = adapter_names(name)
        if self._adapters is None or up not in self._names:
            return tensor
        down_RI, up_OR = (self._reader.read(self._names[each]) for each in (down, up))
        return merged_weight(tensor, down_RI, up_OR[rows], self._adapters.scale)

    def close(self) -> None:
        """Let go of the tensors held and of the files."""
        self._held = None
        self._reader.close()


def imported_state(model: LanguageModel, special: SpecialTokens, source: Path) -> dict[str, Any]:
    """Return the state.json of a checkpoint that holds imported weights: no optimizer, no data position, step 0."""
    return {
        "step": 0,
        "weights_only": True,
        "model": model.model_dump(mode="json"),
        "special_tokens": special.as_config(),
        "imported_from": source.name,
    }


def _parse_state(state: dict[str, Any], where: Path) -> tuple[LanguageRun | None, LanguageModel]:
    """Return the run and the model that a checkpoint's state describes."""
    if isinstance(state.get("run"), str):
        run = parse_run(state["run"], f"{where}/state.json: run")
        if not isinstance(run, LanguageRun):
            raise ConfigError(
                f"{where} holds a {run.model.family} model; this is for language models: {_VERBS[run.model.family]}"
            )
        return run, run.model
    try:
        return None, LanguageModel.model_validate(state.get("model"))
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}: " for part in first["loc"])
        raise CheckpointError(f"{where}/state.json does not describe a model: {place}{first['msg']}") from None


def tokenizer_files(weights: Weights, override: Path | None = None) -> TokenizerFiles:
    """Find the tokenizer of `weights`: at `override`, beside the weights, or with the data that they were trained on.

    override: a tokenizer.json, or a folder with one. The result is empty where none is found. Raises CheckpointError
    where there is none at `override`, DataError where the run's data is there but damaged.
    """
    found = weights.tokenizer
    # A checkpoint that was copied away has none beside it; the data that it was trained on have.
    if not found.files and weights.run is not None:
        folders = (token_path(source.path) for source in weights.run.data.sources)
        folder = next((folder for folder in folders if (folder / MANIFEST).is_file()), None)
        if folder is not None:
            record = read_token_manifest(folder).tokenizer
            content = check_size(folder, record.file).read_bytes()
            found = TokenizerFiles({TOKENIZER: content}, SpecialTokens(end=(record.end_of_document,)))
    if override is None:
        return found
    if override.is_dir():
        given = TokenizerFiles.read(override, found.special)
        if not given.files:
            raise CheckpointError(f"--tokenizer={override} holds no {TOKENIZER}")
        return given
    if not override.is_file():
        raise CheckpointError(f"--tokenizer={override} does not exist; give a {TOKENIZER}, or a folder with one")
    return TokenizerFiles({TOKENIZER: override.read_bytes()}, found.special)


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
    path: Path,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    ema: bool = False,
) -> LoadedModel:
    """Load a run directory (its newest whole checkpoint), one checkpoint, or a Hugging Face folder.

    dtype: number format of weights and activations; by default that of the run, and for imported weights bfloat16 on
    accelerators and float32 on the CPU. tokenizer: a tokenizer.json, or a folder with one, in place of the one that
    belongs to the model. ema: whether to take the moving averages of the weights. One block's tensors are held on the CPU
    beside the model.

    Raises CheckpointError where there is no sound checkpoint, or the tokenizer asked for is not there.
    """
    with open_weights(path, ema=ema) as weights:
        if dtype is None and weights.run is not None:
            dtype = PRECISIONS[weights.run.layout.precision].compute_dtype
        elif dtype is None:
            dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        require_cpu_format(dtype, device, "--precision")
        # Built without memory, then emptied on the device: the weights are never held twice.
        with torch.device("meta"):
            chunk = max(128, _CHUNK_LOGITS // weights.model.vocab_size)
            model = Decoder(weights.model, dtype=dtype, chunk_tokens=chunk)
        # Every layer but a router casts its parameters to the activations' format, so keeping them in it changes no number.
        model.to(dtype)
        for module in model.modules():
            if isinstance(module, Router):
                module.float()
        model.to_empty(device=device)
        with torch.no_grad():
            for buffer in model.buffers():
                buffer.zero_()
            for name, tensor in model.state_dict().items():
                weights.read_into(name, tensor)
        files = tokenizer_files(weights, tokenizer)
        found = TextTokenizer.from_files(files, weights.where) if files.files else None
        return LoadedModel(model.eval(), weights.run, found, weights.where, weights.step)
