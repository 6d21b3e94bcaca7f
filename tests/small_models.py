"""Decoders small enough for a test, one of each family, with random weights; and their `transformers` counterparts."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from phalanx.config.model import LanguageModel, RopeScaling
from phalanx.models.language.decoder import Decoder

_SIZE = {"n_layers": 2, "d_model": 48, "n_heads": 6, "vocab_size": 97, "max_positions": 64}

LLAMA = LanguageModel(
    **_SIZE,
    n_kv_heads=2,
    d_ff=96,
    rope_theta=5000.0,
    rope_scaling=RopeScaling(factor=4.0, original_positions=16),
)
GPT = LanguageModel(**_SIZE, positions="learned", norm="layernorm", mlp="gelu_tanh", bias=True, tied_head=True)
MPT = LanguageModel(**_SIZE, positions="alibi", norm="layernorm", mlp="gelu", tied_head=True)

FAMILIES = {"llama": LLAMA, "gpt": GPT, "mpt": MPT}


def random_decoder(model: LanguageModel, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder of `model` with weights large enough that attention is far from uniform."""
    decoder = Decoder(model, dtype=dtype, chunk_tokens=16).to(torch.promote_types(dtype, torch.float32))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1.0 + 0.1 * values if name.endswith("norm.weight") else 0.15 * values)
    return decoder


def random_tokens(*shape: int, vocab_size: int = 97, seed: int = 1) -> torch.Tensor:
    """Token ids, int64 of the given shape."""
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def random_transformers(config: transformers.PreTrainedConfig, *, seed: int = 0) -> transformers.PreTrainedModel:
    """A `transformers` model of `config` in float32, every weight random."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = parameter.dim() == 1 and name.endswith("weight")
            values = torch.randn_like(parameter)
            parameter.copy_(1.0 + 0.1 * values if norm else 0.15 * values)
    return model


def huggingface_config(name: str, **changes: object) -> transformers.PreTrainedConfig:
    """A small configuration of llama, gpt2 or mpt."""
    if name == "llama":
        fields = {
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
        return transformers.LlamaConfig(**{**fields, **changes})
    if name == "gpt2":
        fields = {"vocab_size": 97, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 6}
        return transformers.GPT2Config(**{**fields, **changes})
    fields = {"vocab_size": 97, "d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 64}
    return transformers.MptConfig(**{**fields, **changes})


def save_huggingface(
    path: Path, config: transformers.PreTrainedConfig, **options: object
) -> transformers.PreTrainedModel:
    """A random `transformers` model, saved as the folder `path`."""
    model = random_transformers(config)
    model.save_pretrained(path, **options)
    return model
