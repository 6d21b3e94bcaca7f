"""Activations whose gradients are cheap to differentiate again, as force training does.

PyTorch's own SiLU turns into a chain of pointwise operations, each of which keeps its result, as soon as its backward pass
is to be differentiated. Here that pass stays one kernel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.torch_compat.vmap import transformed


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    # A compiler fuses the chain of operations itself; networks that run side by side are not trained.
    if torch.compiler.is_compiling() or not x.requires_grad or transformed():
        return F.silu(x)
    result: Tensor = _Silu.apply(x)
    return result


def shifted_softplus(x: Tensor) -> Tensor:
    """ln(0.5 e^x + 0.5): smooth, and 0 at 0."""
    return F.softplus(x) - math.log(2.0)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        result: Tensor = _SiluGradient.apply(grads[0], *ctx.saved_tensors)
        return result


class _SiluGradient(torch.autograd.Function):
    """The gradient by x, as a function of the gradient by the result and of x."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(grad, x)
        return torch.ops.aten.silu_backward(grad, x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        (outer,) = grads
        grad, x = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        curvature = (x * (1.0 - 2.0 * sigmoid) + 2.0) * (sigmoid * (1.0 - sigmoid))
        return torch.ops.aten.silu_backward(outer, x), outer * grad * curvature
