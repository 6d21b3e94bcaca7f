"""MptForCausalLM: ALiBi, LayerNorm, exact GELU, no biases, MLP four times as wide as the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from phalanx.config.model import LanguageModel
from phalanx.models.language.huggingface.architecture import Architecture, ConfigFields, Positive, Size
from phalanx.models.language.huggingface.rules import Counterpart


class AttentionFields(BaseModel):
    """`attn_config` of an MPT `config.json`."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)

    attn_type: Literal["multihead_attention"] = "multihead_attention"
    alibi: Literal[True] = True
    alibi_bias_max: Size = 8
    clip_qkv: Positive | None = None
    softmax_scale: Positive | None = None
    prefix_lm: Literal[False] = False
    qk_ln: Literal[False] = False
    rope: Literal[False] = False


class MptFields(ConfigFields):
    """Fields of an MPT `config.json`. `learned_pos_emb` has no effect beside ALiBi.

    `attn_config.alibi_bias_max` is honoured, as LLM Foundry does, where such models are trained.
    """

    vocab_size: Size = 50368
    d_model: Size = 2048
    n_heads: Size = 16
    n_layers: Size = 24
    expansion_ratio: Literal[4] = 4
    max_seq_len: Size = 2048
    layer_norm_epsilon: Positive = 1e-5
    norm_type: Literal["low_precision_layernorm", "layernorm"] = "low_precision_layernorm"
    no_bias: Literal[True] = True
    logit_scale: None = None
    tie_word_embeddings: bool = True
    attn_config: AttentionFields = Field(default_factory=AttentionFields)

    @model_validator(mode="after")
    def _usual_scale(self) -> Self:
        scale = self.attn_config.softmax_scale
        usual = (self.d_model // self.n_heads) ** -0.5
        if scale is not None and abs(scale - usual) > 1e-6 * usual:
            raise ValueError(f"attn_config.softmax_scale={scale} is not the decoder's 1/sqrt(head size) = {usual:.6g}")
        return self

    def to_model(self) -> LanguageModel:
        """The decoder that computes the same."""
        return LanguageModel(
            n_layers=self.n_layers,
            d_model=self.d_model,
            n_heads=self.n_heads,
            vocab_size=self.vocab_size,
            max_positions=self.max_seq_len,
            positions="alibi",
            alibi_bias_max=float(self.attn_config.alibi_bias_max),
            norm="layernorm",
            norm_eps=self.layer_norm_epsilon,
            mlp="gelu",
            bias=False,
            tied_head=self.tie_word_embeddings,
            clip_qkv=self.attn_config.clip_qkv,
        )

    @classmethod
    def from_model(cls, model: LanguageModel) -> Self:
        """The fields for a decoder that fits."""
        return cls(
            vocab_size=model.vocab_size,
            d_model=model.d_model,
            n_heads=model.n_heads,
            n_layers=model.n_layers,
            max_seq_len=model.max_positions,
            layer_norm_epsilon=model.norm_eps,
            tie_word_embeddings=model.tied_head,
            attn_config=AttentionFields(clip_qkv=model.clip_qkv),
        )


def _needs(model: LanguageModel) -> Mapping[str, object]:
    return {
        "positions": "alibi",
        "norm": "layernorm",
        "mlp": "gelu",
        "bias": False,
        "n_kv_heads": model.n_heads,
        "head_dim": model.d_model // model.n_heads,
        "d_ff": 4 * model.d_model,
        # transformers computes with 8 whatever attn_config says
        "alibi_bias_max": 8.0,
        "qk_norm": False,
    }


MPT = Architecture(
    name="MptForCausalLM",
    model_type="mpt",
    prefix="transformer.",
    config=MptFields,
    counterparts={
        "embedding": Counterpart(("transformer.wte",)),
        "blocks.*.attention_norm": Counterpart(("transformer.blocks.*.norm_1",)),
        "blocks.*.attention.qkv": Counterpart(("transformer.blocks.*.attn.Wqkv",), rows="qkv"),
        "blocks.*.attention.output": Counterpart(("transformer.blocks.*.attn.out_proj",)),
        "blocks.*.mlp_norm": Counterpart(("transformer.blocks.*.norm_2",)),
        "blocks.*.mlp.up": Counterpart(("transformer.blocks.*.ffn.up_proj",)),
        "blocks.*.mlp.down": Counterpart(("transformer.blocks.*.ffn.down_proj",)),
        "head.norm": Counterpart(("transformer.norm_f",)),
        "head": Counterpart(("lm_head",)),
    },
    ignored=re.compile(r"(?!)"),
    needs=_needs,
)
