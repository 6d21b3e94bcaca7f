"""GIN with edge features (Xu et al. 2019; Hu et al. 2020) and CGCNN (Xie & Grossman 2018): plain invariant messages.

Activations are smooth where the originals have corners, so that forces are continuous, and messages fade at the cutoff.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model.layers import Atoms, Mlp, linear, silu
from phalanx.families.materials.model.messages import sum_messages
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.nn.layers import Linear


class GinBlock(nn.Module):
    """x + mlp((1 + eps) x + sum of silu(x_j + edge(d_ij)))."""

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width = config.d_model
        self.scale = 1.0 / config.mean_neighbors
        self.eps = nn.Parameter(torch.empty(1))
        self.edge = Linear(config.n_radial, width, bias=True)
        self.mlp = Mlp(width, 2 * width, width)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Next features."""
        x_NC = atoms.scalars_NC
        edges = (geometry.source_E, geometry.radial_ER, geometry.envelope_E1)
        shared = (geometry.exchange.atoms(x_NC), *self.edge.parameters())
        sums_NC = sum_messages(_gin_message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk)
        change_NC: Tensor = self.mlp((1.0 + self.eps.to(x_NC.dtype)) * x_NC + sums_NC * self.scale)
        return atoms._replace(scalars_NC=x_NC + change_NC)


def _gin_message(
    source_E: Tensor, radial_ER: Tensor, envelope_E1: Tensor, x_NC: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    return silu(x_NC.index_select(0, source_E) + linear(radial_ER, weight, bias)) * envelope_E1


class CgcnnBlock(nn.Module):
    """x + sum of sigmoid(gate(z)) * softplus(core(z)), z = (x_i, x_j, d_ij); no batch normalisation, which mixes graphs."""

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width = config.d_model
        self.scale = 1.0 / config.mean_neighbors
        self.target = Linear(width, 2 * width, bias=True)
        self.source = Linear(width, 2 * width, bias=False)
        self.edge = Linear(config.n_radial, 2 * width, bias=False)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Next features."""
        x_NC = atoms.scalars_NC
        edges = (geometry.source_E, geometry.target_E, geometry.radial_ER, geometry.envelope_E1)
        # Gate and core of z, before their inputs are gathered: atoms are fewer than edges.
        # What travels is half as wide as what the layer makes of it.
        from_MC = self.source(geometry.exchange.atoms(x_NC))
        shared = (from_MC, self.target(x_NC), self.edge.weight)
        sums_NC = sum_messages(_cgcnn_message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk)
        return atoms._replace(scalars_NC=x_NC + sums_NC * self.scale)


def _cgcnn_message(
    source_E: Tensor,
    target_E: Tensor,
    radial_ER: Tensor,
    envelope_E1: Tensor,
    from_NC: Tensor,
    to_NC: Tensor,
    weight: Tensor,
) -> Tensor:
    z = linear(radial_ER, weight) + from_NC.index_select(0, source_E) + to_NC.index_select(0, target_E)
    gate_EC, core_EC = z.chunk(2, dim=-1)
    return gate_EC.sigmoid() * F.softplus(core_EC) * envelope_E1
