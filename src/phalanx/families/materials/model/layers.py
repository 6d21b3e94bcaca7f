"""Layers that several backbones share, global attention among them. Plain PyTorch for one device; parameters are cast
where they are used."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model_config import GlobalAttention, MaterialsModel
from phalanx.nn.layers import Linear, Norm
from phalanx.torch_compat.common import inside_transform

Block = TypeVar("Block", bound=nn.Module)


class Atoms(NamedTuple):
    """Features of atoms (and edges), as they flow from block to block."""

    scalars_NC: Tensor
    """Invariant features of atoms."""
    vectors_NMC: Tensor | None = None
    """Equivariant features of atoms: M = 3 cartesian components first, then those of degree 2; channels may differ."""
    edges_EC: Tensor | None = None
    """Features of edges."""
    kept_K: Tensor | None = None
    """int64, ascending: of the nodes before pooling, those that these features are of; None where none is left out."""
    earlier_NC: tuple[Tensor, ...] = ()
    """Scalars behind each block before the last, where the heads read them."""


class Mlp(nn.Module):
    """Linear layers with SiLU between them. sizes: features in, in between and out."""

    def __init__(self, *sizes: int, bias: bool = True) -> None:
        super().__init__()
        for number, (inside, outside) in enumerate(pairwise(sizes)):
            self.add_module(str(number), Linear(inside, outside, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        first, *rest = self.children()
        x = first(x)
        for layer in rest:
            x = layer(silu(x))
        return x


def layer_values(module: nn.Module) -> Iterator[Tensor]:
    """Yield weight and bias of each linear layer in `module`, for functions that multiply by them themselves."""
    for layer in module.modules():
        if isinstance(layer, Linear):
            yield layer.whole_weight()
            if layer.bias is not None:
                yield layer.bias


class ElementTable(nn.Module):
    """One row of features for each element. weight: [elements + 1, *shape]; row 0 belongs to no element."""

    def __init__(self, max_atomic_number: int, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_atomic_number + 1, *shape))

    def forward(self, species_N: Tensor, dtype: torch.dtype) -> Tensor:
        """Map atomic numbers, int64 [N], to [N, *shape] in format `dtype`."""
        return self.weight.index_select(0, species_N).to(dtype)


def cast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, parameters cast to the format of x: for message functions, which are given parameters as tensors."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def silu(x: Tensor) -> Tensor:
    """Return x sigmoid(x), with a second derivative that keeps no more than x."""
    # A compiler fuses the chain of operations itself; networks that run side by side are not trained.
    if torch.compiler.is_compiling() or not x.requires_grad or inside_transform():
        return F.silu(x)
    result: Tensor = _Silu.apply(x)
    return result


def shifted_softplus(x: Tensor) -> Tensor:
    """Return ln(0.5 e^x + 0.5): smooth, and 0 at 0."""
    return F.softplus(x) - math.log(2.0)


class _Silu(torch.autograd.Function):
    """SiLU whose first derivative is one kernel with a derivative of its own.

    PyTorch's own backward pass, differentiated again, is a chain of pointwise kernels that keep a tensor of edges each.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        result: Tensor = _SiluGradient.apply(grads[0], *ctx.saved_tensors)
        return result


class _SiluGradient(torch.autograd.Function):
    """The gradient by x, as a function of the gradient by the result and of x."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(grad, x)
        return torch.ops.aten.silu_backward(grad, x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        (outer,) = grads
        grad, x = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        curvature = (x * (1.0 - 2.0 * sigmoid) + 2.0) * (sigmoid * (1.0 - sigmoid))
        return torch.ops.aten.silu_backward(outer, x), outer * grad * curvature


class InvariantAttention(nn.Module):
    """What attention and an MLP add to the scalars of atoms (Rampasek et al. 2022, GPS); no atom sees another structure's.

    Vectors are left out: softmax weights of invariants are invariant, so adding values of scalars breaks no symmetry.
    """

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
        """Map [N, C] to [N, C]."""
        query, key, value = self.qkv(self.norm(x_NC)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        mix = _mix_linear if self.kind == "linear" else _mix_softmax
        return self.output(mix(query, key, value, geometry).flatten(1))  # type: ignore[no-any-return]

    def feed(self, x_NC: Tensor) -> Tensor:
        """Apply the MLP behind messages and attention: [N, C] to [N, C]."""
        fed: Tensor = self.mlp(self.mlp_norm(x_NC))
        return fed


def _mix_linear(query_NHE: Tensor, key_NHE: Tensor, value_NHE: Tensor, geometry: Geometry) -> Tensor:
    """Mix values linearly (Katharopoulos et al. 2020): phi(q) sum(phi(k) v) / phi(q) sum(phi(k)), phi = elu + 1."""
    query, key = F.elu(query_NHE) + 1.0, F.elu(key_NHE) + 1.0
    # A 1 beside the values gives the denominator in the same sums.
    value = torch.cat((value_NHE, torch.ones_like(value_NHE[..., :1])), dim=-1)
    products_NHEF = key[..., :, None] * value[..., None, :]
    sums_GHEF = products_NHEF.new_zeros((geometry.graphs, *products_NHEF.shape[1:])).index_add(
        0, geometry.graph_N, products_NHEF
    )
    sums_GHEF = geometry.exchange.over_graphs(sums_GHEF)
    mixed_NHF = (query[..., :, None] * sums_GHEF.index_select(0, geometry.graph_N)).sum(-2)
    return mixed_NHF[..., :-1] / mixed_NHF[..., -1:]


def _mix_softmax(query_NHE: Tensor, key_NHE: Tensor, value_NHE: Tensor, geometry: Geometry) -> Tensor:
    """Mix values by softmax attention in rows padded to the largest structure; where atoms are elsewhere, by those at hand
    to all."""
    graphs, exchange = geometry.graphs, geometry.exchange
    asking = _Padding(geometry.graph_N, graphs, exchange.largest(geometry.max_atoms))
    asked = _Padding(exchange.graph_of_everyone(geometry.graph_N), graphs, geometry.max_atoms)
    key_AHE, value_AHE = exchange.everyone(torch.stack((key_NHE, value_NHE), dim=1)).unbind(1)
    query, key, value = asking.padded(query_NHE), asked.padded(key_AHE), asked.padded(value_AHE)
    # Written out rather than by a fused kernel: those have no second derivative, which forces need.
    scores_GHLM = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    empty_G11M = asked.empty_GL[:, None, None, :]
    # Not -inf: rows of a structure without atoms would be NaN, and their gradients too.
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
        """Map rows of atoms to [G, H, L, E], zeros where there is no atom."""
        graphs, length = self.shape
        zeros = x_NHE.new_zeros((graphs * length, *x_NHE.shape[1:]))
        rows: Tensor = zeros.index_copy(0, self.slot_N, x_NHE).unflatten(0, self.shape)
        return rows.transpose(1, 2)

    def rows(self, x_GHLE: Tensor) -> Tensor:
        """Map [G, H, L, E] back to rows of atoms [N, H, E]."""
        return x_GHLE.transpose(1, 2).flatten(0, 1).index_select(0, self.slot_N)
