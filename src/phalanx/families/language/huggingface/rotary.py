"""What architectures with rotary positions have in common: sizes, rotary settings, and names of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from phalanx.config.layers import RopeScaling
from phalanx.config.model import LanguageModel
from phalanx.families.language.huggingface.architecture import (
    GENERAL_KEYS,
    ConfigFields,
    KnownKeys,
    Positive,
    Size,
)
from phalanx.families.language.huggingface.tensor_rules import Counterpart

One = Annotated[float, Field(ge=1.0, le=1.0, exclude=True)]
"""A field that is read, to refuse other values, and not written."""
Silu = Literal["silu", "swish"]
"""Names of one activation."""


Off = Annotated[Literal[False], Field(exclude=True)]
"""A switch that is always off; read, to refuse other values, and not written."""

_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
"""Fields of the decoder's scaling, each with the key that holds the same value."""
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Keys that each type must have."""
_POSSIBLE = {"yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")}
"""Keys that a type may have besides."""


class RopeParameters(KnownKeys):
    """`rope_scaling` (transformers 4) or `rope_parameters` (transformers 5, with the base among them)."""

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Size | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    truncate: bool | None = None
    attention_factor: Positive | None = None
    mscale: Annotated[float, Field(ge=0.0)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0.0)] | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0.0, le=1.0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _old_name(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "type" not in value:
            return value
        # Older files call it `type`; some have both names.
        others = {name: part for name, part in value.items() if name != "type"}
        if others.get("rope_type", value["type"]) != value["type"]:
            raise ValueError(f"type={value['type']} and rope_type={others['rope_type']} differ")
        return {**others, "rope_type": value["type"]}

    @model_validator(mode="after")
    def _whole(self) -> Self:
        needed = _NEEDED[self.rope_type]
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"rope_type {self.rope_type} needs {', '.join(missing)}")
        known = {*needed, *_POSSIBLE.get(self.rope_type, ())}
        for name in _SCALING.values():
            value = getattr(self, name)
            # False, as null, switches nothing on.
            if name not in known and value is not None:
                raise ValueError(f"{name}={value} has no effect with rope_type {self.rope_type}; take it out")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError(f"mscale={self.mscale} and mscale_all_dim={self.mscale_all_dim} count together alone")
        return self

    def to_scaling(self) -> RopeScaling | None:
        """Return the decoder's form of the scaling."""
        if self.rope_type == "default":
            return None
        found = {field: getattr(self, key) for field, key in _SCALING.items()}
        given = {field: value for field, value in found.items() if value is not None}
        return RopeScaling.model_validate({"kind": self.rope_type, **given})

    @classmethod
    def from_scaling(cls, scaling: RopeScaling) -> Self:
        """Return Hugging Face's form of the scaling."""
        known = {*_NEEDED.get(scaling.kind, ()), *_POSSIBLE.get(scaling.kind, ())}
        keys = {key: getattr(scaling, field) for field, key in _SCALING.items() if key in known}
        return cls.model_validate({"rope_type": scaling.kind, **keys})


class RotaryFields(ConfigFields):
    """Fields of a `config.json` that Llama, and all that came after it, have: rotary positions, RMSNorm, SwiGLU."""

    irrelevant: ClassVar[frozenset[str]] = GENERAL_KEYS | {"attention_dropout"}
    same: ClassVar[Mapping[str, str]] = {
        "n_layers": "num_hidden_layers",
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "d_ff": "intermediate_size",
        "vocab_size": "vocab_size",
        "max_positions": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "tied_head": "tie_word_embeddings",
    }
    needs: ClassVar[Mapping[str, object]] = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu"}
    others: ClassVar[frozenset[str]] = frozenset({"rope_theta", "rope_scaling"})
    default_theta: ClassVar[float] = 10000.0
    """Base of the rotary frequencies where a file does not give it."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Size = 2048
    hidden_act: Silu = "silu"
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: Positive | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None
    partial_rotary_factor: One = 1.0

    scales_attention: ClassVar[bool] = False
    """Whether YaRN's `mscale_all_dim` scales attention, as in DeepSeek alone."""
    partial: ClassVar[bool] = False
    """Whether a part of each head may be rotated."""

    @model_validator(mode="after")
    def _scaling_as_computed(self) -> Self:
        rope = self._rope
        if rope.mscale_all_dim and not self.scales_attention:
            raise ValueError(
                f"rope_scaling.mscale_all_dim={rope.mscale_all_dim} has no counterpart in this architecture"
            )
        if rope.partial_rotary_factor not in (None, 1.0) and not self.partial:
            raise ValueError(
                f"partial_rotary_factor={rope.partial_rotary_factor} has no counterpart in this architecture"
            )
        return self

    @property
    def _rope(self) -> RopeParameters:
        """Return the rotary settings, wherever they stand."""
        return self.rope_scaling or self.rope_parameters or RopeParameters()

    def to_others(self) -> dict[str, object]:
        """Return rotary positions of the decoder."""
        rope = self._rope
        return {
            # transformers 5 keeps the base among the rotary settings, version 4 beside them.
            "rope_theta": rope.rope_theta or self.rope_theta or self.default_theta,
            "rope_scaling": rope.to_scaling(),
        }

    @classmethod
    def from_others(cls, model: LanguageModel) -> dict[str, object]:
        """Return rotary settings as transformers 4 writes them, which version 5 reads too."""
        return {
            "rope_theta": model.rope_theta,
            "rope_scaling": None if model.rope_scaling is None else RopeParameters.from_scaling(model.rope_scaling),
        }


def find_window(layer_types: Sequence[str], window: int | None) -> dict[str, object]:
    """Return the decoder's fields for layers that are sliding_attention, of so many tokens, or full_attention.

    Raises ValueError for a pattern other than every so many-th layer attending to all tokens.
    """
    # The decoder has no list of layers: its pattern is a window and how often a layer does without it.
    full = [kind == "full_attention" for kind in layer_types]
    if all(full) or window is None:
        return {"sliding_window": None, "global_every": 0}
    for every in (0, *range(2, len(full) + 1)):
        if full == [every > 0 and (number + 1) % every == 0 for number in range(len(full))]:
            return {"sliding_window": window, "global_every": every}
    raise ValueError(
        f"layer_types={list(layer_types)} has no counterpart in the decoder, where every so many-th is full"
    )


def layer_types(model: LanguageModel) -> list[str]:
    """Return Hugging Face's names of the attention of each layer."""
    windows = [model.layer(number).attention.window for number in range(model.n_layers)]
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


ATTENTION: Mapping[str, Counterpart] = {
    "blocks.*.attention.qkv": Counterpart(
        tuple(f"model.layers.*.self_attn.{part}_proj" for part in "qkv"),
        rows="qkv",
    ),
    "blocks.*.attention.output": Counterpart(("model.layers.*.self_attn.o_proj",)),
}
MLP: Mapping[str, Counterpart] = {
    "blocks.*.mlp.gate_up": Counterpart(("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"), rows="gate_up"),
    "blocks.*.mlp.down": Counterpart(("model.layers.*.mlp.down_proj",)),
}
ENDS: Mapping[str, Counterpart] = {
    "embedding": Counterpart(("model.embed_tokens",)),
    "head.norm": Counterpart(("model.norm",)),
    "head": Counterpart(("lm_head",)),
}
NORMS: Mapping[str, Counterpart] = {
    "blocks.*.attention_norm": Counterpart(("model.layers.*.input_layernorm",)),
    "blocks.*.mlp_norm": Counterpart(("model.layers.*.post_attention_layernorm",)),
}
HEAD_NORMS: Mapping[str, Counterpart] = {
    "blocks.*.attention.query_norm": Counterpart(("model.layers.*.self_attn.q_norm",)),
    "blocks.*.attention.key_norm": Counterpart(("model.layers.*.self_attn.k_norm",)),
}
EXPERTS: Mapping[str, Counterpart] = {
    "blocks.*.mlp.router": Counterpart(("model.layers.*.mlp.gate",)),
    "blocks.*.mlp.experts.gate_up": Counterpart(
        ("model.layers.*.mlp.experts.#.gate_proj.weight", "model.layers.*.mlp.experts.#.up_proj.weight"),
        rows="gate_up",
        fused="model.layers.*.mlp.experts.gate_up_proj",
    ),
    "blocks.*.mlp.experts.down": Counterpart(
        ("model.layers.*.mlp.experts.#.down_proj.weight",), fused="model.layers.*.mlp.experts.down_proj"
    ),
}
"""Names of experts in Qwen3-MoE, OLMoE and DeepSeek."""
