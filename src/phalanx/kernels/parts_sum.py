"""The sum of parts, such as arrive from several ranks, in a wider format and in their order."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.triton_modules import triton_module


def sum_parts(parts: Tensor, total: Tensor, *, add: bool = False) -> None:
    """Fill `total`, [n], with the sum over the first dim of `parts`, [ranks, n], both contiguous; or add that to it.

    Sums are formed in the format of `total`, at least as wide as that of `parts`; on an accelerator one after another.
    """
    kernel = triton_module("parts_sum_triton") if total.is_cuda else None
    if kernel is None or total.dtype != torch.float32 or parts.shape[0] > _MOST_RANKS or not total.numel():
        if add:
            total += parts.sum(0, dtype=total.dtype)
        else:
            torch.sum(parts, 0, dtype=total.dtype, out=total)
    else:
        kernel.run_sum_parts(parts, total, add=add)


_MOST_RANKS = 16
"""A kernel is compiled for each number of ranks: those of one machine."""
