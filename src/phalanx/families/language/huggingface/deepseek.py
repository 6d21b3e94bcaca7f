"""DeepseekV2ForCausalLM and DeepseekV3ForCausalLM: latent attention, many small experts beside shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from phalanx.config.model import LanguageModel
from phalanx.families.language.huggingface.architecture import SOME, Architecture, Size
from phalanx.families.language.huggingface.mixtures import MixtureFields
from phalanx.families.language.huggingface.rotary import ENDS, EXPERTS, MLP, NORMS, Off
from phalanx.families.language.huggingface.tensor_rules import Counterpart

LatentEps = Annotated[float, Field(ge=1e-6, le=1e-6)]
"""transformers normalises latents with this, whatever a file says of other norms; the decoder has one for all."""
Yes = Annotated[Literal[True], Field(exclude=True)]
"""A switch that is always on; read, to refuse other values, and not written."""


class DeepseekFields(MixtureFields):
    """What DeepSeek-V2 and V3 have in common."""

    irrelevant: ClassVar[frozenset[str]] = MixtureFields.irrelevant | {
        # follows from other sizes
        "head_dim",
        "qk_head_dim",
        # how it is trained, and how many experts' ranks there were
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
        "auto_map",
    }
    same: ClassVar[Mapping[str, str]] = {
        **{field: key for field, key in MixtureFields.same.items() if field not in ("head_dim", "n_kv_heads")},
        "experts.count": "n_routed_experts",
        "experts.d_ff": "moe_intermediate_size",
        "experts.shared": "n_shared_experts",
        "experts.dense_layers": "first_k_dense_replace",
        "experts.normalize": "norm_topk_prob",
        "experts.scale": "routed_scaling_factor",
        "latent.query_rank": "q_lora_rank",
        "latent.key_value_rank": "kv_lora_rank",
        "latent.rope_size": "qk_rope_head_dim",
        "latent.nope_size": "qk_nope_head_dim",
        "latent.value_size": "v_head_dim",
    }
    needs: ClassVar[Mapping[str, object]] = {**MixtureFields.needs, "latent": SOME}
    others: ClassVar[frozenset[str]] = MixtureFields.others | {
        "experts.groups",
        "experts.active_groups",
        # Follow from the sizes of latent attention.
        "n_kv_heads",
        "head_dim",
    }
    scales_attention: ClassVar[bool] = True

    rms_norm_eps: LatentEps = 1e-6
    moe_intermediate_size: Size
    n_routed_experts: Size
    n_shared_experts: Size
    first_k_dense_replace: Annotated[int, Field(ge=0)] = 0
    norm_topk_prob: bool = False
    routed_scaling_factor: Annotated[float, Field(gt=0.0)] = 1.0
    n_group: Size | None = None
    topk_group: Size | None = None
    q_lora_rank: Size | None = 1536
    kv_lora_rank: Size = 512
    qk_rope_head_dim: Size = 64
    qk_nope_head_dim: Size = 128
    v_head_dim: Size = 128
    attention_bias: Off = False
    moe_layer_freq: Annotated[Literal[1], Field(exclude=True)] = 1

    @property
    def normalizes(self) -> bool:
        """Whether the weights of a token's experts are divided by their sum."""
        return self.norm_topk_prob

    @model_validator(mode="after")
    def _one_key_a_head(self) -> Self:
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} is not num_attention_heads={self.num_attention_heads}: "
                f"latent attention has a key for each head"
            )
        return self

    def to_others(self) -> dict[str, object]:
        """Return rotary positions and groups of experts."""
        return {
            **super().to_others(),
            "experts.groups": self.n_group or 1,
            "experts.active_groups": self.topk_group or 1,
        }

    @classmethod
    def from_others(cls, model: LanguageModel) -> dict[str, object]:
        """Return rotary settings, groups of experts, and as many keys as heads."""
        assert model.experts is not None
        return {
            **super().from_others(model),
            "num_key_value_heads": model.n_heads,
            "n_group": model.experts.groups,
            "topk_group": model.experts.active_groups if model.experts.groups > 1 else 1,
        }


class DeepseekV2Fields(DeepseekFields):
    """Fields of a DeepSeek-V2 `config.json`: softmax scores; a group counts by its best expert."""

    needs: ClassVar[Mapping[str, object]] = {
        **DeepseekFields.needs,
        "experts.scoring": "softmax",
        "experts.group_score": "max",
        "experts.normalize": False,
    }

    norm_topk_prob: Off = False
    scoring_func: Annotated[Literal["softmax"], Field(exclude=True)] = "softmax"
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    mlp_bias: Off = False

    @model_validator(mode="after")
    def _groups_are_used(self) -> Self:
        if self.topk_method == "group_limited_greedy" and (self.n_group is None or self.topk_group is None):
            raise ValueError("topk_method=group_limited_greedy needs n_group and topk_group")
        return self

    def to_others(self) -> dict[str, object]:
        """Return rotary positions and groups of experts, which count with one of the methods alone."""
        others = super().to_others()
        grouped = self.topk_method == "group_limited_greedy"
        return others if grouped else {**others, "experts.groups": 1, "experts.active_groups": 1}

    @classmethod
    def from_others(cls, model: LanguageModel) -> dict[str, object]:
        """Return rotary settings and groups of experts, with the method that uses them."""
        assert model.experts is not None
        method = "group_limited_greedy" if model.experts.groups > 1 else "greedy"
        return {**super().from_others(model), "topk_method": method}


class DeepseekV3Fields(DeepseekFields):
    """Fields of a DeepSeek-V3 `config.json`: sigmoid scores, and a bias where experts are chosen.

    Layers that predict further tokens (`num_nextn_predict_layers`) are no part of the decoder.
    """

    irrelevant: ClassVar[frozenset[str]] = DeepseekFields.irrelevant | {"num_nextn_predict_layers", "num_mtp_layers"}
    needs: ClassVar[Mapping[str, object]] = {
        **DeepseekFields.needs,
        "experts.scoring": "sigmoid",
        "experts.group_score": "top2_sum",
        "experts.selection_bias": True,
    }

    max_position_embeddings: Size = 4096
    moe_intermediate_size: Size = 2048
    n_routed_experts: Size = 256
    n_shared_experts: Size = 1
    num_experts_per_tok: Size = 8
    first_k_dense_replace: Annotated[int, Field(ge=0)] = 3
    norm_topk_prob: bool = True
    routed_scaling_factor: Annotated[float, Field(gt=0.0)] = 2.5
    n_group: Size | None = 8
    topk_group: Size | None = 4
    scoring_func: Annotated[Literal["sigmoid"], Field(exclude=True)] = "sigmoid"
    topk_method: Annotated[Literal["noaux_tc"], Field(exclude=True)] = "noaux_tc"
    rope_interleave: Yes = True


def _attention(ours: str, theirs: str, **options: Any) -> tuple[str, Counterpart]:
    """Return where a module of latent attention lies."""
    return f"blocks.*.attention.{ours}", Counterpart((f"model.layers.*.self_attn.{theirs}",), **options)


_COUNTERPARTS: Mapping[str, Counterpart] = {
    **ENDS,
    **NORMS,
    **MLP,
    **EXPERTS,
    **dict(
        [
            _attention("query", "q_proj", rows="rotary_heads"),
            _attention("query_down", "q_a_proj"),
            _attention("query_norm", "q_a_layernorm"),
            _attention("query_up", "q_b_proj", rows="rotary_heads"),
            _attention("key_value_down", "kv_a_proj_with_mqa", rows="rotary_end"),
            _attention("key_value_norm", "kv_a_layernorm"),
            _attention("key_value_up", "kv_b_proj"),
            _attention("output", "o_proj"),
        ]
    ),
    "blocks.*.mlp.shared.gate_up": Counterpart(
        ("model.layers.*.mlp.shared_experts.gate_proj", "model.layers.*.mlp.shared_experts.up_proj"), rows="gate_up"
    ),
    "blocks.*.mlp.shared.down": Counterpart(("model.layers.*.mlp.shared_experts.down_proj",)),
    "blocks.*.mlp.router.bias": Counterpart(("model.layers.*.mlp.gate.e_score_correction_bias",), wide=True),
}
DEEPSEEK_V2 = Architecture(
    name="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    prefix="model.",
    config=DeepseekV2Fields,
    counterparts=_COUNTERPARTS,
)
DEEPSEEK_V3 = Architecture(
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    prefix="model.",
    config=DeepseekV3Fields,
    counterparts=_COUNTERPARTS,
    further_layers=True,
)
