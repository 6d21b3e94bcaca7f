"""What Transformer Engine and Megatron run for experts and attention in place of what is traced."""

from dataclasses import replace

import pytest
import torch

from phalanx.planner.trace.operations import Attention, Kind, Matmul, Operation, Phase
from published.transformer_engine import (
    attention_in_8_bits,
    with_8_bit_head,
    with_expert_biases,
    with_fused_experts,
    with_recomputed_activation,
    without_weight_copies,
)

ROWS, WIDTH, HIDDEN, EXPERTS = 640, 48, 96, 4


def _product(phase: Phase, n: int, k: int, *, weight: bool = False) -> Operation:
    sizes = (n, k, ROWS) if weight else (ROWS, n, k)
    product = Matmul(1, *sizes, groups=EXPERTS, ragged="k" if weight else "m")
    return Operation("grouped", "matmul", phase, torch.bfloat16, 1, 1, 1, matmul=product, weight_gradient=weight)


def _other(name: str, kind: Kind, phase: Phase) -> Operation:
    return Operation(name, kind, phase, torch.bfloat16, 0, 10, 10)


EXPERT = [
    _other("norm", "reduction", "forward"),
    _product("forward", 2 * HIDDEN, WIDTH),
    _other("swiglu", "pointwise", "forward"),
    _product("forward", WIDTH, HIDDEN),
    _other("add", "pointwise", "forward"),
    _product("backward", HIDDEN, WIDTH),
    _other("swiglu_backward", "pointwise", "backward"),
    _product("backward", WIDTH, HIDDEN, weight=True),
    _other("quantise", "copy", "backward"),
    _product("backward", WIDTH, 2 * HIDDEN),
    _other("sum", "reduction", "backward"),
]


def test_weights_are_transposed_with_their_8_bits_and_gradients_in_each_pass() -> None:
    def turned(size: int, phase: Phase) -> Operation:
        return replace(_other("transpose_quantised", "copy", phase), bytes_read=size)

    def product(*sizes: int, weight: bool = False) -> Operation:
        one = Matmul(1, *sizes, width=1)
        return Operation("product", "matmul", "backward", torch.bfloat16, 1, 1, 1, matmul=one, weight_gradient=weight)

    operations = [
        # The input of the forward pass is as large as the weight.
        turned(WIDTH * HIDDEN, "forward"),
        turned(WIDTH * HIDDEN, "backward"),
        _other("gather", "collective", "backward"),
        product(ROWS, WIDTH, HIDDEN),
        turned(ROWS * HIDDEN, "backward"),
        product(HIDDEN, WIDTH, ROWS, weight=True),
    ]
    assert without_weight_copies(operations) == [operations[0], *operations[2:]]


def test_fused_experts_have_no_pass_between_their_products() -> None:
    kept = with_fused_experts(EXPERT)
    assert [op for op in EXPERT if op not in kept] == [EXPERT[2], EXPERT[6], EXPERT[8]]


def test_a_recomputed_activation_runs_again_and_no_more() -> None:
    again = with_recomputed_activation(EXPERT)
    assert again[: len(EXPERT)] == EXPERT and again[len(EXPERT) :] == [replace(EXPERT[2], phase="recompute")]
    assert with_recomputed_activation(EXPERT[:1]) == EXPERT[:1]


@pytest.mark.parametrize(
    ("wide", "forward", "backward"), [(False, 2 + 6 + 4, 12 + 4), (True, 4 + 10 + 8 + 6, 6 + 6 + 24 + 4)]
)
def test_experts_biases_are_passes_over_their_rows(wide: bool, forward: int, backward: int) -> None:
    found = with_expert_biases(EXPERT, wide_probabilities=wide)
    assert [op for op in found if op.name != "pass"] == EXPERT
    passes = [op for op in found if op.name == "pass"]
    moved = {
        phase: sum((op.bytes_read + op.bytes_written) * op.times for op in passes if op.phase == phase)
        for phase in ("forward", "backward")
    }
    # Clamping two halves and joining them: 8 bytes a number forward, 10 backward, of two numbers a hidden one.
    assert moved["forward"] == ROWS * (WIDTH * forward + 2 * HIDDEN * 8)
    assert moved["backward"] == ROWS * (WIDTH * backward + 2 * HIDDEN * 10)
    assert {op.times for op in passes} == {1, EXPERTS}


def test_attention_in_8_bits_is_as_fast_as_exponentials_allow() -> None:
    def gain(head_size: int, exponentials: float, backward: bool) -> float:
        attention = Attention(1, 8, 2, 128, 128, head_size, causal=True, backward=backward)
        op = Operation("attention", "attention", "forward", torch.bfloat16, 0, 0, 0, attention=attention)
        made, done = attention_in_8_bits(op, exponentials)
        assert done.attention is not None and made.attention is None
        # Queries and keys and values of a quarter as many heads, or one gradient; two copies of a byte.
        assert made.bytes_read == made.bytes_written == 2 * 128 * 8 * head_size * (1 if backward else 1.5)
        return attention.flops / done.attention.flops

    assert gain(128, 16, backward=False) == pytest.approx(1)
    assert gain(128, 32, backward=False) == pytest.approx(2)
    assert gain(128, 16, backward=True) == pytest.approx(2)
    assert gain(64, 16, backward=True) == pytest.approx(1.25, rel=1e-3)
    assert attention_in_8_bits(EXPERT[0], 16) == [EXPERT[0]]


def test_a_head_in_8_bits_multiplies_them() -> None:
    head = [_other("norm", "reduction", "forward"), _product("forward", 7, 8)]
    done = with_8_bit_head(head)
    assert done[0] == head[0] and done[1].matmul is not None and done[1].matmul.width == 1
