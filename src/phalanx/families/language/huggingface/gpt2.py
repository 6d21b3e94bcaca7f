"""GPT2LMHeadModel: learned positions, LayerNorm, GELU, biases everywhere, matrices kept as [in, out]."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Literal

from phalanx.config.model import LanguageModel
from phalanx.families.language.huggingface.architecture import (
    GENERAL_KEYS,
    Architecture,
    ConfigFields,
    Positive,
    Size,
)
from phalanx.families.language.huggingface.tensor_rules import Counterpart


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
    same: ClassVar[Mapping[str, str]] = {
        "n_layers": "n_layer",
        "d_model": "n_embd",
        "n_heads": "n_head",
        "d_ff": "n_inner",
        "vocab_size": "vocab_size",
        "max_positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "tied_head": "tie_word_embeddings",
    }
    needs: ClassVar[Mapping[str, object]] = {
        "positions": "learned",
        "norm": "layernorm",
        "mlp": ("gelu", "gelu_tanh"),
        "bias": True,
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

    def to_others(self) -> dict[str, object]:
        """Return which GELU the decoder has."""
        return {"mlp": "gelu" if self.activation_function == "gelu" else "gelu_tanh"}

    @classmethod
    def from_others(cls, model: LanguageModel) -> dict[str, object]:
        """Return Hugging Face's name of the GELU."""
        return {"activation_function": "gelu" if model.mlp == "gelu" else "gelu_new"}


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
)
