"""Gemma2ForCausalLM and Gemma3ForCausalLM: windows with global layers between, norms on both sides, GeGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from phalanx.config.model import LanguageModel
from phalanx.families.language.huggingface.architecture import Architecture, Positive, Size
from phalanx.families.language.huggingface.rotary import (
    ATTENTION,
    ENDS,
    HEAD_NORMS,
    MLP,
    Off,
    RopeParameters,
    RotaryFields,
    find_window,
    layer_types,
)
from phalanx.families.language.huggingface.tensor_rules import Counterpart

LayerTypes = list[Literal["full_attention", "sliding_attention"]]
TanhGelu = Literal["gelu_pytorch_tanh"]


class GemmaFields(RotaryFields):
    """What Gemma 2 and 3 have in common. Embeddings are scaled by the root of the width."""

    irrelevant: ClassVar[frozenset[str]] = RotaryFields.irrelevant | {"cache_implementation"}
    same: ClassVar[Mapping[str, str]] = {
        **RotaryFields.same,
        "attention_softcap": "attn_logit_softcapping",
        "logit_softcap": "final_logit_softcapping",
    }
    needs: ClassVar[Mapping[str, object]] = {
        **RotaryFields.needs,
        "mlp": "geglu",
        "norm_offset": True,
        "norm_position": "sandwich",
    }
    others: ClassVar[frozenset[str]] = RotaryFields.others | {
        "sliding_window",
        "global_every",
        "embedding_scale",
        "attention_scale",
    }

    num_key_value_heads: Size | None = 4
    head_dim: Size = 256
    hidden_activation: TanhGelu = "gelu_pytorch_tanh"
    hidden_act: Annotated[TanhGelu, Field(exclude=True)] = "gelu_pytorch_tanh"  # type: ignore[assignment]
    tie_word_embeddings: bool = True
    attention_bias: Off = False
    query_pre_attn_scalar: Size = 256
    sliding_window: Size | None = 4096
    layer_types: LayerTypes | None = None
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    use_bidirectional_attention: Annotated[Literal[False] | None, Field(exclude=True)] = None

    @model_validator(mode="after")
    def _one_type_a_layer(self) -> Self:
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types={self.layer_types} are not num_hidden_layers={self.num_hidden_layers}")
        return self

    @property
    def full_every(self) -> int:
        """Every so many-th layer attends to all tokens, where the file does not say which."""
        return 2

    @property
    def usual_types(self) -> list[str]:
        """Return the attention of each layer, where the file does not say it."""
        full = [(number + 1) % self.full_every == 0 for number in range(self.num_hidden_layers)]
        return ["full_attention" if here else "sliding_attention" for here in full]

    def to_others(self) -> dict[str, object]:
        """Return what depends on sizes, and windows."""
        return {
            **super().to_others(),
            **find_window(self.layer_types or self.usual_types, self.sliding_window),
            "embedding_scale": self.hidden_size**0.5,
            "attention_scale": self.query_pre_attn_scalar**-0.5,
        }

    @classmethod
    def from_others(cls, model: LanguageModel) -> dict[str, object]:
        """Return rotary settings, windows, and the width of a head that the scale of attention is the root of."""
        return {
            **super().from_others(model),
            "query_pre_attn_scalar": round(_attention_scale(model) ** -2),
            "sliding_window": model.sliding_window,
            "layer_types": layer_types(model),
        }

    @classmethod
    def misfits(cls, model: LanguageModel) -> list[str]:
        """Return the fields of `model` without a counterpart, scales among them."""
        scale = _attention_scale(model)
        problems = super().misfits(model)
        if model.embedding_scale != model.d_model**0.5:
            problems.append(f"model.embedding_scale={model.embedding_scale} (it has {model.d_model**0.5})")
        if round(scale**-2) ** -0.5 != scale:
            problems.append(f"model.attention_scale={scale} (it has 1 / root of a whole number)")
        return problems


def _attention_scale(model: LanguageModel) -> float:
    return model.attention_scale or model.head_size**-0.5


class Gemma2Fields(GemmaFields):
    """Fields of a Gemma 2 `config.json`. What a file leaves out is capped."""

    max_position_embeddings: Size = 8192
    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0


class LayerRope(RopeParameters):
    """Rotary settings of one kind of layer."""


class Gemma3Rope(RopeParameters):
    """`rope_parameters` of a Gemma 3 `config.json`: of each kind of layer."""

    full_attention: LayerRope | None = None
    sliding_attention: LayerRope | None = None


class Gemma3Fields(GemmaFields):
    """Fields of a Gemma 3 `config.json`: rotary frequencies of their own, never stretched, for layers with a window.

    `sliding_window_pattern` says where full attention is in files without `layer_types`.
    """

    irrelevant: ClassVar[frozenset[str]] = GemmaFields.irrelevant | {"_sliding_window_pattern"}
    needs: ClassVar[Mapping[str, object]] = {**GemmaFields.needs, "qk_norm": "head"}
    # transformers caps logits of Gemma 3, but not its attention.
    same: ClassVar[Mapping[str, str]] = {
        field: key for field, key in GemmaFields.same.items() if field != "attention_softcap"
    }
    others: ClassVar[frozenset[str]] = GemmaFields.others | {"local_rope_theta"}
    default_theta: ClassVar[float] = 1e6

    max_position_embeddings: Size = 131072
    attn_logit_softcapping: None = None
    sliding_window_pattern: Annotated[Size, Field(exclude=True)] = 6
    rope_local_base_freq: Positive = 10000.0
    rope_parameters: Gemma3Rope | None = None

    @model_validator(mode="after")
    def _one_pattern(self) -> Self:
        given = "sliding_window_pattern" in self.model_fields_set and self.layer_types is not None
        if given and self.layer_types != self.usual_types:
            raise ValueError(f"sliding_window_pattern={self.sliding_window_pattern} is not that of layer_types")
        return self

    @model_validator(mode="after")
    def _local_is_plain(self) -> Self:
        local = None if self.rope_parameters is None else self.rope_parameters.sliding_attention
        if local is not None and local.rope_type != "default":
            raise ValueError(f"rope_parameters.sliding_attention.rope_type={local.rope_type} is none that windows have")
        return self

    @property
    def full_every(self) -> int:
        """Every so many-th layer attends to all tokens, where the file does not say which."""
        return self.sliding_window_pattern

    @property
    def _rope(self) -> RopeParameters:
        """Return the rotary settings of layers that attend to all tokens."""
        full = None if self.rope_parameters is None else self.rope_parameters.full_attention
        return self.rope_scaling or full or RopeParameters()

    def to_others(self) -> dict[str, object]:
        """Return what depends on sizes, windows, and both rotary bases."""
        others = super().to_others()
        both = self.rope_parameters or Gemma3Rope()
        full = both.full_attention or LayerRope()
        local = both.sliding_attention or LayerRope()
        theta = local.rope_theta or self.rope_local_base_freq
        return {
            **others,
            # Version 4 keeps the stretching beside the base, version 5 in one place.
            "rope_theta": full.rope_theta or self.rope_theta or self.default_theta,
            "local_rope_theta": None if others["sliding_window"] is None else theta,
        }

    @classmethod
    def from_others(cls, model: LanguageModel) -> dict[str, object]:
        """Return rotary settings as transformers 4 writes them, and windows."""
        local = model.local_rope_theta
        return super().from_others(model) | ({} if local is None else {"rope_local_base_freq": local})

    @classmethod
    def misfits(cls, model: LanguageModel) -> list[str]:
        """Return the fields of `model` without a counterpart, rotary bases among them."""
        missing = model.sliding_window is not None and model.local_rope_theta is None
        problems = super().misfits(model)
        if missing and (model.rope_scaling is not None or model.rope_theta != 10000.0):
            problems.append("model.local_rope_theta=none (it has a base for layers with a window)")
        return problems


_SANDWICH: Mapping[str, Counterpart] = {
    "blocks.*.attention_norm": Counterpart(("model.layers.*.input_layernorm",)),
    "blocks.*.attention_out_norm": Counterpart(("model.layers.*.post_attention_layernorm",)),
    "blocks.*.mlp_norm": Counterpart(("model.layers.*.pre_feedforward_layernorm",)),
    "blocks.*.mlp_out_norm": Counterpart(("model.layers.*.post_feedforward_layernorm",)),
}
GEMMA2 = Architecture(
    name="Gemma2ForCausalLM",
    model_type="gemma2",
    prefix="model.",
    config=Gemma2Fields,
    counterparts={**ENDS, **ATTENTION, **MLP, **_SANDWICH},
)
GEMMA3 = Architecture(
    name="Gemma3ForCausalLM",
    model_type="gemma3_text",
    prefix="model.",
    config=Gemma3Fields,
    counterparts={**ENDS, **ATTENTION, **HEAD_NORMS, **MLP, **_SANDWICH},
)
