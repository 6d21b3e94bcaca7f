"""Attention among all atoms of a structure, beside message passing (GPS, Rampasek et al. 2022), on invariant channels.

Written out in plain operations: fused attention kernels have no second derivative, which force training needs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.materials import GlobalAttention, MaterialsModel
from phalanx.models.language.layers import Linear, Norm
from phalanx.models.materials.geometry import Geometry
from phalanx.models.materials.layers import Mlp


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
    mixed_NHF = (query[..., :, None] * sums_GHEF.index_select(0, geometry.graph_N)).sum(-2)
    return mixed_NHF[..., :-1] / mixed_NHF[..., -1:]


def _softmax(query_NHE: Tensor, key_NHE: Tensor, value_NHE: Tensor, geometry: Geometry) -> Tensor:
    """Softmax attention in rows padded to the largest structure."""
    graph_N = geometry.graph_N
    count_G = torch.zeros(geometry.graphs, dtype=torch.int64, device=graph_N.device).index_add_(
        0, graph_N, torch.ones_like(graph_N)
    )
    length = int(count_G.max()) if geometry.max_atoms is None else geometry.max_atoms
    start_G = count_G.cumsum(0) - count_G
    rank_N = torch.arange(len(graph_N), device=graph_N.device) - start_G.index_select(0, graph_N)
    slot_N = graph_N * length + rank_N

    def padded(x_NHE: Tensor) -> Tensor:
        zeros = x_NHE.new_zeros((geometry.graphs * length, *x_NHE.shape[1:]))
        rows: Tensor = zeros.index_copy(0, slot_N, x_NHE).unflatten(0, (geometry.graphs, length))
        return rows.transpose(1, 2)

    query, key, value = padded(query_NHE), padded(key_NHE), padded(value_NHE)
    scores_GHLM = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    empty_GL = torch.arange(length, device=graph_N.device) >= count_G[:, None]
    weights_GHLM = scores_GHLM.masked_fill(empty_GL[:, None, None, :], -torch.finfo(scores_GHLM.dtype).max).softmax(-1)
    mixed_GLHE = (weights_GHLM @ value).transpose(1, 2)
    return mixed_GLHE.flatten(0, 1).index_select(0, slot_N)
