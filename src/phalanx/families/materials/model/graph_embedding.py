"""Graphs whose nodes are no atoms: features of nodes, edges and graphs in the places of elements and distances.

Backbones are the same as for atoms. What they take for functions of the distance is made of an edge's features and, where
nodes have positions, of its length; nothing fades, since the edges are given.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.families.materials.model.geometry import Constant, Geometry
from phalanx.families.materials.model.layers import Atoms, Mlp
from phalanx.families.materials.model_config import GraphInputs, MaterialsModel


class GraphEmbedding(nn.Module):
    """Scalars of nodes from their features and their graph's, and what edges say from theirs."""

    def __init__(self, config: MaterialsModel, graph: GraphInputs) -> None:
        super().__init__()
        self.nodes = Mlp(graph.nodes + graph.graphs, config.d_model, config.d_model)
        inside = graph.edges + config.n_radial * graph.positions
        self.edges = Mlp(inside, config.n_radial, config.n_radial) if inside else None
        self.positions = graph.positions
        self.units = {
            level: (_table(getattr(graph, f"{level}_shift")), _table(getattr(graph, f"{level}_scale")))
            for level in ("nodes", "edges", "graphs")
        }

    def forward(self, geometry: Geometry) -> Atoms:
        """Return nodes before the first block, with what each edge says, [E, R]."""
        return Atoms(self._describe_nodes(geometry), edges_EC=self._describe_edges(geometry))

    def _describe_edges(self, geometry: Geometry) -> Tensor:
        parts: list[Tensor] = []
        if geometry.edge_features_EF is not None and geometry.edge_features_EF.shape[1]:
            parts.append(self._in_units("edges", geometry.edge_features_EF, geometry.radial_ER.dtype))
        if self.positions:
            parts.append(geometry.radial_ER)
        # Edges that say nothing still tell that they are there.
        said_ER: Tensor
        said_ER = torch.ones_like(geometry.radial_ER) if self.edges is None else self.edges(torch.cat(parts, dim=1))
        return said_ER

    def _describe_nodes(self, geometry: Geometry) -> Tensor:
        assert geometry.node_features_NF is not None
        dtype = geometry.radial_ER.dtype
        parts = [self._in_units("nodes", geometry.node_features_NF, dtype)]
        if geometry.graph_features_GF is not None and geometry.graph_features_GF.shape[1]:
            of_graphs = self._in_units("graphs", geometry.graph_features_GF, dtype)
            parts.append(of_graphs.index_select(0, geometry.graph_N))
        scalars_NC: Tensor = self.nodes(torch.cat(parts, dim=1))
        return scalars_NC

    def _in_units(self, level: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return features less their shift and over their scale; in float64, as a shift may be large beside the spread."""
        shift, scale = self.units[level]
        if shift is not None:
            x = x.double() - shift.on(x.device, torch.float64)
        if scale is not None:
            x = x.double() / scale.on(x.device, torch.float64)
        return x.to(dtype)


def _table(values: list[float]) -> Constant | None:
    return Constant(torch.tensor(values, dtype=torch.float64, device="cpu")) if values else None
