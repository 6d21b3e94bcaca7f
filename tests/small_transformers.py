"""Models of `transformers` small enough for a test, with random weights.

Apart from `small_models`, which ranks of tests load: `transformers` takes more than a second of each.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers


def random_transformers(config: transformers.PreTrainedConfig, *, seed: int = 0) -> transformers.PreTrainedModel:
    """A `transformers` model of `config` in float32, every weight random."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = parameter.dim() == 1 and name.endswith("weight")
            values = torch.randn_like(parameter)
            parameter.copy_(1.0 + 0.1 * values if norm else 0.15 * values)
        for name, buffer in model.named_buffers():
            # Of a router, what is added to scores where experts are chosen.
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    return model


_ROTARY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_LATENT = {
    **{key: value for key, value in _ROTARY.items() if key != "num_key_value_heads"},
    "num_key_value_heads": 6,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 13,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 9,
    "v_head_dim": 7,
    "moe_intermediate_size": 35,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
# The width of an expert is odd, and that of a head unlike width over heads.
CONFIGS: dict[str, tuple[type[transformers.PreTrainedConfig], dict[str, object]]] = {
    "llama": (transformers.LlamaConfig, _ROTARY),
    "gpt2": (transformers.GPT2Config, {"vocab_size": 97, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 6}),
    "mpt": (transformers.MptConfig, {"vocab_size": 97, "d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 64}),
    "mistral": (transformers.MistralConfig, {**_ROTARY, "head_dim": 12, "sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, {**_ROTARY, "head_dim": 12}),
    "qwen3": (transformers.Qwen3Config, {**_ROTARY, "head_dim": 10}),
    "mixtral": (
        transformers.MixtralConfig,
        {**_ROTARY, "head_dim": 12, "intermediate_size": 35, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {**_ROTARY, "head_dim": 10, "moe_intermediate_size": 35, "num_experts": 6, "num_experts_per_tok": 3},
    ),
    "olmo2": (transformers.Olmo2Config, {**_ROTARY, **_TOKENS}),
    "olmoe": (
        transformers.OlmoeConfig,
        {**_ROTARY, **_TOKENS, "intermediate_size": 35, "num_experts": 5, "num_experts_per_tok": 2},
    ),
    "gemma2": (
        transformers.Gemma2Config,
        {**_ROTARY, **_TOKENS, "head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 9, "num_hidden_layers": 3},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            **_ROTARY,
            **_TOKENS,
            "head_dim": 10,
            "query_pre_attn_scalar": 12,
            "sliding_window": 9,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 3,
        },
    ),
    "deepseek_v2": (
        transformers.DeepseekV2Config,
        {
            **_LATENT,
            # transformers takes pairs of numbers for complex ones, so none of these is odd.
            "kv_lora_rank": 14,
            "qk_nope_head_dim": 10,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 3.0,
        },
    ),
    "deepseek_v3": (transformers.DeepseekV3Config, {**_LATENT, "q_lora_rank": 22}),
    "phi3": (transformers.Phi3Config, {**_ROTARY, **_TOKENS}),
    "gpt_neox": (
        transformers.GPTNeoXConfig,
        {**{key: value for key, value in _ROTARY.items() if key != "num_key_value_heads"}, "intermediate_size": 70},
    ),
}
"""Small configurations of every architecture that is read."""


def huggingface_config(name: str, **changes: object) -> transformers.PreTrainedConfig:
    """The small configuration `name` of `CONFIGS`, with some fields changed."""
    kind, fields = CONFIGS[name]
    return kind(**{**fields, **changes})


def save_huggingface(
    path: Path, config: transformers.PreTrainedConfig, **options: object
) -> transformers.PreTrainedModel:
    """A random `transformers` model, saved as the folder `path`."""
    model = random_transformers(config)
    model.save_pretrained(path, **options)
    return model
