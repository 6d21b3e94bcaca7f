"""Closed-form sizes against the modules themselves, over every option that changes them."""

import itertools

import pytest
import torch

from phalanx.config.model import LanguageModel
from phalanx.families.language.decoder import Decoder
from phalanx.families.language.sizes import (
    embedding_parameters,
    matmul_parameters,
    model_flops_per_token,
    parameter_count,
)

OPTIONS = {
    "positions": ["learned", "alibi", "rope"],
    "norm": ["layernorm", "rmsnorm"],
    "mlp": ["gelu", "swiglu", "geglu"],
    "bias": [False, True],
    "tied_head": [False, True],
    "qk_norm": [False, True, "whole"],
    "qkv_bias": [None, False, True],
    "norm_position": ["pre", "post", "sandwich"],
    "n_kv_heads": [None, 2],
    "head_dim": [None, 24],
    "d_ff": [None, 96],
}


def model(**changes: object) -> LanguageModel:
    base = {"n_layers": 3, "d_model": 64, "n_heads": 4, "vocab_size": 101, "max_positions": 50}
    return LanguageModel.model_validate({**base, **changes})


def pairwise() -> list[dict[str, object]]:
    """Every pair of values of every two options, the others at their first value."""
    first = {name: values[0] for name, values in OPTIONS.items()}
    pairs = itertools.combinations(OPTIONS, 2)
    return [{**first, a: x, b: y} for a, b in pairs for x in OPTIONS[a] for y in OPTIONS[b]]


def test_parameter_count_equals_the_module_for_every_pair_of_options() -> None:
    for options in pairwise():
        described = model(**options)
        with torch.device("meta"):
            decoder = Decoder(described)
        assert sum(p.numel() for p in decoder.parameters()) == parameter_count(described), options


def test_matmul_parameters_are_all_weight_matrices_but_the_lookup() -> None:
    for options in pairwise():
        described = model(**options)
        with torch.device("meta"):
            decoder = Decoder(described)
        in_blocks = sum(p.numel() for p in decoder.blocks.parameters() if p.dim() == 2)
        assert matmul_parameters(described) == in_blocks + 101 * 64, options


def test_embedding_parameters_are_the_lookup_tables() -> None:
    assert embedding_parameters(model()) == 101 * 64
    assert embedding_parameters(model(positions="learned")) == (101 + 50) * 64


@pytest.mark.parametrize(("convention", "attention"), [("causal", 6), ("palm", 12)])
def test_flops_by_hand(convention: str, attention: int) -> None:
    described = model(head_dim=24, n_kv_heads=2, tied_head=True)
    width = 4 * 24
    matmul = 3 * (2 * 64 * width + 2 * 64 * 2 * 24 + 3 * 64 * 256) + 101 * 64
    assert model_flops_per_token(described, 32, convention) == 6 * matmul + attention * 3 * width * 32  # type: ignore[arg-type]


@pytest.mark.parametrize(("length", "window"), [(32, 8), (33, 32), (32, 32), (32, 40), (7, 3)])
def test_windows_count_what_they_let_in(length: int, window: int) -> None:
    """As many pairs as a mask of the window has, but for the half of the diagonal that the causal convention leaves out."""
    plain = model(sliding_window=None)
    # Every second of three layers is global: two have windows.
    windowed = model(sliding_window=window, global_every=2)
    queries, keys = torch.arange(length)[:, None], torch.arange(length)[None, :]
    pairs = int(((queries >= keys) & (queries - keys < window)).sum()) - min(window, length) / 2
    less = 2 * 6 * 2 * 64 * (length**2 / 2 - pairs) / length
    found = model_flops_per_token(plain, length) - model_flops_per_token(windowed, length)
    # The mask's diagonal: a window of w has (w L - w (w - 1) / 2) pairs, of which the convention counts w L - w w / 2.
    assert found == pytest.approx(less, abs=12)
    assert model_flops_per_token(plain, length, "palm") == model_flops_per_token(windowed, length, "palm")


def test_flops_of_a_published_table() -> None:
    """LLM Foundry prints 417 TFLOP/s for 9,670 tokens/s a GPU of MPT-7B at 2,048 tokens: 3 (2 N + 4 L h s) a token.

    Its N counts the token table once, as here; positions and biases, which it also counts, are 0.15% of N.
    """
    mpt = LanguageModel(
        n_layers=32, d_model=4096, n_heads=32, vocab_size=50368, max_positions=2048,
        positions="alibi", norm="layernorm", mlp="gelu", tied_head=True,
    )  # fmt: skip
    assert model_flops_per_token(mpt, 2048, "palm") * 9670 == pytest.approx(417e12, rel=0.003)
