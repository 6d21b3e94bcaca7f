"""Decoders small enough for a test, one of each family, with random weights; `small_transformers` has counterparts."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch

from phalanx.checkpoint import CheckpointStore
from phalanx.config.layers import LatentSizes, RopeScaling
from phalanx.config.load import dump_run
from phalanx.config.model import LanguageModel
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.decoder import Decoder
from phalanx.families.language.huggingface.folder_files import SpecialTokens, TokenizerFiles

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

VARIANTS = {
    "qkv biases": LanguageModel(**_SIZE, n_kv_heads=3, qkv_bias=True),
    "norms behind, joint head norms": LanguageModel(**_SIZE, n_kv_heads=2, norm_position="post", qk_norm="whole"),
    "joint layer norms": LanguageModel(**_SIZE, norm="layernorm", qk_norm="whole", bias=True, qkv_bias=False),
    "parallel, partly rotated": LanguageModel(
        **_SIZE, norm="layernorm", mlp="gelu", bias=True, parallel_residual=True, rotary_fraction=0.25
    ),
    "sandwich": LanguageModel(
        **_SIZE,
        n_kv_heads=2,
        head_dim=10,
        norm_offset=True,
        norm_position="sandwich",
        mlp="geglu",
        d_ff=80,
        embedding_scale=48**0.5,
        attention_scale=0.2,
        logit_softcap=3.0,
        tied_head=True,
    ),
    "linear scaling": LanguageModel(**_SIZE, rope_scaling=RopeScaling(kind="linear", factor=3.0)),
    "base scaling": LanguageModel(**_SIZE, qk_norm="head", rope_scaling=RopeScaling(kind="ntk", factor=3.0)),
    "windows": LanguageModel(
        **_SIZE,
        n_kv_heads=2,
        sliding_window=7,
        global_every=2,
        local_rope_theta=100.0,
        rope_scaling=RopeScaling(kind="linear", factor=4.0),
    ),
    "capped windows": LanguageModel(**_SIZE, n_kv_heads=2, sliding_window=5, attention_softcap=1.5),
    "sinks": LanguageModel(
        **_SIZE, n_kv_heads=2, attention_sinks=True, sliding_window=9, global_every=2, qkv_bias=True
    ),
    "alibi, capped, with sinks": LanguageModel(
        **_SIZE, positions="alibi", attention_softcap=2.0, attention_sinks=True, sliding_window=11
    ),
    "latent": LanguageModel(
        **_SIZE,
        latent=LatentSizes(query_rank=20, key_value_rank=14, rope_size=4, nope_size=6, value_size=8),
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_positions=16, mscale=1.0, mscale_all_dim=0.8),
    ),
    "latent of keys alone, windows, sinks": LanguageModel(
        **_SIZE,
        latent=LatentSizes(key_value_rank=14, rope_size=6, nope_size=5, value_size=7),
        sliding_window=9,
        global_every=2,
        attention_sinks=True,
    ),
    "yarn": LanguageModel(
        **_SIZE,
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_positions=16, mscale=1.0, mscale_all_dim=0.7),
    ),
}
"""Decoders that together have every option of today's models."""

READER = LLAMA.model_copy(update={"vocab_size": 300, "max_positions": 128})
"""A decoder for the tokens of `byte_tokenizer`."""


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


def byte_tokenizer(vocab_size: int = 300) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer with <|endoftext|> as token 0, trained on a text that stays as it is."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([(Path(__file__).parents[1] / "LICENSE").read_text()], trainer)
    return tokenizer


def run_of(model: LanguageModel, data: str = "nowhere", **fields: object) -> LanguageRun:
    """A run that could have trained `model`, in float32."""
    sections = {
        "model": model.model_dump(),
        "data": {"sources": [data], "sequence_length": 32},
        "layout": {"global_batch": 4, "precision": "fp32"},
        "optimizer": {"lr": 1e-3},
        "training": {"steps": 10},
        **fields,
    }
    return LanguageRun.model_validate_json(json.dumps(sections))


def save_run(
    path: Path, decoder: Decoder, *, step: int = 10, data: str = "nowhere", tokenizer: bool = True
) -> LanguageRun:
    """A run directory with one checkpoint of `decoder`, as training leaves it; float32, some optimizer state included."""
    run = run_of(decoder.config, data)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in decoder.named_parameters()}
    tensors |= {name.replace("model.", "optimizer.exp_avg.", 1): tensor * 0 for name, tensor in tensors.items()}
    with CheckpointStore(path / "checkpoints", keep_last=2) as store:
        store.save(step, tensors, {"step": step, "run": dump_run(run)})
    if tokenizer:
        (path / "tokenizer").mkdir(exist_ok=True)
        files = {"tokenizer.json": byte_tokenizer().to_str().encode()}
        TokenizerFiles(files, SpecialTokens(end=(0,))).write(path / "tokenizer", decoder.config.max_positions)
    return run
