"""GPTNeoXForCausalLM: a part of each head rotated, LayerNorm, GELU, biases, MLP and attention side by side."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from phalanx.config.model import LanguageModel
from phalanx.families.language.huggingface.architecture import (
    GENERAL_KEYS,
    Architecture,
    ConfigFields,
    Positive,
    Size,
)
from phalanx.families.language.huggingface.rotary import RopeParameters
from phalanx.families.language.huggingface.tensor_rules import Counterpart

Always = Annotated[Literal[True], Field(exclude=True)]
"""A switch that is always on; read, to refuse other values, and not written."""


class GPTNeoXFields(ConfigFields):
    """Fields of a GPT-NeoX `config.json`. Version 5 of transformers keeps `rotary_pct` and the base in `rope_parameters`."""

    irrelevant: ClassVar[frozenset[str]] = GENERAL_KEYS | {
        "attention_dropout",
        "hidden_dropout",
        "classifier_dropout",
    }
    same: ClassVar[Mapping[str, str]] = {
        "n_layers": "num_hidden_layers",
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "d_ff": "intermediate_size",
        "vocab_size": "vocab_size",
        "max_positions": "max_position_embeddings",
        "norm_eps": "layer_norm_eps",
        "tied_head": "tie_word_embeddings",
        "rope_theta": "rotary_emb_base",
        "rotary_fraction": "rotary_pct",
        "parallel_residual": "use_parallel_residual",
    }
    needs: ClassVar[Mapping[str, object]] = {
        "positions": "rope",
        "norm": "layernorm",
        "mlp": ("gelu", "gelu_tanh"),
        "bias": True,
    }
    others: ClassVar[frozenset[str]] = frozenset({"rope_scaling"})

    vocab_size: Size = 50432
    hidden_size: Size = 6144
    num_hidden_layers: Size = 44
    num_attention_heads: Size = 64
    intermediate_size: Size = 24576
    hidden_act: Literal["gelu", "gelu_new", "gelu_pytorch_tanh"] = "gelu"
    max_position_embeddings: Size = 2048
    layer_norm_eps: Positive = 1e-5
    use_parallel_residual: bool = True
    attention_bias: Always = True
    tie_word_embeddings: bool = False
    rotary_pct: float = Field(0.25, gt=0.0, le=1.0)
    rotary_emb_base: Positive = 10000.0
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None

    @model_validator(mode="after")
    def _scaling_as_computed(self) -> Self:
        if self._rope.mscale_all_dim:
            raise ValueError(f"mscale_all_dim={self._rope.mscale_all_dim} has no counterpart in this architecture")
        return self

    @property
    def _rope(self) -> RopeParameters:
        """Return the rotary settings, wherever they stand."""
        return self.rope_scaling or self.rope_parameters or RopeParameters()

    def to_others(self) -> dict[str, object]:
        """Return rotary positions of the decoder, and which GELU it has."""
        rope = self._rope
        share = rope.partial_rotary_factor
        return {
            "rope_theta": rope.rope_theta or self.rotary_emb_base,
            "rotary_fraction": self.rotary_pct if share is None else share,
            "rope_scaling": rope.to_scaling(),
            "mlp": "gelu" if self.hidden_act == "gelu" else "gelu_tanh",
        }

    @classmethod
    def from_others(cls, model: LanguageModel) -> dict[str, object]:
        """Return rotary settings and Hugging Face's name of the GELU."""
        return {
            "rope_scaling": None if model.rope_scaling is None else RopeParameters.from_scaling(model.rope_scaling),
            "hidden_act": "gelu" if model.mlp == "gelu" else "gelu_new",
        }


GPT_NEOX = Architecture(
    name="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    prefix="gpt_neox.",
    config=GPTNeoXFields,
    counterparts={
        "embedding": Counterpart(("gpt_neox.embed_in",)),
        "blocks.*.attention_norm": Counterpart(("gpt_neox.layers.*.input_layernorm",)),
        # Rows lie head by head, as ours do where each head has a key and a value of its own.
        "blocks.*.attention.qkv": Counterpart(("gpt_neox.layers.*.attention.query_key_value",)),
        "blocks.*.attention.output": Counterpart(("gpt_neox.layers.*.attention.dense",)),
        "blocks.*.mlp_norm": Counterpart(("gpt_neox.layers.*.post_attention_layernorm",)),
        "blocks.*.mlp.up": Counterpart(("gpt_neox.layers.*.mlp.dense_h_to_4h",)),
        "blocks.*.mlp.down": Counterpart(("gpt_neox.layers.*.mlp.dense_4h_to_h",)),
        "head.norm": Counterpart(("gpt_neox.final_layer_norm",)),
        "head": Counterpart(("embed_out",)),
    },
    ignored=re.compile(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
)
