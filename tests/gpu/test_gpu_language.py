"""Every option of the language model on the device, compiled and not, beside float64 on the CPU."""

from __future__ import annotations

from functools import cache

import pytest

from device_runs import CPU, accelerator, distance, record_steps, small_run
from layout_runs import Fields
from phalanx.verification.record_training import Record

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Fields] = {
    "plain": {},
    "one key head": {"model.n_kv_heads": 1},
    "as many key heads": {"model.n_kv_heads": None},
    "head of 24": {"model.head_dim": 24},
    "head of 10": {"model.head_dim": 10},
    "learned positions": {"model.positions": "learned"},
    "alibi": {"model.positions": "alibi"},
    "alibi, lower slopes": {"model.positions": "alibi", "model.alibi_bias_max": 4.0},
    "other rotary base": {"model.rope_theta": 500.0},
    "stretched rotary": {"model.rope_scaling": {"factor": 4.0, "original_positions": 16}},
    "layernorm": {"model.norm": "layernorm", "model.norm_eps": 1e-3},
    "gelu": {"model.mlp": "gelu"},
    "gelu_tanh": {"model.mlp": "gelu_tanh"},
    "default width of the MLP": {"model.d_ff": None},
    "biases": {"model.bias": True, "model.norm": "layernorm"},
    "tied head": {"model.tied_head": True},
    "normalised queries and keys": {"model.qk_norm": True},
    "queries and keys normalised over all heads": {"model.qk_norm": "whole"},
    "biases of queries, keys and values": {"model.qkv_bias": True},
    "norms behind": {"model.norm_position": "post"},
    "norms before and behind": {"model.norm_position": "sandwich"},
    "parallel residual": {"model.parallel_residual": True},
    "geglu": {"model.mlp": "geglu"},
    "half rotary": {"model.rotary_fraction": 0.5},
    "linear rotary": {"model.rope_scaling": {"kind": "linear", "factor": 4.0}},
    "raised rotary base": {"model.rope_scaling": {"kind": "ntk", "factor": 4.0}},
    "yarn": {"model.rope_scaling": {"kind": "yarn", "factor": 4.0, "original_positions": 16}},
    "scale of attention": {"model.attention_scale": 0.4},
    "windows": {"model.sliding_window": 9},
    "windows and global layers": {
        "model.sliding_window": 9,
        "model.global_every": 2,
        "model.local_rope_theta": 100.0,
    },
    "windows, documents, alibi": {
        "model.sliding_window": 9,
        "data.document_mask": True,
        "model.positions": "alibi",
    },
    "capped scores": {"model.attention_softcap": 0.5},
    "sinks": {"model.attention_sinks": True},
    "sinks, capped, windows, documents": {
        "model.attention_sinks": True,
        "model.attention_softcap": 0.5,
        "model.sliding_window": 9,
        "data.document_mask": True,
    },
    "latent attention": {
        "model.n_kv_heads": None,
        "model.latent": {"query_rank": 24, "key_value_rank": 32, "rope_size": 8, "nope_size": 16, "value_size": 16},
    },
    "latent attention, documents": {
        "model.n_kv_heads": None,
        "model.latent": {"key_value_rank": 32, "rope_size": 16, "nope_size": 16, "value_size": 24},
        "data.document_mask": True,
    },
    "capped logits": {"model.logit_softcap": 2.0},
    "scaled embedding": {"model.embedding_scale": 8.0},
    "clipped projections": {"model.clip_qkv": 0.05},
    "normalised and clipped": {"model.qk_norm": True, "model.clip_qkv": 0.05},
    "dropout": {"model.dropout": 0.3},
    "dropout, learned positions": {"model.dropout": 0.3, "model.positions": "learned"},
    "larger initial weights": {"model.init_std": 0.05},
    "documents": {"data.document_mask": True},
    "documents, alibi": {"data.document_mask": True, "model.positions": "alibi"},
    "z-loss": {"training.z_loss": 1e-2},
    "chunks of the head": {"training.loss_chunk_tokens": 48},
    "vocabulary of 1,000": {"model.vocab_size": 1000},
}
NOISE = {"fp32": 2e-5, "bf16": 5e-3}
"""Relative error that any order of sums may leave."""


@cache
def reference(option: str) -> Record:
    """The steps in float64 on the CPU."""
    return record_steps(small_run(OPTIONS[option], "fp64", compiled=False), CPU)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("option", OPTIONS)
def test_option_computes_what_the_cpu_computes(option: str, precision: str, compiled: bool) -> None:
    """Errors against float64 are those of the format: at most three times what the CPU's own arithmetic leaves in it."""
    found = distance(
        record_steps(small_run(OPTIONS[option], precision, compiled=compiled), accelerator()), reference(option)
    )
    plain = distance(record_steps(small_run(OPTIONS[option], precision, compiled=False), CPU), reference(option))
    assert found.loss <= 3 * plain.loss + NOISE[precision]
    for name, error in found.gradients.items():
        assert error <= 3 * plain.gradients[name] + NOISE[precision], name


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "fp16", "bf16"])
def test_recompute_changes_no_number(precision: str, recompute: str) -> None:
    """Dropout included: what is computed again must drop the same elements.

    Positions are learned: the angles of rotary ones are float32 numbers of each device's own cosine.
    """
    option = "dropout, learned positions"
    run = small_run({**OPTIONS[option], "layout.recompute": recompute}, precision, compiled=True)
    found = distance(record_steps(run, accelerator()), reference(option))
    limit = {"fp64": 1e-10, "fp32": 2e-5, "fp16": 2e-2, "bf16": 1e-1}[precision]
    assert found.loss <= limit and found.worst <= limit
