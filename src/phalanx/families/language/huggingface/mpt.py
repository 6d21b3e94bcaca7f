"""MptForCausalLM: ALiBi, LayerNorm, exact GELU, no biases, MLP four times as wide as the model.

LLM Foundry, where such models are trained, calls the class MPTForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AliasChoices, Field, model_validator

from phalanx.config.model import LanguageModel
from phalanx.families.language.huggingface.architecture import (
    GENERAL_KEYS,
    Architecture,
    ConfigFields,
    KnownKeys,
    Positive,
    Size,
)
from phalanx.families.language.huggingface.tensor_rules import Counterpart

Unlimited = Annotated[Literal[-1], Field(exclude=True)]
"""A window that bounds nothing. It is read, to refuse other values, and not written."""
Always = Annotated[Literal[True], Field(exclude=True)]
"""A switch that is always on; read, to refuse other values, and not written."""


class AttentionFields(KnownKeys):
    """`attn_config` of an MPT `config.json`. transformers writes the keys of any configuration into it."""

    irrelevant: ClassVar[frozenset[str]] = GENERAL_KEYS | {
        "attn_impl",
        "attn_pdrop",
        "rope_theta",
        "rope_impl",
        "rope_dail_config",
        "rope_hf_config",
    }

    attn_type: Literal["multihead_attention"] = "multihead_attention"
    alibi: Literal[True] = True
    alibi_bias_max: Size = 8
    clip_qkv: Positive | None = None
    softmax_scale: Positive | None = None
    prefix_lm: Literal[False] = False
    qk_ln: Literal[False] = False
    rope: Literal[False] = False
    sliding_window_size: Unlimited = -1
    fused_qkv: Always = True


class FeedForwardFields(KnownKeys):
    """`ffn_config` of an MPT `config.json`, as LLM Foundry writes it."""

    irrelevant: ClassVar[frozenset[str]] = frozenset({"fc_type"})

    ffn_type: Literal["mptmlp"] = "mptmlp"


class MptFields(ConfigFields):
    """Fields of an MPT `config.json`. `learned_pos_emb` has no effect beside ALiBi.

    `attn_config.alibi_bias_max` is honoured, as LLM Foundry does, where such models are trained. LLM Foundry's name of
    `layer_norm_epsilon` is `norm_eps`. `embedding_fraction` scales gradients alone.
    """

    irrelevant: ClassVar[frozenset[str]] = GENERAL_KEYS | {
        "learned_pos_emb",
        "resid_pdrop",
        "emb_pdrop",
        "embedding_fraction",
        "init_config",
        "init_device",
        "verbose",
        "auto_map",
        "tokenizer_name",
        "fc_type",
        "loss_fn",
        "use_pad_tok_in_ffn",
    }
    same: ClassVar[Mapping[str, str]] = {
        "n_layers": "n_layers",
        "d_model": "d_model",
        "n_heads": "n_heads",
        "vocab_size": "vocab_size",
        "max_positions": "max_seq_len",
        "norm_eps": "layer_norm_epsilon",
        "tied_head": "tie_word_embeddings",
    }
    needs: ClassVar[Mapping[str, object]] = {"positions": "alibi", "norm": "layernorm", "mlp": "gelu", "bias": False}
    # Slopes can be read, and not be written: transformers computes with a largest bias of 8 whatever attn_config says.
    others: ClassVar[frozenset[str]] = frozenset({"clip_qkv"})

    vocab_size: Size = 50368
    d_model: Size = 2048
    n_heads: Size = 16
    n_layers: Size = 24
    expansion_ratio: Literal[4] = 4
    max_seq_len: Size = 2048
    layer_norm_epsilon: Positive = Field(1e-5, validation_alias=AliasChoices("layer_norm_epsilon", "norm_eps"))
    norm_type: Literal["low_precision_layernorm", "layernorm"] = "low_precision_layernorm"
    no_bias: Literal[True] = True
    logit_scale: None = None
    tie_word_embeddings: bool = True
    attn_config: AttentionFields = Field(default_factory=AttentionFields)
    ffn_config: FeedForwardFields | None = None

    @model_validator(mode="after")
    def _usual_scale(self) -> Self:
        scale = self.attn_config.softmax_scale
        usual = (self.d_model // self.n_heads) ** -0.5
        if scale is not None and abs(scale - usual) > 1e-6 * usual:
            raise ValueError(f"attn_config.softmax_scale={scale} is not the decoder's 1/sqrt(head size) = {usual:.6g}")
        return self

    def to_others(self) -> dict[str, object]:
        """Return what the decoder takes of `attn_config`."""
        return {
            "alibi_bias_max": float(self.attn_config.alibi_bias_max),
            "clip_qkv": self.attn_config.clip_qkv,
        }

    @classmethod
    def from_others(cls, model: LanguageModel) -> dict[str, object]:
        """Return `attn_config`."""
        return {"attn_config": AttentionFields(clip_qkv=model.clip_qkv)}


MPT = Architecture(
    name="MptForCausalLM",
    aliases=("MPTForCausalLM",),
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
)
