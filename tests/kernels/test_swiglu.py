"""The gated MLP's product and its backward kernel: right numbers, traced by the compiler, and wide memory accesses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from ahead_of_time import ASSEMBLY, NARROW, WIDE, assembly_of, needs_triton, run_interpreted, threads
from phalanx.kernels.swiglu import gated_linear, swiglu, swiglu_backward, swiglu_backward_reference

BOUND = {"rtol": 1e-12, "atol": 1e-12}


def random(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.requires_grad_(grad)


def plain(gate_up: Tensor, block: int) -> Tensor:
    """silu(gate) * up by indexing, one feature at a time in memory order."""
    features = torch.arange(gate_up.shape[-1] // 2)
    at = features // block * 2 * block + features % block
    gate, up = gate_up[..., at], gate_up[..., at + block]
    return gate / (1.0 + torch.exp(-gate)) * up


@pytest.mark.parametrize(
    ("shape", "block"), [((3, 256), 64), ((5, 96), 16), ((2, 3, 64), 32), ((7, 6), 1), ((4, 24), 4), ((1, 128), 64)]
)
def test_operation_equals_automatic_differentiation(shape: tuple[int, ...], block: int) -> None:
    gate_up = random(*shape, grad=True)
    hidden = plain(gate_up, block)
    torch.testing.assert_close(swiglu(gate_up, block), hidden, **BOUND)
    grad_hidden = random(*hidden.shape, seed=1)
    (expected,) = torch.autograd.grad(hidden, gate_up, grad_hidden)
    grad_gate_up, again = swiglu_backward(grad_hidden, gate_up.detach(), block)
    torch.testing.assert_close(grad_gate_up, expected, **BOUND)
    torch.testing.assert_close(again, hidden.detach(), **BOUND)


def test_operation_is_sound() -> None:
    """Fake shapes and strides are those of the results, and no input is changed or handed out."""
    torch.library.opcheck(swiglu_backward, (random(2, 3, 32), random(2, 3, 64), 16))


def test_extreme_values_give_no_nan() -> None:
    gate = torch.tensor([-3e38, -200.0, -89.0, 0.0, 89.0, 200.0, 1e19, -1e19])
    gate_up = torch.cat((gate, torch.ones(8)))[None]
    grad_gate_up, hidden = swiglu_backward(torch.ones(1, 8), gate_up, 8)
    assert torch.isfinite(grad_gate_up).all() and torch.isfinite(hidden).all()
    assert torch.equal(hidden[0, [3, 5, 7]], torch.tensor([0.0, 200.0, 0.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_rounded_once(dtype: torch.dtype) -> None:
    grad_hidden, gate_up = random(16, 64).to(dtype), random(16, 128, seed=1).to(dtype)
    exact = swiglu_backward_reference(grad_hidden.double(), gate_up.double(), 64)
    for found, wanted in zip(swiglu_backward(grad_hidden, gate_up, 64), exact, strict=True):
        assert found.dtype == dtype
        # Half a unit in the last place, and what float32 arithmetic adds to it.
        assert ((found.double() - wanted).abs() <= torch.finfo(dtype).eps * 0.501 * wanted.abs() + 1e-7).all()


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_the_product(bias: bool) -> None:
    gate_up, weight = random(2, 3, 16, grad=True), random(5, 8, seed=1, grad=True)
    offset = random(5, seed=2, grad=True) if bias else None
    assert torch.autograd.gradcheck(lambda *inputs: gated_linear(*inputs, 4), (gate_up, weight, offset))


def loss_and_gradients(run: Any) -> list[Tensor]:
    gate_up, weight = random(2, 3, 64, grad=True), random(5, 32, seed=1, grad=True)
    loss = run(gate_up, weight).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, (gate_up, weight))]


def test_compiled_product_gives_the_same_numbers() -> None:
    def product(gate_up: Tensor, weight: Tensor) -> Tensor:
        return gated_linear(gate_up * 2.0, weight, None, 16)

    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(loss_and_gradients(compiled), loss_and_gradients(product), strict=True):
        torch.testing.assert_close(found, wanted, **BOUND)


def test_only_the_input_and_the_weight_are_kept() -> None:
    kept: list[Tensor] = []
    gate_up, weight = random(2, 3, 64, grad=True), random(5, 32, seed=1, grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        gated_linear(gate_up, weight, None, 16)
    assert {x.data_ptr() for x in kept} == {gate_up.data_ptr(), weight.data_ptr()}


# --- the Triton kernel, compiled for devices that are not here ----------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("element", ["bf16", "fp32"])
@pytest.mark.parametrize("target", ASSEMBLY)
def test_kernel_compiles_to_wide_accesses(target: str, element: str, even: bool) -> None:
    from phalanx.kernels import swiglu_triton  # noqa: PLC0415

    pointers = dict.fromkeys(("grad_hidden", "gate_up", "grad_gate_up", "hidden"), f"*{element}")
    tile = swiglu_triton.tile_groups(64, 2 if element == "bf16" else 4)
    constants = {"BLOCK": 64, "TILE": tile, "EVEN": even}
    kernel, warps = swiglu_triton.swiglu_backward_kernel, swiglu_triton.WARPS
    assembly = assembly_of(kernel, target, warps, {**pointers, "groups": "i64"}, constants, even=(0, 1, 2, 3))
    load, store = WIDE[ASSEMBLY[target]]
    # 4096 bytes of the product a program: three loads and three stores of it, by threads of 16 bytes each.
    vectors = 4096 // (16 * threads(target, warps))
    assert len(re.findall(load, assembly)) == 3 * vectors
    assert len(re.findall(store, assembly)) == 3 * vectors
    assert not re.findall(NARROW[ASSEMBLY[target]], assembly)


INTERPRETED = """
import torch
from phalanx.kernels.swiglu import swiglu_backward_reference
from phalanx.kernels.swiglu_triton import swiglu_backward_kernel, tile_groups

for rows, features, block in ((5, 192, 64), (8, 512, 32), (3, 80, 16)):
    torch.manual_seed(rows)
    grad, gate_up = torch.randn(rows, features), torch.randn(rows, 2 * features)
    groups = grad.numel() // block
    wanted = swiglu_backward_reference(grad.double(), gate_up.double(), block)
    for tile in (1, tile_groups(block, 4)):
        found = torch.full_like(gate_up, torch.nan), torch.full_like(grad, torch.nan)
        grid = (-(-groups // tile),)
        swiglu_backward_kernel[grid](grad, gate_up, *found, groups, BLOCK=block, TILE=tile, EVEN=groups % tile == 0)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)
"""


@needs_triton
def test_kernel_computes_what_the_reference_computes() -> None:
    """With and without a ragged end."""
    run_interpreted(INTERPRETED)
