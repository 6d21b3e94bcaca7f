"""Llama and the decoders that differ from it in a few fields.

LlamaForCausalLM and MistralForCausalLM: rotary positions, RMSNorm, SwiGLU, grouped-query attention. Qwen2ForCausalLM adds
biases of queries, keys and values; Qwen3ForCausalLM normalises heads instead. Olmo2ForCausalLM has its norms behind
attention and MLP, and normalises queries and keys over all heads. Phi3ForCausalLM keeps queries, keys and values in one
tensor, and gate and up in one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from phalanx.config.model import LanguageModel
from phalanx.families.language.huggingface.architecture import Architecture, Positive, Size
from phalanx.families.language.huggingface.rotary import ATTENTION, ENDS, HEAD_NORMS, MLP, NORMS, Off, RotaryFields
from phalanx.families.language.huggingface.tensor_rules import Counterpart

COUNTERPARTS: Mapping[str, Counterpart] = {**ENDS, **NORMS, **ATTENTION, **MLP}


class LlamaFields(RotaryFields):
    """Fields of a Llama `config.json`."""

    irrelevant: ClassVar[frozenset[str]] = RotaryFields.irrelevant | {"is_llama_config"}
    others: ClassVar[frozenset[str]] = RotaryFields.others | {"bias"}

    attention_bias: bool = False
    mlp_bias: bool = False

    @model_validator(mode="after")
    def _one_bias(self) -> Self:
        if self.attention_bias != self.mlp_bias:
            raise ValueError(
                f"attention_bias={self.attention_bias} and mlp_bias={self.mlp_bias} differ; the decoder has both or neither"
            )
        return self

    def to_others(self) -> dict[str, object]:
        """Return rotary positions and biases of the decoder."""
        return {**super().to_others(), "bias": self.attention_bias}

    @classmethod
    def from_others(cls, model: LanguageModel) -> dict[str, object]:
        """Return rotary settings and biases."""
        return {**super().from_others(model), "attention_bias": model.bias, "mlp_bias": model.bias}


class MistralFields(RotaryFields):
    """Fields of a Mistral `config.json`. A file that leaves the window out has one."""

    same: ClassVar[Mapping[str, str]] = {**RotaryFields.same, "sliding_window": "sliding_window"}

    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size = 131072
    sliding_window: Size | None = 4096


LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    prefix="model.",
    config=LlamaFields,
    counterparts=COUNTERPARTS,
    ignored=re.compile(r".*rotary_emb\.inv_freq"),
)
MISTRAL = Architecture(
    name="MistralForCausalLM",
    model_type="mistral",
    prefix="model.",
    config=MistralFields,
    counterparts=COUNTERPARTS,
)


class QwenFields(RotaryFields):
    """Fields of Qwen2 and Qwen3. `sliding_window` and `max_window_layers` count with `use_sliding_window` alone."""

    irrelevant: ClassVar[frozenset[str]] = RotaryFields.irrelevant | {"sliding_window", "max_window_layers"}

    num_key_value_heads: Size | None = 32
    max_position_embeddings: Size = 32768
    use_sliding_window: Off = False
    layer_types: list[Literal["full_attention"]] | None = None

    @model_validator(mode="after")
    def _one_type_a_layer(self) -> Self:
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types={self.layer_types} are not num_hidden_layers={self.num_hidden_layers}")
        return self


class Qwen2Fields(QwenFields):
    """Fields of a Qwen2 `config.json`. transformers 4 takes no width of a head, version 5 what it finds."""

    needs: ClassVar[Mapping[str, object]] = {**RotaryFields.needs, "qkv_bias": True}


class Qwen3Fields(QwenFields):
    """Fields of a Qwen3 `config.json`."""

    needs: ClassVar[Mapping[str, object]] = {**RotaryFields.needs, "qk_norm": "head"}

    head_dim: Size = 128
    attention_bias: Off = False


QWEN2 = Architecture(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    prefix="model.",
    config=Qwen2Fields,
    counterparts=COUNTERPARTS,
)
QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    prefix="model.",
    config=Qwen3Fields,
    counterparts={**COUNTERPARTS, **HEAD_NORMS},
)


class Olmo2Fields(RotaryFields):
    """Fields of an OLMo 2 `config.json`."""

    same: ClassVar[Mapping[str, str]] = {field: key for field, key in RotaryFields.same.items() if field != "head_dim"}
    needs: ClassVar[Mapping[str, object]] = {**RotaryFields.needs, "qk_norm": "whole", "norm_position": "post"}

    rms_norm_eps: Positive = 1e-5
    attention_bias: Off = False
    head_dim: None = None


OLMO2 = Architecture(
    name="Olmo2ForCausalLM",
    model_type="olmo2",
    prefix="model.",
    config=Olmo2Fields,
    counterparts={
        **ENDS,
        **ATTENTION,
        **HEAD_NORMS,
        **MLP,
        "blocks.*.attention_out_norm": Counterpart(("model.layers.*.post_attention_layernorm",)),
        "blocks.*.mlp_out_norm": Counterpart(("model.layers.*.post_feedforward_layernorm",)),
    },
)


class Phi3Fields(RotaryFields):
    """Fields of a Phi-3 `config.json`. `original_max_position_embeddings` counts with LongRoPE alone, which is refused."""

    irrelevant: ClassVar[frozenset[str]] = RotaryFields.irrelevant | {
        "resid_pdrop",
        "embd_pdrop",
        "original_max_position_embeddings",
    }
    same: ClassVar[Mapping[str, str]] = {
        **{field: key for field, key in RotaryFields.same.items() if field != "head_dim"},
        "sliding_window": "sliding_window",
        "rotary_fraction": "partial_rotary_factor",
    }
    partial: ClassVar[bool] = True

    max_position_embeddings: Size = 4096
    rms_norm_eps: Positive = 1e-5
    partial_rotary_factor: float = Field(1.0, gt=0.0, le=1.0)
    sliding_window: Size | None = None
    head_dim: None = None

    @model_validator(mode="after")
    def _known_positions(self) -> Self:
        if self._rope.rope_type != "default":
            raise ValueError(f"rope_scaling.rope_type={self._rope.rope_type} is none that Phi-3 has")
        return self

    def to_others(self) -> dict[str, object]:
        """Return rotary positions of the decoder."""
        inner = self._rope.partial_rotary_factor
        return {**super().to_others(), "rotary_fraction": self.partial_rotary_factor if inner is None else inner}


PHI3 = Architecture(
    name="Phi3ForCausalLM",
    model_type="phi3",
    prefix="model.",
    config=Phi3Fields,
    counterparts={
        **ENDS,
        **NORMS,
        "blocks.*.attention.qkv": Counterpart(("model.layers.*.self_attn.qkv_proj",), rows="qkv"),
        "blocks.*.attention.output": Counterpart(("model.layers.*.self_attn.o_proj",)),
        "blocks.*.mlp.gate_up": Counterpart(("model.layers.*.mlp.gate_up_proj",), rows="gate_up"),
        "blocks.*.mlp.down": Counterpart(("model.layers.*.mlp.down_proj",)),
    },
)
