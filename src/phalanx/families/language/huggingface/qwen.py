"""Qwen2ForCausalLM, as Llama with biases of queries, keys and values; Qwen3ForCausalLM, with normalised heads instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from phalanx.families.language.huggingface.architecture import Architecture, Size
from phalanx.families.language.huggingface.llama import COUNTERPARTS
from phalanx.families.language.huggingface.rotary import HEAD_NORMS, Off, RotaryFields


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
