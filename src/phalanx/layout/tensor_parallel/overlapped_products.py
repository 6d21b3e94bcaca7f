"""Products of split matrices that run beside their exchange, part by part (Wang et al. 2023, "Overlap communication with
dependent computation via decomposition"): a gather and a product, a product and a reduce-scatter, and both their gradients.

The sequence [B, S, ...] is sharded over the ranks of a group. Each rank begins with what needs nobody: the product of its
own part of the sequence where parts are gathered, the products of its peers' parts where results are summed. Parts travel by
copy engines meanwhile (`peer_exchange`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.copy_stream import Copies
from phalanx.kernels.float8 import scaled_product, scaled_product_into
from phalanx.kernels.parts_sum import add_weight_gradient
from phalanx.kernels.swiglu import swiglu, swiglu_backward
from phalanx.layout.mesh import Axis
from phalanx.layout.tensor_parallel.peer_exchange import PeerExchange, exchange_of


def gather_multiply(x_BsI: Tensor, weight_OI: Tensor, tp: Axis, gradient_sum: Tensor | None = None) -> Tensor:
    """Return x W^T of all ranks' positions: [B, S/tp, in] -> [B, S, out]; the backward pass sums over ranks and scatters.

    gradient_sum: see `nn.layers.Linear`.
    """
    y: Tensor = _GatherMultiply.apply(x_BsI, weight_OI, tp.group_name, gradient_sum)
    return y


def multiply_scatter(
    x_BSI: Tensor, weight_OI: Tensor, tp: Axis, block: int = 0, gradient_sum: Tensor | None = None
) -> Tensor:
    """Return x W^T summed over ranks, of this rank's positions: [B, S, in/tp] -> [B, S/tp, out]; backward gathers.

    block: where it is not 0, swiglu(x) (see `kernels.swiglu`) is in place of x, which is then [B, S, 2 in/tp] and all that
    is kept for the backward pass. gradient_sum: see `nn.layers.Linear`.
    """
    promise: Tensor = _ScatterGradient.apply(x_BSI, weight_OI, tp.group_name, tp.size, block, gradient_sum)
    y: Tensor = _ScatterValue.apply(promise, x_BSI, weight_OI, tp.group_name, block)
    return y


class _GatherMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: str, gradient_sum: Tensor | None) -> Tensor:
        ctx.group = group
        y: Tensor
        y, whole = gather_product(x, weight, group)
        ctx.save_for_backward(whole, weight, gradient_sum)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        whole, weight, gradient_sum = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        if not needs_x:
            return None, weight_gradient(grad, whole, gradient_sum), None, None
        kept = whole if needs_weight else None
        grad_x, grad_weight = scatter_gradients(grad, weight, kept, gradient_sum, ctx.group)
        return grad_x, grad_weight if needs_weight and gradient_sum is None else None, None, None


class _ScatterGradient(torch.autograd.Function):
    """The backward pass of `multiply_scatter`, ahead of its value: see `kernels.swiglu` for the reason."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, group: str, size: int, block: int, gradient_sum: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, gradient_sum)
        ctx.group, ctx.block = group, block
        return x.new_empty(1).expand(x.shape[0], x.shape[1] // size, weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gradient_sum = ctx.saved_tensors
        grad_x, whole = gather_product(grad, weight.t(), ctx.group)
        if ctx.block:
            grad_x, x = swiglu_backward(grad_x, x, ctx.block)
        grad_weight = weight_gradient(whole, x, gradient_sum) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None, None, None


class _ScatterValue(torch.autograd.Function):
    """The value of `multiply_scatter`; hands its gradient on to `_ScatterGradient` through `promise`."""

    @staticmethod
    def forward(ctx: Any, promise: Tensor, x: Tensor, weight: Tensor, group: str, block: int) -> Tensor:
        y: Tensor = product_scatter(swiglu(x, block) if block else x, weight, group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None


def weight_gradient(grad_BSO: Tensor, x_BSI: Tensor, gradient_sum: Tensor | None) -> Tensor | None:
    """Return the gradient of a weight, [out, in], from those of its results and what it was multiplied by.

    gradient_sum: where there is one, the gradient is added to it, and None is returned.
    """
    grad_NO, x_NI = grad_BSO.reshape(-1, grad_BSO.shape[-1]), x_BSI.reshape(-1, x_BSI.shape[-1])
    if gradient_sum is None:
        return grad_NO.t() @ x_NI
    add_weight_gradient(gradient_sum, grad_NO, x_NI)
    return None


# --- what the compiler sees as one operation each -----------------------------------------------------------------------


@torch.library.custom_op("phalanx::gather_product", mutates_args=())
def gather_product(x_BsI: Tensor, weight_OI: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Return the product of all ranks' x and W^T, [B, S, out], and all ranks' x, [B, S, in]. x: [B, S/tp, in]."""
    pair = _empty_gathered(x_BsI, weight_OI, x_BsI.dtype, group)
    _gather(x_BsI, *pair, partial(_multiply, weight_OI), exchange_of(group))
    return pair


@gather_product.register_fake
def _(x_BsI: Tensor, weight_OI: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return _empty_gathered(x_BsI, weight_OI, x_BsI.dtype, group)


@torch.library.custom_op("phalanx::product_scatter", mutates_args=())
def product_scatter(x_BSI: Tensor, weight_OI: Tensor, group: str) -> Tensor:
    """Return x W^T summed over ranks, [B, S/tp, out]. x: [B, S, in/tp]."""
    y = _empty_scattered(x_BSI, weight_OI, x_BSI.dtype, group)
    _scatter(x_BSI, y, partial(_multiply, weight_OI), _nothing(x_BSI), exchange_of(group))
    return y


@product_scatter.register_fake
def _(x_BSI: Tensor, weight_OI: Tensor, group: str) -> Tensor:
    return _empty_scattered(x_BSI, weight_OI, x_BSI.dtype, group)


def scatter_gradients(
    grad_BSO: Tensor, weight_OI: Tensor, whole_BSI: Tensor | None, gradient_sum: Tensor | None, group: str
) -> tuple[Tensor, Tensor]:
    """Return both gradients of `gather_product`, of x, [B, S/tp, in], and of W, [out, in]: sums travel beside the second.

    whole: all ranks' x, or None where the gradient of W is not wanted. gradient_sum: what the gradient of W is added to, if
    that is wanted instead. In both cases the gradient that is returned is empty.
    """
    both: tuple[Tensor, Tensor] = torch.ops.phalanx.scatter_gradients(
        grad_BSO, weight_OI, whole_BSI, gradient_sum, group
    )
    return both


# For the reason of `kernels.parts_sum.add_weight_gradient`.
torch.library.define(
    "phalanx::scatter_gradients",
    "(Tensor grad, Tensor weight, Tensor? whole, Tensor(a!)? gradient_sum, str group) -> (Tensor, Tensor)",
)


def _scatter_gradients(
    grad_BSO: Tensor, weight_OI: Tensor, whole_BSI: Tensor | None, gradient_sum: Tensor | None, group: str
) -> tuple[Tensor, Tensor]:
    grad_x = _empty_scattered(grad_BSO, weight_OI.t(), grad_BSO.dtype, group)

    def form_weight_gradient() -> Tensor:
        formed = None if whole_BSI is None else weight_gradient(grad_BSO, whole_BSI, gradient_sum)
        return grad_BSO.new_empty(0) if formed is None else formed

    multiply = partial(_multiply, weight_OI.t())
    return grad_x, _scatter(grad_BSO, grad_x, multiply, form_weight_gradient, exchange_of(group))


torch.library.impl("phalanx::scatter_gradients", "CompositeExplicitAutograd", _scatter_gradients)


def _empty_gradients(
    grad_BSO: Tensor, weight_OI: Tensor, whole_BSI: Tensor | None, gradient_sum: Tensor | None, group: str
) -> tuple[Tensor, Tensor]:
    formed = whole_BSI is not None and gradient_sum is None
    grad_weight = weight_OI.new_empty(weight_OI.shape if formed else (0,))
    return _empty_scattered(grad_BSO, weight_OI.t(), grad_BSO.dtype, group), grad_weight


torch.library.register_fake("phalanx::scatter_gradients", _empty_gradients)


@torch.library.custom_op("phalanx::gather_scaled_product", mutates_args=())
def gather_scaled_product(
    x_BsI: Tensor, weight_OI: Tensor, scale: Tensor, weight_scale: Tensor, dtype: torch.dtype, fast: bool, group: str
) -> tuple[Tensor, Tensor]:
    """Do as `gather_product` with both operands in 8 bits, the product in `dtype`; see `kernels.float8.scaled_product`."""
    pair = _empty_gathered(x_BsI, weight_OI, dtype, group)
    _gather(x_BsI, *pair, partial(_multiply_scaled, weight_OI, scale, weight_scale, fast), exchange_of(group))
    return pair


@gather_scaled_product.register_fake
def _(x_BsI: Tensor, weight_OI: Tensor, _s: Tensor, _w: Tensor, dtype: torch.dtype, _f: bool, group: str) -> Any:
    return _empty_gathered(x_BsI, weight_OI, dtype, group)


@torch.library.custom_op("phalanx::scaled_product_scatter", mutates_args=())
def scaled_product_scatter(
    x_BSI: Tensor,
    weight_OI: Tensor,
    scale: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    fast: bool,
    two: list[Tensor],
    wide: torch.dtype,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Do as `product_scatter` with both operands in 8 bits, the sum in `dtype`; sums travel beside another product.

    two: the operands of that, in 8 bits, and their scales; its result has the format `wide`. None of them: it is empty.
    """
    y = _empty_scattered(x_BSI, weight_OI, dtype, group)
    beside = partial(scaled_product, *two, wide, False) if two else _nothing(y)
    multiply = partial(_multiply_scaled, weight_OI, scale, weight_scale, fast)
    return y, _scatter(x_BSI, y, multiply, beside, exchange_of(group))


@scaled_product_scatter.register_fake
def _(
    x_BSI: Tensor,
    weight_OI: Tensor,
    _s: Tensor,
    _w: Tensor,
    dtype: torch.dtype,
    _f: bool,
    two: list[Tensor],
    wide: torch.dtype,
    group: str,
) -> tuple[Tensor, Tensor]:
    product = x_BSI.new_empty((two[0].shape[0], two[1].shape[0]) if two else (0,), dtype=wide if two else dtype)
    return _empty_scattered(x_BSI, weight_OI, dtype, group), product


# --- part by part -------------------------------------------------------------------------------------------------------

Multiply = Callable[[Tensor, Tensor], None]
"""Fills the second, positions of a result, with the product of the first."""


def _gather(x_BsI: Tensor, y_BSO: Tensor, whole_BSI: Tensor, multiply: Multiply, exchange: PeerExchange) -> None:
    """Fill `whole` with all ranks' x, and `y` with its product."""
    x = x_BsI.contiguous()
    exchange.begin(x.shape, x.dtype)
    sent = [exchange.send(x, peer) for peer in exchange.peers]
    kept = [_keep(x, whole_BSI, exchange.rank, exchange)]
    multiply(x, _part(y_BSO, exchange.rank, exchange))
    for source, copies in zip(exchange.sources, sent, strict=True):
        # What this rank has sent by now is as much as its sources have sent to it.
        exchange.meet(copies)
        arrived = exchange.place(source)
        kept.append(_keep(arrived, whole_BSI, source, exchange))
        multiply(arrived, _part(y_BSO, source, exchange))
    for copies in kept:
        copies.wait()


def _scatter(
    x_BSI: Tensor, y_BsO: Tensor, multiply: Multiply, beside: Callable[[], Tensor], exchange: PeerExchange
) -> Tensor:
    """Fill `y` with this rank's positions of the product of x, summed over ranks; returns what `beside` does meanwhile."""
    exchange.begin(y_BsO.shape, y_BsO.dtype)
    sent, parts = [], []
    for peer in exchange.peers:
        # Kept until the copies are done: another product must not be written over it.
        parts.append(torch.empty_like(y_BsO))
        multiply(_part(x_BSI, peer, exchange), parts[-1])
        sent.append(exchange.send(parts[-1], peer))
    multiply(_part(x_BSI, exchange.rank, exchange), exchange.place(exchange.rank))
    product = beside()
    exchange.meet(*sent)
    # In the order of ranks, whichever rank sums.
    arrived = [exchange.place(source) for source in range(exchange.size)]
    if len(arrived) == 2:
        torch.add(*arrived, out=y_BsO)
    else:
        torch.sum(torch.stack(arrived), 0, out=y_BsO)
    return product


def _multiply(weight_OI: Tensor, x: Tensor, y: Tensor) -> None:
    # One sample after the other: part of a sequence lies apart from that of the next sample.
    for sample, result in zip(x, y, strict=True):
        torch.mm(sample, weight_OI.t(), out=result)


def _multiply_scaled(weight_OI: Tensor, scale: Tensor, weight_scale: Tensor, fast: bool, x: Tensor, y: Tensor) -> None:
    for sample, result in zip(x, y, strict=True):
        scaled_product_into(sample, weight_OI, scale, weight_scale, result, fast)


def _nothing(like: Tensor) -> Callable[[], Tensor]:
    return partial(like.new_empty, 0)


def _empty_gathered(x: Tensor, weight: Tensor, dtype: torch.dtype, group: str) -> tuple[Tensor, Tensor]:
    batch, length, width = x.shape
    length *= exchange_of(group).size
    return x.new_empty((batch, length, weight.shape[0]), dtype=dtype), x.new_empty((batch, length, width))


def _empty_scattered(x: Tensor, weight: Tensor, dtype: torch.dtype, group: str) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // exchange_of(group).size, weight.shape[0]), dtype=dtype)


def _part(x: Tensor, rank: int, exchange: PeerExchange) -> Tensor:
    """Return the positions of `rank` in a whole sequence [B, S, ...]."""
    length = x.shape[1] // exchange.size
    return x[:, rank * length : (rank + 1) * length]


def _keep(part: Tensor, whole: Tensor, rank: int, exchange: PeerExchange) -> Copies:
    """Copy the part of `rank` into the whole beside what computes."""
    with exchange.copies.behind_present() as kept:
        # A sample at a time: copy engines copy what lies together.
        for sample, place in zip(part, _part(whole, rank, exchange), strict=True):
            place.copy_(sample, non_blocking=True)
    return kept
