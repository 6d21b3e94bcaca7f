"""Qwen3ForCausalLM: as Llama, with normalised query and key heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from phalanx.families.language.huggingface.architecture import Architecture, Size
from phalanx.families.language.huggingface.llama import COUNTERPARTS
from phalanx.families.language.huggingface.rotary import HEAD_NORMS, RotaryFields

Off = Annotated[Literal[False], Field(exclude=True)]
"""A switch that is always off; read, to refuse other values, and not written."""


class Qwen3Fields(RotaryFields):
    """Fields of a Qwen3 `config.json`. `sliding_window` and `max_window_layers` count with `use_sliding_window` alone."""

    irrelevant: ClassVar[frozenset[str]] = RotaryFields.irrelevant | {"sliding_window", "max_window_layers"}
    needs: ClassVar[Mapping[str, object]] = {**RotaryFields.needs, "qk_norm": True}

    num_key_value_heads: Size | None = 32
    head_dim: Size = 128
    max_position_embeddings: Size = 32768
    attention_bias: Off = False
    use_sliding_window: Off = False
    layer_types: list[Literal["full_attention"]] | None = None

    @model_validator(mode="after")
    def _one_type_a_layer(self) -> Self:
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types={self.layer_types} are not num_hidden_layers={self.num_hidden_layers}")
        return self


QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    prefix="model.",
    config=Qwen3Fields,
    counterparts={**COUNTERPARTS, **HEAD_NORMS},
)
