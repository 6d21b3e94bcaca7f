"""Backbones whose messages are invariant features alone: GIN, CGCNN, SchNet, GATv2 and PNA.

Activations are smooth where the originals have corners, so that forces are continuous, and messages fade at the cutoff.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model.layers import Atoms, Mlp, cast_linear, layer_values, shifted_softplus, silu
from phalanx.families.materials.model.messages import sum_messages
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


_LARGEST_SCORE = 10.0
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
    weight = (_LARGEST_SCORE * torch.tanh(raw / _LARGEST_SCORE)).exp()
    return torch.cat((weight, weight * given.unflatten(-1, (heads, -1))), dim=-1)


_SPREAD_FLOOR = 0.1
"""Spread of messages that all agree. Its inverse bounds how sharply forces can turn there."""


class PnaBlock(nn.Module):
    """PNA (Corso et al. 2020): x + update(x, mean, largest, smallest and spread of messages under three degree scalers).

    A force is a derivative of all of these, so each is smooth. The largest and smallest are softened: means in which
    messages count by an exponential of their size (Li et al. 2020, softmax aggregation), so that no force changes hands
    where two neighbours tie. How sharply is learned, by channel. The spread has a floor under its root. Neighbours, and the
    degree that scales, count with their envelope, and one neighbour that says nothing is always there: nothing jumps as
    atoms cross the cutoff, and nothing is undefined without neighbours.
    """

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width = config.d_model
        self.mean_log_degree = math.log1p(config.mean_neighbors)
        self.source = Linear(width, width, bias=True)
        self.target = Linear(width, width, bias=False)
        self.edge = Linear(config.n_radial, width, bias=False)
        # Begins at 1: between a mean (0) and an extremum (large).
        self.sharpness = nn.Parameter(torch.empty(width))
        self.update = Linear(13 * width, width, bias=True)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Return the next features."""
        x_NC = atoms.scalars_NC
        edges = (geometry.source_E, geometry.target_E, geometry.radial_ER, geometry.envelope_E1)
        shared = (
            geometry.exchange.atoms(self.source(x_NC)),
            self.target(x_NC),
            self.edge.whole_weight(),
            self.sharpness,
        )
        sums = sum_messages(_pna_message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk)
        degree_N1 = sums[:, :1]
        total, large_weight, small_weight, square, large, small = sums[:, 1:].chunk(6, dim=-1)
        # The neighbour that says nothing adds a message of 0 and a weight of 1.
        mean_NC = total / (degree_N1 + 1.0)
        # Only bfloat16 rounds a variance below 0.
        variance_NC = (square / (degree_N1 + 1.0) - mean_NC.square()).clamp(min=0.0)
        spread_NC = (variance_NC + _SPREAD_FLOOR**2).sqrt()
        found = torch.cat((mean_NC, large / (large_weight + 1.0), small / (small_weight + 1.0), spread_NC), dim=-1)
        # Without neighbours the published attenuation, 1 / more, has no value.
        # Of a degree that counts neighbours with their envelope, so that it is smooth and no whole number.
        more_N1 = torch.log1p(degree_N1) / self.mean_log_degree
        scaled = torch.cat((x_NC, found, found * more_N1, found * (2.0 / (1.0 + more_N1))), dim=-1)
        change_NC: Tensor = self.update(scaled)
        return atoms._replace(scalars_NC=x_NC + change_NC)


def _pna_message(
    source_E: Tensor,
    target_E: Tensor,
    radial_ER: Tensor,
    envelope_E1: Tensor,
    from_NC: Tensor,
    to_NC: Tensor,
    edge: Tensor,
    sharpness_C: Tensor,
) -> Tensor:
    """Return degree, message and the weights of both extrema, then each of these three times the message: [E, 1 + 6C]."""
    inside = from_NC.index_select(0, source_E) + to_NC.index_select(0, target_E) + cast_linear(radial_ER, edge)
    message_EC = silu(inside)
    score_EC = _LARGEST_SCORE * torch.tanh(message_EC * sharpness_C.to(message_EC.dtype) / _LARGEST_SCORE)
    faded_EC, large_EC, small_EC = (share * envelope_E1 for share in (message_EC, score_EC.exp(), (-score_EC).exp()))
    times = (faded_EC * message_EC, large_EC * message_EC, small_EC * message_EC)
    return torch.cat((envelope_E1, faded_EC, large_EC, small_EC, *times), dim=-1)
