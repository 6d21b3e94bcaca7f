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
    others: ClassVar[frozenset[str]] = frozenset({"rope_theta", "rope_scaling", "bias"})

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

    def to_others(self) -> dict[str, object]:
        """Return rotary positions and biases of the decoder."""
        rope = self.rope_scaling or self.rope_parameters or RopeParameters()
        return {
            # transformers 5 keeps the base among the rotary settings, version 4 beside them.
            "rope_theta": rope.rope_theta or self.rope_theta or 10000.0,
            "rope_scaling": rope.to_scaling(),
            "bias": self.attention_bias,
        }

    @classmethod
    def from_others(cls, model: LanguageModel) -> dict[str, object]:
        """Return rotary settings as transformers 4 writes them, which version 5 reads too, and biases."""
        return {
            "rope_theta": model.rope_theta,
            "rope_scaling": None if model.rope_scaling is None else RopeParameters.from_scaling(model.rope_scaling),
            "attention_bias": model.bias,
            "mlp_bias": model.bias,
        }


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
)
