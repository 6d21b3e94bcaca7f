"""Phi3ForCausalLM: as Llama, with queries, keys and values in one tensor, and gate and up in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator

from phalanx.families.language.huggingface.architecture import Architecture, Positive, Size
from phalanx.families.language.huggingface.rotary import ENDS, NORMS, RotaryFields
from phalanx.families.language.huggingface.tensor_rules import Counterpart


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
