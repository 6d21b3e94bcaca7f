"""Collectives that autograd and the compiler see through: each has its adjoint as its backward pass.

Sequence dims are gathered and scattered in the order of the group's ranks. All sums are in the format of the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.layout.mesh import Axis
from phalanx.torch_compat import common as compat


def gather_parts(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return all ranks' parts joined along `dim`; backward sums the ranks' gradients and keeps this rank's part."""
    if axis.size == 1:
        return x
    result = _Gather.apply(x, axis.group_name, axis.size, dim)
    assert isinstance(result, Tensor)
    return result


def scatter_sum(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum all ranks' `x` and keep this rank's part along `dim`; backward gathers the parts' gradients."""
    if axis.size == 1:
        return x
    result = _ScatterSum.apply(x, axis.group_name, axis.size, dim)
    assert isinstance(result, Tensor)
    return result


def exchange_parts(x: Tensor, axis: Axis, *, split: int, join: int) -> Tensor:
    """Split along dim `split`, send part i to rank i, join what comes along dim `join`; backward sends it all back."""
    if axis.size == 1:
        return x
    result = _Exchange.apply(x, axis.group_name, axis.size, split, join)
    assert isinstance(result, Tensor)
    return result


def gather_values(x: Tensor, axis: Axis) -> Tensor:
    """Return all ranks' `x` in a new first dim, [ranks, *x.shape]; no gradient."""
    if axis.size == 1:
        return x[None]
    return compat.all_gather(x, axis.group_name, axis.size)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int, dim: int) -> Tensor:
        ctx.place = group, size, dim
        return join_parts(compat.all_gather(x, group, size), dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        group, size, dim = ctx.place
        return compat.reduce_scatter(split_parts(grads[0], size, dim), group, size), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int, dim: int) -> Tensor:
        ctx.place = group, size, dim
        return compat.reduce_scatter(split_parts(x, size, dim), group, size)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        group, size, dim = ctx.place
        return join_parts(compat.all_gather(grads[0], group, size), dim), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int, split: int, join: int) -> Tensor:
        ctx.place = group, size, split, join
        return join_parts(compat.all_to_all(split_parts(x, size, split), group, size), join)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        group, size, split, join = ctx.place
        return (
            join_parts(compat.all_to_all(split_parts(grads[0], size, join), group, size), split),
            None,
            None,
            None,
            None,
        )


def join_parts(parts: Tensor, dim: int) -> Tensor:
    """[ranks, ..., n, ...] -> [..., ranks * n, ...] along `dim`: a view where nothing longer than 1 stands before it."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def split_parts(x: Tensor, size: int, dim: int) -> Tensor:
    """[..., ranks * n, ...] -> contiguous [ranks, ..., n, ...]."""
    parts: Tensor = x.unflatten(dim, (size, x.shape[dim] // size))
    return parts.movedim(dim, 0).contiguous()
