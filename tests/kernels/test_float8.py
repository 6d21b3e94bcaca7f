"""Quantisation and products in 8 bits: scales, rounding, shapes of any size, and the kernels for devices not here."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from ahead_of_time import assembly_of, needs_triton, run_interpreted
from phalanx.kernels.float8 import (
    QuantisedCopy,
    block_product,
    measure_copies,
    power_of_two_scale,
    quantise,
    quantise_blocks,
    row_column_amax,
    scaled_product,
    transpose_quantised,
)
from phalanx.kernels.float8_swiglu import quantise_swiglu_gradient, swiglu_gradient_amax
from phalanx.kernels.swiglu import swiglu_backward_reference

E4M3, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz


def random(*shape: int, seed: int = 0) -> Tensor:
    """Values whose sizes lie up to 2^12 apart."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randint(-6, 6, shape, generator=generator).double())
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * size).bfloat16()


@pytest.mark.parametrize("dtype", [E4M3, E5M2, FNUZ, torch.float8_e5m2fnuz])
def test_scales_are_the_smallest_powers_of_two_that_suffice(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    sizes = torch.tensor([most, math.nextafter(most, 1e9) * (1 + 1e-6), most / 3, 1.0, 3e-20, 7e30])
    scales = power_of_two_scale(sizes, dtype)
    exponents = torch.log2(scales.double())
    assert torch.equal(exponents, exponents.round())
    assert (sizes / scales <= most).all() and (sizes / (scales / 2) > most).all()
    assert scales[0] == 1.0 and scales[1] == 2.0
    assert power_of_two_scale(torch.zeros(1), dtype) > 0
    assert power_of_two_scale(torch.tensor([math.inf, math.nan]), dtype).isnan().all()


@pytest.mark.parametrize("dtype", [E4M3, FNUZ, E5M2])
def test_numbers_keep_their_digits_and_their_transposed(dtype: torch.dtype) -> None:
    x = random(37, 53)
    scale = power_of_two_scale(x.abs().amax().view(1), dtype)
    q, q_t = quantise(x, scale, scale, dtype, True, True)
    assert q.shape == (37, 53) and q_t.shape == (53, 37) and torch.equal(q.float(), q_t.float().t())
    normal = x.float().abs() / scale >= torch.finfo(dtype).smallest_normal
    error = (q.float() * scale - x.float()).abs()
    assert (error[normal] <= torch.finfo(dtype).eps / 2 * x.float().abs()[normal]).all()
    assert (error <= torch.finfo(dtype).smallest_normal * scale).logical_or(normal).all()


def test_rows_and_columns_have_scales_of_their_own() -> None:
    x = random(37, 53) * torch.exp2(torch.arange(37.0))[:, None].bfloat16()
    of_rows, of_columns = row_column_amax(x)
    assert torch.equal(of_rows, x.float().abs().amax(1)) and torch.equal(of_columns, x.float().abs().amax(0))
    scale, column_scale = power_of_two_scale(of_rows, E4M3), power_of_two_scale(of_columns, E4M3)
    q, q_t = quantise(x, scale, column_scale, E4M3, True, True)
    for back, wanted in (
        (q.float() * scale[:, None], x.float()),
        ((q_t.float() * column_scale[:, None]), x.float().t()),
    ):
        assert (back - wanted).norm() <= 0.04 * wanted.norm()
    # A row of small numbers is as accurate as one of large ones.
    assert (q.float()[0] * scale[0] - x.float()[0]).norm() <= 0.04 * x.float()[0].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_copy_is_written_where_its_scale_differs(dtype: torch.dtype) -> None:
    x = random(37, 53).to(dtype)
    scale = power_of_two_scale(x.abs().amax().view(1), E4M3)
    copy = QuantisedCopy.empty(torch.zeros_like(x, dtype=E4M3))
    wanted = quantise(x, scale, scale, E4M3, True, False)[0].float()
    copy.renew(x, scale)
    assert torch.equal(copy.q.float(), wanted) and torch.equal(copy.scale, scale)
    copy.renew(7.0 * x, scale)
    assert torch.equal(copy.q.float(), wanted)
    copy.renew(x, torch.full((1,), math.nan))
    assert copy.q.float().isnan().all() and copy.scale.isnan()
    copy.renew(x, scale)
    assert torch.equal(copy.q.float(), wanted)


def test_what_an_optimizer_wrote_is_not_measured() -> None:
    parameters = [torch.full((3, 16), 2.0), torch.full((2, 16), -3.0), torch.empty(0, 16)]
    copies = [QuantisedCopy.empty(torch.zeros_like(x, dtype=E4M3)) for x in parameters]
    for copy in copies:
        copy.scale.fill_(0.5)
        copy.amax.fill_(7.0)
    copies[2].amax.fill_(0.0)
    measure_copies(parameters, copies, [copies[0].q])
    assert [float(copy.amax) for copy in copies] == [7.0, 3.0, 0.0]
    # Numbers that nobody wrote are those of parameters that are no more.
    assert [bool(copy.scale.isnan()) for copy in copies[:2]] == [False, True]


@pytest.mark.parametrize(("block", "square"), [(128, False), (128, True), (32, False)])
def test_blocks_have_scales_of_their_own(block: int, square: bool) -> None:
    x = random(130, 200, seed=1)
    x[:128, :128] *= 2.0**-40
    q, scale, q_t, column_scale = quantise_blocks(x, E4M3, block, square, True, True)
    wide = scale.repeat_interleave(block, 1)[:, :200]
    wide_t = column_scale.repeat_interleave(block, 1)[:, :130]
    if square:
        wide, wide_t = wide.repeat_interleave(block, 0)[:130], wide_t.repeat_interleave(block, 0)[:200]
        assert torch.equal(column_scale, scale.t())
    for back, wanted in ((q.float() * wide, x.float()), (q_t.float() * wide_t, x.float().t())):
        # The part of tiny numbers is in blocks of its own, along either dim.
        assert (back - wanted)[:128, :128].norm() <= 0.04 * wanted[:128, :128].norm()
        assert (back - wanted).norm() <= 0.04 * wanted.norm()


@pytest.mark.parametrize("square", [False, True])
def test_products_are_those_of_the_numbers_kept(square: bool) -> None:
    a, b = random(37, 200), random(150, 200, seed=1)
    q_a, s_a, _, _ = quantise_blocks(a, E4M3, 128, False, True, False)
    q_b, s_b, _, _ = quantise_blocks(b, E4M3, 128, square, True, False)
    wide_b = s_b.repeat_interleave(128, 1)[:, :200]
    wide_b = wide_b.repeat_interleave(128, 0)[:150] if square else wide_b
    exact = (q_a.double() * s_a.repeat_interleave(128, 1)[:, :200]) @ (q_b.double() * wide_b).t()
    found = block_product(q_a, q_b, s_a, s_b, torch.float32, 128)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)
    scales = power_of_two_scale(a.abs().amax(1), E4M3), power_of_two_scale(b.abs().amax().view(1), E4M3)
    pair = (
        quantise(a, scales[0], scales[0], E4M3, True, False)[0],
        quantise(b, scales[1], scales[1], E4M3, True, False)[0],
    )
    exact = (pair[0].double() * scales[0][:, None]) @ (pair[1].double() * scales[1]).t()
    found = scaled_product(*pair, *scales, torch.float64, True)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-9)


def test_operations_are_sound() -> None:
    """Fake shapes and strides are those of the results, and no input is changed or handed out."""
    x, one = random(20, 36), torch.ones(1)
    # The check of schemas multiplies its arguments, which 8-bit numbers do not.
    checks = ("test_faketensor",)
    for wanted in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(quantise, (x, one, one, E4M3, *wanted), test_utils=checks)
        torch.library.opcheck(quantise_blocks, (x, E4M3, 128, True, *wanted), test_utils=checks)
    torch.library.opcheck(row_column_amax, (x,), test_utils=checks)
    q = x.to(E4M3)
    torch.library.opcheck(transpose_quantised, (q, None, None), test_utils=checks)
    torch.library.opcheck(transpose_quantised, (q, torch.ones(20), torch.ones(36)), test_utils=checks)
    torch.library.opcheck(scaled_product, (q, q, one, one, torch.bfloat16, True), test_utils=checks)
    blocks = torch.ones(20, 1)
    torch.library.opcheck(block_product, (q, q, blocks, blocks, torch.bfloat16, 128), test_utils=checks)


@pytest.mark.parametrize("dtype", [E4M3, FNUZ])
def test_numbers_in_eight_bits_are_transposed_and_brought_to_other_scales(dtype: torch.dtype) -> None:
    x = random(37, 53) * random(37, 53, seed=1)
    of_rows, of_columns = (power_of_two_scale(amax, dtype) for amax in row_column_amax(x))
    q, wanted = quantise(x, of_rows, of_columns, dtype, True, True)
    assert torch.equal(transpose_quantised(q, None, None).float(), q.float().t())
    found = transpose_quantised(q, of_rows, of_columns).float()
    least = torch.finfo(dtype).smallest_normal
    kept = (x.float().abs() >= least * torch.maximum(of_rows[:, None], of_columns)).t()
    assert 0.5 < kept.float().mean() < 0.9 and torch.equal(found[kept], wanted.float()[kept])
    # A number that is small beside the largest of its row or of its column is rounded to what these are rounded to.
    lost = (found - wanted.float()).abs() * of_columns[:, None]
    assert lost.max() > 0 and (lost <= least * torch.maximum(of_rows, of_columns[:, None])).all()


def test_a_number_rounded_beyond_the_scale_of_its_column_stays_a_number() -> None:
    """The smallest number of a row's scale may be more than the column's scale holds."""
    x = torch.tensor([[1.0, 2.0**-17 * 0.8]])
    of_rows, of_columns = (power_of_two_scale(amax, E4M3) for amax in row_column_amax(x))
    q = quantise(x, of_rows, of_columns, E4M3, True, False)[0]
    assert float(q[0, 1].float() * of_rows / of_columns[1]) > torch.finfo(E4M3).max
    assert float(transpose_quantised(q, of_rows, of_columns)[1, 0].float()) == torch.finfo(E4M3).max


@pytest.mark.parametrize("block", [1, 16, 64])
def test_gradients_of_a_gated_product_are_quantised_as_they_are_formed(block: int) -> None:
    grad, gate_up = random(37, 128), random(37, 256, seed=1)
    exact = swiglu_backward_reference(grad.double(), gate_up.double(), block)[0]
    amax = swiglu_gradient_amax(grad, gate_up, block)
    # As numbers that lie in memory in 16 bits are.
    rounded, hidden = swiglu_backward_reference(grad, gate_up, block)
    assert torch.equal(amax, rounded.abs().amax().view(1).float())
    scale = power_of_two_scale(amax, E4M3)
    hidden_scale = power_of_two_scale(hidden.abs().amax().view(1), E5M2)
    arguments = (grad, gate_up, block, scale, hidden_scale, E4M3, E5M2)
    q, q_t, hidden_t = quantise_swiglu_gradient(*arguments)
    assert torch.equal(hidden_t.float(), quantise(hidden, hidden_scale, hidden_scale, E5M2, False, True)[1].float())
    assert torch.equal(q.float(), q_t.float().t())
    assert (q.double() * scale - exact).norm() <= 0.03 * exact.norm()
    torch.library.opcheck(quantise_swiglu_gradient, arguments, test_utils=("test_faketensor",))
    torch.library.opcheck(swiglu_gradient_amax, (grad, gate_up, block), test_utils=("test_faketensor",))


# --- the Triton kernels, compiled for devices that are not here ---------------------------------------------------------


SHAPED = {"ROWS": True, "COLUMNS": True}
FOUND = {"LEAST": 2.0**-100, "CARRY": 0x1FFFFF, "SHIFT": 8 << 23, "TILE": 128}


def quantising(name: str, read: str, element: str) -> tuple[Any, int, dict[str, str], dict[str, Any]]:
    """A kernel that quantises `read` numbers: itself, warps, types of its arguments and constants."""
    from phalanx.kernels import float8_triton as kernels  # noqa: PLC0415

    q, scales, sizes = f"*{element}", {"scale": "*fp32", "column_scale": "*fp32"}, {"rows": "i32", "columns": "i32"}
    if name in ("quantise", "by row"):
        *tiles, warps = kernels.QUANTISE_TILES
        types = {"x": f"*{read}", **scales, "q": q, "q_t": q, **sizes}
        constants = {"BY_ROW": name == "by row", **SHAPED, **dict(zip(("TILE_R", "TILE_C"), tiles, strict=True))}
        return kernels.quantise_kernel, warps, types, constants
    if name == "transpose":
        *tiles, warps = kernels.QUANTISE_TILES
        types = {"q": q, **scales, "q_t": q, **sizes}
        constants = {"BY_ROW": True, "MOST": 240.0, **dict(zip(("TILE_R", "TILE_C"), tiles, strict=True))}
        return kernels.transpose_kernel, warps, types, constants
    if name == "gated":
        types = {"grad_hidden": f"*{read}", "gate_up": f"*{read}", "scale": "*fp32", "same_scale": "*fp32"}
        types |= {"hidden_scale": "*fp32", "q": q, "q_t": q, "hidden_t": q, "rows": "i32", "features": "i32"}
        *tiles, warps = kernels.SWIGLU_TILES
        constants = {"BLOCK": 64, **dict(zip(("TILE", "COLUMNS"), tiles, strict=True))}
        return kernels.quantise_swiglu_gradient_kernel, warps, types, constants
    types = {"x": f"*{read}", "q": q, "scale": "*fp32", "q_t": q, "column_scale": "*fp32", **sizes}
    constants = {"SQUARE": name == "square", **SHAPED, **FOUND}
    return kernels.quantise_blocks_kernel, kernels.QUANTISE_WARPS, types, constants


@needs_triton
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("quantise", "bf16"),
        ("quantise", "fp32"),
        ("by row", "bf16"),
        ("blocks", "bf16"),
        ("square", "bf16"),
        ("square", "fp32"),
        ("gated", "bf16"),
    ],
)
def test_no_tile_of_eight_bits_is_stored_both_as_it_is_and_transposed(name: str, read: str, even: bool) -> None:
    """Triton 3.6 stored wrong numbers on an H100 where both orders were made from one tile of 8 bits."""
    kernel, warps, types, constants = quantising(name, read, "fp8e4nv")
    places = tuple(place for place, kind in enumerate(types.values()) if even or kind.startswith("*"))
    layouts = assembly_of(kernel, "sm_90", warps, types, constants, even=places, layouts=True)
    stored = set(re.findall(r"tt\.store %\w+, (%\w+)", layouts))
    transposed = set(re.findall(r"tt\.trans (%\w+)", layouts))
    assert len(stored) >= 2 and transposed and not stored & transposed


@needs_triton
@pytest.mark.parametrize(("target", "element"), [("sm_90", "fp8e4nv"), ("gfx942", "fp8e4b8"), ("sm_90", "fp8e5")])
def test_kernels_compile(target: str, element: str) -> None:
    from phalanx.kernels import float8_triton as kernels  # noqa: PLC0415

    for name in ("quantise", "transpose", "blocks", "gated"):
        kernel, warps, types, constants = quantising(name, "bf16", element)
        assembly_of(kernel, target, warps, types, constants, even=tuple(range(len(types))))
    types = {"x": "*fp32", "scale": "*fp32", "present": "*fp32", "q": f"*{element}", "n": "i64"}
    assembly_of(
        kernels.requantise_kernel, target, kernels.FLAT_WARPS, types, {"TILE": kernels.FLAT_TILE}, even=(0, 1, 2, 3, 4)
    )
    types = {"grad_hidden": "*bf16", "gate_up": "*bf16", "amax": "*fp32", "rows": "i32", "features": "i32"}
    constants = {"BLOCK": 64, "TILE": kernels.SWIGLU_ROWS}
    assembly_of(
        kernels.swiglu_gradient_amax_kernel, target, kernels.SWIGLU_WARPS, types, constants, even=(0, 1, 2, 3, 4)
    )
    tiles = dict(zip(("TILE_M", "TILE_N", "TILE_K"), kernels.PRODUCT_TILES, strict=True))
    pointers = {"a": f"*{element}", "b": "*fp8e4nv" if target == "sm_90" else f"*{element}", "out": "*bf16"}
    assembly = assembly_of(
        kernels.block_product_kernel,
        target,
        kernels.PRODUCT_WARPS,
        {**pointers, "a_scale": "*fp32", "b_scale": "*fp32", "m": "i32", "n": "i32", "k": "i32"},
        {"SQUARE": True, "EVEN": True, **tiles, "GROUP": 8},
        even=(0, 1, 2, 3, 4, 5, 6, 7),
    )
    assert ("wgmma" if target == "sm_90" else "mfma") in assembly


INTERPRETED = """
import torch
from phalanx.kernels import float8_triton as kernels
from phalanx.kernels.float8 import *
from phalanx.kernels.float8_swiglu import *

class Here:
    def __init__(self, *_): ...
    def __enter__(self): ...
    def __exit__(self, *_): ...

torch.cuda.device = Here

draw = torch.Generator().manual_seed(0)
# The interpreter does not round as devices do: numbers of two binary digits need no rounding in any format.
x = torch.randint(4, 8, (130, 200), generator=draw) * torch.exp2(torch.randint(-4, 3, (130, 200), generator=draw).float())
x *= torch.randint(0, 2, x.shape, generator=draw) * 2 - 1
for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
    one = power_of_two_scale(x.abs().amax().view(1), dtype)
    wanted, nothing = (quantise_reference(x, one, one, dtype, True, False)[0], torch.zeros_like(x, dtype=dtype))
    for present, result in ((one, nothing), (2 * one, wanted), (torch.full((1,), torch.nan), wanted)):
        found = nothing.clone()
        kernels.run_requantise(x, one, present, found)
        assert torch.equal(found.float(), result.float())
    amax = row_column_amax_reference(x)
    for found, wanted in zip(kernels.run_row_column_amax(x), amax):
        assert torch.equal(found, wanted)
    for scales in ((one, one), tuple(power_of_two_scale(size, dtype) for size in amax)):
        wanted = quantise_reference(x, *scales, dtype, True, True)
        found = tuple(torch.empty_like(w) for w in wanted)
        kernels.run_quantise(x, *scales, *found)
        for f, w in zip(found, wanted):
            assert torch.equal(f.float(), w.float())
        by_row = scales if scales[0].numel() > 1 else (None, None)
        turned = torch.empty_like(wanted[1])
        kernels.run_transpose(wanted[0], *by_row, turned)
        assert torch.equal(turned.float(), transpose_reference(wanted[0], *by_row).float())
    for square in (False, True):
        wanted = quantise_blocks_reference(x, dtype, 128, square, True, True)
        found = tuple(torch.empty_like(w) for w in wanted)
        kernels.run_quantise_blocks(x, *found, square)
        for f, w in zip(found, wanted):
            assert torch.equal(f.float(), w.float())
        q, scale = quantise_blocks_reference(x[:70], dtype, 128, False, True, False)[:2]
        exact = block_product_reference(q, wanted[0], scale, wanted[1], torch.float32, 128)
        product = kernels.run_block_product(q, wanted[0], scale, wanted[1], torch.float32)
        torch.testing.assert_close(product, exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))
grad, gate_up = x[:, :64].contiguous(), x[:, :128].contiguous()
amax = swiglu_gradient_amax(grad, gate_up, 16)
torch.testing.assert_close(kernels.run_swiglu_gradient_amax(grad, gate_up, 16), amax, rtol=1e-5, atol=0.0)
scale = power_of_two_scale(amax, torch.float8_e4m3fn)
wanted = quantise_swiglu_gradient(grad, gate_up, 16, scale, scale, torch.float8_e4m3fn, torch.float8_e4m3fn)
found = tuple(torch.empty_like(w) for w in wanted)
kernels.run_quantise_swiglu_gradient(grad, gate_up, 16, scale, scale, *found)
assert torch.equal(found[0].float(), found[1].float().t())
# Sums are not those of two digits: the interpreter may take a neighbour of a number, or lose what carries.
for f, w in zip(found, wanted):
    assert ((f.float() - w.float()).abs() <= 0.51 * w.float().abs() + 2.0**-6).all()
"""


@needs_triton
def test_kernels_compute_what_their_references_do() -> None:
    run_interpreted(INTERPRETED)
