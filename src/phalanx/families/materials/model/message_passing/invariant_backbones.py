"""Backbones whose messages are invariant features alone: GIN, GraphSAGE, MFC, CGCNN, SchNet and GATv2.

Activations are smooth where the originals have corners, so that forces are continuous, and messages fade at the cutoff.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model.layers import Atoms, Mlp, cast_linear, layer_values, shifted_softplus, silu
from phalanx.families.materials.model.message_passing.messages import sum_messages
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.nn.layers import Linear


class GinBlock(nn.Module):
    """GIN with edge features (Xu et al. 2019; Hu et al. 2020): x + mlp((1 + eps) x + sum of silu(x_j + edge(d_ij)))."""

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width = config.d_model
        self.scale = 1.0 / config.mean_neighbors
        self.eps = nn.Parameter(torch.empty(1))
        self.edge = Linear(config.n_radial, width, bias=True)
        self.mlp = Mlp(width, 2 * width, width)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Return the next features."""
        x_NC = atoms.scalars_NC
        edges = (geometry.source_E, geometry.radial_ER, geometry.envelope_E1)
        shared = (geometry.exchange.atoms(x_NC), *layer_values(self.edge))
        sums_NC = sum_messages(_gin_message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk)
        change_NC: Tensor = self.mlp((1.0 + self.eps.to(x_NC.dtype)) * x_NC + sums_NC * self.scale)
        return atoms._replace(scalars_NC=x_NC + change_NC)


def _gin_message(
    source_E: Tensor, radial_ER: Tensor, envelope_E1: Tensor, x_NC: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    return silu(x_NC.index_select(0, source_E) + cast_linear(radial_ER, weight, bias)) * envelope_E1


class SageBlock(nn.Module):
    """GraphSAGE (Hamilton, Ying & Leskovec 2017, algorithm 1): x + act(own(x) + neighbours(mean of messages)).

    Messages are GIN's: silu(x_j + edge(d_ij)). Neighbours count with their envelope, and one that says nothing is always
    there: the mean does not jump as atoms cross the cutoff, and has a value without neighbours.
    """

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width = config.d_model
        self.edge = Linear(config.n_radial, width, bias=True)
        self.own = Linear(width, width, bias=True)
        self.neighbours = Linear(width, width, bias=False)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Return the next features."""
        x_NC = atoms.scalars_NC
        sums_NC, degree_N1 = _sum_and_count(x_NC, self.edge, geometry)
        change_NC = silu(self.own(x_NC) + self.neighbours(sums_NC / (degree_N1 + 1.0)))
        return atoms._replace(scalars_NC=x_NC + change_NC)


class MfcBlock(nn.Module):
    """MFC (Duvenaud et al. 2015, algorithm 2): x + act(own(x) + neighbours(sum of messages)), matrices by degree.

    Messages are GIN's. The degree of an atom counts neighbours with their envelope, so it is no whole number: cubic
    B-splines of it weigh the matrices, with two continuous derivatives as the envelope has. The first belongs to no
    neighbours, the last to twice the mean number and more.
    """

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width = config.d_model
        self.degrees = config.mfc.degrees
        self.scale = 1.0 / config.mean_neighbors
        self.edge = Linear(config.n_radial, width, bias=True)
        self.own = Linear(width, self.degrees * width, bias=True)
        self.neighbours = Linear(width, self.degrees * width, bias=False)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Return the next features."""
        x_NC = atoms.scalars_NC
        sums_NC, degree_N1 = _sum_and_count(x_NC, self.edge, geometry)
        every_NKC = (self.own(x_NC) + self.neighbours(sums_NC * self.scale)).unflatten(-1, (self.degrees, -1))
        weight_NK = degree_weights(degree_N1 * (0.5 * self.scale * (self.degrees - 1)), self.degrees)
        change_NC = silu((every_NKC * weight_NK[:, :, None]).sum(1))
        return atoms._replace(scalars_NC=x_NC + change_NC)


def _sum_and_count(x_NC: Tensor, edge: Linear, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return sums of GIN's messages, [N, C], and of envelopes, [N, 1]: neighbours that fade count less than one."""
    edges = (geometry.source_E, geometry.radial_ER, geometry.envelope_E1)
    shared = (geometry.exchange.atoms(x_NC), *layer_values(edge))
    sums = sum_messages(_counted_message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk)
    sums_NC, degree_N1 = sums.split((x_NC.shape[1], 1), dim=-1)
    return sums_NC, degree_N1


def _counted_message(
    source_E: Tensor, radial_ER: Tensor, envelope_E1: Tensor, x_NC: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    return torch.cat((_gin_message(source_E, radial_ER, envelope_E1, x_NC, weight, bias), envelope_E1), dim=-1)


def degree_weights(place_N1: Tensor, count: int) -> Tensor:
    """Return weights [N, count] that add up to 1: cubic B-splines around 0 to count - 1, the last for all beyond."""
    if count == 1:
        return torch.ones_like(place_N1)
    distance_NK = (place_N1 - torch.arange(-1, count - 1, device=place_N1.device, dtype=place_N1.dtype)).abs()
    splines_NK = ((2.0 - distance_NK).clamp(min=0.0).pow(3) - 4.0 * (1.0 - distance_NK).clamp(min=0.0).pow(3)) / 6.0
    # What belongs to fewer than no neighbours is the first one's.
    first_N1 = splines_NK[:, :1] + splines_NK[:, 1:2]
    but_last = torch.cat((first_N1, splines_NK[:, 2:]), dim=1)
    return torch.cat((but_last, 1.0 - but_last.sum(1, keepdim=True)), dim=1)


class CgcnnBlock(nn.Module):
    """CGCNN (Xie & Grossman 2018): x + sum of sigmoid(gate(z)) * softplus(core(z)), z = (x_i, x_j, d_ij).

    Without batch normalisation, which mixes graphs.
    """

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width = config.d_model
        self.scale = 1.0 / config.mean_neighbors
        self.target = Linear(width, 2 * width, bias=True)
        self.source = Linear(width, 2 * width, bias=False)
        self.edge = Linear(config.n_radial, 2 * width, bias=False)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Return the next features."""
        x_NC = atoms.scalars_NC
        edges = (geometry.source_E, geometry.target_E, geometry.radial_ER, geometry.envelope_E1)
        # Gate and core of z, before their inputs are gathered: atoms are fewer than edges.
        # What travels is half as wide as what the layer makes of it.
        from_MC = self.source(geometry.exchange.atoms(x_NC))
        shared = (from_MC, self.target(x_NC), self.edge.whole_weight())
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
    z = cast_linear(radial_ER, weight) + from_NC.index_select(0, source_E) + to_NC.index_select(0, target_E)
    gate_EC, core_EC = z.chunk(2, dim=-1)
    return gate_EC.sigmoid() * F.softplus(core_EC) * envelope_E1


class SchNetBlock(nn.Module):
    """SchNet (Schuett et al. 2017): x + update(act(outward(sum of inward(x_j) * filter(d_ij)))).

    Neighbours' features are multiplied by filters that are functions of the distance.
    """

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width = config.d_model
        self.scale = 1.0 / config.mean_neighbors
        self.inward = Linear(width, width, bias=False)
        self.filter = Mlp(config.n_radial, width, width)
        self.outward = Linear(width, width, bias=True)
        self.update = Linear(width, width, bias=True)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Return the next features."""
        edges = (geometry.source_E, geometry.radial_ER, geometry.envelope_E1)
        # Scaled before it is sent: the sum over neighbours then needs no pass of its own.
        given_MC = geometry.exchange.atoms(self.inward(atoms.scalars_NC) * self.scale)
        shared = (given_MC, *layer_values(self.filter))
        sums_NC = sum_messages(_schnet_message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk)
        change_NC: Tensor = self.update(shifted_softplus(self.outward(sums_NC)))
        return atoms._replace(scalars_NC=atoms.scalars_NC + change_NC)


def _schnet_message(
    source_E: Tensor,
    radial_ER: Tensor,
    envelope_E1: Tensor,
    x_NC: Tensor,
    weight_1: Tensor,
    bias_1: Tensor,
    weight_2: Tensor,
    bias_2: Tensor,
) -> Tensor:
    filter_EC = cast_linear(shifted_softplus(cast_linear(radial_ER, weight_1, bias_1)), weight_2, bias_2)
    return x_NC.index_select(0, source_E) * (filter_EC * envelope_E1)


LARGEST_SCORE = 10.0
"""Scores are bent to stay below: exponentials then need no maximum over neighbours, which would not be smooth."""


class Gatv2Block(nn.Module):
    """GATv2 (Brody, Alon & Yahav 2022): x + mlp(attention over neighbours), whose scores see both ends and the distance.

    An atom attends to itself too, with a weight that does not fade: a lone neighbour that crosses the cutoff then leaves
    smoothly, where a softmax over neighbours alone would jump.
    """

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width = config.d_model
        self.heads = config.gatv2.heads
        self.source = Linear(width, width, bias=True)
        self.target = Linear(width, width, bias=False)
        self.edge = Linear(config.n_radial, width, bias=False)
        self.score = nn.Parameter(torch.empty(self.heads, width // self.heads))
        self.mlp = Mlp(width, width, width)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Return the next features."""
        x_NC = atoms.scalars_NC
        from_NC, to_NC = self.source(x_NC), self.target(x_NC)
        edges = (geometry.source_E, geometry.target_E, geometry.radial_ER, geometry.envelope_E1)
        shared = (geometry.exchange.atoms(from_NC), to_NC, self.edge.whole_weight(), self.score)
        sums_NHE = sum_messages(_gatv2_message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk)
        sums_NHE = sums_NHE + _weigh_values(from_NC + to_NC, from_NC, self.score)
        mixed_NC = (sums_NHE[..., 1:] / sums_NHE[..., :1]).flatten(1)
        change_NC: Tensor = self.mlp(mixed_NC)
        return atoms._replace(scalars_NC=x_NC + change_NC)


def _gatv2_message(
    source_E: Tensor,
    target_E: Tensor,
    radial_ER: Tensor,
    envelope_E1: Tensor,
    from_NC: Tensor,
    to_NC: Tensor,
    edge: Tensor,
    score: Tensor,
) -> Tensor:
    given_EC = from_NC.index_select(0, source_E)
    seen_EC = given_EC + to_NC.index_select(0, target_E) + cast_linear(radial_ER, edge)
    return _weigh_values(seen_EC, given_EC, score) * envelope_E1[:, :, None]


def _weigh_values(seen: Tensor, given: Tensor, score_HE: Tensor) -> Tensor:
    """Return the weight of each head, then the weighted values: [rows, H, 1 + C/H]."""
    heads = len(score_HE)
    raw = (silu(seen).unflatten(-1, (heads, -1)) * score_HE.to(seen.dtype)).sum(-1, keepdim=True)
    # No maximum over neighbours is taken off, which a softmax usually needs: it has a corner where two tie.
    weight = (LARGEST_SCORE * torch.tanh(raw / LARGEST_SCORE)).exp()
    return torch.cat((weight, weight * given.unflatten(-1, (heads, -1))), dim=-1)
