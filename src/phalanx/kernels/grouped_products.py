"""Products of rows with the matrix of their group: what the experts of a mixture compute. Knows nothing of routing.

Rows lie sorted by group, and `ends_G` says on the device where each group ends, so that no product waits for the host. On
NVIDIA devices of 16-bit floats PyTorch's grouped product runs where it is fast; elsewhere an own Triton kernel; on the CPU,
and for formats that neither takes, a plain loop over the groups, which reads `ends_G` on the host.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import triton_module
from phalanx.kernels.swiglu import swiglu, swiglu_backward
from phalanx.torch_compat import common as compat


@torch.library.custom_op("phalanx::grouped_product", mutates_args=())
def grouped_product(rows_RI: Tensor, matrices_GOI: Tensor, ends_G: Tensor, complete: bool) -> Tensor:
    """Return each row times the transposed matrix of its group, [R, O]; rows behind the last group give 0.

    rows: [R, I]. matrices: [G, O, I], of the same format and any strides. ends: int32 [G], one past the last row of each
    group, never falling. complete: whether every row belongs to a group, which saves a pass. Sums are formed in at least
    float32 and rounded once.
    """
    return grouped_product_reference(rows_RI, matrices_GOI, ends_G)


@grouped_product.register_fake
def _(rows_RI: Tensor, matrices_GOI: Tensor, ends_G: Tensor, complete: bool) -> Tensor:
    return rows_RI.new_empty((rows_RI.shape[0], matrices_GOI.shape[1]))


@grouped_product.register_kernel("cuda")
def _(rows_RI: Tensor, matrices_GOI: Tensor, ends_G: Tensor, complete: bool) -> Tensor:
    rows_RI = rows_RI.contiguous()
    if _library_takes(rows_RI, matrices_GOI.shape[1]):
        out_RO = F.grouped_mm(rows_RI, matrices_GOI.transpose(1, 2), offs=ends_G)
        if not complete:
            # PyTorch leaves rows behind the last group as they were in memory.
            row_R1 = torch.arange(len(out_RO), device=ends_G.device)[:, None]
            out_RO.masked_fill_(row_R1 >= ends_G[-1], 0.0)
        return out_RO
    kernel = triton_module("grouped_products_triton")
    if kernel is None or not _kernel_takes(rows_RI, matrices_GOI.shape[1]):
        return grouped_product_reference(rows_RI, matrices_GOI, ends_G)
    result: Tensor = kernel.run_grouped_product(rows_RI, matrices_GOI, ends_G, complete)
    return result


@torch.library.custom_op("phalanx::grouped_gradient", mutates_args=())
def grouped_gradient(grad_RO: Tensor, rows_RI: Tensor, ends_G: Tensor) -> Tensor:
    """Return the gradient of the matrices of `grouped_product`, [G, O, I]: 0 for a group without rows.

    grad: [R, O], of the result. rows and ends: as there.
    """
    return grouped_gradient_reference(grad_RO, rows_RI, ends_G)


@grouped_gradient.register_fake
def _(grad_RO: Tensor, rows_RI: Tensor, ends_G: Tensor) -> Tensor:
    return grad_RO.new_empty((len(ends_G), grad_RO.shape[1], rows_RI.shape[1]))


@grouped_gradient.register_kernel("cuda")
def _(grad_RO: Tensor, rows_RI: Tensor, ends_G: Tensor) -> Tensor:
    grad_RO, rows_RI = grad_RO.contiguous(), rows_RI.contiguous()
    if _library_takes(rows_RI, grad_RO.shape[1]):
        return F.grouped_mm(grad_RO.t(), rows_RI, offs=ends_G)
    kernel = triton_module("grouped_products_triton")
    if kernel is None or not _kernel_takes(rows_RI, grad_RO.shape[1]):
        return grouped_gradient_reference(grad_RO, rows_RI, ends_G)
    result: Tensor = kernel.run_grouped_gradient(grad_RO, rows_RI, ends_G)
    return result


GROUPED_PRODUCT = torch.ops.phalanx.grouped_product.default
"""The operation itself, as cost models see it."""
GROUPED_GRADIENT = torch.ops.phalanx.grouped_gradient.default


def _library_takes(rows_RI: Tensor, out_features: int) -> bool:
    """Return whether PyTorch's grouped product is to be used: on NVIDIA, in bfloat16, on rows of whole 16 bytes."""
    whole = rows_RI.shape[1] % 8 == 0 and out_features % 8 == 0 and rows_RI.numel() > 0
    return rows_RI.dtype == torch.bfloat16 and whole and not compat.is_rocm()


def _kernel_takes(rows_RI: Tensor, out_features: int) -> bool:
    known = rows_RI.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return known and rows_RI.numel() > 0 and out_features > 0


def grouped_product_reference(rows_RI: Tensor, matrices_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """Do as `grouped_product` in plain PyTorch, for every device and format."""
    out_RO = rows_RI.new_zeros((rows_RI.shape[0], matrices_GOI.shape[1]))
    start = 0
    for group, end in enumerate(ends_G.tolist()):
        if end > start:
            torch.mm(rows_RI[start:end], matrices_GOI[group].t(), out=out_RO[start:end])
        start = end
    return out_RO


def grouped_gradient_reference(grad_RO: Tensor, rows_RI: Tensor, ends_G: Tensor) -> Tensor:
    """Do as `grouped_gradient` in plain PyTorch, for every device and format."""
    # Gradients that autograd expands from one number have stride 0, which some products refuse as an output's operand.
    grad_RO = grad_RO.contiguous()
    out_GOI = grad_RO.new_zeros((len(ends_G), grad_RO.shape[1], rows_RI.shape[1]))
    start = 0
    for group, end in enumerate(ends_G.tolist()):
        if end > start:
            torch.mm(grad_RO[start:end].t(), rows_RI[start:end], out=out_GOI[group])
        start = end
    return out_GOI


class GroupedLinear(torch.autograd.Function):
    """`grouped_product` with its gradients; `apply(rows_RI, matrices_GOI, ends_G, complete)`."""

    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, matrices_GOI: Tensor, ends_G: Tensor, complete: bool) -> Tensor:
        """Return [R, O]."""
        ctx.save_for_backward(rows_RI, matrices_GOI, ends_G)
        ctx.complete = complete
        out_RO: Tensor = grouped_product(rows_RI, matrices_GOI, ends_G, complete)
        return out_RO

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Return the gradients of rows and matrices, each where it is asked for."""
        rows_RI, matrices_GOI, ends_G = ctx.saved_tensors
        grad_rows = grad_matrices = None
        # A split backward pass asks for one of the two at a time.
        if ctx.needs_input_grad[0]:
            grad_rows = grouped_product(grad_RO, matrices_GOI.transpose(1, 2), ends_G, ctx.complete)
        if ctx.needs_input_grad[1]:
            grad_matrices = grouped_gradient(grad_RO, rows_RI, ends_G)
        return grad_rows, grad_matrices, None, None


class GatedGroupedLinear(torch.autograd.Function):
    """`grouped_product` of swiglu(gate_up), which is formed again in the backward pass instead of being kept.

    `apply(gate_up_R2F, matrices_GOF, ends_G, block, complete)`; see `kernels.swiglu` for `block`.
    """

    @staticmethod
    def forward(
        ctx: Any, gate_up_RF: Tensor, matrices_GOF: Tensor, ends_G: Tensor, block: int, complete: bool
    ) -> Tensor:
        """Return [R, O]."""
        ctx.save_for_backward(gate_up_RF, matrices_GOF, ends_G)
        ctx.block, ctx.complete = block, complete
        out_RO: Tensor = grouped_product(swiglu(gate_up_RF, block), matrices_GOF, ends_G, complete)
        return out_RO

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        """Return the gradients of gate_up and of the matrices, the latter where they are trained."""
        gate_up_RF, matrices_GOF, ends_G = ctx.saved_tensors
        grad_hidden = grouped_product(grad_RO, matrices_GOF.transpose(1, 2), ends_G, ctx.complete)
        grad_gate_up, hidden_RF = swiglu_backward(grad_hidden, gate_up_RF, ctx.block)
        grad_matrices = grouped_gradient(grad_RO, hidden_RF, ends_G) if ctx.needs_input_grad[1] else None
        return grad_gate_up, grad_matrices, None, None, None
