"""Olmo2ForCausalLM: norms behind attention and MLP, queries and keys normalised over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from phalanx.families.language.huggingface.architecture import Architecture, Positive
from phalanx.families.language.huggingface.rotary import ATTENTION, ENDS, HEAD_NORMS, MLP, Off, RotaryFields
from phalanx.families.language.huggingface.tensor_rules import Counterpart


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
