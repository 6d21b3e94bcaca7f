"""Rows sorted by expert and summed back: right numbers and gradients, and kernels for devices not here."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from ahead_of_time import ASSEMBLY, assembly_of, needs_triton, run_interpreted
from phalanx.kernels.routed_rows import CombineRows, SortRows, SumCopies, combine_rows, combine_rows_backward

TOKENS, COPIES, WIDTH = 6, 3, 5


def random(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.requires_grad_(grad)


def tables() -> tuple[Tensor, Tensor]:
    """(token of each row, row of each copy)."""
    slot = torch.randperm(TOKENS * COPIES, generator=torch.Generator().manual_seed(3))
    return slot // COPIES, slot.argsort().view(TOKENS, COPIES).int()


def test_gradients() -> None:
    source, position = tables()
    assert torch.autograd.gradcheck(lambda x: SortRows.apply(x, source, position), (random(TOKENS, WIDTH, grad=True),))
    rows, weights = random(TOKENS * COPIES, WIDTH, grad=True), random(TOKENS, COPIES, seed=1, grad=True)
    assert torch.autograd.gradcheck(lambda r, w: CombineRows.apply(r, position, w), (rows, weights))
    assert torch.autograd.gradcheck(lambda r: SumCopies.apply(r, source, position), (rows,))


def test_copies_come_back_to_their_tokens() -> None:
    source, position = tables()
    x = random(TOKENS, WIDTH)
    back = CombineRows.apply(SortRows.apply(x, source, position), position, torch.ones(TOKENS, COPIES).double())
    torch.testing.assert_close(back, COPIES * x, rtol=1e-12, atol=1e-12)
    summed = SumCopies.apply(SortRows.apply(x, source, position), source, position)
    torch.testing.assert_close(summed, COPIES * x, rtol=1e-12, atol=1e-12)


def test_sums_are_rounded_once() -> None:
    _, position = tables()
    rows = random(TOKENS * COPIES, WIDTH).bfloat16()
    weights = torch.rand(TOKENS, COPIES, generator=torch.Generator().manual_seed(4))
    found = combine_rows(rows, position, weights)
    exact = combine_rows(rows.double(), position, weights.double())
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= torch.finfo(torch.bfloat16).eps * 0.501 * exact.abs() + 1e-6).all()


def test_operations_are_sound() -> None:
    """Fake shapes and strides are those of the results, and no input is changed or handed out."""
    _, position = tables()
    rows, weights = random(TOKENS * COPIES, WIDTH), random(TOKENS, COPIES)
    torch.library.opcheck(combine_rows, (rows, position, weights))
    torch.library.opcheck(combine_rows, (rows, position, None))
    torch.library.opcheck(combine_rows_backward, (random(TOKENS, WIDTH), rows, position, weights))


# --- the Triton kernels, compiled for devices that are not here ---------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("element", ["bf16", "fp32"])
@pytest.mark.parametrize("target", ASSEMBLY)
def test_kernels_compile(target: str, element: str) -> None:
    from phalanx.kernels import routed_rows_triton as kernels  # noqa: PLC0415

    sizes = {"features": "i32"}
    forward = {"rows": f"*{element}", "position": "*i32", "weights": "*fp32", "out": f"*{element}", **sizes}
    constants = {"COPIES": 8, "TILE": 1024}
    code = assembly_of(
        kernels.combine_kernel, target, kernels.WARPS, forward, {**constants, "WEIGHTED": True}, even=(0, 1, 2, 3, 4)
    )
    backward = {
        "grad": f"*{element}",
        "rows": f"*{element}",
        "position": "*i32",
        "weights": "*fp32",
        "grad_rows": f"*{element}",
        "grad_weights": "*fp32",
        **sizes,
    }
    other = assembly_of(
        kernels.combine_backward_kernel, target, kernels.WARPS, backward, constants, even=(0, 1, 2, 3, 4, 5, 6)
    )
    # No program adds to what another writes.
    assert not re.findall(r"atomic|atom\.|red\.(?:global|relaxed|async)", code + other)


INTERPRETED = """
import torch
from phalanx.kernels.routed_rows import combine_rows_backward_reference, combine_rows_reference
from phalanx.kernels.routed_rows_triton import combine_backward_kernel, combine_kernel

for tokens, copies, width, tile in ((7, 2, 40, 16), (5, 3, 32, 32), (1, 1, 3, 4)):
    torch.manual_seed(tokens)
    position = torch.randperm(tokens * copies).view(tokens, copies).int()
    rows, weights, grad = torch.randn(tokens * copies, width), torch.rand(tokens, copies), torch.randn(tokens, width)
    for chosen in (weights, None):
        found = torch.full((tokens, width), torch.nan)
        combine_kernel[(tokens,)](
            rows, position, weights, found, width, COPIES=copies, WEIGHTED=chosen is not None, TILE=tile
        )
        torch.testing.assert_close(found, combine_rows_reference(rows, position, chosen), rtol=1e-5, atol=1e-5)
    found = torch.full_like(rows, torch.nan), torch.full_like(weights, torch.nan)
    combine_backward_kernel[(tokens,)](grad, rows, position, weights, *found, width, COPIES=copies, TILE=tile)
    for a, b in zip(found, combine_rows_backward_reference(grad, rows, position, weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
"""


@needs_triton
def test_kernels_compute_what_the_references_compute() -> None:
    """Widths that tiles divide, and that they do not."""
    run_interpreted(INTERPRETED)
