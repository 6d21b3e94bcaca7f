"""Linear layers whose products are those of 8-bit floating-point numbers, forward and backward.

A recipe says which numbers share a scale. All scales follow from the numbers of the moment (dynamic scaling). The product
of the forward pass, the gradient of the input and that of the weight are each formed from 8-bit operands, added up in
float32 and rounded to the format of the activations. Knows names of groups of ranks, and of meshes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

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
    transpose_quantised,
)
from phalanx.kernels.float8_swiglu import quantise_swiglu_gradient, swiglu_gradient_amax
from phalanx.kernels.grouped_products import IN_FORMAT_OF_ROWS, Float8GroupedProducts, GroupedProducts
from phalanx.kernels.swiglu import swiglu
from phalanx.torch_compat import common as compat

Scaling = Literal["tensor", "row", "block", "mx"]
BLOCKS = {"block": SCALED_TOGETHER["fp8-block"], "mx": SCALED_TOGETHER["mxfp8"]}
"""Numbers along one dim that share a scale."""
SMALLEST = 16
"""Features below which, or of which no multiple, a matrix stays in the format of the activations."""


def takes_rows(scaling: Scaling) -> bool:
    """Return whether rows of a weight in 8 bits, which ranks may quantise one by one, say all of it."""
    return scaling != "mx"


class Operand(NamedTuple):
    """A matrix in 8 bits as one side of a product, or nothing."""

    q: Tensor
    scale: Tensor


class HeldWeight(NamedTuple):
    """A weight in 8 bits, made once an optimizer step; each backward pass makes its transposed of it."""

    rows: Operand
    column_scale: Tensor
    """Scales of the transposed."""


class SequenceExchange(Protocol):
    """Ranks over which positions of activations [B, S, ...] are sharded between layers, and what they exchange in 8 bits."""

    @property
    def group(self) -> str:
        """Name of their group."""

    def gather_multiply(
        self, x_BsI: Tensor, x_scale: Tensor, weight: Operand, dtype: torch.dtype, *, fast: bool
    ) -> tuple[Tensor, Tensor]:
        """Return x W^T of all positions, [B, S, out] in `dtype`, and all positions of x, [B, S, in] in 8 bits.

        x_scale: float32 [1], of all ranks' x. fast: see `kernels.float8.scaled_product`.
        """

    def multiply_scatter(
        self, x_BSI: Tensor, x_scale: Tensor, weight: Operand, dtype: torch.dtype, *, fast: bool, beside: Beside | None
    ) -> tuple[Tensor, Tensor]:
        """Return x W^T summed over ranks, [B, S/ranks, out] in `dtype`, and the product `beside`, or something empty."""


class Beside(NamedTuple):
    """Two operands whose product may be formed while results travel."""

    a: Operand
    b: Operand
    dtype: torch.dtype
    """Of the result."""


LinearProduct = Callable[[Tensor, Tensor, Tensor | None, HeldWeight | None], Tensor]
"""x [..., in], weight [out, in], bias [out] or None in the format of x, the weight in 8 bits if it is held so
-> x W^T + bias [..., out] in the format of x."""
Weight = tuple[Tensor, HeldWeight | None]
GatedPair = Callable[[Tensor, Weight, Weight, int], Tensor]
"""x [..., in], weights [2 hidden, in] and [out, hidden], block of `kernels.swiglu` -> swiglu(x G^T) D^T, [..., out]."""


@dataclass(frozen=True)
class Float8Recipe:
    """Which numbers of a matrix share a scale, and the format of gradients."""

    scaling: Scaling
    """tensor: all; row: those that are summed up for one number of the result; block: 128 of these, and
    square blocks of weights and of what gradients of weights sum over; mx: 32 of these, of a weight too."""
    wide_gradients: bool = False
    """Whether gradients have 5 bits of exponent and 2 digits (e5m2), instead of 4 and 3 (e4m3)."""
    experts: bool = False
    """Whether experts multiply in 8 bits too, with a scale for what is summed up for one number of a result."""

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

    def of_experts(self, d_model: int, d_ff: int, device: torch.device) -> GroupedProducts:
        """Return the products of experts of this width and hidden width on `device`."""
        if not self.experts or d_model % SMALLEST or d_ff % SMALLEST:
            return IN_FORMAT_OF_ROWS
        e4m3, e5m2 = compat.float8_formats(device)
        return Float8GroupedProducts(e4m3, e5m2 if self.wide_gradients else e4m3)


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
    gathers: SequenceExchange | None = None
    """Ranks that have each but some positions of the input, of which the product reads all."""
    scatters: SequenceExchange | None = None
    """Ranks that have each but some positions of the result, summed over the ranks."""

    def over_sequence(self, gathers: SequenceExchange | None, scatters: SequenceExchange | None) -> Float8Product:
        """Return the product that exchanges positions itself, in 8 bits, where that changes no number."""
        # A scale for what is summed up over positions would be another one for each rank.
        return replace(self, gathers=gathers, scatters=scatters) if self.scaling == "tensor" else self

    def __call__(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, held: HeldWeight | None = None) -> Tensor:
        """Return x W^T + b, [..., O]. x: [..., I]. held: the weight in 8 bits, if others see to that."""
        y: Tensor = _Product.apply(x, weight_OI, self, *flatten_held(held))
        return y if bias_O is None else y + bias_O

    def gated_pair(self, second: LinearProduct | None) -> GatedPair | None:
        """Return a function of this product, SwiGLU and the product `second` together; None where that gains nothing."""
        if self.scaling == "tensor" and isinstance(second, Float8Product):
            return partial(_apply_pair, self, second)
        return None

    def quantise_input(self, x_NI: Tensor, *, columns: bool) -> tuple[Operand, Operand]:
        """Return an input as operands of the forward pass and, if wanted, of the gradient of the weight."""
        if self.scaling == "block":
            # Products with square blocks on one side take half the time of those without.
            rows = quantise_both(x_NI, "block", self.format, columns=False)[0]
            return rows, quantise_both(x_NI, "block", self.format, rows=False, columns=columns, square=True)[1]
        group = _group_of(self.gathers)
        return quantise_both(
            x_NI, self.scaling, self.format, row_group=group, column_group=self.input_group, columns=columns
        )

    def multiply_input(self, x: Tensor, weight: Operand, *, columns: bool) -> tuple[Tensor, Tensor, Operand]:
        """Return x W^T, the scale of x [..., I], and x as the operand of the gradient of the weight, if wanted."""
        rows, turned = self.quantise_input(x.reshape(-1, x.shape[-1]), columns=columns and self.gathers is None)
        q, scale = rows.q.view(x.shape), rows.scale
        if self.gathers is not None:
            y, whole = self.gathers.gather_multiply(q, scale, weight, x.dtype, fast=True)
            return y, scale, _turn(whole, scale, wanted=columns)
        if self.scatters is not None:
            return self.scatters.multiply_scatter(q, scale, weight, x.dtype, fast=True, beside=None)[0], scale, turned
        y = multiply(rows, weight, self.scaling, x.dtype, fast=True)
        return y.view(*x.shape[:-1], y.shape[-1]), scale, turned

    def multiply_gradient(self, grad: Tensor, kept: Sequence[Tensor], *, columns: bool) -> tuple[Tensor, Operand]:
        """Return the gradient of the input, and that of the result as the operand of the gradient of the weight, if wanted.

        grad: [..., O]. kept: see `turn_weight`. Not for inputs whose positions were gathered.
        """
        own = columns and self.scatters is None
        rows, turned = self.quantise_gradient(grad.reshape(-1, grad.shape[-1]), columns=own)
        if self.scatters is None:
            return self.gradients(rows, kept, grad.shape, grad.dtype, None)[0], turned
        q, weight = rows.q.view(grad.shape), self.turn_weight(kept, after=rows.scale)
        grad_x, whole = self.scatters.gather_multiply(q, rows.scale, weight, grad.dtype, fast=False)
        return grad_x, _turn(whole, rows.scale, wanted=columns)

    def gradients(
        self, rows: Operand, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, beside: Beside | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of the input in `dtype`, and the product `beside`.

        rows: gradient of the result, of this shape. kept: see `turn_weight`.
        """
        weight = self.turn_weight(kept, after=rows.scale)
        if self.gathers is not None:
            q = rows.q.view(shape)
            return self.gathers.multiply_scatter(q, rows.scale, weight, dtype, fast=False, beside=beside)
        grad_x = multiply(rows, weight, self.scaling, dtype, fast=False)
        return grad_x.view(*shape[:-1], grad_x.shape[-1]), self.weight_gradient(beside)

    def weight_gradient(self, beside: Beside | None) -> Tensor | None:
        """Return the product of two operands, where there are any."""
        return None if beside is None else multiply(beside.a, beside.b, self.scaling, beside.dtype, fast=False)

    def hold_weight(self, weight_OI: Tensor) -> HeldWeight:
        """Return a weight in 8 bits, of recipes in which it has more than one scale."""
        rows, _ = self._weight_operands(weight_OI, columns=False)
        if self.scaling == "row":
            return HeldWeight(rows, self._column_scale(weight_OI))
        return HeldWeight(rows, rows.scale.t().clone())

    def forward_operand(self, weight_OI: Tensor, held: Sequence[Tensor]) -> tuple[Operand, Sequence[Tensor]]:
        """Return a weight as an operand of the forward pass, and the tensors that `turn_weight` wants to have.

        held: those of a `HeldWeight`, in the order of `flatten_held`; none where the weight is to be quantised now.
        """
        if held:
            q, scale, _ = held
            return Operand(q, scale), held
        rows, _ = self._weight_operands(weight_OI, columns=False)
        return rows, (weight_OI, rows.scale)

    def turn_weight(self, kept: Sequence[Tensor], *, after: Tensor) -> Operand:
        """Return the transposed of a weight, for the gradient of the input.

        kept: the weight in 8 bits, its scales and those of the transposed; or the weight as it came and the scales of the
        forward pass. after: see `kernels.float8.quantise`.
        """
        if len(kept) == 3:
            q, scale, column_scale = kept
            scales = (scale, column_scale) if self.scaling == "row" else (None, None)
            return Operand(transpose_quantised(q, *scales, after), column_scale)
        weight, scale = kept
        if self.scaling == "tensor":
            return Operand(quantise(weight, scale, scale, self.format, False, True, after)[1], scale)
        if self.scaling == "row":
            # Made of 8 bits, as ranks make it that have gathered nothing else.
            q, _ = quantise(weight, scale, scale, self.format, True, False, after)
            column_scale = self._column_scale(weight)
            return Operand(transpose_quantised(q, scale, column_scale, after), column_scale)
        return self._weight_operands(weight, rows=False, after=after)[1]

    def _column_scale(self, weight_OI: Tensor) -> Tensor:
        """Return the scales of the columns of a weight that has one a row."""
        return power_of_two_scale(_agree(row_column_amax(weight_OI)[1], self.output_group), self.format)

    def _weight_operands(
        self, weight_OI: Tensor, *, rows: bool = True, columns: bool = True, after: Tensor | None = None
    ) -> tuple[Operand, Operand]:
        groups = {"row_group": self.output_group, "column_group": self.input_group}
        return quantise_both(
            weight_OI, self.scaling, self.format, **groups, rows=rows, columns=columns, square=True, after=after
        )

    def quantise_gradient(self, grad_NO: Tensor, *, rows: bool = True, columns: bool) -> tuple[Operand, Operand]:
        """Return the gradient of a result as operands of the gradients of input and weight, those that are wanted."""
        return quantise_both(
            grad_NO,
            self.scaling,
            self.gradient_format,
            row_group=_group_of(self.scatters),
            column_group=self.output_group,
            rows=rows,
            columns=columns,
        )


def _group_of(exchange: SequenceExchange | None) -> str:
    return "" if exchange is None else exchange.group


def _turn(q: Tensor, scale: Tensor, *, wanted: bool) -> Operand:
    """Return the transposed of numbers in 8 bits with one scale, [..., I] -> [I, ...]; something empty where not wanted."""
    flat = q.flatten(0, -2)
    return Operand(transpose_quantised(flat, None, None) if wanted else flat.new_empty(0), scale)


def _apply_pair(
    first: Float8Product, second: Float8Product, x: Tensor, gate_up: Weight, down: Weight, block: int
) -> Tensor:
    held = *flatten_held(gate_up[1]), *flatten_held(down[1])
    result: Tensor = _GatedPair.apply(x, gate_up[0], down[0], block, first, second, *held)
    return result


def flatten_held(held: HeldWeight | None) -> tuple[Tensor, ...]:
    """Return the numbers, scales and scales of the transposed of a weight in 8 bits, if there is one."""
    # Compilers see tensors that are arguments of their own.
    return () if held is None else (*held.rows, held.column_scale)


def quantise_both(
    x_NI: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    *,
    row_group: str = "",
    column_group: str = "",
    rows: bool = True,
    columns: bool = True,
    square: bool = False,
    after: Tensor | None = None,
) -> tuple[Operand, Operand]:
    """Return a matrix and its transposed as operands: of products that sum over its columns, and over its rows.

    row_group, column_group: ranks that share out its rows and its columns. rows, columns: whether the matrix itself and the
    transposed are wanted. square: whether blocks are, in block-wise scaling. after: see `quantise`.
    """
    if scaling in BLOCKS:
        q, scale, q_t, column_scale = quantise_blocks(
            x_NI, dtype, BLOCKS[scaling], square and scaling == "block", rows, columns, after
        )
        return Operand(q, scale), Operand(q_t, column_scale)
    if scaling == "tensor":
        # Row by row first: a compiler joins that to the kernel that makes the rows.
        amax = _agree(_agree(x_NI.detach().abs().amax(-1).amax().view(1), row_group), column_group)
        scale = column_scale = power_of_two_scale(amax, dtype)
    else:
        of_rows, of_columns = row_column_amax(x_NI)
        scale = power_of_two_scale(_agree(of_rows, column_group) if rows else of_rows, dtype)
        column_scale = power_of_two_scale(_agree(of_columns, row_group) if columns else of_columns, dtype)
    q, q_t = quantise(x_NI, scale, column_scale, dtype, rows, columns, after)
    return Operand(q, scale), Operand(q_t, column_scale)


def _agree(amax: Tensor, group: str) -> Tensor:
    """Return the largest of what the ranks of a group have."""
    return compat.all_reduce(amax, group, "max") if group else amax


def multiply(a: Operand, b: Operand, scaling: Scaling, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Return the product of a and the transposed b in `dtype`, summed over the columns of both.

    fast: see `kernels.float8.scaled_product`.
    """
    if scaling in BLOCKS:
        product: Tensor = block_product(a.q, b.q, a.scale, b.scale, dtype, BLOCKS[scaling])
    else:
        product = scaled_product(a.q, b.q, a.scale, b.scale, dtype, fast)
    return product


class _Product(torch.autograd.Function):
    """x W^T. Keeps the transposed input in 8 bits, and what `Float8Product.turn_weight` wants of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, product: Float8Product, *held: Tensor) -> Tensor:
        weight, kept = product.forward_operand(weight_OI, held)
        y, _, columns = product.multiply_input(x, weight, columns=ctx.needs_input_grad[1])
        ctx.save_for_backward(*columns, *kept)
        ctx.product, ctx.dtype, ctx.others = product, weight_OI.dtype, 1 + len(held)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q_x, x_scale, *kept = ctx.saved_tensors
        product: Float8Product = ctx.product
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        # Tensor cores give products by rows in 16 bits alone.
        wide = grad.dtype if product.scaling == "row" else ctx.dtype
        grad_x = grad_weight = None
        if product.scatters is not None:
            grad_x, columns = product.multiply_gradient(grad, kept, columns=needs_weight)
        else:
            flat = grad.reshape(-1, grad.shape[-1])
            rows, columns = product.quantise_gradient(flat, rows=needs_x, columns=needs_weight)
        beside = Beside(columns, Operand(q_x, x_scale), wide) if needs_weight else None
        if needs_x and product.scatters is None:
            grad_x, grad_weight = product.gradients(rows, kept, grad.shape, grad.dtype, beside)
        else:
            grad_weight = product.weight_gradient(beside)
        return grad_x, None if grad_weight is None else grad_weight.to(ctx.dtype), *[None] * ctx.others


class _GatedPair(torch.autograd.Function):
    """swiglu(x G^T) D^T with one scale a tensor. The gradient between the two products is quantised as it is formed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
        block: int,
        first: Float8Product,
        second: Float8Product,
        *held: Tensor,
    ) -> Tensor:
        half = len(held) // 2
        first_rows, first_kept = first.forward_operand(gate_up_weight, held[:half])
        gate_up, _, x_columns = first.multiply_input(x, first_rows, columns=ctx.needs_input_grad[1])
        second_rows, second_kept = second.forward_operand(down_weight, held[half:])
        y, hidden_scale, _ = second.multiply_input(swiglu(gate_up, block), second_rows, columns=False)
        ctx.save_for_backward(*x_columns, gate_up, hidden_scale, *first_kept, *second_kept)
        ctx.block, ctx.first, ctx.second, ctx.of_first = block, first, second, len(first_kept)
        ctx.dtypes, ctx.others = (gate_up_weight.dtype, down_weight.dtype), 3 + len(held)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q_x, x_scale, gate_up, hidden_scale, *kept = ctx.saved_tensors
        first: Float8Product = ctx.first
        needs_x, needs_first, needs_second, *_ = ctx.needs_input_grad
        grad_hidden, columns = ctx.second.multiply_gradient(grad, kept[ctx.of_first :], columns=needs_second)
        grad_NF, gate_up_NF = grad_hidden.flatten(0, -2), gate_up.flatten(0, -2)
        amax = _agree(swiglu_gradient_amax(grad_NF, gate_up_NF, ctx.block), first.output_group)
        scale = power_of_two_scale(amax, first.gradient_format)
        formats = first.gradient_format, first.format
        q, q_t, hidden_t = quantise_swiglu_gradient(grad_NF, gate_up_NF, ctx.block, scale, hidden_scale, *formats)
        second = Beside(columns, Operand(hidden_t, hidden_scale), ctx.dtypes[1]) if needs_second else None
        grad_second = ctx.second.weight_gradient(second)
        beside = Beside(Operand(q_t, scale), Operand(q_x, x_scale), ctx.dtypes[0]) if needs_first else None
        if needs_x:
            shape, rows = gate_up.shape, Operand(q, scale)
            grad_x, grad_first = first.gradients(rows, kept[: ctx.of_first], shape, grad.dtype, beside)
        else:
            grad_x, grad_first = None, first.weight_gradient(beside)
        return grad_x, grad_first, grad_second, *[None] * ctx.others
