"""Products of rows with the matrix of their group: what the experts of a mixture compute. Knows nothing of routing.

Rows lie sorted by group, and `ends_G` says on the device where each group ends, so that no product waits for the host. On
NVIDIA devices of 16-bit floats PyTorch's grouped product runs where it is fast; elsewhere an own Triton kernel; on the CPU,
and for formats that neither takes, a plain loop over the groups, which reads `ends_G` on the host.

`Float8GroupedProducts` has the same products of 8-bit numbers (`kernels.float8`) with a scale for each row of both factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import kernels_for
from phalanx.kernels.float8 import ALIGNMENT, power_of_two_scale, product_reference, quantise
from phalanx.kernels.swiglu import swiglu, swiglu_backward
from phalanx.torch_compat import common as compat


@torch.library.custom_op("phalanx::grouped_product", mutates_args=())
def grouped_product(rows_RI: Tensor, matrices_GOI: Tensor, ends_G: Tensor, complete: bool) -> Tensor:
    """Return each row times the transposed matrix of its group, [R, O]; rows behind the last group give 0.

    rows: [R, I]. matrices: [G, O, I], of the same format and any strides. ends: int32 [G], one past the last row of each
    group, never falling. complete: whether every row belongs to a group, which saves a pass. Sums are formed in at least
    float32 and rounded once.
    """
    if _library_takes(rows_RI, matrices_GOI.shape[1]):
        out_RO = F.grouped_mm(rows_RI.contiguous(), matrices_GOI.transpose(1, 2), offs=ends_G)
        return out_RO if complete else _clear_rows_behind(out_RO, ends_G)
    kernel = kernels_for(rows_RI, "grouped_products_triton")
    if kernel is None or not _kernel_takes(rows_RI, matrices_GOI.shape[1]):
        return grouped_product_reference(rows_RI, matrices_GOI, ends_G)
    result: Tensor = kernel.run_grouped_product(rows_RI.contiguous(), matrices_GOI, ends_G, complete)
    return result


@grouped_product.register_fake
def _(rows_RI: Tensor, matrices_GOI: Tensor, ends_G: Tensor, complete: bool) -> Tensor:
    return rows_RI.new_empty((rows_RI.shape[0], matrices_GOI.shape[1]))


@torch.library.custom_op("phalanx::grouped_gradient", mutates_args=())
def grouped_gradient(grad_RO: Tensor, rows_RI: Tensor, ends_G: Tensor) -> Tensor:
    """Return the gradient of the matrices of `grouped_product`, [G, O, I]: 0 for a group without rows.

    grad: [R, O], of the result. rows and ends: as there.
    """
    if _library_takes(rows_RI, grad_RO.shape[1]):
        return F.grouped_mm(grad_RO.contiguous().t(), rows_RI.contiguous(), offs=ends_G)
    kernel = kernels_for(rows_RI, "grouped_products_triton")
    if kernel is None or not _kernel_takes(rows_RI, grad_RO.shape[1]):
        return grouped_gradient_reference(grad_RO, rows_RI, ends_G)
    result: Tensor = kernel.run_grouped_gradient(grad_RO.contiguous(), rows_RI.contiguous(), ends_G)
    return result


@grouped_gradient.register_fake
def _(grad_RO: Tensor, rows_RI: Tensor, ends_G: Tensor) -> Tensor:
    return grad_RO.new_empty((len(ends_G), grad_RO.shape[1], rows_RI.shape[1]))


GROUPED_PRODUCT = torch.ops.phalanx.grouped_product.default
"""The operation itself, as cost models see it."""
GROUPED_GRADIENT = torch.ops.phalanx.grouped_gradient.default


def _clear_rows_behind(out_RO: Tensor, ends_G: Tensor) -> Tensor:
    # PyTorch leaves rows behind the last group as they were in memory.
    row_R1 = torch.arange(len(out_RO), device=ends_G.device)[:, None]
    return out_RO.masked_fill_(row_R1 >= ends_G[-1], 0.0)


def _library_takes(rows_RI: Tensor, out_features: int) -> bool:
    """Return whether PyTorch's grouped product is to be used: on NVIDIA, in bfloat16, on rows of whole 16 bytes."""
    whole = rows_RI.shape[1] % 8 == 0 and out_features % 8 == 0 and rows_RI.numel() > 0
    return rows_RI.is_cuda and rows_RI.dtype == torch.bfloat16 and whole and not compat.is_rocm()


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


# --- products of 8-bit numbers ------------------------------------------------------------------------------------------


@torch.library.custom_op("phalanx::scaled_grouped_product", mutates_args=())
def scaled_grouped_product(
    a_RK: Tensor,
    b_GNK: Tensor,
    a_scale_R: Tensor,
    b_scale_GN: Tensor,
    ends_G: Tensor,
    dtype: torch.dtype,
    complete: bool,
    fast: bool,
) -> Tensor:
    """Return each row times the transposed matrix of its group, both in 8 bits, [R, N] in `dtype`.

    a_scale, b_scale: what rows are multiplied by, float32. ends, complete: as of `grouped_product`. fast: as of
    `kernels.float8.scaled_product`.
    """
    return scaled_grouped_product_reference(a_RK, b_GNK, a_scale_R, b_scale_GN, ends_G, dtype)


@scaled_grouped_product.register_fake
def _(a_RK: Tensor, b_GNK: Tensor, _a: Tensor, _b: Tensor, _ends: Tensor, dtype: torch.dtype, *_: object) -> Tensor:
    return a_RK.new_empty((a_RK.shape[0], b_GNK.shape[1]), dtype=dtype)


@scaled_grouped_product.register_kernel("cuda")
def scaled_product_of_library(
    a_RK: Tensor,
    b_GNK: Tensor,
    a_scale_R: Tensor,
    b_scale_GN: Tensor,
    ends_G: Tensor,
    dtype: torch.dtype,
    complete: bool,
    fast: bool,
) -> Tensor:
    """Do as `scaled_grouped_product` by PyTorch's product of CUDA and ROCm devices, for bfloat16 results where it has one.

    It asks for factors whose summed-up dim lies in a row, of multiples of 16 numbers, and for float32 scales by row.
    """
    if dtype != torch.bfloat16 or not a_RK.numel() or compat.grouped_float8_refusal(a_RK.device):
        return scaled_grouped_product_reference(a_RK, b_GNK, a_scale_R, b_scale_GN, ends_G, dtype)
    out_RN = torch._scaled_grouped_mm(
        a_RK, b_GNK.transpose(1, 2), a_scale_R, b_scale_GN, offs=ends_G, out_dtype=dtype, use_fast_accum=fast
    )
    return out_RN if complete else _clear_rows_behind(out_RN, ends_G)


def scaled_grouped_product_reference(
    a_RK: Tensor, b_GNK: Tensor, a_scale_R: Tensor, b_scale_GN: Tensor, ends_G: Tensor, dtype: torch.dtype
) -> Tensor:
    """Do as `scaled_grouped_product` in plain PyTorch, for every device and format."""
    out_RN = a_RK.new_zeros((a_RK.shape[0], b_GNK.shape[1]), dtype=dtype)
    start = 0
    for group, end in enumerate(ends_G.tolist()):
        scales = a_scale_R[start:end, None], b_scale_GN[group][:, None]
        out_RN[start:end] = product_reference(a_RK[start:end], b_GNK[group], *scales, dtype)
        start = end
    return out_RN


@torch.library.custom_op("phalanx::scaled_grouped_gradient", mutates_args=())
def scaled_grouped_gradient(
    grad_RO: Tensor, rows_RI: Tensor, grad_scale_GO: Tensor, row_scale_GI: Tensor, ends_G: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the matrices of `scaled_grouped_product`, [G, O, I] in `dtype`: 0 for a group without rows.

    grad, rows: in 8 bits, 0 behind the last group. grad_scale, row_scale: what columns are multiplied by in each group.
    """
    return scaled_grouped_gradient_reference(grad_RO, rows_RI, grad_scale_GO, row_scale_GI, ends_G, dtype)


@scaled_grouped_gradient.register_fake
def _(
    grad_RO: Tensor, rows_RI: Tensor, grad_scale_GO: Tensor, row_scale_GI: Tensor, ends_G: Tensor, dtype: torch.dtype
) -> Tensor:
    return grad_RO.new_empty((len(ends_G), grad_RO.shape[1], rows_RI.shape[1]), dtype=dtype)


@scaled_grouped_gradient.register_kernel("cuda")
def scaled_gradient_of_library(
    grad_RO: Tensor, rows_RI: Tensor, grad_scale_GO: Tensor, row_scale_GI: Tensor, ends_G: Tensor, dtype: torch.dtype
) -> Tensor:
    """Do as `scaled_grouped_gradient` by PyTorch's product of CUDA and ROCm devices, for bfloat16 where it has one."""
    if dtype != torch.bfloat16 or compat.grouped_float8_refusal(grad_RO.device):
        return scaled_grouped_gradient_reference(grad_RO, rows_RI, grad_scale_GO, row_scale_GI, ends_G, dtype)
    # What is summed up must begin at multiples of 16 bytes in each group, and be something.
    place_R, padded_ends_G, count = pad_groups(ends_G, len(rows_RI))
    factors = []
    for x_RF in (grad_RO, rows_RI):
        # Few operations know 8-bit floating point; zero is zero in any format.
        padded_FP = x_RF.new_zeros((x_RF.shape[1], count), dtype=torch.uint8)
        factors.append(padded_FP.index_copy_(1, place_R, x_RF.view(torch.uint8).t()).view(x_RF.dtype))
    scales = grad_scale_GO.flatten(), row_scale_GI.flatten()
    return torch._scaled_grouped_mm(factors[0], factors[1].t(), *scales, offs=padded_ends_G, out_dtype=dtype)


def scaled_grouped_gradient_reference(
    grad_RO: Tensor, rows_RI: Tensor, grad_scale_GO: Tensor, row_scale_GI: Tensor, ends_G: Tensor, dtype: torch.dtype
) -> Tensor:
    """Do as `scaled_grouped_gradient` in plain PyTorch, for every device and format."""
    out_GOI = grad_RO.new_zeros((len(ends_G), grad_RO.shape[1], rows_RI.shape[1]), dtype=dtype)
    start = 0
    for group, end in enumerate(ends_G.tolist()):
        scales = grad_scale_GO[group][:, None], row_scale_GI[group][:, None]
        out_GOI[group] = product_reference(grad_RO[start:end].t(), rows_RI[start:end].t(), *scales, dtype)
        start = end
    return out_GOI


def pad_groups(ends_G: Tensor, rows: int) -> tuple[Tensor, Tensor, int]:
    """Return where rows stand once groups begin at multiples of `ALIGNMENT`, the groups' ends there, int32, and a length.

    Every group gets at least one padded length: sums over no rows are not asked of a library. The length is enough for any
    sizes of groups, so that the host does not wait to learn them. rows: all there are; those behind the last group follow.
    """
    sizes_G = ends_G.diff(prepend=ends_G.new_zeros(1))
    padded_G = (sizes_G.clamp(min=1) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    padded_ends_G = padded_G.cumsum(0)
    shift_G = padded_ends_G - padded_G - (ends_G - sizes_G)
    place_R = torch.arange(rows, device=ends_G.device) + shift_G[_group_of_rows(ends_G, rows)]
    count = -(-(rows + ALIGNMENT * len(ends_G)) // ALIGNMENT) * ALIGNMENT
    return place_R, padded_ends_G.int(), count


def _group_of_rows(ends_G: Tensor, rows: int) -> Tensor:
    """Return the group of each row; the last one for rows behind it."""
    row_R = torch.arange(rows, device=ends_G.device, dtype=ends_G.dtype)
    return torch.searchsorted(ends_G, row_R, right=True).clamp(max=len(ends_G) - 1)


def quantise_groups(x_RI: Tensor, ends_G: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows in 8 bits with a scale for each column of each group, float32 [G, I]; rows behind the last group as 0."""
    group_R = _group_of_rows(ends_G, len(x_RI))
    behind_R1 = (torch.arange(len(x_RI), device=ends_G.device) >= ends_G[-1])[:, None]
    # Exact in bfloat16 all the way: scales are powers of two.
    narrow_RI = x_RI.bfloat16().masked_fill(behind_R1, 0.0)
    amax_GI = narrow_RI.new_zeros((len(ends_G), x_RI.shape[1]))
    amax_GI = amax_GI.scatter_reduce(0, group_R[:, None].expand_as(narrow_RI), narrow_RI.abs(), "amax")
    scale_GI = power_of_two_scale(amax_GI, dtype)
    return (narrow_RI / scale_GI.bfloat16()[group_R]).to(dtype), scale_GI


def quantise_rows(x_RI: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows in 8 bits with a scale for each row, float32 [R]."""
    scale_R = power_of_two_scale(x_RI.bfloat16().abs().amax(1), dtype)
    return quantise(x_RI, scale_R, scale_R, dtype, True, False)[0], scale_R


def _quantise_matrices(x_GOI: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return matrices in 8 bits with a scale for each row, float32 [G, O]."""
    q, scale = quantise_rows(x_GOI.flatten(0, 1), dtype)
    return q.view(x_GOI.shape), scale.view(x_GOI.shape[:2])


# --- with gradients -----------------------------------------------------------------------------------------------------


class GroupedProducts:
    """The three products of grouped layers, in the format of their rows."""

    def product(self, rows_RI: Tensor, matrices_GOI: Tensor, ends_G: Tensor, complete: bool) -> Tensor:
        """Return each row times the transposed matrix of its group; arguments and result as of `grouped_product`."""
        out_RO: Tensor = grouped_product(rows_RI, matrices_GOI, ends_G, complete)
        return out_RO

    def input_gradient(self, grad_RO: Tensor, matrices_GOI: Tensor, ends_G: Tensor, complete: bool) -> Tensor:
        """Return the gradient of the rows of `product`, [R, I]. grad: of its result."""
        grad_RI: Tensor = grouped_product(grad_RO, matrices_GOI.transpose(1, 2), ends_G, complete)
        return grad_RI

    def matrix_gradient(self, grad_RO: Tensor, rows_RI: Tensor, ends_G: Tensor) -> Tensor:
        """Return the gradient of the matrices of `product`, [G, O, I]; 0 for a group without rows."""
        grad_GOI: Tensor = grouped_gradient(grad_RO, rows_RI, ends_G)
        return grad_GOI


IN_FORMAT_OF_ROWS = GroupedProducts()


@dataclass(frozen=True)
class Float8GroupedProducts(GroupedProducts):
    """The same of 8-bit numbers. What is summed up for one number of a result shares a scale, in each of the three."""

    format: torch.dtype
    """Of rows and matrices."""
    gradient_format: torch.dtype

    def product(self, rows_RI: Tensor, matrices_GOI: Tensor, ends_G: Tensor, complete: bool) -> Tensor:
        """See `GroupedProducts`."""
        rows, row_scale = quantise_rows(rows_RI, self.format)
        matrices, scale = _quantise_matrices(matrices_GOI, self.format)
        out_RO: Tensor = scaled_grouped_product(rows, matrices, row_scale, scale, ends_G, rows_RI.dtype, complete, True)
        return out_RO

    def input_gradient(self, grad_RO: Tensor, matrices_GOI: Tensor, ends_G: Tensor, complete: bool) -> Tensor:
        """See `GroupedProducts`."""
        grad, grad_scale = quantise_rows(grad_RO, self.gradient_format)
        matrices, scale = _quantise_matrices(matrices_GOI.transpose(1, 2).contiguous(), self.format)
        grad_RI: Tensor = scaled_grouped_product(
            grad, matrices, grad_scale, scale, ends_G, grad_RO.dtype, complete, False
        )
        return grad_RI

    def matrix_gradient(self, grad_RO: Tensor, rows_RI: Tensor, ends_G: Tensor) -> Tensor:
        """See `GroupedProducts`."""
        grad, grad_scale = quantise_groups(grad_RO, ends_G, self.gradient_format)
        rows, row_scale = quantise_groups(rows_RI, ends_G, self.format)
        grad_GOI: Tensor = scaled_grouped_gradient(grad, rows, grad_scale, row_scale, ends_G, grad_RO.dtype)
        return grad_GOI


class GroupedLinear(torch.autograd.Function):
    """`GroupedProducts.product` with its gradients; `apply(rows_RI, matrices_GOI, ends_G, complete, products)`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RI: Tensor,
        matrices_GOI: Tensor,
        ends_G: Tensor,
        complete: bool,
        products: GroupedProducts = IN_FORMAT_OF_ROWS,
    ) -> Tensor:
        """Return [R, O]."""
        ctx.save_for_backward(rows_RI, matrices_GOI, ends_G)
        ctx.complete, ctx.products = complete, products
        return products.product(rows_RI, matrices_GOI, ends_G, complete)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """Return the gradients of rows and matrices, each where it is asked for."""
        rows_RI, matrices_GOI, ends_G = ctx.saved_tensors
        grad_rows = grad_matrices = None
        # A split backward pass asks for one of the two at a time.
        if ctx.needs_input_grad[0]:
            grad_rows = ctx.products.input_gradient(grad_RO, matrices_GOI, ends_G, ctx.complete)
        if ctx.needs_input_grad[1]:
            grad_matrices = ctx.products.matrix_gradient(grad_RO, rows_RI, ends_G)
        return grad_rows, grad_matrices, None, None, None


class GatedGroupedLinear(torch.autograd.Function):
    """`GroupedProducts.product` of swiglu(gate_up), which is formed again in the backward pass instead of being kept.

    `apply(gate_up_R2F, matrices_GOF, ends_G, block, complete, products)`; see `kernels.swiglu` for `block`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate_up_RF: Tensor,
        matrices_GOF: Tensor,
        ends_G: Tensor,
        block: int,
        complete: bool,
        products: GroupedProducts = IN_FORMAT_OF_ROWS,
    ) -> Tensor:
        """Return [R, O]."""
        ctx.save_for_backward(gate_up_RF, matrices_GOF, ends_G)
        ctx.block, ctx.complete, ctx.products = block, complete, products
        return products.product(swiglu(gate_up_RF, block), matrices_GOF, ends_G, complete)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        """Return the gradients of gate_up and of the matrices, the latter where they are trained."""
        gate_up_RF, matrices_GOF, ends_G = ctx.saved_tensors
        grad_hidden = ctx.products.input_gradient(grad_RO, matrices_GOF, ends_G, ctx.complete)
        grad_gate_up, hidden_RF = swiglu_backward(grad_hidden, gate_up_RF, ctx.block)
        needs_matrices = ctx.needs_input_grad[1]
        grad_matrices = ctx.products.matrix_gradient(grad_RO, hidden_RF, ends_G) if needs_matrices else None
        return grad_gate_up, grad_matrices, None, None, None, None
