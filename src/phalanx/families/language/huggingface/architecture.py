"""What is known of one Hugging Face architecture: the fields of its `config.json` and where its tensors go."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from phalanx.config.model import LanguageModel
from phalanx.families.language.model.decoder import Decoder
from phalanx.nn.layers import gate_block

# fmt: off
GENERAL_KEYS = frozenset(
    {
        # what the model is called and made with
        "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path",
        "name_or_path", "_commit_hash", "finetuning_task", "tokenizer_class", "prefix", "task_specific_params",
        "problem_type", "id2label", "label2id", "is_decoder", "transformers.js_config", "attn_implementation",
        "_attn_implementation", "_attn_implementation_autoset",
        # how it is run: what a call returns, caches, and pieces in which equal numbers are computed
        "return_dict", "output_hidden_states", "output_attentions", "output_scores", "return_dict_in_generate",
        "use_cache", "torchscript", "use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward",
        "pretraining_tp",
        # training
        "initializer_range",
        # generation
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
        "forced_bos_token_id", "forced_eos_token_id", "max_length", "min_length", "do_sample", "early_stopping",
        "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
        "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
        "bad_words_ids", "num_return_sequences", "remove_invalid_values", "exponential_decay_length_penalty",
        "suppress_tokens", "begin_suppress_tokens",
    }
)
# fmt: on
"""Keys of any `config.json` that do not change the numbers a model computes."""

# The bound keeps a product of two sizes, in bytes, within 64 bits.
Size = Annotated[int, Field(ge=1, le=2**24)]
Positive = Annotated[float, Field(gt=0.0)]


class KnownKeys(BaseModel):
    """One object of `config.json`, of which every key must be known.

    Keys that change what a model computes are fields; one that the decoder has no counterpart for is declared with the
    values that mean "not used". `irrelevant` names the keys that change nothing. Any other key is refused by name, unless
    its value switches nothing on (null, false, or empty): it may well be read by the code that the model was made with.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    irrelevant: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_irrelevant(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        declared = {*cls.model_fields, *cls._aliases()}
        return {
            key: value
            for key, value in values.items()
            if key in declared or not (key in cls.irrelevant or _switches_nothing_on(value))
        }

    @classmethod
    def _aliases(cls) -> set[str]:
        aliases = (field.validation_alias for field in cls.model_fields.values())
        return {str(name) for alias in aliases if isinstance(alias, AliasChoices) for name in alias.choices}


class ConfigFields(KnownKeys):
    """The fields of `config.json` that say what a model computes, with Hugging Face's defaults."""

    def to_model(self) -> LanguageModel:
        """The decoder that computes the same."""
        raise NotImplementedError

    @classmethod
    def from_model(cls, model: LanguageModel) -> Self:
        """The fields for a decoder that fits the architecture (`Architecture.misfits` is empty)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Architecture:
    """One entry of the table in `architectures`."""

    name: str
    """Class name, as `architectures` in `config.json` has it."""
    aliases: tuple[str, ...] = field(default=(), kw_only=True)
    """Other class names of the same model, in the code of those who train it."""
    model_type: str
    """`model_type` in `config.json`."""
    prefix: str
    """First part of the names of all tensors but the head's; checkpoints of the bare model leave it out."""
    config: type[ConfigFields]
    """The fields of `config.json`."""
    counterparts: Mapping[str, Counterpart]
    """See `tensor_rules`."""
    ignored: re.Pattern[str]
    """Names of tensors that hold constants, which some versions wrote out."""
    needs: Callable[[LanguageModel], Mapping[str, object]]
    """The values that a decoder's fields must have to fit; a tuple holds alternatives."""

    def rules(self, model: LanguageModel) -> list[TensorRule]:
        """One rule for each parameter of the decoder."""
        return tensor_rules(model, self.counterparts)

    def misfits(self, model: LanguageModel) -> list[str]:
        """The fields of `model` that the architecture has no counterpart for: "model.norm=rmsnorm (it has layernorm)"."""
        found = resolved_fields(model)
        return [
            f"model.{field}={_show(found[field])} (it has {_show(needed)})"
            for field, needed in self.needs(model).items()
            if found[field] not in (needed if isinstance(needed, tuple) else (needed,))
        ]

    def config_json(self, model: LanguageModel) -> dict[str, Any]:
        """Content of `config.json` for a decoder that fits."""
        fields = self.config.from_model(model).model_dump(exclude_none=True)
        return {"architectures": [self.name], "model_type": self.model_type, **fields}


def resolved_fields(model: LanguageModel) -> dict[str, object]:
    """Every field of `model`, with the sizes that null stands for filled in."""
    return {**model.model_dump(), "n_kv_heads": model.kv_heads, "head_dim": model.head_size, "d_ff": model.ff_size}


def _switches_nothing_on(value: object) -> bool:
    return value is None or value is False or value in ({}, [], "")


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return " or ".join(map(_show, value))
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value}"


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
