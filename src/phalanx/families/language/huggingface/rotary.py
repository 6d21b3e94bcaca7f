"""What architectures with rotary positions have in common: sizes, rotary settings, and names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from phalanx.config.model import LanguageModel, RopeScaling
from phalanx.errors import ConfigError
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
        """Return Hugging Face's form of the scaling. Raises ConfigError for kinds other than Llama's."""
        if scaling.kind != "llama3":
            raise ConfigError(
                f"model.rope_scaling.kind={scaling.kind} cannot be written to this architecture's config.json, which has "
                "llama3 alone; such a model stays in Phalanx's own format"
            )
        return cls(
            rope_type="llama3",
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=scaling.original_positions,
        )


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

    def to_others(self) -> dict[str, object]:
        """Return rotary positions of the decoder."""
        rope = self.rope_scaling or self.rope_parameters or RopeParameters()
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
