"""Decoders of others: logits in float64 equal those of `transformers`, whose random weights are copied over.

Sizes are odd on purpose: heads of another width than the model over its heads, 6 query and 2 key heads, tied or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
import transformers
from torch import Tensor

from phalanx.config.layers import LatentSizes, RopeScaling
from phalanx.config.model import LanguageModel
from phalanx.families.language.decoder import Decoder
from phalanx.families.language.huggingface.tensor_rules import Counterpart, tensor_rules
from small_models import random_tokens
from small_transformers import random_transformers

_SIZE = {"n_layers": 4, "d_model": 48, "n_heads": 6, "n_kv_heads": 2, "d_ff": 80, "vocab_size": 97, "max_positions": 64}
_THEIRS = {
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LAYER = "model.layers.*."
_MLP = {
    "blocks.*.mlp.gate_up": Counterpart((f"{_LAYER}mlp.gate_proj", f"{_LAYER}mlp.up_proj"), rows="gate_up"),
    "blocks.*.mlp.down": Counterpart((f"{_LAYER}mlp.down_proj",)),
}
_ENDS = {
    "embedding": Counterpart(("model.embed_tokens",)),
    "head.norm": Counterpart(("model.norm",)),
    "head": Counterpart(("lm_head",)),
}
_ATTENTION = {
    "blocks.*.attention.qkv": Counterpart(
        tuple(f"{_LAYER}self_attn.{name}_proj" for name in ("q", "k", "v")), rows="qkv"
    ),
    "blocks.*.attention.output": Counterpart((f"{_LAYER}self_attn.o_proj",)),
    "blocks.*.attention.query_norm": Counterpart((f"{_LAYER}self_attn.q_norm",)),
    "blocks.*.attention.key_norm": Counterpart((f"{_LAYER}self_attn.k_norm",)),
}
_PRE = {
    "blocks.*.attention_norm": Counterpart((f"{_LAYER}input_layernorm",)),
    "blocks.*.mlp_norm": Counterpart((f"{_LAYER}post_attention_layernorm",)),
}
_POST = {
    "blocks.*.attention_out_norm": Counterpart((f"{_LAYER}post_attention_layernorm",)),
    "blocks.*.mlp_out_norm": Counterpart((f"{_LAYER}post_feedforward_layernorm",)),
}
_SANDWICH = {
    **_POST,
    "blocks.*.attention_norm": Counterpart((f"{_LAYER}input_layernorm",)),
    "blocks.*.mlp_norm": Counterpart((f"{_LAYER}pre_feedforward_layernorm",)),
}
_USUAL = {**_ENDS, **_ATTENTION, **_MLP}


@dataclass(frozen=True)
class Published:
    """A model of `transformers` and ours."""

    config: transformers.PreTrainedConfig
    model: LanguageModel
    counterparts: Mapping[str, Counterpart]
    added_to_norms: float = 0.0
    """What their norms add to their weights."""
    without_mlp: bool = False
    """Whether MLPs are left out: theirs compute what ours have no counterpart for."""


def _ours(**fields: object) -> LanguageModel:
    return LanguageModel.model_validate({**_SIZE, **fields})


def _yarn(**fields: object) -> dict[str, object]:
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        **fields,
    }


_LATENT = {"key_value_rank": 14, "rope_size": 4, "nope_size": 6, "value_size": 8}


def _deepseek(query_rank: int | None, sizes: LatentSizes) -> Published:
    """DeepSeek-V3's attention with an MLP in every layer; pairs of rotary features are halves, as ours."""
    scaling = {"mscale": 1.0, "mscale_all_dim": 0.7}
    config = transformers.DeepseekV3Config(
        **{**_THEIRS, "num_key_value_heads": 6},
        q_lora_rank=query_rank,
        kv_lora_rank=14,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=8,
        first_k_dense_replace=4,
        rope_interleave=False,
        rope_parameters=_yarn(**scaling),
    )
    scaled = RopeScaling(kind="yarn", factor=4.0, original_positions=16, beta_fast=4.0, **scaling)
    attention = {
        "query": "q_proj",
        "query_down": "q_a_proj",
        "query_norm": "q_a_layernorm",
        "query_up": "q_b_proj",
        "key_value_down": "kv_a_proj_with_mqa",
        "key_value_norm": "kv_a_layernorm",
        "key_value_up": "kv_b_proj",
        "output": "o_proj",
    }
    return Published(
        config,
        _ours(n_kv_heads=None, latent=sizes.model_dump(), rope_scaling=scaled, norm_eps=1e-6),
        {
            **_ENDS,
            **_MLP,
            **_PRE,
            **{
                f"blocks.*.attention.{ours}": Counterpart((f"{_LAYER}self_attn.{theirs}",))
                for ours, theirs in attention.items()
            },
        },
    )


PUBLISHED: dict[str, Published] = {
    "Qwen2": Published(
        transformers.Qwen2Config(**_THEIRS, rms_norm_eps=1e-5, tie_word_embeddings=True),
        _ours(qkv_bias=True, tied_head=True),
        {**_USUAL, **_PRE},
    ),
    "Qwen3": Published(
        transformers.Qwen3Config(**_THEIRS, head_dim=10, rms_norm_eps=1e-5),
        _ours(qk_norm="head", head_dim=10),
        {**_USUAL, **_PRE},
    ),
    "OLMo2": Published(
        transformers.Olmo2Config(**_THEIRS, rms_norm_eps=1e-5),
        _ours(norm_position="post", qk_norm="whole"),
        {**_USUAL, **_POST},
    ),
    "Gemma": Published(
        transformers.GemmaConfig(**_THEIRS, head_dim=10, rms_norm_eps=1e-5),
        _ours(mlp="geglu", head_dim=10, embedding_scale=48**0.5, tied_head=True),
        {**_USUAL, **_PRE},
        added_to_norms=1.0,
    ),
    "GPT-NeoX": Published(
        transformers.GPTNeoXConfig(
            **{key: value for key, value in _THEIRS.items() if key != "num_key_value_heads"},
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        ),
        _ours(
            n_kv_heads=6,
            norm="layernorm",
            mlp="gelu",
            bias=True,
            parallel_residual=True,
            rotary_fraction=0.25,
            rope_theta=500.0,
        ),
        {
            "embedding": Counterpart(("gpt_neox.embed_in",)),
            "blocks.*.attention_norm": Counterpart(("gpt_neox.layers.*.input_layernorm",)),
            "blocks.*.mlp_norm": Counterpart(("gpt_neox.layers.*.post_attention_layernorm",)),
            # Each head has its query, its key and its value, as ours where no heads are shared.
            "blocks.*.attention.qkv": Counterpart(("gpt_neox.layers.*.attention.query_key_value",)),
            "blocks.*.attention.output": Counterpart(("gpt_neox.layers.*.attention.dense",)),
            "blocks.*.mlp.up": Counterpart(("gpt_neox.layers.*.mlp.dense_h_to_4h",)),
            "blocks.*.mlp.down": Counterpart(("gpt_neox.layers.*.mlp.dense_4h_to_h",)),
            "head.norm": Counterpart(("gpt_neox.final_layer_norm",)),
            "head": Counterpart(("lm_head",)),
        },
    ),
    "Mistral": Published(
        transformers.MistralConfig(**_THEIRS, head_dim=10, rms_norm_eps=1e-5, sliding_window=9),
        _ours(head_dim=10, sliding_window=9),
        {**_USUAL, **_PRE},
    ),
    "Gemma 2": Published(
        transformers.Gemma2Config(
            **_THEIRS,
            head_dim=10,
            rms_norm_eps=1e-5,
            sliding_window=9,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        _ours(
            mlp="geglu",
            head_dim=10,
            embedding_scale=48**0.5,
            tied_head=True,
            norm_position="sandwich",
            attention_scale=24**-0.5,
            attention_softcap=2.0,
            logit_softcap=3.0,
            sliding_window=9,
            global_every=2,
        ),
        {**_USUAL, **_SANDWICH},
        added_to_norms=1.0,
    ),
    "Gemma 3": Published(
        transformers.Gemma3TextConfig(
            **_THEIRS,
            head_dim=10,
            rms_norm_eps=1e-5,
            sliding_window=9,
            query_pre_attn_scalar=24,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        ),
        _ours(
            mlp="geglu",
            head_dim=10,
            embedding_scale=48**0.5,
            tied_head=True,
            norm_position="sandwich",
            qk_norm="head",
            attention_scale=24**-0.5,
            sliding_window=9,
            global_every=3,
            rope_theta=5000.0,
            rope_scaling=RopeScaling(kind="linear", factor=4.0),
            local_rope_theta=100.0,
        ),
        {**_USUAL, **_SANDWICH},
        added_to_norms=1.0,
    ),
    "gpt-oss": Published(
        transformers.GptOssConfig(
            **_THEIRS,
            head_dim=10,
            rms_norm_eps=1e-5,
            sliding_window=9,
            num_local_experts=2,
            num_experts_per_tok=1,
            attention_bias=False,
            rope_parameters=_yarn(truncate=False),
        ),
        _ours(
            head_dim=10,
            attention_sinks=True,
            sliding_window=9,
            global_every=2,
            rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_positions=16, beta_fast=4.0, truncate=False),
        ),
        {
            **_USUAL,
            **_PRE,
            "blocks.*.attention.sinks.weight": Counterpart((f"{_LAYER}self_attn.sinks",)),
        },
        without_mlp=True,
    ),
    "DeepSeek-V3, compressed queries": _deepseek(20, LatentSizes(query_rank=20, **_LATENT)),
    "DeepSeek-V3, plain queries": _deepseek(None, LatentSizes(**_LATENT)),
    "Llama, linear": Published(
        transformers.LlamaConfig(
            **_THEIRS,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        ),
        _ours(rope_scaling=RopeScaling(kind="linear", factor=3.0)),
        {**_USUAL, **_PRE},
    ),
    "Llama, YaRN": Published(
        transformers.LlamaConfig(**_THEIRS, rms_norm_eps=1e-5, rope_parameters=_yarn()),
        _ours(rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_positions=16, beta_fast=4.0)),
        {**_USUAL, **_PRE},
    ),
}


class Nothing(torch.nn.Module):
    """Adds nothing to the residual stream, and chooses no expert."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.zeros_like(x), None


def load_published(published: Published, theirs: transformers.PreTrainedModel) -> Decoder:
    """Our decoder in float64, with the weights of `theirs`."""
    weights = theirs.state_dict()
    decoder = Decoder(published.model, dtype=torch.float64).double()
    tensors: dict[str, Tensor] = {}
    for rule in tensor_rules(published.model, published.counterparts):
        if published.without_mlp and ".mlp." in rule.ours:
            tensors[rule.ours] = torch.zeros(rule.shape)
            continue
        tensors[rule.ours] = rule.join([weights[name] for name in rule.theirs])
        if rule.ours.endswith("norm.weight"):
            tensors[rule.ours] = tensors[rule.ours] + published.added_to_norms
    decoder.load_state_dict(tensors)
    return decoder


@pytest.mark.parametrize("name", PUBLISHED)
@torch.no_grad()
def test_logits_are_those_of_transformers(name: str) -> None:
    published = PUBLISHED[name]
    published.config._attn_implementation = "eager"
    theirs = random_transformers(published.config).double()
    tokens = random_tokens(2, 37)
    if published.without_mlp:
        for layer in theirs.model.layers:
            layer.mlp = Nothing()
    expected = theirs(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    # Theirs have norms and angles in float32, whatever the format of the activations.
    torch.testing.assert_close(load_published(published, theirs).logits(tokens), expected, rtol=1e-5, atol=3e-5)
