"""The second half of a gated MLP, down(silu(gate) * up), as one product that keeps only its input for the backward pass.

Gate and up projection stand in one tensor, in alternating groups of `block` features. The backward pass needs the product
`silu(gate) * up` again beside the gradient of both: one operation forms the two in a single pass over memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import kernels_for
from phalanx.kernels.parts_sum import add_weight_gradient

SMALLEST_BLOCK = 16
"""Shorter groups leave threads too little contiguous memory; a generated kernel does no worse there."""


def swiglu(gate_up: Tensor, block: int) -> Tensor:
    """Compute silu(gate) * up (Shazeer 2020), [..., F].

    gate_up: [..., 2F] in groups of `block` gate, then `block` up features.
    """
    gate, up = gate_up.unflatten(-1, (-1, 2, block)).unbind(-2)
    hidden: Tensor = (F.silu(gate) * up).flatten(-2)
    return hidden


def gated_linear(
    gate_up: Tensor, weight: Tensor, bias: Tensor | None, block: int, gradient_sum: Tensor | None = None
) -> Tensor:
    """Return swiglu(gate_up) W^T + b; keeps `gate_up` and `weight` for the backward pass, and no product of theirs.

    The gradients of input and weight come from one node: that of the weight takes the input's as well.
    gate_up: [..., 2F] as in `swiglu`; weight: [D, F]; bias: [D]; all of one format. gradient_sum: [D, F], what the backward
    pass adds the weight's gradient to in place of giving it to autograd. Returns [..., D].
    """
    promise: Tensor = _Gradient.apply(gate_up, weight, bias, block, gradient_sum)
    result: Tensor = _Value.apply(promise, gate_up, weight, bias, block)
    return result


class _Gradient(torch.autograd.Function):
    """The backward pass of `gated_linear`. Its result has the shape of the value and no elements worth reading.

    The value has a node of its own, behind this one: recomputation in a backward pass ends with the last tensor that is
    kept, and everything is kept here, before the product. In one node it would be computed again, for nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, weight: Tensor, bias: Tensor | None, block: int, gradient_sum: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(gate_up, weight, gradient_sum)
        ctx.block = block
        ctx.biased = bias is not None
        # One element of memory, whatever the shape: only the shape is read.
        return gate_up.new_empty(1).expand(*gate_up.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weight, gradient_sum = ctx.saved_tensors
        grad_ND = grad.reshape(-1, grad.shape[-1])
        gate_up_NF = gate_up.reshape(-1, gate_up.shape[-1])
        grad_gate_up, hidden_NF = swiglu_backward(grad_ND @ weight, gate_up_NF, ctx.block)
        # Frozen ones have no gradient.
        _, trains_weight, trains_bias, *_ = ctx.needs_input_grad
        grad_weight = None
        if gradient_sum is not None:
            add_weight_gradient(gradient_sum, grad_ND, hidden_NF)
        elif trains_weight:
            grad_weight = grad_ND.t() @ hidden_NF
        grad_bias = grad_ND.sum(0) if ctx.biased and trains_bias else None
        return grad_gate_up.view(gate_up.shape), grad_weight, grad_bias, None, None


class _Value(torch.autograd.Function):
    """The value of `gated_linear`; hands its gradient on to `_Gradient` through `promise`."""

    @staticmethod
    def forward(ctx: Any, promise: Tensor, gate_up: Tensor, weight: Tensor, bias: Tensor | None, block: int) -> Tensor:
        return F.linear(swiglu(gate_up, block), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad, None, None, None, None


@torch.library.custom_op("phalanx::swiglu_backward", mutates_args=())
def swiglu_backward(grad_hidden: Tensor, gate_up: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of `gate_up`, and `swiglu(gate_up)` itself, from the gradient of the latter.

    grad_hidden: [..., F]; gate_up: [..., 2F] as in `swiglu`, of the same format. Returns ([..., 2F], [..., F]), contiguous,
    in that format: computed in at least float32 and rounded once.
    """
    kernel = kernels_for(gate_up, "swiglu_triton")
    if kernel is None or not _covers_tensor(gate_up, block):
        return swiglu_backward_reference(grad_hidden, gate_up, block)
    result: tuple[Tensor, Tensor] = kernel.run_swiglu_backward(grad_hidden.contiguous(), gate_up.contiguous(), block)
    return result


SWIGLU_BACKWARD = torch.ops.phalanx.swiglu_backward.default
"""The operation itself, as cost models see it."""


@swiglu_backward.register_fake
def _(grad_hidden: Tensor, gate_up: Tensor, block: int) -> tuple[Tensor, Tensor]:
    return gate_up.new_empty(gate_up.shape), grad_hidden.new_empty(grad_hidden.shape)


def _covers_tensor(gate_up: Tensor, block: int) -> bool:
    # Triton's ranges are powers of two.
    power_of_two = block & (block - 1) == 0
    known = gate_up.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return known and power_of_two and block >= SMALLEST_BLOCK and gate_up.numel() > 0


def swiglu_backward_reference(grad_hidden: Tensor, gate_up: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Do as `swiglu_backward` in plain PyTorch, for every device and format."""
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(wide).unflatten(-1, (-1, 2, block)).unbind(-2)
    grad = grad_hidden.to(wide).unflatten(-1, (-1, block))
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    # Stacked before they are rounded, once: both are formed in the wide format.
    grad_gate_up = torch.stack((grad * up * slope, grad * silu), dim=-2).flatten(-3)
    return grad_gate_up.to(gate_up.dtype), (silu * up).flatten(-2).to(gate_up.dtype)
