"""A folder with a Hugging Face checkpoint, read one tensor at a time.

Folders come from strangers and are checked before any tensor is read: only safetensors are read (never pickle), names in the
index may not lead out of the folder, and every tensor must be one the architecture has, in the shape that `config.json`
gives it.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.families.language.huggingface.find_architecture import read_config
from phalanx.families.language.huggingface.folder_files import (
    GENERATION,
    INDEX,
    WEIGHTS,
    SpecialTokens,
    file_inside,
    read_json,
)
from phalanx.families.language.huggingface.tensor_rules import FORMATS, LOADS, TensorRule

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
        # Those of the configuration are overruled by those that text is generated with.
        tokens = {"bos_token_id": self.config.get("bos_token_id"), "eos_token_id": self.config.get("eos_token_id")}
        if (path / GENERATION).exists():
            settings = read_json(file_inside(path, GENERATION))
            tokens |= {name: settings[name] for name in tokens if settings.get(name) is not None}
        self.special_tokens = SpecialTokens.from_config(tokens)
        # Weight files stay open and are closed together, also where a later check fails.
        self._files = ExitStack()
        try:
            self._open_weights()
            self._rules = self._choose_rules()
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

    def format_of(self, name: str) -> torch.dtype:
        """Return the number format in which our tensor `name` is stored; one that holds all parts, where they differ."""
        if LOADS.fullmatch(name):
            return torch.float32
        stored = [self._stored_name(theirs) for rule in self._rules[name] for theirs in rule.theirs]
        formats = (FORMATS[self._tensors[part].get_slice(part).get_dtype()] for part in stored)
        return reduce(torch.promote_types, formats)

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Read some rows of our tensor `name` on the CPU, in its stored format. Raises as `read_into` does."""
        stop, *sizes = self.shape_of(name)
        first, last, _ = rows.indices(stop)
        out = torch.empty(last - first, *sizes, dtype=self.format_of(name))
        self.read_into(name, out, first)
        return out

    def read_into(self, name: str, out: Tensor, first_row: int = 0) -> None:
        """Fill `out` with the rows of our tensor `name` from `first_row`, holding the tensors of one rule besides.

        Raises CheckpointError where one of these holds NaN or infinities."""
        if LOADS.fullmatch(name):
            # What an untrained router begins with: all experts alike.
            out.fill_(1.0 / self.shape_of(name)[0])
            return
        for rule in self._rules[name]:
            start, stop = max(rule.rows.start, first_row), min(rule.rows.stop, first_row + len(out))
            if start >= stop:
                continue
            parts = []
            for theirs in rule.theirs:
                stored, expert = self._stored_name(theirs), rule.expert
                whole = self._tensors[stored]
                part: Tensor = whole.get_tensor(stored) if expert is None else whole.get_slice(stored)[expert]
                broken = part.numel() - int(part.isfinite().sum())
                if broken:
                    raise CheckpointError(
                        f"{self.path}: {broken:,} of {part.numel():,} numbers of tensor {stored} are NaN or infinite; "
                        f"nothing can be computed with them, fetch or save the model again"
                    )
                parts.append(part)
            within = slice(start - rule.rows.start, stop - rule.rows.start)
            out[start - first_row : stop - first_row].copy_(rule.join(parts)[within])

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of our tensor `name`."""
        if LOADS.fullmatch(name):
            name = name.removesuffix("load") + "weight"
            return self.shape_of(name)[:1]
        last = self._rules[name][-1]
        return (last.rows.stop, *last.shape[1:])

    def _choose_rules(self) -> dict[str, list[TensorRule]]:
        """Return the rules for each of our tensors, for the layout of experts that the files have."""
        rules = self.architecture.rules(self.model)
        if self.architecture.fuses:
            fused = self.architecture.rules(self.model, fused=True)
            separate = {name for rule in rules for name in rule.theirs}
            found = {name for rule in fused for name in rule.theirs if name not in separate}
            if any(self._stored_name(name) in self._tensors for name in found):
                rules = fused
        by_tensor: dict[str, list[TensorRule]] = {}
        for rule in rules:
            by_tensor.setdefault(rule.ours, []).append(rule)
        return by_tensor

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
            for rules in self._rules.values()
            for rule in rules
            for name, shape in rule.their_shapes().items()
        }
        problems = [f"{self.path}: tensor {name} is missing" for name in expected if name not in self._tensors]
        for name in sorted(self._tensors):
            if name in expected:
                header = self._tensors[name].get_slice(name)
                shape, stored = tuple(header.get_shape()), header.get_dtype()
                if shape != expected[name]:
                    problems.append(
                        f"{self.path}: tensor {name} has shape {list(shape)}, config.json asks for {list(expected[name])}"
                    )
                if stored not in FORMATS:
                    problems.append(f"{self.path}: tensor {name} is stored as {stored}; read are {', '.join(FORMATS)}")
            # Constants, layers that predict further tokens and a second copy of a tied table may be there; nothing else may.
            elif not (self.architecture.passes_over(name, self.model) or (self.model.tied_head and name == _HEAD)):
                problems.append(f"{self.path}: {self.architecture.name} has no tensor {name}")
        if problems:
            more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
            raise CheckpointError("\n".join(problems[:_SHOWN] + more))

    def _check_tied_head(self) -> None:
        """Refuse a head of its own where the configuration ties the head to the embedding.

        A tied head is often written out a second time, so one that is equal is passed over."""
        if not self.model.tied_head or _HEAD not in self._tensors:
            return
        embedding = self._stored_name(self._rules["embedding.weight"][0].theirs[0])
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
