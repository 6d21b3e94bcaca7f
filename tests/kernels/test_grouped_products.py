"""Products of rows with the matrices of their groups: right numbers and gradients, and kernels for devices not here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ahead_of_time import ASSEMBLY, assembly_of, needs_triton, run_interpreted
from phalanx.kernels.float8 import product_reference
from phalanx.kernels.grouped_products import (
    Float8GroupedProducts,
    GatedGroupedLinear,
    GroupedLinear,
    GroupedProducts,
    grouped_gradient,
    grouped_product,
    pad_groups,
    quantise_groups,
    quantise_rows,
    scaled_gradient_of_library,
    scaled_grouped_gradient,
    scaled_grouped_gradient_reference,
    scaled_grouped_product,
    scaled_grouped_product_reference,
    scaled_product_of_library,
)
from phalanx.kernels.swiglu import swiglu
from phalanx.nn.float8_linear import multiply, quantise_both
from phalanx.torch_compat import common as compat

BOUND = {"rtol": 1e-12, "atol": 1e-12}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GROUPS = [(3, 0, 4, 1), (0, 0, 8, 0), (2, 2, 2, 2), (0, 0, 0, 0)]
"""Rows of each of four groups; of eight rows, those that are left belong to none."""


def random(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.requires_grad_(grad)


def ends_of(groups: tuple[int, ...]) -> Tensor:
    return torch.tensor(groups).cumsum(0).int()


def by_row(rows: Tensor, matrices: Tensor, groups: tuple[int, ...]) -> Tensor:
    """One row at a time."""
    number = [group for group, count in enumerate(groups) for _ in range(count)]
    found = [matrices[group] @ row for group, row in zip(number, rows, strict=False)]
    return torch.stack([*found, *[rows.new_zeros(matrices.shape[1])] * (len(rows) - len(found))])


@pytest.mark.parametrize("groups", GROUPS)
def test_product_and_gradients_equal_those_of_single_rows(groups: tuple[int, ...]) -> None:
    rows, matrices = random(8, 5, grad=True), random(4, 3, 5, seed=1, grad=True)
    complete = sum(groups) == len(rows)
    found = GroupedLinear.apply(rows, matrices, ends_of(groups), complete)
    wanted = by_row(rows, matrices, groups)
    torch.testing.assert_close(found, wanted, **BOUND)
    grad = random(8, 3, seed=2)
    for one, other in zip(
        torch.autograd.grad(found, (rows, matrices), grad),
        # The matrices join even where no group has a row.
        torch.autograd.grad(wanted + 0.0 * (rows.sum() + matrices.sum()), (rows, matrices), grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other, **BOUND)


@pytest.mark.parametrize("products", [GroupedProducts(), Float8GroupedProducts(E4M3, E4M3)])
def test_gated_product_has_the_gradients_of_its_parts(products: GroupedProducts) -> None:
    gate_up, matrices, ends = random(8, 32, grad=True), random(4, 3, 16, seed=1, grad=True), ends_of((3, 0, 4, 1))
    found = GatedGroupedLinear.apply(gate_up, matrices, ends, 4, True, products)
    wanted = GroupedLinear.apply(swiglu(gate_up, 4), matrices, ends, True, products)
    torch.testing.assert_close(found, wanted, **BOUND)
    grad = random(8, 3, seed=2)
    for one, other in zip(
        torch.autograd.grad(found, (gate_up, matrices), grad),
        torch.autograd.grad(wanted, (gate_up, matrices), grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other, **BOUND)


def test_gradient_of_a_sum_is_taken() -> None:
    """Autograd expands it from one number, with strides of 0."""
    rows, matrices = random(8, 5, grad=True), random(4, 3, 5, seed=1, grad=True)
    GroupedLinear.apply(rows, matrices, ends_of((3, 0, 4, 1)), True).sum().backward()
    assert matrices.grad is not None and rows.grad is not None
    torch.testing.assert_close(matrices.grad[0], rows[:3].sum(0).expand(3, -1).detach(), **BOUND)


def test_operations_are_sound() -> None:
    """Fake shapes and strides are those of the results, and no input is changed or handed out."""
    rows, matrices, ends = random(8, 5), random(4, 3, 5), ends_of((3, 0, 4, 1))
    torch.library.opcheck(grouped_product, (rows, matrices, ends, True))
    torch.library.opcheck(grouped_gradient, (random(8, 3), rows, ends))


# --- products of 8-bit numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", GROUPS)
def test_each_group_is_multiplied_as_a_layer_by_rows_is(groups: tuple[int, ...]) -> None:
    """Rows and columns of very unlike sizes: a scale that more numbers shared would lose digits of the small ones."""
    sizes = torch.logspace(-12, 3, 8, dtype=torch.float64)
    rows = (random(8, 32) * sizes[:, None]).requires_grad_()
    matrices = (random(4, 16, 32, seed=1) * torch.logspace(-9, 9, 16, dtype=torch.float64)[:, None]).requires_grad_()
    grad = random(8, 16, seed=2) * sizes.flip(0)[:, None]
    products = Float8GroupedProducts(E4M3, E5M2)
    y = GroupedLinear.apply(rows, matrices, ends_of(groups), sum(groups) == 8, products)
    grad_rows, grad_matrices = torch.autograd.grad(y, (rows, matrices), grad)
    start = 0
    for group, count in enumerate(groups):
        of_group = slice(start, start + count)
        start += count
        if not count:
            assert not grad_matrices[group].any()
            continue
        x, x_t = quantise_both(rows.detach()[of_group], "row", E4M3)
        w, w_t = quantise_both(matrices.detach()[group], "row", E4M3)
        g, g_t = quantise_both(grad[of_group], "row", E5M2)
        for found, factors in (
            (y[of_group], (x, w)),
            (grad_rows[of_group], (g, w_t)),
            (grad_matrices[group], (g_t, x_t)),
        ):
            torch.testing.assert_close(found, multiply(*factors, "row", torch.float64, fast=False), **BOUND)
    assert not y[start:].any() and not grad_rows[start:].any()


def test_operations_of_eight_bits_are_sound() -> None:
    rows, ends = random(8, 16), ends_of((3, 0, 4, 1))
    matrices, scale = quantise_rows(random(4, 16, 16).flatten(0, 1), E4M3)
    of_rows = *quantise_rows(rows, E4M3), *quantise_groups(rows, ends, E4M3)
    arguments = of_rows[0], matrices.view(4, 16, 16), of_rows[1], scale.view(4, 16), ends, torch.bfloat16, True, False
    torch.library.opcheck(scaled_grouped_product, arguments, test_utils="test_faketensor")
    arguments = of_rows[2], of_rows[2], of_rows[3], of_rows[3], ends, torch.bfloat16
    torch.library.opcheck(scaled_grouped_gradient, arguments, test_utils="test_faketensor")


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *,
    offs: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> Tensor:
    """`torch._scaled_grouped_mm` of CUDA devices, and what it asks for (GroupedBlas.cpp, GroupMMCommon.cuh)."""
    assert a.dtype == b.dtype == E4M3 and offs.dtype == torch.int32 and out_dtype == torch.bfloat16
    assert a_scale.dtype == b_scale.dtype == torch.float32 and a_scale.is_contiguous() and b_scale.is_contiguous()
    assert a.stride(-1) == 1 and b.stride(-2) == 1 and a.dim() == 2
    assert not any(size % 16 for size in (a.shape[-1], *b.shape[-2:]))
    ends, parts = offs.tolist(), []
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if b.dim() == 3:
            scales = a_scale[start:end, None], b_scale[group][:, None]
            parts.append(product_reference(a[start:end], b[group].t(), *scales, out_dtype))
        else:
            assert end > start and (end - start) % 16 == 0
            scales = (each.view(len(ends), -1)[group][:, None] for each in (a_scale, b_scale))
            parts.append(product_reference(a[:, start:end], b[start:end].t(), *scales, out_dtype))
    if b.dim() == 2:
        return torch.stack(parts)
    # What is behind the last group stays as it was in memory.
    return torch.cat([*parts, torch.full((len(a) - ends[-1], b.shape[2]), torch.nan, dtype=out_dtype)])


@pytest.mark.parametrize("groups", [(100, 0, 1, 155), (64, 64, 64, 64), (0, 0, 0, 256), (0, 0, 0, 0), (13, 1, 130, 7)])
def test_library_gets_what_it_asks_for(groups: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    monkeypatch.setattr(compat, "grouped_float8_refusal", lambda _: "")
    ends, rows, grad = ends_of(groups), random(256, 32), random(256, 48, seed=1)
    x, x_scale = quantise_rows(rows, E4M3)
    matrices, scale = quantise_rows(random(4 * 48, 32, seed=2), E4M3)
    arguments = x, matrices.view(4, 48, 32), x_scale, scale.view(4, 48), ends, torch.bfloat16
    found = scaled_product_of_library(*arguments, sum(groups) == 256, True)
    torch.testing.assert_close(found, scaled_grouped_product_reference(*arguments), rtol=0.0, atol=0.0)
    (x, x_scale), (g, g_scale) = (quantise_groups(each, ends, E4M3) for each in (rows, grad))
    of_sums = g, x, g_scale, x_scale, ends, torch.bfloat16
    found, wanted = scaled_gradient_of_library(*of_sums), scaled_grouped_gradient_reference(*of_sums)
    # Zeros between the numbers change the order of sums.
    torch.testing.assert_close(found, wanted, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-5)


@pytest.mark.parametrize("groups", GROUPS)
def test_padded_groups_hold_their_rows(groups: tuple[int, ...]) -> None:
    place, ends, count = pad_groups(ends_of(groups), 8)
    starts = [0, *ends.tolist()[:-1]]
    inside = [start + row for start, rows in zip(starts, groups, strict=True) for row in range(rows)]
    assert place[: len(inside)].tolist() == inside and len(set(place.tolist())) == 8
    assert int(place.max()) < count and int(ends[-1]) <= count and count % 16 == 0


# --- the Triton kernels, compiled for devices that are not here ---------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("element", ["bf16", "fp32"])
@pytest.mark.parametrize("target", ASSEMBLY)
def test_kernels_compile_to_matrix_instructions(target: str, element: str) -> None:
    from phalanx.kernels import grouped_products_triton as kernels  # noqa: PLC0415

    matrix = {"gfx90a": "v_mfma_f32", "gfx942": "v_mfma_f32", "sm_90": "wgmma.mma_async"}[target]
    tiles = dict(zip(("TILE_R", "TILE_O", "TILE_I"), kernels.tile_sizes(2 if element == "bf16" else 4), strict=True))
    numbers = dict.fromkeys(("groups", "out_features", "in_features"), "i32")
    strides = dict.fromkeys(("stride_group", "stride_out", "stride_in"), "i64")
    tables = dict.fromkeys(("ends", "tile_group", "tile_start"), "*i32")
    pointers = dict.fromkeys(("rows", "matrices", "out"), f"*{element}")
    product = assembly_of(
        kernels.grouped_product_kernel,
        target,
        kernels.WARPS,
        {**pointers, **tables, **numbers, **strides},
        tiles,
        even=(0, 1, 2),
    )
    pointers = dict.fromkeys(("grad", "rows", "out"), f"*{element}")
    gradient = assembly_of(
        kernels.grouped_gradient_kernel,
        target,
        kernels.WARPS,
        {**pointers, "ends": "*i32", "out_features": "i32", "in_features": "i32"},
        tiles,
        even=(0, 1, 2),
    )
    for assembly in (product, gradient):
        # On NVIDIA float32 products of full precision are no matrix instructions.
        assert matrix in assembly or (target == "sm_90" and element == "fp32")


INTERPRETED = """
import torch
import triton
from phalanx.kernels.grouped_products import grouped_gradient_reference, grouped_product_reference
from phalanx.kernels.grouped_products_triton import grouped_gradient_kernel, grouped_product_kernel, plan_tiles

for groups, out, wide in (((3, 0, 40, 1), 24, 40), ((0, 0, 0, 50), 33, 17), ((16, 16, 16, 2), 16, 32)):
    ends = torch.tensor(groups).cumsum(0).int()
    rows = int(ends[-1]) + 3
    x, w = torch.randn(rows, wide), torch.randn(4, out, wide)
    for matrices in (w, torch.randn(4, wide, out).transpose(1, 2)):
        found = torch.zeros(rows, out)
        group, start = plan_tiles(ends, rows, 16)
        grid = (len(group) * triton.cdiv(out, 16),)
        grouped_product_kernel[grid](
            x, matrices, found, ends, group, start, 4, out, wide, *matrices.stride(), TILE_R=16, TILE_O=16, TILE_I=16
        )
        torch.testing.assert_close(found, grouped_product_reference(x, matrices, ends), rtol=1e-4, atol=1e-4)
    grad = torch.randn(rows, out)
    found = torch.full((4, out, wide), torch.nan)
    grid = (triton.cdiv(out, 16) * triton.cdiv(wide, 16), 4)
    grouped_gradient_kernel[grid](grad, x, found, ends, out, wide, TILE_R=16, TILE_O=16, TILE_I=16)
    torch.testing.assert_close(found, grouped_gradient_reference(grad, x, ends), rtol=1e-4, atol=1e-4)
"""


@needs_triton
def test_kernels_compute_what_the_references_compute() -> None:
    """Empty and ragged groups, rows of no group, matrices of either order in memory."""
    run_interpreted(INTERPRETED)
