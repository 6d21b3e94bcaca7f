"""How one tensor of the decoder is made of tensors of a Hugging Face architecture, and taken apart again.

Every rule only moves numbers, so both directions are exact and each undoes the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from phalanx.config.model import LanguageModel
from phalanx.families.language.model.decoder import Decoder
from phalanx.nn.layers import gate_block


@dataclass(frozen=True)
class Counterpart:
    """The Hugging Face modules that together hold one module (or one parameter) of ours."""

    names: tuple[str, ...]
    """Their names; `*` stands for the layer."""
    rows: Literal["same", "qkv", "gate_up"] = "same"
    """What the rows are, where ours are in another order: query, key, value (in one tensor or three), or gate and up."""
    transposed: bool = False
    """Whether matrices are kept as [in, out]."""


@dataclass(frozen=True)
class TensorRule:
    """One tensor of ours and the tensors of theirs that hold the same numbers."""

    ours: str
    theirs: tuple[str, ...]
    shape: tuple[int, ...]
    """Shape of ours."""
    counterpart: Counterpart
    model: LanguageModel

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Our tensor from theirs, given in the order of `theirs`."""
        parts = [self._turned(part) for part in parts]
        if self.counterpart.rows == "qkv":
            query, key, value = parts if len(parts) == 3 else self._split_fused(parts[0])
            return _group_heads(query, key, value, self.model)
        if self.counterpart.rows == "gate_up":
            return _alternate(parts[0], parts[1], gate_block(self.model.ff_size))
        return parts[0]

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Their tensors from ours, in the order of `theirs`."""
        parts: Sequence[Tensor] = (tensor,)
        if self.counterpart.rows == "qkv":
            parts = _ungroup_heads(tensor, self.model)
            parts = parts if len(self.theirs) == 3 else (torch.cat(parts),)
        elif self.counterpart.rows == "gate_up":
            parts = _unalternate(tensor, gate_block(self.model.ff_size))
        return [self._turned(part) for part in parts]

    def their_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each of their tensors, by name."""
        parts = self.split(torch.empty(self.shape, device="meta"))
        return {name: tuple(part.shape) for name, part in zip(self.theirs, parts, strict=True)}

    def _turned(self, tensor: Tensor) -> Tensor:
        return tensor.T if self.counterpart.transposed and tensor.dim() == 2 else tensor

    def _split_fused(self, fused: Tensor) -> Sequence[Tensor]:
        model = self.model
        sizes = [heads * model.head_size for heads in (model.n_heads, model.kv_heads, model.kv_heads)]
        parts: Sequence[Tensor] = fused.split(sizes)
        return parts


def tensor_rules(model: LanguageModel, counterparts: Mapping[str, Counterpart]) -> list[TensorRule]:
    """A rule for every parameter of the decoder that `model` describes, in the decoder's own order.

    counterparts: by our module name, or by parameter name where a module's parameters have different homes; `*` stands
    for the layer.
    """
    with torch.device("meta"):
        decoder = Decoder(model)
    return [_rule(name, tuple(p.shape), model, counterparts) for name, p in decoder.named_parameters()]


def _rule(
    ours: str, shape: tuple[int, ...], model: LanguageModel, counterparts: Mapping[str, Counterpart]
) -> TensorRule:
    pattern, layer = ours, ""
    if ours.startswith("blocks."):
        _, layer, rest = ours.split(".", 2)
        pattern = f"blocks.*.{rest}"
    if pattern in counterparts:
        counterpart, kind = counterparts[pattern], ""
    else:
        module, _, kind = pattern.rpartition(".")
        counterpart, kind = counterparts[module], f".{kind}"
    theirs = tuple(name.replace("*", layer) + kind for name in counterpart.names)
    return TensorRule(ours, theirs, shape, counterpart, model)


def _group_heads(query: Tensor, key: Tensor, value: Tensor, model: LanguageModel) -> Tensor:
    """Rows of all queries, keys and values -> for each key/value head its query heads, its key, its value."""
    heads = [part.unflatten(0, (model.kv_heads, -1, model.head_size)) for part in (query, key, value)]
    return torch.cat(heads, dim=1).flatten(0, 2)


def _ungroup_heads(qkv: Tensor, model: LanguageModel) -> tuple[Tensor, Tensor, Tensor]:
    group = model.n_heads // model.kv_heads
    heads = qkv.unflatten(0, (model.kv_heads, group + 2, model.head_size))
    query, key, value = (part.flatten(0, 2) for part in heads.split([group, 1, 1], dim=1))
    return query, key, value


def _alternate(gate: Tensor, up: Tensor, block: int) -> Tensor:
    """Rows of gate and up -> groups of `block` rows in turn."""
    return torch.stack((gate.unflatten(0, (-1, block)), up.unflatten(0, (-1, block))), dim=1).flatten(0, 2)


def _unalternate(gate_up: Tensor, block: int) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.unflatten(0, (-1, 2, block)).unbind(1)
    return gate.flatten(0, 1), up.flatten(0, 1)
