"""The Triton kernels behind `kernels.logits`; import only where Triton is installed.

Both are bound by memory. A program goes over one row of the log-partition, whose maximum is not known before its end: the
sum so far is scaled whenever a larger one is met (Milakov & Gimelshein 2018, arXiv:1805.02867, algorithm 3).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Columns that a program takes at a time."""
WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def log_partition_kernel(
    logits: tl.tensor,
    log_z: tl.tensor,
    columns: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Write the log-partition of one row of logits [rows, columns] into log_z [rows], float32."""
    # Whole tensors have more elements than 32 bits count.
    logits += tl.program_id(0).to(tl.int64) * columns
    place = tl.arange(0, TILE)
    # Finite, so that a first tile without a number larger than it is no difference of two infinities.
    largest = -3.0e38
    total = tl.zeros((TILE,), dtype=tl.float32)
    for start in range(0, columns, TILE):
        value = tl.load(logits + start + place, mask=place < columns - start, other=float("-inf")).to(tl.float32)
        before = largest
        largest = tl.maximum(before, tl.max(value, 0))
        total = total * tl.exp(before - largest) + tl.exp(value - largest)
    tl.store(log_z + tl.program_id(0), largest + tl.log(tl.sum(total, 0)))


@triton.jit  # type: ignore[untyped-decorator]
def replace_by_gradient_kernel(
    logits: tl.tensor,
    log_z: tl.tensor,
    target: tl.tensor,
    factor: tl.tensor,
    columns: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Write softmax(logits) * factor, less one in the column of the target, over TILE columns of one row."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * columns
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < columns
    scale = tl.load(factor + row)
    value = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.exp(value - tl.load(log_z + row)) * scale - tl.where(column == tl.load(target + row), 1.0, 0.0)
    # Chosen and not multiplied: a row that takes no part may hold numbers that are none.
    gradient = tl.where(scale == 0.0, 0.0, gradient)
    tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=inside)


def run_log_partition(logits_NV: Tensor) -> Tensor:
    """Do as `kernels.logits.log_partition`, for contiguous logits of a CUDA or ROCm device."""
    rows, columns = logits_NV.shape
    log_z_N = logits_NV.new_empty(rows, dtype=torch.float32)
    # Triton launches on the current device, whichever the tensors are on.
    with torch.cuda.device(logits_NV.device):
        log_partition_kernel[(rows,)](logits_NV, log_z_N, columns, TILE=TILE, num_warps=WARPS)
    return log_z_N


def run_replace_by_gradient(logits_NV: Tensor, log_z_N: Tensor, target_N: Tensor, factor_N: Tensor) -> None:
    """Do as `kernels.logits.replace_by_gradient`, for contiguous tensors of a CUDA or ROCm device."""
    rows, columns = logits_NV.shape
    with torch.cuda.device(logits_NV.device):
        replace_by_gradient_kernel[(rows, triton.cdiv(columns, TILE))](
            logits_NV, log_z_N, target_N, factor_N, columns, TILE=TILE, num_warps=WARPS
        )
