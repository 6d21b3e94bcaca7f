"""Pooling of nodes between blocks: which ones stay, and the graph of those."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model.layers import Atoms
from phalanx.families.materials.model_config import MaterialsModel, NodePooling


class TopKPooling(nn.Module):
    """Keeps the nodes of each graph that a learned direction scores best, times tanh of their score (Gao & Ji 2019)."""

    def __init__(self, config: MaterialsModel, options: NodePooling) -> None:
        super().__init__()
        self.ratio = options.ratio
        self.score = nn.Parameter(torch.empty(1, config.d_model))

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Return the features of the nodes that stay, and in `kept_K` which they are."""
        direction_C = self.score[0].to(atoms.scalars_NC.dtype)
        score_N = torch.tanh(atoms.scalars_NC @ direction_C / direction_C.norm())
        kept_K = best_of_each(score_N.detach(), geometry.graph_N, geometry.graphs, self.ratio)
        weight_K = score_N.index_select(0, kept_K)
        vectors_NMC = atoms.vectors_NMC
        if vectors_NMC is not None:
            vectors_NMC = vectors_NMC.index_select(0, kept_K) * weight_K[:, None, None]
        scalars_KC = atoms.scalars_NC.index_select(0, kept_K) * weight_K[:, None]
        return atoms._replace(scalars_NC=scalars_KC, vectors_NMC=vectors_NMC, kept_K=kept_K)


def best_of_each(score_N: Tensor, graph_N: Tensor, graphs: int, ratio: float) -> Tensor:
    """Return the nodes of each graph with the highest scores, ratio of them rounded up: int64, ascending."""
    count_G = torch.zeros(graphs, dtype=torch.int64, device=graph_N.device).index_add_(
        0, graph_N, torch.ones_like(graph_N)
    )
    # By score, then stably by graph: graphs come one after the other, each with its best node first.
    by_score = torch.argsort(score_N, descending=True, stable=True)
    order_N = by_score[torch.argsort(graph_N[by_score], stable=True)]
    place_N = torch.arange(len(graph_N), device=graph_N.device) - (count_G.cumsum(0) - count_G)[graph_N]
    stays_N = place_N < torch.ceil(count_G * ratio).long()[graph_N]
    return order_N[stays_N].sort().values


def keep_nodes(geometry: Geometry, kept_K: Tensor) -> Geometry:
    """Return the graph of these nodes and the edges between them."""
    place_N = torch.full_like(geometry.graph_N, -1)
    place_N[kept_K] = torch.arange(len(kept_K), device=kept_K.device)
    source_E, target_E = place_N[geometry.source_E], place_N[geometry.target_E]
    edges = ((source_E >= 0) & (target_E >= 0)).nonzero().squeeze(1)
    return geometry._replace(
        source_E=source_E[edges],
        target_E=target_E[edges],
        species_N=geometry.species_N[kept_K],
        graph_N=geometry.graph_N[kept_K],
        vector_E3=geometry.vector_E3[edges],
        unit_E3=geometry.unit_E3[edges],
        envelope_E1=geometry.envelope_E1[edges],
        radial_ER=geometry.radial_ER[edges],
    )
