"""The sum of parts that arrived from several ranks, in a wider format and in the order of the ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.triton_modules import triton_module


def sum_parts(parts: Tensor, total: Tensor) -> None:
    """Fill `total`, [n], with the sum over the first dim of `parts`, [ranks, n], both contiguous.

    Sums are formed in the format of `total`, at least as wide as that of `parts`; on an accelerator one after another.
    """
    kernel = triton_module("parts_sum_triton") if total.is_cuda else None
    if kernel is None or total.dtype != torch.float32 or parts.shape[0] > _MOST_RANKS or not total.numel():
        torch.sum(parts, 0, dtype=total.dtype, out=total)
    else:
        kernel.run_sum_parts(parts, total)


_MOST_RANKS = 16
"""A kernel is compiled for each number of ranks: those of one machine."""
