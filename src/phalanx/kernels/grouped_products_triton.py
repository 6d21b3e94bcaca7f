"""The Triton kernels behind `kernels.grouped_products`; import only where Triton is installed.

How many rows a group has is known on the device alone. So as many programs are started as any division of the rows could
need, ceil(R / tile) + G, and a table that is computed beside them, without a wait, says which group and row each begins at.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS, TILE_OUT, TILE_IN = 128, 128, 64
"""Rows, output features and input features that a program multiplies at a time; 16-bit formats."""
WARPS, STAGES = 8, 3


@triton.jit  # type: ignore[untyped-decorator]
def grouped_product_kernel(
    rows: tl.tensor,
    matrices: tl.tensor,
    out: tl.tensor,
    ends: tl.tensor,
    tile_group: tl.tensor,
    tile_start: tl.tensor,
    groups: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    stride_group: tl.tensor,
    stride_out: tl.tensor,
    stride_in: tl.tensor,
    TILE_R: tl.constexpr,
    TILE_O: tl.constexpr,
    TILE_I: tl.constexpr,
) -> None:
    """Compute one tile of `out`: rows of one group times a part of that group's matrix, whose strides are given."""
    tiles_out = tl.cdiv(out_features, TILE_O)
    # Programs that follow each other read the same rows.
    tile = tl.program_id(0) // tiles_out
    column = (tl.program_id(0) % tiles_out) * TILE_O + tl.arange(0, TILE_O)
    group = tl.load(tile_group + tile)
    if group < groups:
        row = tl.load(tile_start + tile) + tl.arange(0, TILE_R)
        inside = row < tl.load(ends + group)
        # Whole tensors have more elements than 32 bits count.
        row_at = rows + row.to(tl.int64)[:, None] * in_features
        matrix_at = matrices + group.to(tl.int64) * stride_group + column.to(tl.int64)[None, :] * stride_out
        total = tl.zeros((TILE_R, TILE_O), dtype=tl.float32)
        for first in range(0, in_features, TILE_I):
            k = first + tl.arange(0, TILE_I)
            a = tl.load(row_at + k[None, :], mask=inside[:, None] & (k < in_features)[None, :], other=0.0)
            b = tl.load(
                matrix_at + k.to(tl.int64)[:, None] * stride_in,
                mask=(k < in_features)[:, None] & (column < out_features)[None, :],
                other=0.0,
            )
            total = tl.dot(a, b, total, input_precision="ieee")
        place = out + row.to(tl.int64)[:, None] * out_features + column[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=inside[:, None] & (column < out_features)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def grouped_gradient_kernel(
    grad: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    ends: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    TILE_R: tl.constexpr,
    TILE_O: tl.constexpr,
    TILE_I: tl.constexpr,
) -> None:
    """Compute one tile of one group's gradient: the rows of the group, TILE_R at a time, in their order."""
    group = tl.program_id(1)
    tiles_in = tl.cdiv(in_features, TILE_I)
    o = (tl.program_id(0) // tiles_in) * TILE_O + tl.arange(0, TILE_O)
    i = (tl.program_id(0) % tiles_in) * TILE_I + tl.arange(0, TILE_I)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    total = tl.zeros((TILE_O, TILE_I), dtype=tl.float32)
    for first in range(start, end, TILE_R):
        row = first + tl.arange(0, TILE_R)
        inside = row < end
        far = row.to(tl.int64)
        a = tl.load(
            grad + far[None, :] * out_features + o[:, None],
            mask=inside[None, :] & (o < out_features)[:, None],
            other=0.0,
        )
        b = tl.load(
            rows + far[:, None] * in_features + i[None, :], mask=inside[:, None] & (i < in_features)[None, :], other=0.0
        )
        total = tl.dot(a, b, total, input_precision="ieee")
    place = out + group.to(tl.int64) * out_features * in_features + o.to(tl.int64)[:, None] * in_features + i[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(o < out_features)[:, None] & (i < in_features)[None, :])


def tile_sizes(itemsize: int) -> tuple[int, int, int]:
    """Return (rows, output features, input features) of a tile, for elements of so many bytes."""
    # Elements of 4 bytes take twice the shared memory, and a wavefront's registers.
    return (TILE_ROWS, TILE_OUT, TILE_IN) if itemsize == 2 else (TILE_ROWS // 2, TILE_OUT // 2, TILE_IN // 2)


def plan_tiles(ends_G: Tensor, rows: int, tile_rows: int) -> tuple[Tensor, Tensor]:
    """Return the group and the first row of each tile of `tile_rows` rows, int32 [ceil(rows / tile_rows) + G].

    Tiles that no group needs have the group G.
    """
    groups = len(ends_G)
    starts_G = torch.cat((ends_G.new_zeros(1), ends_G[:-1]))
    tiles_G = (ends_G - starts_G + tile_rows - 1) // tile_rows
    last_G = tiles_G.cumsum(0)
    tile = torch.arange(triton.cdiv(rows, tile_rows) + groups, device=ends_G.device)
    group = torch.searchsorted(last_G, tile, right=True)
    known = group.clamp(max=groups - 1)
    start = starts_G[known] + (tile - (last_G - tiles_G)[known]) * tile_rows
    return group.int(), start.int()


def run_grouped_product(rows_RI: Tensor, matrices_GOI: Tensor, ends_G: Tensor, complete: bool) -> Tensor:
    """Do as `kernels.grouped_products.grouped_product`, for contiguous rows on a CUDA or ROCm device."""
    groups, out_features, in_features = matrices_GOI.shape
    rows = rows_RI.shape[0]
    # Rows behind the last group belong to no tile.
    out_RO = (rows_RI.new_empty if complete else rows_RI.new_zeros)((rows, out_features))
    tile_r, tile_o, tile_i = tile_sizes(rows_RI.element_size())
    tile_group, tile_start = plan_tiles(ends_G, rows, tile_r)
    with torch.cuda.device(rows_RI.device):
        grouped_product_kernel[(len(tile_group) * triton.cdiv(out_features, tile_o),)](
            rows_RI,
            matrices_GOI,
            out_RO,
            ends_G,
            tile_group,
            tile_start,
            groups,
            out_features,
            in_features,
            *matrices_GOI.stride(),
            TILE_R=tile_r,
            TILE_O=tile_o,
            TILE_I=tile_i,
            num_warps=WARPS,
            num_stages=STAGES,
        )
    return out_RO


def run_grouped_gradient(grad_RO: Tensor, rows_RI: Tensor, ends_G: Tensor) -> Tensor:
    """Do as `kernels.grouped_products.grouped_gradient_reference`, for contiguous tensors of a CUDA or ROCm device."""
    out_features, in_features = grad_RO.shape[1], rows_RI.shape[1]
    out_GOI = grad_RO.new_empty((len(ends_G), out_features, in_features))
    tile_r, tile_o, tile_i = tile_sizes(rows_RI.element_size())
    # What a product sums over are rows here: the inner size of a tile is theirs.
    tile_r, tile_i = tile_i, tile_r
    grid = (triton.cdiv(out_features, tile_o) * triton.cdiv(in_features, tile_i), len(ends_G))
    with torch.cuda.device(rows_RI.device):
        grouped_gradient_kernel[grid](
            grad_RO,
            rows_RI,
            out_GOI,
            ends_G,
            out_features,
            in_features,
            TILE_R=tile_r,
            TILE_O=tile_o,
            TILE_I=tile_i,
            num_warps=WARPS,
            num_stages=STAGES,
        )
    return out_GOI
