"""Linear layers whose products are those of 8-bit floating-point numbers, forward and backward.

A recipe says which numbers share a scale. All scales follow from the numbers of the moment (dynamic scaling). The product
of the forward pass, the gradient of the input and that of the weight are each formed from 8-bit operands, added up in
float32 and rounded to the format of the activations. Knows names of groups of ranks, and of meshes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from phalanx.config.schema import SCALED_TOGETHER
from phalanx.kernels.float8 import (
    block_product,
    power_of_two_scale,
    quantise,
    quantise_blocks,
    row_column_amax,
    scaled_product,
)
from phalanx.torch_compat import common as compat

Scaling = Literal["tensor", "row", "block", "mx"]
BLOCKS = {"block": SCALED_TOGETHER["fp8-block"], "mx": SCALED_TOGETHER["mxfp8"]}
"""Numbers along one dim that share a scale."""
SMALLEST = 16
"""Features below which, or of which no multiple, a matrix stays in the format of the activations."""


@dataclass(frozen=True)
class Float8Recipe:
    """Which numbers of a matrix share a scale, and the format of gradients."""

    scaling: Scaling
    """tensor: all; row: those that are summed up for one number of the result; block: 128 of these, and
    square blocks of a weight; mx: 32 of these, of a weight too."""
    wide_gradients: bool = False
    """Whether gradients have 5 bits of exponent and 2 digits (e5m2), instead of 4 and 3 (e4m3)."""

    def of_layer(
        self, in_features: int, out_features: int, input_group: str, output_group: str, device: torch.device
    ) -> Float8Product | None:
        """Return the product of a layer of these features on `device`; None where the layer stays in 16 bits.

        input_group, output_group: names of the groups of ranks that share out its input and its output features; "" where
        each rank has them all.
        """
        if in_features % SMALLEST or out_features % SMALLEST:
            return None
        e4m3, e5m2 = compat.float8_formats(device)
        return Float8Product(self.scaling, e4m3, e5m2 if self.wide_gradients else e4m3, input_group, output_group)


@dataclass(frozen=True)
class Float8Product:
    """The product of linear layers by a recipe: equal layers have equal products, which compiled programs ask for."""

    scaling: Scaling
    format: torch.dtype
    """Of inputs and weights."""
    gradient_format: torch.dtype
    input_group: str = ""
    """Ranks that share out the input features, by the name of their group."""
    output_group: str = ""
    """Ranks that share out the output features."""

    def __call__(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + b, [..., O]. x: [..., I]."""
        y: Tensor = _Product.apply(
            x, weight_OI, self.scaling, self.format, self.gradient_format, self.input_group, self.output_group
        )
        return y if bias_O is None else y + bias_O


class Operand(NamedTuple):
    """A matrix in 8 bits as one side of a product, or nothing."""

    q: Tensor
    scale: Tensor


def quantise_both(
    x_NI: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    *,
    row_group: str = "",
    column_group: str = "",
    rows: bool = True,
    columns: bool = True,
    weight: bool = False,
) -> tuple[Operand, Operand]:
    """Return a matrix and its transposed as operands: of products that sum over its columns, and over its rows.

    row_group, column_group: ranks that share out its rows and its columns. rows, columns: whether the matrix itself and the
    transposed are wanted. weight: whether it is one, which in block-wise scaling has square blocks.
    """
    if scaling in BLOCKS:
        square = weight and scaling == "block"
        q, scale, q_t, column_scale = quantise_blocks(x_NI, dtype, BLOCKS[scaling], square, rows, columns)
        return Operand(q, scale), Operand(q_t, column_scale)
    if scaling == "tensor":
        # Row by row first: a compiler joins that to the kernel that makes the rows.
        amax = _agree(_agree(x_NI.detach().abs().amax(-1).amax().view(1), row_group), column_group)
        scale = column_scale = power_of_two_scale(amax, dtype)
    else:
        of_rows, of_columns = row_column_amax(x_NI)
        scale = power_of_two_scale(_agree(of_rows, column_group) if rows else of_rows, dtype)
        column_scale = power_of_two_scale(_agree(of_columns, row_group) if columns else of_columns, dtype)
    q, q_t = quantise(x_NI, scale, column_scale, dtype, rows, columns)
    return Operand(q, scale), Operand(q_t, column_scale)


def _agree(amax: Tensor, group: str) -> Tensor:
    """Return the largest of what the ranks of a group have."""
    return compat.all_reduce(amax, group, "max") if group else amax


def multiply(a: Operand, b: Operand, scaling: Scaling, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Return the product of a and the transposed b in `dtype`, summed over the columns of both."""
    if scaling in BLOCKS:
        product: Tensor = block_product(a.q, b.q, a.scale, b.scale, dtype, BLOCKS[scaling])
    else:
        product = scaled_product(a.q, b.q, a.scale, b.scale, dtype, fast)
    return product


class _Product(torch.autograd.Function):
    """x W^T. Keeps the transposed input in 8 bits, and the weight as it came, which others may gather anew."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        scaling: Scaling,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        input_group: str,
        output_group: str,
    ) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1])
        rows, columns = quantise_both(x_NI, scaling, dtype, column_group=input_group, columns=ctx.needs_input_grad[1])
        weight, _ = quantise_both(
            weight_OI, scaling, dtype, row_group=output_group, column_group=input_group, columns=False, weight=True
        )
        ctx.save_for_backward(columns.q, columns.scale, weight_OI, weight.scale)
        ctx.recipe = scaling, dtype, gradient_dtype, input_group, output_group
        ctx.like = x.dtype
        product = multiply(rows, weight, scaling, x.dtype, fast=True)
        return product.view(*x.shape[:-1], weight_OI.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q_IN, x_scale, weight_OI, weight_scale = ctx.saved_tensors
        scaling, dtype, gradient_dtype, input_group, output_group = ctx.recipe
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_NO = grad.reshape(-1, grad.shape[-1])
        rows, columns = quantise_both(
            grad_NO, scaling, gradient_dtype, column_group=output_group, rows=needs_x, columns=needs_weight
        )
        grad_x = grad_weight = None
        if needs_x:
            if scaling == "tensor":
                q_IO = quantise(weight_OI, weight_scale, weight_scale, dtype, False, True)[1]
                turned = Operand(q_IO, weight_scale)
            else:
                groups = {"row_group": output_group, "column_group": input_group}
                turned = quantise_both(weight_OI, scaling, dtype, rows=False, weight=True, **groups)[1]
            grad_x = multiply(rows, turned, scaling, ctx.like, fast=False)
            grad_x = grad_x.view(*grad.shape[:-1], weight_OI.shape[1])
        if needs_weight:
            grad_weight = multiply(columns, Operand(q_IN, x_scale), scaling, weight_OI.dtype, fast=False)
        return grad_x, grad_weight, *[None] * 5
