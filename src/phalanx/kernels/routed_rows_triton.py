"""The Triton kernels behind `kernels.routed_rows`; import only where Triton is installed.

A program takes one token and goes through its features a tile at a time: rows are read and written once, whole.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4
LARGEST_TILE = 2048
"""Features that a program holds at a time: 16 bytes a thread in 16-bit formats, twice over."""


@triton.jit  # type: ignore[untyped-decorator]
def combine_kernel(
    rows: tl.tensor,
    position: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    features: tl.tensor,
    COPIES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """out[t] = sum_k weights[t, k] * rows[position[t, k]]."""
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, features, TILE):
        d = first + tl.arange(0, TILE)
        inside = d < features
        total = tl.zeros((TILE,), dtype=tl.float32)
        for k in tl.static_range(COPIES):
            row = tl.load(position + token * COPIES + k).to(tl.int64)
            value = tl.load(rows + row * features + d, mask=inside, other=0.0).to(tl.float32)
            if WEIGHTED:
                value *= tl.load(weights + token * COPIES + k)
            total += value
        tl.store(out + token * features + d, total.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def combine_backward_kernel(
    grad: tl.tensor,
    rows: tl.tensor,
    position: tl.tensor,
    weights: tl.tensor,
    grad_rows: tl.tensor,
    grad_weights: tl.tensor,
    features: tl.tensor,
    COPIES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """grad_rows[position[t, k]] = weights[t, k] * grad[t]; grad_weights[t, k] = grad[t] . rows[position[t, k]]."""
    token = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(COPIES):
        row = tl.load(position + token * COPIES + k).to(tl.int64)
        weight = tl.load(weights + token * COPIES + k)
        product = tl.zeros((TILE,), dtype=tl.float32)
        for first in range(0, features, TILE):
            d = first + tl.arange(0, TILE)
            inside = d < features
            # The second and later copies find the token's gradient in the cache.
            value = tl.load(grad + token * features + d, mask=inside, other=0.0).to(tl.float32)
            product += value * tl.load(rows + row * features + d, mask=inside, other=0.0).to(tl.float32)
            place = grad_rows + row * features + d
            tl.store(place, (weight * value).to(grad_rows.dtype.element_ty), mask=inside)
        tl.store(grad_weights + token * COPIES + k, tl.sum(product, axis=0))


def tile_size(features: int) -> int:
    """Return the features that a program holds at a time: a power of two."""
    return min(LARGEST_TILE, 1 << (features - 1).bit_length())


def run_combine(rows_RD: Tensor, position_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Do as `kernels.routed_rows.combine_rows_reference`, for contiguous tensors of a CUDA or ROCm device."""
    tokens, copies = position_TK.shape
    features = rows_RD.shape[1]
    out_TD = rows_RD.new_empty((tokens, features))
    if tokens == 0:
        return out_TD
    with torch.cuda.device(rows_RD.device):
        combine_kernel[(tokens,)](
            rows_RD,
            position_TK.contiguous(),
            # Never read without weights; a kernel's argument must be some tensor.
            position_TK if weights_TK is None else weights_TK.contiguous(),
            out_TD,
            features,
            COPIES=copies,
            WEIGHTED=weights_TK is not None,
            TILE=tile_size(features),
            num_warps=WARPS,
        )
    return out_TD


def run_combine_backward(
    grad_TD: Tensor, rows_RD: Tensor, position_TK: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Do as `kernels.routed_rows.combine_rows_backward_reference`, for contiguous tensors of a CUDA or ROCm device."""
    tokens, copies = position_TK.shape
    features = rows_RD.shape[1]
    grad_rows, grad_weights = torch.empty_like(rows_RD), torch.empty_like(weights_TK)
    with torch.cuda.device(rows_RD.device):
        combine_backward_kernel[(tokens,)](
            grad_TD,
            rows_RD,
            position_TK.contiguous(),
            weights_TK.contiguous(),
            grad_rows,
            grad_weights,
            features,
            COPIES=copies,
            TILE=tile_size(features),
            num_warps=WARPS,
        )
    return grad_rows, grad_weights
