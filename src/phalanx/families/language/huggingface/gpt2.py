"""GPT2LMHeadModel: learned positions, LayerNorm, GELU, biases everywhere, matrices kept as [in, out]."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from phalanx.config.model import LanguageModel
from phalanx.families.language.huggingface.architecture import (
    GENERAL_KEYS,
    Architecture,
    ConfigFields,
    Counterpart,
    Positive,
    Size,
)


class GPT2Fields(ConfigFields):
    """Fields of a GPT-2 `config.json`. `n_ctx` is an older name of `n_positions`, written beside it."""

    irrelevant: ClassVar[frozenset[str]] = GENERAL_KEYS | {
        "n_ctx",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "reorder_and_upcast_attn",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
    }

    vocab_size: Size = 50257
    n_positions: Size = 1024
    n_embd: Size = 768
    n_layer: Size = 12
    n_head: Size = 12
    n_inner: Size | None = None
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh", "gelu"] = "gelu_new"
    layer_norm_epsilon: Positive = 1e-5
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: bool = True

    def to_model(self) -> LanguageModel:
        """Return the decoder that computes the same."""
        return LanguageModel(
            n_layers=self.n_layer,
            d_model=self.n_embd,
            n_heads=self.n_head,
            d_ff=self.n_inner,
            vocab_size=self.vocab_size,
            max_positions=self.n_positions,
            positions="learned",
            norm="layernorm",
            norm_eps=self.layer_norm_epsilon,
            mlp="gelu" if self.activation_function == "gelu" else "gelu_tanh",
            bias=True,
            tied_head=self.tie_word_embeddings,
        )

    @classmethod
    def from_model(cls, model: LanguageModel) -> Self:
        """Return the fields for a decoder that fits."""
        return cls(
            vocab_size=model.vocab_size,
            n_positions=model.max_positions,
            n_embd=model.d_model,
            n_layer=model.n_layers,
            n_head=model.n_heads,
            n_inner=model.ff_size,
            activation_function="gelu" if model.mlp == "gelu" else "gelu_new",
            layer_norm_epsilon=model.norm_eps,
            tie_word_embeddings=model.tied_head,
        )


def _needed_fields(model: LanguageModel) -> Mapping[str, object]:
    return {
        "positions": "learned",
        "norm": "layernorm",
        "mlp": ("gelu", "gelu_tanh"),
        "bias": True,
        "n_kv_heads": model.n_heads,
        "head_dim": model.d_model // model.n_heads,
        "qk_norm": False,
        "clip_qkv": None,
    }


GPT2 = Architecture(
    name="GPT2LMHeadModel",
    model_type="gpt2",
    prefix="transformer.",
    config=GPT2Fields,
    counterparts={
        "embedding": Counterpart(("transformer.wte",)),
        "embedding.positions": Counterpart(("transformer.wpe.weight",)),
        "blocks.*.attention_norm": Counterpart(("transformer.h.*.ln_1",)),
        "blocks.*.attention.qkv": Counterpart(("transformer.h.*.attn.c_attn",), rows="qkv", transposed=True),
        "blocks.*.attention.output": Counterpart(("transformer.h.*.attn.c_proj",), transposed=True),
        "blocks.*.mlp_norm": Counterpart(("transformer.h.*.ln_2",)),
        "blocks.*.mlp.up": Counterpart(("transformer.h.*.mlp.c_fc",), transposed=True),
        "blocks.*.mlp.down": Counterpart(("transformer.h.*.mlp.c_proj",), transposed=True),
        "head.norm": Counterpart(("transformer.ln_f",)),
        "head": Counterpart(("lm_head",)),
    },
    ignored=re.compile(r".*\.attn\.(bias|masked_bias)"),
    needs=_needed_fields,
)
