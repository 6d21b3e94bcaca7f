"""Sums of messages over the edges that end at an atom, all at once or in chunks that are computed again.

A message function is pure: it takes tensors of edges, then tensors shared by all edges (atoms' features, parameters), and
returns one tensor [E, ...]. Forces are derivatives of the network, so training differentiates twice; everything here has
correct second derivatives. A chunk keeps only its inputs, in both of these backward passes. There is no largest message: its
derivative jumps from one neighbour to another where two tie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

Message = Callable[..., tuple[Tensor, ...]]


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

    def sums(target: Tensor, *tensors: Tensor) -> tuple[Tensor]:
        found = message(*tensors)
        return (found.new_zeros((atoms, *found.shape[1:])).index_add(0, target, found),)

    if chunk is None or len(target_E) <= chunk:
        return sums(target_E, *edges, *shared)[0]
    rows = [slice(start, start + chunk) for start in range(0, len(target_E), chunk)]
    # Chunks one after another: each holds its messages only while it is computed, forward and backward.
    parts = (recompute_function(sums, target_E[some], *(edge[some] for edge in edges), *shared)[0] for some in rows)
    return reduce(torch.add, parts)


def recompute_function(function: Message, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return function(*inputs), computed again in the backward pass and in the backward pass of that.

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
        # A gradient that nobody asks for stays None, not zeros of the size of all edges.
        ctx.set_materialize_grads(False)
        inputs = [t.detach().requires_grad_(want) for t, want in zip(tensors, wanted, strict=False)]
        return _input_gradients(function, inputs, tensors[len(wanted) :], differentiable=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Autograd would otherwise take the results for constants. (once_differentiable looks at `grads` alone.)
        if torch.is_grad_enabled():
            raise RuntimeError("recomputed messages have no third derivative; set edge_chunk to None")
        tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[2:]
        # Leaves of a graph of their own: only this chunk's forward and first backward pass are formed again.
        leaves = [t.detach().requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)]
        count = len(ctx.wanted)
        for leaf, want in zip(leaves, ctx.wanted, strict=False):
            leaf.requires_grad_(want)
        first = _input_gradients(ctx.function, leaves[:count], leaves[count:], differentiable=True)
        given = [(a, b) for a, b in zip(first, grads, strict=True) if a is not None and b is not None]
        given = [(a, b) for a, b in given if a.requires_grad]
        asked = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        found = iter(_gradients_or_none([a for a, _ in given], asked, [b for _, b in given], differentiable=False))
        return (None, None, *(next(found) if want else None for want in wanted))


def _input_gradients(
    function: Message, inputs: Sequence[Tensor], grads: Sequence[Tensor], *, differentiable: bool
) -> tuple[Tensor | None, ...]:
    """Return gradients by the inputs that require one, None for the others."""
    with torch.enable_grad():
        outputs = function(*inputs)
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
    asked = [x for x in inputs if x.requires_grad]
    found = iter(_gradients_or_none([o for o, _ in pairs], asked, [g for _, g in pairs], differentiable=differentiable))
    return tuple(next(found) if x.requires_grad else None for x in inputs)


def _gradients_or_none(
    outputs: list[Tensor], inputs: list[Tensor], grads: list[Tensor], *, differentiable: bool
) -> Sequence[Tensor | None]:
    if not outputs or not inputs:
        return [None] * len(inputs)
    with torch.set_grad_enabled(differentiable):
        return torch.autograd.grad(outputs, inputs, grads, create_graph=differentiable, allow_unused=True)
