"""Sums (and maxima) of messages over the edges that end at an atom, all at once or in chunks that are computed again.

A message function is pure: it takes tensors of edges, then tensors shared by all edges (atoms' features, parameters), and
returns one tensor [E, ...] for each way of reducing. Forces are derivatives of the network, so training differentiates
twice; everything here has correct second derivatives. A chunk keeps only its inputs, in both of these backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor

Message = Callable[..., tuple[Tensor, ...]]
Reduction = Literal["sum", "amax"]

_TIE_EXPONENT = 0.75
"""Messages tie within this power of the format's precision: far above rounding, far below what tells neighbours apart."""


def sum_messages(
    message: Callable[..., Tensor],
    edges: Sequence[Tensor],
    shared: Sequence[Tensor],
    target_E: Tensor,
    atoms: int,
    chunk: int | None = None,
) -> Tensor:
    """Sum over edges of message(*edges, *shared), [E, ...], into the atoms they end at: [atoms, ...].

    edges: tensors with a row for each edge. chunk: edges whose messages exist at once; None for all.
    """

    def alone(*tensors: Tensor) -> tuple[Tensor]:
        return (message(*tensors),)

    return reduce_messages(alone, edges, shared, target_E, atoms, ("sum",), chunk)[0]


def reduce_messages(
    message: Message,
    edges: Sequence[Tensor],
    shared: Sequence[Tensor],
    target_E: Tensor,
    atoms: int,
    how: tuple[Reduction, ...],
    chunk: int | None = None,
) -> tuple[Tensor, ...]:
    """The same for messages of several parts, each reduced in its own way; amax is never below 0.

    Messages that are the largest up to rounding, and 0 where it is, share the gradient of an amax evenly: derivatives depend
    neither on chunks nor on the order of edges, and equivalent neighbours in a crystal count the same.
    """
    if chunk is None or len(target_E) <= chunk:
        parts = message(*edges, *shared)
        largest = _largest(parts, how, target_E, atoms)
        least = _least_tied(largest)
        return _with_values(how, largest, least, _sums(parts, how, least, target_E, atoms))
    rows = [slice(start, start + chunk) for start in range(0, len(target_E), chunk)]
    chunks = [(target_E[some], [edge[some] for edge in edges]) for some in rows]
    largest = ()
    if "amax" in how:
        with torch.no_grad():
            found = (_largest(message(*some, *shared), how, target, atoms) for target, some in chunks)
            largest = _over_chunks(torch.maximum, found)
    least = _least_tied(largest)

    def sums(target: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _sums(message(*tensors[len(least) :]), how, tensors[: len(least)], target, atoms)

    again = (recomputed(sums, target, *least, *some, *shared) for target, some in chunks)
    return _with_values(how, largest, least, _over_chunks(torch.add, again))


def _over_chunks(join: Callable[[Tensor, Tensor], Tensor], found: Iterator[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return reduce(lambda total, part: tuple(map(join, total, part)), found)


def _largest(parts: Sequence[Tensor], how: tuple[Reduction, ...], target_E: Tensor, atoms: int) -> tuple[Tensor, ...]:
    """Of each part that is maximised the largest message of each atom, or 0; without a gradient."""
    maximised = [part.detach() for part, way in zip(parts, how, strict=True) if way == "amax"]
    return tuple(
        part.new_zeros((atoms, *part.shape[1:])).scatter_reduce(
            0, target_E.view(-1, *[1] * (part.dim() - 1)).expand_as(part), part, "amax", include_self=True
        )
        for part in maximised
    )


def _least_tied(largest: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """From which value on a message counts as one of the largest.

    The sums inside a message round by the size of their terms, not of their result: all of an atom's numbers have the margin
    of its largest.
    """
    sizes = (most.amax(tuple(range(1, most.dim())), keepdim=True) if most.dim() > 1 else most for most in largest)
    return tuple(
        most - torch.finfo(most.dtype).eps ** _TIE_EXPONENT * size for most, size in zip(largest, sizes, strict=True)
    )


def _sums(
    parts: Sequence[Tensor],
    how: tuple[Reduction, ...],
    least: Sequence[Tensor],
    target_E: Tensor,
    atoms: int,
) -> tuple[Tensor, ...]:
    """Of each part the sum over an atom's messages; of a maximised one over the largest, and then how many these are."""
    bounds, found = iter(least), []
    for part, way in zip(parts, how, strict=True):
        if way == "amax":
            tied = part >= next(bounds).index_select(0, target_E)
            # bfloat16 counts no further than 256.
            count = _sum(tied.to(torch.float32), target_E, atoms)
            found += [_sum(torch.where(tied, part, 0.0), target_E, atoms), count]
        else:
            found.append(_sum(part, target_E, atoms))
    return tuple(found)


def _sum(message: Tensor, target_E: Tensor, atoms: int) -> Tensor:
    return message.new_zeros((atoms, *message.shape[1:])).index_add(0, target_E, message)


def _with_values(
    how: tuple[Reduction, ...], largest: Sequence[Tensor], least: Sequence[Tensor], sums: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """What `reduce_messages` gives: of a maximised part the largest, with the gradient of the mean of all that tie."""
    extremes, left, found = zip(largest, least, strict=True), iter(sums), []
    for way in how:
        total = next(left)
        if way == "amax":
            (most, bound), count = next(extremes), next(left).detach()
            # 0 stands for no message; where it ties, its share of the gradient goes nowhere.
            share = (count + (bound <= 0.0)).clamp(min=1.0).to(total.dtype)
            total = most + (total - total.detach()) / share
        found.append(total)
    return tuple(found)


def recomputed(function: Message, *inputs: Tensor) -> tuple[Tensor, ...]:
    """function(*inputs), computed again in the backward pass and in the backward pass of that.

    torch.utils.checkpoint keeps everything once the first backward pass is itself differentiated, as force training does.
    function: pure in `inputs`; whatever wants a gradient must be one of them. A third derivative raises an error.
    """
    result: tuple[Tensor, ...] = _Recomputed.apply(function, *inputs)
    return result


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Message, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        found = _RecomputedGradient.apply(ctx.function, ctx.needs_input_grad[1:], *ctx.saved_tensors, *grads)
        return (None, *found)


class _RecomputedGradient(torch.autograd.Function):
    """The gradient by the inputs, as a function of inputs and output gradients that has a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, function: Message, wanted: tuple[bool, ...], *tensors: Tensor) -> tuple[Tensor | None, ...]:
        ctx.function, ctx.wanted = function, wanted
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        inputs = [t.detach().requires_grad_(want) for t, want in zip(tensors, wanted, strict=False)]
        return _gradient(function, inputs, tensors[len(wanted) :], differentiable=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Autograd would otherwise take the results for constants. (once_differentiable looks at `grads` alone.)
        if torch.is_grad_enabled():
            raise RuntimeError("recomputed messages have no third derivative; set edge_chunk to None")
        tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[2:]
        leaves = [t.detach().requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)]
        count = len(ctx.wanted)
        for leaf, want in zip(leaves, ctx.wanted, strict=False):
            leaf.requires_grad_(want)
        first = _gradient(ctx.function, leaves[:count], leaves[count:], differentiable=True)
        given = [(a, b) for a, b in zip(first, grads, strict=True) if a is not None and b is not None]
        given = [(a, b) for a, b in given if a.requires_grad]
        asked = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        found = iter(_derivatives([a for a, _ in given], asked, [b for _, b in given], differentiable=False))
        return (None, None, *(next(found) if want else None for want in wanted))


def _gradient(
    function: Message, inputs: Sequence[Tensor], grads: Sequence[Tensor], *, differentiable: bool
) -> tuple[Tensor | None, ...]:
    """Gradients by the inputs that require one, None for the others."""
    with torch.enable_grad():
        outputs = function(*inputs)
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
    asked = [x for x in inputs if x.requires_grad]
    found = iter(_derivatives([o for o, _ in pairs], asked, [g for _, g in pairs], differentiable=differentiable))
    return tuple(next(found) if x.requires_grad else None for x in inputs)


def _derivatives(
    outputs: list[Tensor], inputs: list[Tensor], grads: list[Tensor], *, differentiable: bool
) -> Sequence[Tensor | None]:
    if not outputs or not inputs:
        return [None] * len(inputs)
    with torch.set_grad_enabled(differentiable):
        return torch.autograd.grad(outputs, inputs, grads, create_graph=differentiable, allow_unused=True)
