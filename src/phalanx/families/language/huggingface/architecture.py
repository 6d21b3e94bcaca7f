"""What is known of one Hugging Face architecture: the fields of its `config.json` and where its tensors go."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from phalanx.config.model import LanguageModel
from phalanx.families.language.huggingface.rules import Counterpart, TensorRule, tensor_rules

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
