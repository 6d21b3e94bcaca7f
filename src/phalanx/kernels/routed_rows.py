"""Copies of rows sorted by expert, and their weighted sums back in the order of tokens.

A token goes to K experts. `position_TK` says where its K copies lie among the sorted rows, `source_R` which token a sorted
row is a copy of: the one is the inverse of the other. Both directions read through these tables, so that no two programs add
to one place: results are the same bits in every run, and nothing is set to 0 first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.kernels import kernels_for


@torch.library.custom_op("phalanx::combine_rows", mutates_args=())
def combine_rows(rows_RD: Tensor, position_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Return sum_k weights[t, k] rows[position[t, k]], [T, D]; without weights all count as 1.

    rows: [R, D]. position: int32 [T, K]. weights: float32 (float64 where rows are) [T, K]. Summed in the format of the
    weights, at least float32, in the order of k, and rounded once to the rows' format.
    """
    kernel = kernels_for(rows_RD, "routed_rows_triton")
    if kernel is None or not _kernel_takes(rows_RD):
        return combine_rows_reference(rows_RD, position_TK, weights_TK)
    result: Tensor = kernel.run_combine(rows_RD.contiguous(), position_TK, weights_TK)
    return result


@combine_rows.register_fake
def _(rows_RD: Tensor, position_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    return rows_RD.new_empty((position_TK.shape[0], rows_RD.shape[1]))


@torch.library.custom_op("phalanx::combine_rows_backward", mutates_args=())
def combine_rows_backward(
    grad_TD: Tensor, rows_RD: Tensor, position_TK: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows [R, D] and weights [T, K] of `combine_rows`, from that of its result.

    Every sorted row must be a copy of some token: `position` takes each of 0 .. R-1 once.
    """
    kernel = kernels_for(rows_RD, "routed_rows_triton")
    if kernel is None or not _kernel_takes(rows_RD):
        return combine_rows_backward_reference(grad_TD, rows_RD, position_TK, weights_TK)
    result: tuple[Tensor, Tensor] = kernel.run_combine_backward(
        grad_TD.contiguous(), rows_RD.contiguous(), position_TK, weights_TK
    )
    return result


@combine_rows_backward.register_fake
def _(grad_TD: Tensor, rows_RD: Tensor, position_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    return rows_RD.new_empty(rows_RD.shape), weights_TK.new_empty(weights_TK.shape)


COMBINE_ROWS = torch.ops.phalanx.combine_rows.default
"""The operation itself, as cost models see it."""
COMBINE_ROWS_BACKWARD = torch.ops.phalanx.combine_rows_backward.default


def _kernel_takes(rows_RD: Tensor) -> bool:
    return rows_RD.dtype in (torch.bfloat16, torch.float16, torch.float32) and rows_RD.numel() > 0


def combine_rows_reference(rows_RD: Tensor, position_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Do as `combine_rows` in plain PyTorch, for every device and format."""
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    total = torch.zeros((position_TK.shape[0], rows_RD.shape[1]), dtype=wide, device=rows_RD.device)
    for k in range(position_TK.shape[1]):
        rows_TD = rows_RD.index_select(0, position_TK[:, k].long()).to(wide)
        total = total + (rows_TD if weights_TK is None else weights_TK[:, k, None].to(wide) * rows_TD)
    return total.to(rows_RD.dtype)


def combine_rows_backward_reference(
    grad_TD: Tensor, rows_RD: Tensor, position_TK: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Do as `combine_rows_backward` in plain PyTorch, for every device and format."""
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    grad_rows, grad_weights = torch.empty_like(rows_RD), torch.empty_like(weights_TK)
    wide_grad = grad_TD.to(wide)
    for k in range(position_TK.shape[1]):
        at = position_TK[:, k].long()
        grad_rows[at] = (weights_TK[:, k, None].to(wide) * wide_grad).to(rows_RD.dtype)
        grad_weights[:, k] = (wide_grad * rows_RD.index_select(0, at).to(wide)).sum(1).to(weights_TK.dtype)
    return grad_rows, grad_weights


class SortRows(torch.autograd.Function):
    """Copies of tokens sorted by expert; `apply(x_TD, source_R, position_TK)` gives [R, D]."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, source_R: Tensor, position_TK: Tensor) -> Tensor:
        """Return the copies."""
        ctx.save_for_backward(position_TK)
        return x_TD.index_select(0, source_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        """Sum the gradients of a token's copies."""
        (position_TK,) = ctx.saved_tensors
        grad_TD: Tensor = combine_rows(grad_RD, position_TK, None)
        return grad_TD, None, None


class SumCopies(torch.autograd.Function):
    """The way back of `SortRows`: `apply(rows_RD, source_R, position_TK)` gives the sums of each token's rows, [T, D]."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, source_R: Tensor, position_TK: Tensor) -> Tensor:
        """Return the sums."""
        ctx.save_for_backward(source_R)
        out_TD: Tensor = combine_rows(rows_RD, position_TK, None)
        return out_TD

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        """Copy the gradient of each sum to the rows that it is of."""
        (source_R,) = ctx.saved_tensors
        return grad_TD.index_select(0, source_R), None, None


class CombineRows(torch.autograd.Function):
    """`combine_rows` with its gradients; `apply(rows_RD, position_TK, weights_TK)` gives [T, D]."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, position_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the weighted sums."""
        ctx.save_for_backward(rows_RD, position_TK, weights_TK)
        out_TD: Tensor = combine_rows(rows_RD, position_TK, weights_TK)
        return out_TD

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, Tensor]:
        """Return the gradients of rows and weights."""
        grad_rows, grad_weights = combine_rows_backward(grad_TD, *ctx.saved_tensors)
        return grad_rows, None, grad_weights
