"""MixtralForCausalLM, Qwen3MoeForCausalLM and OlmoeForCausalLM: mixtures of experts, each a SwiGLU network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import AliasChoices, Field, model_validator

from phalanx.config.model import LanguageModel
from phalanx.families.language.huggingface.architecture import SOME, Architecture, Positive, Size
from phalanx.families.language.huggingface.llama import COUNTERPARTS
from phalanx.families.language.huggingface.rotary import (
    ATTENTION,
    ENDS,
    EXPERTS,
    HEAD_NORMS,
    NORMS,
    Off,
    RotaryFields,
)
from phalanx.families.language.huggingface.tensor_rules import Counterpart

_TRAINING = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
"""Keys of routers that change losses and training alone."""


class MixtureFields(RotaryFields):
    """Fields that architectures with mixtures of experts share."""

    irrelevant: ClassVar[frozenset[str]] = RotaryFields.irrelevant | _TRAINING
    same: ClassVar[Mapping[str, str]] = {**RotaryFields.same, "experts.active": "num_experts_per_tok"}
    needs: ClassVar[Mapping[str, object]] = {**RotaryFields.needs, "experts": SOME}

    num_experts_per_tok: Size

    @property
    def normalizes(self) -> bool:
        """Whether the weights of a token's experts are divided by their sum."""
        return True

    @model_validator(mode="after")
    def _weights_of_several(self) -> Self:
        if self.normalizes and self.num_experts_per_tok == 1:
            raise ValueError(
                "num_experts_per_tok=1 with weights that are divided by their sum has no counterpart in the decoder, which "
                "leaves the weight of a single expert as it is"
            )
        return self


class MixtralFields(MixtureFields):
    """Fields of a Mixtral `config.json`. Every block has experts, of the width that other models give their MLPs."""

    same: ClassVar[Mapping[str, str]] = {
        **{field: key for field, key in MixtureFields.same.items() if field != "d_ff"},
        "experts.count": "num_local_experts",
        "experts.d_ff": "intermediate_size",
        "sliding_window": "sliding_window",
    }
    default_theta: ClassVar[float] = 1e6

    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size = 131072
    rms_norm_eps: Positive = 1e-5
    num_experts_per_tok: Size = 2
    num_local_experts: Size = 8
    sliding_window: Size | None = None


class Qwen3MoeFields(MixtureFields):
    """Fields of a Qwen3-MoE `config.json`. Blocks without experts stand in front, as in all models that were published."""

    irrelevant: ClassVar[frozenset[str]] = MixtureFields.irrelevant | {"sliding_window", "max_window_layers"}
    same: ClassVar[Mapping[str, str]] = {
        **MixtureFields.same,
        "experts.count": "num_experts",
        "experts.d_ff": "moe_intermediate_size",
        "experts.normalize": "norm_topk_prob",
    }
    needs: ClassVar[Mapping[str, object]] = {**MixtureFields.needs, "qk_norm": "head"}
    others: ClassVar[frozenset[str]] = MixtureFields.others | {"experts.dense_layers"}

    num_key_value_heads: Size | None = 4
    max_position_embeddings: Size = 32768
    num_experts: Size = Field(128, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: Size = 8
    moe_intermediate_size: Size = 768
    norm_topk_prob: bool = False
    mlp_only_layers: list[int] | None = None
    decoder_sparse_step: Literal[1] = 1
    attention_bias: Off = False
    use_sliding_window: Off = False

    @property
    def normalizes(self) -> bool:
        """Whether the weights of a token's experts are divided by their sum."""
        return self.norm_topk_prob

    @model_validator(mode="after")
    def _dense_layers_first(self) -> Self:
        # The decoder counts the blocks without experts from the first one on.
        layers = self.mlp_only_layers or []
        if sorted(set(layers)) != list(range(len(set(layers)))):
            raise ValueError(f"mlp_only_layers={layers} are not the first layers; the decoder has MLPs in those alone")
        return self

    def to_others(self) -> dict[str, object]:
        """Return rotary positions, and how many blocks have no experts."""
        return {**super().to_others(), "experts.dense_layers": len(set(self.mlp_only_layers or []))}

    @classmethod
    def from_others(cls, model: LanguageModel) -> dict[str, object]:
        """Return rotary settings, and the blocks without experts."""
        assert model.experts is not None
        return {**super().from_others(model), "mlp_only_layers": list(range(model.experts.dense_layers))}


class OlmoeFields(MixtureFields):
    """Fields of an OLMoE `config.json`: experts in every block, queries and keys normalised over all heads, then clamped."""

    same: ClassVar[Mapping[str, str]] = {
        **{field: key for field, key in MixtureFields.same.items() if field not in ("d_ff", "head_dim")},
        "experts.count": "num_experts",
        "experts.d_ff": "intermediate_size",
        "experts.normalize": "norm_topk_prob",
    }
    needs: ClassVar[Mapping[str, object]] = {**MixtureFields.needs, "qk_norm": "whole"}

    max_position_embeddings: Size = 4096
    rms_norm_eps: Positive = 1e-5
    num_experts: Size = 64
    num_experts_per_tok: Size = 8
    norm_topk_prob: bool = False
    attention_bias: Off = False
    head_dim: None = None
    clip_qkv: None = None

    @property
    def normalizes(self) -> bool:
        """Whether the weights of a token's experts are divided by their sum."""
        return self.norm_topk_prob


def _mixtral_counterpart(parts: tuple[str, ...], fused: str, **options: Any) -> Counterpart:
    """Return where Mixtral keeps a matrix of its experts; in one tensor, under the name that others use."""
    names = tuple(f"model.layers.*.block_sparse_moe.experts.#.{part}.weight" for part in parts)
    return Counterpart(names, fused=f"model.layers.*.mlp.experts.{fused}", **options)


MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    model_type="mixtral",
    prefix="model.",
    config=MixtralFields,
    counterparts={
        **ENDS,
        **NORMS,
        **ATTENTION,
        "blocks.*.mlp.router": Counterpart(("model.layers.*.block_sparse_moe.gate",), fused="model.layers.*.mlp.gate"),
        "blocks.*.mlp.experts.gate_up": _mixtral_counterpart(("w1", "w3"), "gate_up_proj", rows="gate_up"),
        "blocks.*.mlp.experts.down": _mixtral_counterpart(("w2",), "down_proj"),
    },
)
QWEN3_MOE = Architecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    prefix="model.",
    config=Qwen3MoeFields,
    counterparts={**COUNTERPARTS, **HEAD_NORMS, **EXPERTS},
)
OLMOE = Architecture(
    name="OlmoeForCausalLM",
    model_type="olmoe",
    prefix="model.",
    config=OlmoeFields,
    counterparts={**ENDS, **NORMS, **ATTENTION, **HEAD_NORMS, **EXPERTS},
)
