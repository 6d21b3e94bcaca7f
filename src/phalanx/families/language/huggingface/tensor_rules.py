"""Which tensors of a Hugging Face checkpoint hold which of ours, and how their rows lie.

A rule moves some rows of one tensor of ours to and from theirs, and only moves them: both directions are exact and each
undoes the other. Experts have a rule each, so that no more than one of them is in memory, whichever layout a file has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from phalanx.config.model import LanguageModel
from phalanx.families.language.decoder import Decoder
from phalanx.nn.declared_layers import gate_block

FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Number formats that are read and written, by their names in safetensors."""

LOADS = re.compile(r"blocks\.\d+\.mlp\.router\.load")
"""Names of our tensors that only training counts, which no checkpoint of Hugging Face has."""


@dataclass(frozen=True)
class Counterpart:
    """The Hugging Face modules that together hold one module (or one parameter) of ours."""

    names: tuple[str, ...]
    """Their names; `*` stands for the layer, `#` for the expert."""
    rows: Literal["same", "qkv", "gate_up", "rotary_heads", "rotary_end"] = "same"
    """What the rows are, where ours are in another order: query, key, value, or gate and up, in one tensor or several; or
    those of latent attention whose last features, of each head or of all, are rotated in neighbouring pairs."""
    transposed: bool = False
    """Whether matrices are kept as [in, out]."""
    fused: str | None = None
    """Name in files that keep the experts of a layer in one tensor, [experts, rows, columns]; None where it is the same."""
    wide: bool = False
    """Whether it is stored in float32 beside weights of fewer bits."""


@dataclass(frozen=True)
class TensorRule:
    """Some rows of one tensor of ours, and the tensors of theirs that hold the same numbers."""

    ours: str
    theirs: tuple[str, ...]
    shape: tuple[int, ...]
    """Shape of the rows of ours."""
    counterpart: Counterpart
    model: LanguageModel
    first_row: int = 0
    """First row of our tensor that the rule is about."""
    expert: int | None = None
    """Index in the first dim of their tensor, where it holds all experts of a layer."""

    @property
    def rows(self) -> slice:
        """Return the rows of our tensor."""
        return slice(self.first_row, self.first_row + self.shape[0])

    def dtype(self, chosen: torch.dtype) -> torch.dtype:
        """Return the number format of their tensors in an export in the format `chosen`."""
        return torch.promote_types(chosen, torch.float32) if self.counterpart.wide else chosen

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join their tensors, given in the order of `theirs`, into the rows of ours."""
        parts = [self._transposed(part) for part in parts]
        if self.counterpart.rows == "qkv":
            model = self.model
            if len(parts) == 1:
                sizes = [heads * model.head_size for heads in (model.n_heads, model.kv_heads, model.kv_heads)]
                parts = list(parts[0].split(sizes))
            # All queries, keys and values become for each key/value head its query heads, its key, its value, so that a
            # contiguous slice of the rows is a whole part of the layer.
            heads = [part.unflatten(0, (model.kv_heads, -1, model.head_size)) for part in parts]
            return torch.cat(heads, dim=1).flatten(0, 2)
        if self.counterpart.rows == "gate_up":
            # One tensor holds all gate rows, then all up rows.
            halves = parts if len(parts) == 2 else parts[0].chunk(2)
            gate_up = [half.unflatten(0, (-1, gate_block(self.shape[0] // 2))) for half in halves]
            return torch.stack(gate_up, dim=1).flatten(0, 2)
        if self.counterpart.rows in ("rotary_heads", "rotary_end"):
            # They turn features 2i and 2i + 1 together, we the i-th of both halves.
            rest, turned = self._rotary_parts(parts[0])
            halves = turned.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
            return torch.cat((rest, halves), dim=1).flatten(0, 1)
        return parts[0]

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Split the rows of ours into their tensors, in the order of `theirs`: the inverse of `join`."""
        parts: Sequence[Tensor] = (tensor,)
        if self.counterpart.rows == "qkv":
            model = self.model
            group = model.n_heads // model.kv_heads
            heads = tensor.unflatten(0, (model.kv_heads, group + 2, model.head_size))
            parts = [part.flatten(0, 2) for part in heads.split([group, 1, 1], dim=1)]
        elif self.counterpart.rows == "gate_up":
            gate_up = tensor.unflatten(0, (-1, 2, gate_block(self.shape[0] // 2)))
            parts = [part.flatten(0, 1) for part in gate_up.unbind(1)]
        elif self.counterpart.rows in ("rotary_heads", "rotary_end"):
            rest, turned = self._rotary_parts(tensor)
            pairs = turned.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            parts = (torch.cat((rest, pairs), dim=1).flatten(0, 1),)
        # Some architectures keep in one tensor what others split.
        if len(self.theirs) < len(parts):
            parts = (torch.cat(list(parts)),)
        return [self._transposed(part) for part in parts]

    def _rotary_parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows whose features are not rotated, and those whose are, each [heads or 1, rows, columns]."""
        latent = self.model.latent
        assert latent is not None
        heads = self.model.n_heads if self.counterpart.rows == "rotary_heads" else 1
        by_head = rows.unflatten(0, (heads, -1))
        return by_head[:, : -latent.rope_size], by_head[:, -latent.rope_size :]

    def their_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each of their tensors, by name."""
        shapes = _split_shapes(self.counterpart, self.model, self.shape, len(self.theirs))
        if self.expert is not None:
            # One rule speaks of one expert, their tensor of all.
            settings = self.model.experts
            assert settings is not None
            shapes = tuple((settings.count, *shape) for shape in shapes)
        return dict(zip(self.theirs, shapes, strict=True))

    def _transposed(self, tensor: Tensor) -> Tensor:
        return tensor.T if self.counterpart.transposed and tensor.dim() == 2 else tensor


@cache
def _split_shapes(
    counterpart: Counterpart, model: LanguageModel, shape: tuple[int, ...], count: int
) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the `count` tensors that rows of `shape` are split into; alike for all layers and experts."""
    rule = TensorRule("", ("",) * count, shape, counterpart, model)
    return tuple(tuple(part.shape) for part in rule.split(torch.empty(shape, device="meta")))


def tensor_rules(
    model: LanguageModel, counterparts: Mapping[str, Counterpart], *, fused: bool = False
) -> list[TensorRule]:
    """Return rules for every tensor of the decoder that `model` describes, in the decoder's own order.

    counterparts: by our module name, or by parameter name where a module's parameters have different homes; `*` stands
    for the layer. fused: whether their files keep the experts of a layer in one tensor.
    """
    # Names and shapes come from the model itself, without memory, so a rule can never be forgotten.
    with torch.device("meta"):
        tensors = Decoder(model).state_dict()
    rules: list[TensorRule] = []
    for ours, tensor in tensors.items():
        if LOADS.fullmatch(ours):
            continue
        pattern, layer = re.sub(r"^blocks\.\d+\.", "blocks.*.", ours), "".join(ours.split(".")[1:2])
        # A rule for the parameter itself goes before that of its module.
        module, _, kind = pattern.rpartition(".")
        counterpart = counterparts[pattern if pattern in counterparts else module]
        suffix = "" if pattern in counterparts else f".{kind}"

        names = tuple(name.replace("*", layer) + suffix for name in counterpart.names)
        if fused and counterpart.fused is not None:
            names = (counterpart.fused.replace("*", layer) + suffix,)
        shape = tuple(tensor.shape)
        # A module whose names speak of experts gets a rule for each of them, also where their files keep all in one tensor.
        if not any("#" in name for name in counterpart.names):
            rules.append(TensorRule(ours, names, shape, counterpart, model))
            continue
        assert model.experts is not None
        in_one, rows = fused and counterpart.fused is not None, shape[0] // model.experts.count
        for expert in range(model.experts.count):
            theirs = tuple(name.replace("#", str(expert)) for name in names)
            part, index = (rows, *shape[1:]), expert if in_one else None
            rules.append(TensorRule(ours, theirs, part, counterpart, model, first_row=expert * rows, expert=index))
    return rules
