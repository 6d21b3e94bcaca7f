"""Products of rows with the matrices of their groups: right numbers and gradients, and kernels for devices not here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ahead_of_time import ASSEMBLY, assembly_of, needs_triton, run_interpreted
from phalanx.kernels.grouped_products import (
    GatedGroupedLinear,
    GroupedLinear,
    grouped_gradient,
    grouped_product,
)
from phalanx.kernels.swiglu import swiglu

BOUND = {"rtol": 1e-12, "atol": 1e-12}
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


def test_gated_product_has_the_gradients_of_its_parts() -> None:
    gate_up, matrices, ends = random(8, 32, grad=True), random(4, 3, 16, seed=1, grad=True), ends_of((3, 0, 4, 1))
    found = GatedGroupedLinear.apply(gate_up, matrices, ends, 4, True)
    wanted = GroupedLinear.apply(swiglu(gate_up, 4), matrices, ends, True)
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
