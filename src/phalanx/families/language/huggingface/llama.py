"""LlamaForCausalLM: rotary positions, RMSNorm, SwiGLU, grouped-query attention."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from phalanx.config.model import LanguageModel, RopeScaling
from phalanx.families.language.huggingface.architecture import (
    GENERAL_KEYS,
    Architecture,
    ConfigFields,
    Counterpart,
    KnownKeys,
    Positive,
    Size,
)

One = Annotated[float, Field(ge=1.0, le=1.0, exclude=True)]
"""A field that is read, to refuse other values, and not written."""


class RopeParameters(KnownKeys):
    """`rope_scaling` (transformers 4) or `rope_parameters` (transformers 5, with the base among them)."""

    rope_type: Literal["default", "llama3"] = "default"
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: One = 1.0

    @model_validator(mode="before")
    @classmethod
    def _old_name(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "type" not in value:
            return value
        return {"rope_type": value["type"], **{name: part for name, part in value.items() if name != "type"}}

    @model_validator(mode="after")
    def _whole(self) -> Self:
        needed = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        missing = [name for name in needed if getattr(self, name) is None]
        if self.rope_type == "llama3" and missing:
            raise ValueError(f"rope_type llama3 needs {', '.join(missing)}")
        return self

    def to_scaling(self) -> RopeScaling | None:
        """Return the decoder's form of the scaling."""
        if self.rope_type == "default":
            return None
        return RopeScaling.model_validate(
            {
                "factor": self.factor,
                "low_freq_factor": self.low_freq_factor,
                "high_freq_factor": self.high_freq_factor,
                "original_positions": self.original_max_position_embeddings,
            }
        )

    @classmethod
    def from_scaling(cls, scaling: RopeScaling) -> Self:
        """Return Hugging Face's form of the scaling."""
        return cls(
            rope_type="llama3",
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=scaling.original_positions,
        )


class LlamaFields(ConfigFields):
    """Fields of a Llama `config.json`."""

    irrelevant: ClassVar[frozenset[str]] = GENERAL_KEYS | {"attention_dropout", "is_llama_config"}

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Size = 2048
    hidden_act: Literal["silu", "swish"] = "silu"
    rms_norm_eps: Positive = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    rope_theta: Positive | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None
    partial_rotary_factor: One = 1.0

    @model_validator(mode="after")
    def _one_bias(self) -> Self:
        if self.attention_bias != self.mlp_bias:
            raise ValueError(
                f"attention_bias={self.attention_bias} and mlp_bias={self.mlp_bias} differ; the decoder has both or neither"
            )
        return self

    def to_model(self) -> LanguageModel:
        """Return the decoder that computes the same."""
        rope = self.rope_scaling or self.rope_parameters or RopeParameters()
        return LanguageModel(
            n_layers=self.num_hidden_layers,
            d_model=self.hidden_size,
            n_heads=self.num_attention_heads,
            n_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            d_ff=self.intermediate_size,
            vocab_size=self.vocab_size,
            max_positions=self.max_position_embeddings,
            positions="rope",
            # transformers 5 keeps the base among the rotary settings, version 4 beside them.
            rope_theta=rope.rope_theta or self.rope_theta or 10000.0,
            rope_scaling=rope.to_scaling(),
            norm="rmsnorm",
            norm_eps=self.rms_norm_eps,
            mlp="swiglu",
            bias=self.attention_bias,
            tied_head=self.tie_word_embeddings,
        )

    @classmethod
    def from_model(cls, model: LanguageModel) -> Self:
        """Return the fields for a decoder that fits. Rotary settings are written as transformers 4 does; version 5
        reads them."""
        return cls(
            vocab_size=model.vocab_size,
            hidden_size=model.d_model,
            intermediate_size=model.ff_size,
            num_hidden_layers=model.n_layers,
            num_attention_heads=model.n_heads,
            num_key_value_heads=model.kv_heads,
            head_dim=model.head_size,
            max_position_embeddings=model.max_positions,
            rms_norm_eps=model.norm_eps,
            attention_bias=model.bias,
            mlp_bias=model.bias,
            tie_word_embeddings=model.tied_head,
            rope_theta=model.rope_theta,
            rope_scaling=None if model.rope_scaling is None else RopeParameters.from_scaling(model.rope_scaling),
        )


def _needed_fields(_model: LanguageModel) -> Mapping[str, object]:
    return {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "qk_norm": False, "clip_qkv": None}


LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    prefix="model.",
    config=LlamaFields,
    counterparts={
        "embedding": Counterpart(("model.embed_tokens",)),
        "blocks.*.attention_norm": Counterpart(("model.layers.*.input_layernorm",)),
        "blocks.*.attention.qkv": Counterpart(
            (
                "model.layers.*.self_attn.q_proj",
                "model.layers.*.self_attn.k_proj",
                "model.layers.*.self_attn.v_proj",
            ),
            rows="qkv",
        ),
        "blocks.*.attention.output": Counterpart(("model.layers.*.self_attn.o_proj",)),
        "blocks.*.mlp_norm": Counterpart(("model.layers.*.post_attention_layernorm",)),
        "blocks.*.mlp.gate_up": Counterpart(
            ("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"), rows="gate_up"
        ),
        "blocks.*.mlp.down": Counterpart(("model.layers.*.mlp.down_proj",)),
        "head.norm": Counterpart(("model.norm",)),
        "head": Counterpart(("lm_head",)),
    },
    ignored=re.compile(r".*rotary_emb\.inv_freq"),
    needs=_needed_fields,
)
