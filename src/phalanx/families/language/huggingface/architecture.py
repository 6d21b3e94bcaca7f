"""What is known of one Hugging Face architecture: the fields of its `config.json`, and where its tensors go.

An architecture is a table in a module of its own (`llama`, `gpt2`, `mpt`): the keys of `config.json` with their defaults,
which of them hold a field of the decoder as it is (`same`), which values the decoder's fields must have (`needs`), and the
names of tensors. Only what is written in another way takes code. A field of the decoder that a table does not speak of must
have its default, so an architecture refuses options that came after it by itself.

Every tensor rule only moves numbers, so both directions are exact and each undoes the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from phalanx.config.model import LanguageModel
from phalanx.families.language.decoder import Decoder
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
        aliases = (field.validation_alias for field in cls.model_fields.values())
        other_names = {str(name) for alias in aliases if isinstance(alias, AliasChoices) for name in alias.choices}
        declared = {*cls.model_fields, *other_names}

        def matters(key: str, value: object) -> bool:
            switches_on = not (value is None or value is False or value in ({}, [], ""))
            return key in declared or (key not in cls.irrelevant and switches_on)

        return {key: value for key, value in values.items() if matters(key, value)}


class ConfigFields(KnownKeys):
    """The fields of `config.json` that say what a model computes, with Hugging Face's defaults."""

    same: ClassVar[Mapping[str, str]]
    """Fields of the decoder, each with the key that holds the same value."""
    needs: ClassVar[Mapping[str, object]]
    """Values that fields of the decoder have in every such model; `to_others` tells the alternatives of a tuple apart."""
    others: ClassVar[frozenset[str]] = frozenset()
    """Further fields of the decoder that the architecture can express, by `to_others` and `from_others`."""

    def to_others(self) -> dict[str, object]:
        """Return the fields of the decoder that are written otherwise than in `same`; by default none."""
        return {}

    @classmethod
    def from_others(cls, model: LanguageModel) -> dict[str, object]:
        """Return the keys that hold these fields of a decoder; by default none."""
        return {}

    def to_model(self) -> LanguageModel:
        """Return the decoder that computes the same."""
        # Alternatives are told apart by `to_others`, which comes last.
        needed = {field: value for field, value in self.needs.items() if not isinstance(value, tuple)}
        same = {field: getattr(self, key) for field, key in self.same.items()}
        return LanguageModel.model_validate({**needed, **same, **self.to_others()})

    @classmethod
    def from_model(cls, model: LanguageModel) -> Self:
        """Return the fields for a decoder that fits (`misfits` is empty)."""
        found = resolved_fields(model)
        return cls(**{key: found[field] for field, key in cls.same.items()}, **cls.from_others(model))

    @classmethod
    def misfits(cls, model: LanguageModel) -> list[str]:
        """Return the fields of `model` without a counterpart, as in "model.norm=rmsnorm (it has layernorm)"."""
        found = resolved_fields(model)
        spoken_of = cls.same.keys() | cls.needs.keys() | cls.others | _unused_fields(model)
        needs = {
            **cls.needs,
            **{field: value for field, value in _default_fields(model).items() if field not in spoken_of},
        }
        return [
            f"model.{field}={_show_value(found[field])} (it has {_show_value(needed)})"
            for field, needed in needs.items()
            if found[field] not in (needed if isinstance(needed, tuple) else (needed,))
        ]


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
    ignored: re.Pattern[str] = re.compile(r"(?!)")
    """Names of tensors that hold constants, which some versions wrote out; by default there are none."""

    def rules(self, model: LanguageModel) -> list[TensorRule]:
        """Return one rule for each parameter of the decoder."""
        return tensor_rules(model, self.counterparts)

    def config_json(self, model: LanguageModel) -> dict[str, Any]:
        """Return the content of `config.json` for a decoder that fits."""
        fields = self.config.from_model(model).model_dump(exclude_none=True)
        return {"architectures": [self.name], "model_type": self.model_type, **fields}


def resolved_fields(model: LanguageModel) -> dict[str, object]:
    """Return every field of `model`, with the sizes that null stands for filled in."""
    return {**model.model_dump(), "n_kv_heads": model.kv_heads, "head_dim": model.head_size, "d_ff": model.ff_size}


def _default_fields(model: LanguageModel) -> dict[str, object]:
    """Return the default of every field that has one, with the sizes that null stands for filled in."""
    defaults = {name: field.default for name, field in LanguageModel.model_fields.items() if not field.is_required()}
    sizes = {"n_kv_heads": model.n_heads, "head_dim": model.d_model // model.n_heads, "d_ff": 4 * model.d_model}
    return defaults | sizes


def _unused_fields(model: LanguageModel) -> set[str]:
    """Return the fields that do not change what the trained `model` computes."""
    unused = {"family", "preset", "dropout", "init_std"}
    if model.positions != "rope":
        unused |= {"rope_theta", "rope_scaling"}
    if model.positions != "alibi":
        unused.add("alibi_bias_max")
    return unused


def _show_value(value: object) -> str:
    if isinstance(value, tuple):
        return " or ".join(map(_show_value, value))
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
        """Join their tensors, given in the order of `theirs`, into ours."""
        model = self.model
        parts = [self._transposed(part) for part in parts]
        if self.counterpart.rows == "qkv":
            if len(parts) == 1:
                sizes = [heads * model.head_size for heads in (model.n_heads, model.kv_heads, model.kv_heads)]
                parts = parts[0].split(sizes)
            # All queries, keys and values become for each key/value head its query heads, its key, its value, so that a
            # contiguous slice of the rows is a whole part of the layer.
            heads = [part.unflatten(0, (model.kv_heads, -1, model.head_size)) for part in parts]
            return torch.cat(heads, dim=1).flatten(0, 2)
        if self.counterpart.rows == "gate_up":
            gate_up = [part.unflatten(0, (-1, gate_block(model.ff_size))) for part in parts]
            return torch.stack(gate_up, dim=1).flatten(0, 2)
        return parts[0]

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Split our tensor into theirs, in the order of `theirs`: the inverse of `join`."""
        model = self.model
        parts: Sequence[Tensor] = (tensor,)
        if self.counterpart.rows == "qkv":
            group = model.n_heads // model.kv_heads
            heads = tensor.unflatten(0, (model.kv_heads, group + 2, model.head_size))
            parts = [part.flatten(0, 2) for part in heads.split([group, 1, 1], dim=1)]
            if len(self.theirs) == 1:
                parts = (torch.cat(parts),)
        elif self.counterpart.rows == "gate_up":
            gate_up = tensor.unflatten(0, (-1, 2, gate_block(model.ff_size)))
            parts = [part.flatten(0, 1) for part in gate_up.unbind(1)]
        return [self._transposed(part) for part in parts]

    def their_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each of their tensors, by name."""
        parts = self.split(torch.empty(self.shape, device="meta"))
        return {name: tuple(part.shape) for name, part in zip(self.theirs, parts, strict=True)}

    def _transposed(self, tensor: Tensor) -> Tensor:
        return tensor.T if self.counterpart.transposed and tensor.dim() == 2 else tensor


def tensor_rules(model: LanguageModel, counterparts: Mapping[str, Counterpart]) -> list[TensorRule]:
    """Return a rule for every parameter of the decoder that `model` describes, in the decoder's own order.

    counterparts: by our module name, or by parameter name where a module's parameters have different homes; `*` stands
    for the layer.
    """
    # Names and shapes come from the model itself, without memory, so a rule can never be forgotten.
    with torch.device("meta"):
        decoder = Decoder(model)
    rules = []
    for ours, parameter in decoder.named_parameters():
        pattern, layer = ours, ""
        if ours.startswith("blocks."):
            _, layer, rest = ours.split(".", 2)
            pattern = f"blocks.*.{rest}"
        # A rule for the parameter itself goes before that of its module.
        module, _, kind = pattern.rpartition(".")
        suffix = "" if pattern in counterparts else f".{kind}"
        counterpart = counterparts[pattern if pattern in counterparts else module]
        theirs = tuple(name.replace("*", layer) + suffix for name in counterpart.names)
        rules.append(TensorRule(ours, theirs, tuple(parameter.shape), counterpart, model))
    return rules
