"""Sums of parts, such as arrive from several ranks, and of gradients of several micro-batches, in a wider format."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels import LARGE, kernels_for
from phalanx.torch_compat import common as compat


def sum_parts(parts: Tensor, total: Tensor, *, add: bool = False) -> None:
    """Fill `total`, [n], with the sum over the first dim of `parts`, [ranks, n], both contiguous; or add that to it.

    Sums are formed in the format of `total`, at least as wide as that of `parts`; on an accelerator one after another.
    """
    kernel = kernels_for(total, "parts_sum_triton")
    if kernel is None or total.dtype != torch.float32 or parts.shape[0] > _MOST_RANKS or not total.numel():
        if add and parts.shape[0] == 1:
            # A sum of one part would be a copy of it in the wider format.
            total += parts[0]
        elif add:
            total += parts.sum(0, dtype=total.dtype)
        else:
            torch.sum(parts, 0, dtype=total.dtype, out=total)
    else:
        kernel.run_sum_parts(parts, total, add=add)


def add_gradient(gradient: Tensor, total: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `total` with `gradient`, of the same shape, added to it in place; a new tensor of `dtype`, at least as wide as
    `gradient`'s format, where there is none yet.

    PyTorch's own kernels move tensors of two formats at half the speed of memory.
    """
    first = total is None
    if total is None:
        total = torch.empty_like(gradient, dtype=dtype, memory_format=torch.contiguous_format)
    # Views as flat rows need contiguous memory; a small gradient is not worth a launch of its own.
    if gradient.numel() >= LARGE and gradient.is_contiguous() and total.is_contiguous():
        sum_parts(gradient.view(1, -1), total.view(-1), add=not first)
    elif first:
        total.copy_(gradient)
    else:
        total.add_(gradient)
    return total


def add_weight_gradient(total: Tensor, grad_NO: Tensor, x_NI: Tensor) -> None:
    """Add the gradient of a weight, [out, in], to `total`, of its shape: the product of the transposed `grad` and x.

    Devices whose products add to matrices of a wider format round nothing before the sum, and make no pass over it. Graphs
    of several micro-batches may keep `total` to add to it: autograd does not take it for changed.
    """
    torch.ops.phalanx.add_weight_gradient(total, grad_NO, x_NI)


# Not `custom_op`, which would tell autograd that `total` has changed.
torch.library.define("phalanx::add_weight_gradient", "(Tensor(a!) total, Tensor grad, Tensor x) -> ()")


def _add_weight_gradient(total: Tensor, grad_NO: Tensor, x_NI: Tensor) -> None:
    compat.add_matmul(total.data, grad_NO.t(), x_NI, total.dtype)


torch.library.impl("phalanx::add_weight_gradient", "CompositeExplicitAutograd", _add_weight_gradient)


torch.library.register_fake("phalanx::add_weight_gradient", lambda _total, _grad, _x: None)

_MOST_RANKS = 16
"""A kernel is compiled for each number of ranks: those of one machine."""
