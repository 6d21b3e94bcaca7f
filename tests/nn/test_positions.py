"""Rotary angles and ALiBi slopes against the definitions and against `transformers`."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from phalanx.config.layers import AlibiConfig, RopeConfig, RopeScaling
from phalanx.nn.positions import alibi_slopes, rope_frequencies, rope_tables, rotate
from small_models import LLAMA

CPU = torch.device("cpu")


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20, 112])
def test_alibi_slopes_are_those_of_mpt(heads: int) -> None:
    # The bias one position back is minus the slope.
    expected = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    torch.testing.assert_close(alibi_slopes(AlibiConfig(heads, 8.0), CPU), expected, rtol=1e-6, atol=0)


def test_rotary_frequencies_without_scaling() -> None:
    expected = torch.tensor([5000.0 ** (-2 * i / 8) for i in range(4)])
    torch.testing.assert_close(rope_frequencies(RopeConfig(8, 5000.0, None), CPU), expected)


def test_scaled_rotary_frequencies_are_those_of_llama_3() -> None:
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192)
    rope = RopeConfig(128, 500000.0, scaling)
    config = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    torch.testing.assert_close(rope_frequencies(rope, CPU), expected, rtol=1e-6, atol=0)


def llama_with(rope: dict[str, object]) -> LlamaConfig:
    """A Llama of heads of 16 with these rotary settings."""
    return LlamaConfig(hidden_size=32, num_attention_heads=2, rope_parameters={"rope_theta": 10000.0, **rope})


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("mscales", [{}, {"mscale": 0.8, "mscale_all_dim": 0.6}, {"attention_factor": 1.3}], ids=str)
def test_yarn_is_that_of_transformers(mscales: dict[str, float], truncate: bool) -> None:
    fields = {"factor": 6.0, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": truncate, **mscales}
    config = llama_with({"rope_type": "yarn", "original_max_position_embeddings": 64, **fields})
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
    scaling = RopeScaling.model_validate({"kind": "yarn", "original_positions": 64, **fields})
    rope = RopeConfig(16, 10000.0, scaling)
    torch.testing.assert_close(rope_frequencies(rope, CPU), expected, rtol=1e-6, atol=0)
    cos, sin = rope_tables(rope, torch.tensor([0, 5]))
    torch.testing.assert_close(cos[0], torch.full((8,), factor), rtol=1e-6, atol=0)
    torch.testing.assert_close(sin[1], (5 * expected).sin() * factor, rtol=1e-5, atol=1e-6)


def test_linear_scaling_is_that_of_transformers() -> None:
    expected, _ = ROPE_INIT_FUNCTIONS["linear"](llama_with({"rope_type": "linear", "factor": 3.0}), CPU)
    rope = RopeConfig(16, 10000.0, RopeScaling(kind="linear", factor=3.0))
    torch.testing.assert_close(rope_frequencies(rope, CPU), expected, rtol=1e-6, atol=0)


def test_a_scaled_base_keeps_the_highest_frequency_and_stretches_the_lowest_by_the_whole_factor() -> None:
    plain = rope_frequencies(RopeConfig(16, 10000.0, None), CPU)
    scaled = rope_frequencies(RopeConfig(16, 10000.0, RopeScaling(kind="ntk", factor=4.0)), CPU)
    assert scaled[0] == plain[0]
    torch.testing.assert_close(scaled[-1], plain[-1] / 4.0, rtol=1e-5, atol=0)
    assert bool((scaled[1:] < plain[1:]).all())


def test_features_behind_the_rotated_ones_stay() -> None:
    x = torch.randn(1, 3, 2, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tables = rope_tables(RopeConfig(4, 100.0, None), torch.arange(3))
    turned = rotate(x, *tables)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :4], rotate(x[..., :4], *tables))


def test_rotation_makes_products_depend_on_distance_alone() -> None:
    rope = LLAMA.layer(0).attention.rope
    assert rope is not None
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=generator, dtype=torch.float64)

    def product(query_position: int, key_position: int) -> float:
        turned = [
            rotate(x, *(table.double() for table in rope_tables(rope, torch.tensor([position]))))
            for x, position in ((query, query_position), (key, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert math.isclose(product(9, 4), product(25, 20), rel_tol=1e-5)
    assert not math.isclose(product(9, 4), product(9, 5), rel_tol=1e-3)
    assert math.isclose(product(0, 0), float((query * key).sum()), rel_tol=1e-6)
