"""Sums of messages over the edges that end at an atom, all at once or in chunks that are computed again.

A message function is pure: it takes tensors of edges, then tensors shared by all edges (atoms' features, parameters), and
returns one tensor [E, ...]. Forces are derivatives of the network, so training differentiates twice; everything here has
correct second derivatives. A chunk keeps only its inputs, in both of these backward passes. There is no largest message: its
derivative jumps from one neighbour to another where two tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model.layers import Mlp
from phalanx.families.materials.model_config import GlobalAttention, MaterialsModel
from phalanx.nn.layers import Linear, Norm

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
    parts = (recomputed(sums, target_E[some], *(edge[some] for edge in edges), *shared)[0] for some in rows)
    return reduce(torch.add, parts)


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


class InvariantAttention(nn.Module):
    """What attention and an MLP add to the scalars of atoms; no atom sees another structure's."""

    def __init__(self, config: MaterialsModel, options: GlobalAttention) -> None:
        super().__init__()
        width = config.d_model
        self.heads = options.heads
        self.kind = options.kind
        self.norm = Norm(width, kind="layernorm", eps=1e-5, bias=True)
        self.qkv = Linear(width, 3 * width, bias=True)
        self.output = Linear(width, width, bias=True)
        self.mlp_norm = Norm(width, kind="layernorm", eps=1e-5, bias=True)
        self.mlp = Mlp(width, 2 * width, width)

    def forward(self, x_NC: Tensor, geometry: Geometry) -> Tensor:
        """[N, C] -> [N, C]."""
        query, key, value = self.qkv(self.norm(x_NC)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        mix = _linear if self.kind == "linear" else _softmax
        return self.output(mix(query, key, value, geometry).flatten(1))  # type: ignore[no-any-return]

    def feed(self, x_NC: Tensor) -> Tensor:
        """The MLP behind messages and attention: [N, C] -> [N, C]."""
        fed: Tensor = self.mlp(self.mlp_norm(x_NC))
        return fed


def _linear(query_NHE: Tensor, key_NHE: Tensor, value_NHE: Tensor, geometry: Geometry) -> Tensor:
    """Linear attention (Katharopoulos et al. 2020): phi(q) sum(phi(k) v) / phi(q) sum(phi(k)), phi = elu + 1."""
    query, key = F.elu(query_NHE) + 1.0, F.elu(key_NHE) + 1.0
    value = torch.cat((value_NHE, torch.ones_like(value_NHE[..., :1])), dim=-1)
    products_NHEF = key[..., :, None] * value[..., None, :]
    sums_GHEF = products_NHEF.new_zeros((geometry.graphs, *products_NHEF.shape[1:])).index_add(
        0, geometry.graph_N, products_NHEF
    )
    sums_GHEF = geometry.exchange.over_graphs(sums_GHEF)
    mixed_NHF = (query[..., :, None] * sums_GHEF.index_select(0, geometry.graph_N)).sum(-2)
    return mixed_NHF[..., :-1] / mixed_NHF[..., -1:]


def _softmax(query_NHE: Tensor, key_NHE: Tensor, value_NHE: Tensor, geometry: Geometry) -> Tensor:
    """Softmax attention in rows padded to the largest structure; where atoms are elsewhere, by those at hand to all."""
    graphs, exchange = geometry.graphs, geometry.exchange
    asking = _Padding(geometry.graph_N, graphs, exchange.largest(geometry.max_atoms))
    asked = _Padding(exchange.graph_of_everyone(geometry.graph_N), graphs, geometry.max_atoms)
    key_AHE, value_AHE = exchange.everyone(torch.stack((key_NHE, value_NHE), dim=1)).unbind(1)
    query, key, value = asking.padded(query_NHE), asked.padded(key_AHE), asked.padded(value_AHE)
    scores_GHLM = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    empty_G11M = asked.empty_GL[:, None, None, :]
    weights_GHLM = scores_GHLM.masked_fill(empty_G11M, -torch.finfo(scores_GHLM.dtype).max).softmax(-1)
    return asking.rows(weights_GHLM @ value)


class _Padding:
    """Where rows of atoms stand when each graph has as many places as the largest."""

    def __init__(self, graph_N: Tensor, graphs: int, largest: int | None) -> None:
        """graph_N: int64, ascending. largest: most atoms of a graph; None asks the device."""
        count_G = torch.zeros(graphs, dtype=torch.int64, device=graph_N.device).index_add_(
            0, graph_N, torch.ones_like(graph_N)
        )
        length = int(count_G.max()) if largest is None else largest
        start_G = count_G.cumsum(0) - count_G
        rank_N = torch.arange(len(graph_N), device=graph_N.device) - start_G.index_select(0, graph_N)
        self.shape = (graphs, length)
        self.slot_N = graph_N * length + rank_N
        self.empty_GL = torch.arange(length, device=graph_N.device) >= count_G[:, None]

    def padded(self, x_NHE: Tensor) -> Tensor:
        """Rows of atoms -> [G, H, L, E], zeros where there is no atom."""
        graphs, length = self.shape
        zeros = x_NHE.new_zeros((graphs * length, *x_NHE.shape[1:]))
        rows: Tensor = zeros.index_copy(0, self.slot_N, x_NHE).unflatten(0, self.shape)
        return rows.transpose(1, 2)

    def rows(self, x_GHLE: Tensor) -> Tensor:
        """The reverse: [G, H, L, E] -> rows of atoms [N, H, E]."""
        return x_GHLE.transpose(1, 2).flatten(0, 1).index_select(0, self.slot_N)
