"""8-bit kernels and products on the device beside their plain references, on sizes that nothing divides; a training step."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from device_runs import CPU, accelerator, distance, record_steps, relative_error, small_run
from phalanx.kernels.float8 import (
    block_product,
    block_product_reference,
    power_of_two_scale,
    product_reference,
    quantise,
    quantise_blocks,
    quantise_blocks_reference,
    quantise_reference,
    row_column_amax,
    row_column_amax_reference,
    scaled_product,
    transpose_quantised,
    transpose_reference,
)
from phalanx.kernels.float8_swiglu import quantise_swiglu_gradient, quantises_gradients, swiglu_gradient_amax
from phalanx.kernels.swiglu import swiglu
from phalanx.nn.precision import find_precision
from phalanx.torch_compat import common as compat
from phalanx.verification.record_training import Record

pytestmark = pytest.mark.gpu

RECIPES = ("fp8-tensor", "fp8-row", "fp8-block")
SIZES = [(1, 16), (37, 53), (130, 200), (512, 384), (1000, 1040)]


@pytest.fixture(autouse=True)
def formats() -> tuple[torch.dtype, torch.dtype]:
    """The device's own formats of 3 and of 2 digits."""
    if reason := compat.float8_refusal(accelerator()):
        pytest.skip(f"this device multiplies no 8-bit numbers: {reason}")
    return compat.float8_formats(accelerator())


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values whose sizes lie up to 2^12 apart, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randint(-6, 6, shape, generator=generator).double())
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * size).to(dtype).to(accelerator())


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors hold the same numbers."""
    return torch.equal(found.cpu().float(), wanted.cpu().float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("digits", [0, 1])
def test_quantised_bit_by_bit(
    formats: tuple[torch.dtype, torch.dtype], digits: int, size: tuple[int, int], dtype: torch.dtype
) -> None:
    x, kind = random(*size, dtype=dtype), formats[digits]
    amax = row_column_amax(x)
    assert all(map(same, amax, row_column_amax_reference(x.cpu())))
    one = power_of_two_scale(x.abs().amax().view(1), kind)
    for scales in ((one, one), tuple(power_of_two_scale(each, kind) for each in amax)):
        wanted = quantise_reference(x.cpu(), *(scale.cpu() for scale in scales), kind, True, True)
        assert all(map(same, quantise(x, *scales, kind, True, True), wanted))
        q, by_row = quantise(x, *scales, kind, True, False)[0], scales if scales[0] is not one else (None, None)
        here = (None if scale is None else scale.cpu() for scale in by_row)
        assert same(transpose_quantised(q, *by_row), transpose_reference(wanted[0], *here))
        assert same(quantise(x, *scales, kind, False, True)[1], wanted[1])
    for square in (False, True):
        wanted_blocks = quantise_blocks_reference(x.cpu(), kind, 128, square, True, True)
        assert all(map(same, quantise_blocks(x, kind, 128, square, True, True), wanted_blocks))
        assert all(map(same, quantise_blocks(x, kind, 128, square, False, True)[2:], wanted_blocks[2:]))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(37, 53, 40), (130, 200, 1000), (512, 384, 4096), (1, 16, 16)])
def test_products(formats: tuple[torch.dtype, torch.dtype], m: int, n: int, k: int, fast: bool) -> None:
    a, b = random(m, k), random(n, k, seed=1)
    for kind in formats:
        one = [power_of_two_scale(x.abs().amax().view(1), e) for x, e in ((a, kind), (b, formats[0]))]
        by_row = [power_of_two_scale(x.abs().amax(1), e) for x, e in ((a, kind), (b, formats[0]))]
        for scale_a, scale_b in (one, by_row):
            q_a = quantise(a, scale_a, scale_a, kind, True, False)[0]
            q_b = quantise(b, scale_b, scale_b, formats[0], True, False)[0]
            exact = product_reference(q_a, q_b, scale_a.view(-1, 1), scale_b.view(-1, 1), torch.float64)
            found = scaled_product(q_a, q_b, scale_a, scale_b, torch.bfloat16, fast)
            # Sums in the tensor cores' own registers keep fewer digits than the result has.
            assert relative_error(found, exact) <= (2e-2 if fast else 4e-3)
        for square in (False, True):
            q_a, scale_a = quantise_blocks(a, kind, 128, False, True, False)[:2]
            q_b, scale_b = quantise_blocks(b, formats[0], 128, square, True, False)[:2]
            exact = block_product_reference(q_a, q_b, scale_a, scale_b, torch.float64, 128)
            found = block_product(q_a, q_b, scale_a, scale_b, torch.bfloat16, 128)
            assert relative_error(found, exact) <= 4e-3


@pytest.mark.parametrize(("rows", "features", "block"), [(37, 64, 16), (130, 704, 64), (1000, 1024, 64)])
def test_gated_gradients(formats: tuple[torch.dtype, torch.dtype], rows: int, features: int, block: int) -> None:
    assert quantises_gradients(accelerator())
    grad, gate_up = random(rows, features), random(rows, 2 * features, seed=1)
    amax = swiglu_gradient_amax(grad, gate_up, block)
    assert relative_error(amax, swiglu_gradient_amax(grad.cpu(), gate_up.cpu(), block)) <= 1e-5
    for kind in formats:
        scale = power_of_two_scale(amax, kind)
        hidden_scale = power_of_two_scale(swiglu(gate_up, block).abs().amax().view(1), formats[0])
        arguments = (grad, gate_up, block, scale, hidden_scale, kind, formats[0])
        q, q_t, hidden_t = quantise_swiglu_gradient(*arguments)
        here = (value.cpu() if isinstance(value, Tensor) else value for value in arguments)
        wanted, _, wanted_hidden = quantise_swiglu_gradient(*here)
        assert same(q, q_t.float().t())
        # Exponentials differ in the last digit of 24, which a few numbers in 8 bits show.
        assert relative_error(q.float(), wanted.float()) <= 1e-3
        assert relative_error(hidden_t.float(), wanted_hidden.float()) <= 3e-3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("gradients", ["e4m3", "e5m2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_layer_forward_and_backward(recipe: str, gradients: str, compiled: bool) -> None:
    """The emulation on the CPU has the same numbers in 8 bits and sums them up more exactly."""
    found = []
    for device in (CPU, accelerator()):
        products = find_precision(recipe, gradients).products
        assert products is not None
        product = products.of_layer(208, 304, "", "", device)
        assert product is not None
        x, weight, bias, grad = (
            value.to(device).requires_grad_()
            for value in (random(3, 37, 208), random(304, 208, seed=1), random(304, seed=2), random(3, 37, 304, seed=3))
        )
        run = torch.compile(product, fullgraph=True) if compiled and device != CPU else product
        y = run(x, weight, bias)
        found.append([y, *torch.autograd.grad(y, (x, weight, bias), grad.detach())])
    for wanted, here in zip(*found, strict=True):
        assert here.dtype == torch.bfloat16 and relative_error(here.detach(), wanted.detach()) <= 2e-2


@cache
def reference() -> Record:
    return record_steps(small_run({}, "fp64", compiled=False), CPU)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_step(recipe: str, compiled: bool) -> None:
    found = distance(record_steps(small_run({}, recipe, compiled=compiled), accelerator()), reference())
    assert found.loss <= 1e-3 and found.worst <= 0.15
