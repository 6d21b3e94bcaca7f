"""LlamaForCausalLM and MistralForCausalLM: rotary positions, RMSNorm, SwiGLU, grouped-query attention."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import model_validator

from phalanx.config.model import LanguageModel
from phalanx.families.language.huggingface.architecture import Architecture, Size
from phalanx.families.language.huggingface.rotary import ATTENTION, ENDS, MLP, NORMS, RotaryFields
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
