"""What is known of one Hugging Face architecture: the fields of its `config.json`, and where its tensors go.

An architecture is a table in a module of its own (`llama`, `gpt2`, `mpt`): the keys of `config.json` with their defaults,
which of them hold a field of the decoder as it is (`same`), which values the decoder's fields must have (`needs`), and the
names of tensors. Only what is written in another way takes code. A field of the decoder that a table does not speak of must
have its default, so an architecture refuses options that came after it by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from phalanx.config.layers import Experts, LatentSizes
from phalanx.config.model import LanguageModel
from phalanx.families.language.huggingface.tensor_rules import Counterpart, TensorRule, tensor_rules

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
    """The fields of `config.json` that say what a model computes, with Hugging Face's defaults.

    Fields of the decoder go by their names, those of its mixtures of experts as in `experts.count`.
    """

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
        fields = {**needed, **same, **self.to_others()}
        section = {name: value for name, value in fields.items() if "." not in name and name not in SECTIONS}
        for part in SECTIONS:
            prefix = f"{part}."
            inner = {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
            section |= {part: inner} if inner else {}
        return LanguageModel.model_validate(section)

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
        defaults = {field: value for field, value in _default_fields(model).items() if field not in spoken_of}
        absent = [f"{section}." for section in SECTIONS if cls.needs.get(section) != SOME]
        problems = [
            f"model.{field}={_show_value(found[field])} (it has {_show_value(needed)})"
            for field, needed in {**cls.needs, **defaults}.items()
            # Where there are mixtures of experts on one side alone, that says it all.
            if field in found and not any(map(field.startswith, absent))
            if found[field] not in (needed if isinstance(needed, tuple) else (needed,))
        ]
        if problems:
            return problems
        # It fits in kind; the architecture may still not take its values.
        try:
            cls.from_model(model)
        except ValidationError as error:
            return [
                f"{'.'.join(map(str, detail['loc']))}={_show_value(detail['input'])} ({detail['msg']})".removeprefix(
                    "="
                )
                for detail in error.errors()
            ]
        return []


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

    further_layers: bool = False
    """Whether files hold layers behind the decoder's last, which predict further tokens and are passed over."""

    def rules(self, model: LanguageModel, *, fused: bool = False) -> list[TensorRule]:
        """Return the rules for all tensors of the decoder. fused: see `tensor_rules`."""
        return tensor_rules(model, self.counterparts, fused=fused)

    @property
    def fuses(self) -> bool:
        """Whether files may keep the experts of a layer in one tensor."""
        return any(counterpart.fused is not None for counterpart in self.counterparts.values())

    def passes_over(self, name: str, model: LanguageModel) -> bool:
        """Return whether the tensor `name` of theirs is no part of the decoder."""
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        behind = self.further_layers and layer is not None and int(layer[1]) >= model.n_layers
        return behind or self.ignored.fullmatch(name) is not None

    def config_json(self, model: LanguageModel) -> dict[str, Any]:
        """Return the content of `config.json` for a decoder that fits."""
        fields = self.config.from_model(model).model_dump(exclude_none=True)
        # Said of the fields that are something else in a file that leaves them out.
        nulls = {
            name: None
            for name, field in self.config.model_fields.items()
            if name not in fields and field.default is not None and not field.exclude and not field.is_required()
        }
        return {"architectures": [self.name], "model_type": self.model_type, **fields, **nulls}


SECTIONS: Mapping[str, type[BaseModel]] = {"experts": Experts, "latent": LatentSizes}
"""Fields of the decoder that hold fields of their own, or null."""
SOME = "some"
"""What such a field has where it is not null."""
_TRAINING_ONLY = frozenset({"experts.balance", "experts.balance_weight", "experts.z_loss", "experts.bias_rate"})


def resolved_fields(model: LanguageModel) -> dict[str, object]:
    """Return every field of `model`, with the sizes that null stands for filled in; see `ConfigFields` on their names."""
    sizes = {
        "n_kv_heads": model.kv_heads,
        "head_dim": model.head_size,
        "d_ff": model.ff_size,
        "qkv_bias": model.bias if model.qkv_bias is None else model.qkv_bias,
        # Two names of one thing.
        "qk_norm": "head" if model.qk_norm is True else model.qk_norm,
    }
    found = {**model.model_dump(), **sizes}
    for section in SECTIONS:
        inner = found[section]
        if isinstance(inner, dict):
            found |= {f"{section}.{name}": value for name, value in inner.items()} | {section: SOME}
    experts = model.experts
    if experts is not None:
        hidden = experts.d_ff or model.ff_size
        found |= {
            "experts.d_ff": hidden,
            # The weight of a single expert is never divided.
            "experts.normalize": experts.normalize and experts.active > 1,
            "experts.selection_bias": experts.biased,
            # Null where it is what follows from the number of shared experts.
            "experts.shared_d_ff": None if experts.shared_d_ff == experts.shared * hidden else experts.shared_d_ff,
        }
    return found


def _default_fields(model: LanguageModel) -> dict[str, object]:
    """Return the default of every field that has one, with the sizes that null stands for filled in."""
    defaults = {name: field.default for name, field in LanguageModel.model_fields.items() if not field.is_required()}
    inner = {
        f"{section}.{name}": field.default
        for section, kind in SECTIONS.items()
        for name, field in kind.model_fields.items()
        if not field.is_required()
    }
    sizes = {
        "n_kv_heads": model.n_heads,
        "head_dim": model.d_model // model.n_heads,
        "d_ff": 4 * model.d_model,
        "qkv_bias": model.bias,
        "experts.d_ff": model.ff_size,
    }
    return defaults | inner | sizes


def _unused_fields(model: LanguageModel) -> set[str]:
    """Return the fields that do not change what the trained `model` computes."""
    unused = {"family", "preset", "dropout", "init_std", "mup_base_width", *_TRAINING_ONLY}
    if model.positions != "rope":
        unused |= {"rope_theta", "rope_scaling", "rotary_fraction"}
    if model.positions != "alibi":
        unused.add("alibi_bias_max")
    experts = model.experts
    if experts is not None and experts.dense_layers == 0:
        unused.add("d_ff")
    if experts is not None and experts.groups == 1:
        unused |= {"experts.active_groups", "experts.group_score"}
    return unused


def _show_value(value: object) -> str:
    if isinstance(value, tuple):
        return " or ".join(map(_show_value, value))
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value}"
