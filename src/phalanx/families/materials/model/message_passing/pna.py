"""PNA and what HydraGNN makes of it: PNA+, with learned functions of the distance, and PNAEq, with PaiNN's vectors.

A force is a derivative of all aggregations, so each is smooth. The largest and smallest are softened: means in which
messages count by an exponential of their size (Li et al. 2020, softmax aggregation), so that no force changes hands where
two neighbours tie. How sharply is learned, by channel. The spread has a floor under its root. Neighbours, and the degree
that scales, count with their envelope, and one neighbour that says nothing is always there: nothing jumps as atoms cross
the cutoff, and nothing is undefined without neighbours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model.layers import Atoms, Mlp, cast_linear, layer_values, silu
from phalanx.families.materials.model.message_passing.equivariant_backbones import update_vectors
from phalanx.families.materials.model.message_passing.invariant_backbones import LARGEST_SCORE
from phalanx.families.materials.model.message_passing.messages import sum_messages
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.nn.layers import Linear

_SPREAD_FLOOR = 0.1
"""Spread of messages that all agree. Its inverse bounds how sharply forces can turn there."""
AGGREGATIONS = 4
"""Mean, largest, smallest and spread."""


def scaled_aggregations(sums: Tensor, mean_degree: float, scalers: int) -> Tensor:
    """Return mean, largest, smallest and spread of messages, each under scalers of the degree: [N, scalers * 4 C].

    sums: of `message_powers` over the edges of an atom, [N, 1 + 6 C]. scalers: 3 for identity, amplification and attenuation
    (Corso et al. 2020), 4 for the linear one too, 5 for its inverse too.
    """
    degree_N1 = sums[:, :1]
    total, large_weight, small_weight, square, large, small = sums[:, 1:].chunk(6, dim=-1)
    # The neighbour that says nothing adds a message of 0 and a weight of 1.
    mean_NC = total / (degree_N1 + 1.0)
    # Only bfloat16 rounds a variance below 0.
    variance_NC = (square / (degree_N1 + 1.0) - mean_NC.square()).clamp(min=0.0)
    spread_NC = (variance_NC + _SPREAD_FLOOR**2).sqrt()
    found = torch.cat((mean_NC, large / (large_weight + 1.0), small / (small_weight + 1.0), spread_NC), dim=-1)
    # Without neighbours the published attenuation, 1 / more, has no value; nor has the inverse of the degree.
    # Of a degree that counts neighbours with their envelope, so that it is smooth and no whole number.
    more_N1 = torch.log1p(degree_N1) / math.log1p(mean_degree)
    times_N1 = degree_N1 / mean_degree
    factors = (more_N1, 2.0 / (1.0 + more_N1), times_N1, 2.0 / (1.0 + times_N1))
    return torch.cat((found, *(found * factor for factor in factors[: scalers - 1])), dim=-1)


def message_powers(message_EC: Tensor, envelope_E1: Tensor, sharpness_C: Tensor) -> Tensor:
    """Return degree, message and the weights of both extrema, then each of these three times the message: [E, 1 + 6C]."""
    score_EC = LARGEST_SCORE * torch.tanh(message_EC * sharpness_C.to(message_EC.dtype) / LARGEST_SCORE)
    faded_EC, large_EC, small_EC = (share * envelope_E1 for share in (message_EC, score_EC.exp(), (-score_EC).exp()))
    times = (faded_EC * message_EC, large_EC * message_EC, small_EC * message_EC)
    return torch.cat((envelope_E1, faded_EC, large_EC, small_EC, *times), dim=-1)


class PnaBlock(nn.Module):
    """PNA (Corso et al. 2020): x + update(x, mean, largest, smallest and spread of messages under three degree scalers)."""

    scalers = 3

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width = config.d_model
        self.mean_degree = config.mean_neighbors
        self.source = Linear(width, width, bias=True)
        self.target = Linear(width, width, bias=False)
        self.edge = Linear(config.n_radial, width, bias=False)
        # Begins at 1: between a mean (0) and an extremum (large).
        self.sharpness = nn.Parameter(torch.empty(width))
        self.update = Linear((1 + self.scalers * AGGREGATIONS) * width, width, bias=True)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Return the next features."""
        x_NC = atoms.scalars_NC
        edges = (geometry.source_E, geometry.target_E, geometry.radial_ER, geometry.envelope_E1)
        shared = (geometry.exchange.atoms(self.source(x_NC)), self.target(x_NC), self.sharpness, *self.radial_weights())
        sums = sum_messages(_pna_message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk)
        found = scaled_aggregations(sums, self.mean_degree, self.scalers)
        change_NC: Tensor = self.update(torch.cat((x_NC, found), dim=-1))
        return atoms._replace(scalars_NC=x_NC + change_NC)

    def radial_weights(self) -> tuple[Tensor, ...]:
        """Return what messages make of the functions of the distance with."""
        return (self.edge.whole_weight(),)


class PnaPlusBlock(PnaBlock):
    """PNA+ (HydraGNN, PNAPlusStack): messages see embedded functions of the distance and are multiplied by a filter of them;
    the degree scales in a fourth way, linearly."""

    scalers = 4

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__(config)
        width = config.d_model
        self.embed = Linear(config.n_radial, width, bias=True)
        self.edge = Linear(width, width, bias=False)
        self.filter = Linear(config.n_radial, width, bias=False)

    def radial_weights(self) -> tuple[Tensor, ...]:
        """Return what messages make of the functions of the distance with."""
        return (*super().radial_weights(), *layer_values(self.embed), self.filter.whole_weight())


def _pna_message(
    source_E: Tensor,
    target_E: Tensor,
    radial_ER: Tensor,
    envelope_E1: Tensor,
    from_NC: Tensor,
    to_NC: Tensor,
    sharpness_C: Tensor,
    edge: Tensor,
    *plus: Tensor,
) -> Tensor:
    """Return `message_powers` of the messages, [E, 1 + 6C]. plus: of PNA+, weight and bias of the embedding, the filter."""
    seen = silu(cast_linear(radial_ER, *plus[:2])) if plus else radial_ER
    inside = from_NC.index_select(0, source_E) + to_NC.index_select(0, target_E) + cast_linear(seen, edge)
    message_EC = silu(inside)
    if plus:
        message_EC = message_EC * cast_linear(radial_ER, plus[2])
    return message_powers(message_EC, envelope_E1, sharpness_C)


class PnaEqBlock(nn.Module):
    """PNAEq (HydraGNN, PNAEqStack): PaiNN whose scalar messages are aggregated as PNA's are, under five scalers.

    Messages are networks of both atoms and the distance rather than products of a neighbour's features with a filter. They
    give gates of the neighbour's vectors and of the direction, whose vectors are summed as in PaiNN: a sum alone turns with
    the atoms. The layers that follow each block there only change widths, and are left out.
    """

    scalers = 5

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width = config.d_model
        self.mean_degree = config.mean_neighbors
        self.source = Linear(width, width, bias=True)
        self.target = Linear(width, width, bias=False)
        self.embed = Linear(config.n_radial, width, bias=True)
        self.edge = Linear(width, width, bias=False)
        self.message = Mlp(width, width, 3 * width)
        self.filter = Linear(config.n_radial, 3 * width, bias=False)
        self.sharpness = nn.Parameter(torch.empty(width))
        self.gather = Linear((1 + self.scalers * AGGREGATIONS) * width, width, bias=True)
        # No bias: a constant vector would not turn with the atoms.
        self.mix = Linear(width, 2 * width, bias=False)
        self.update = Mlp(2 * width, width, 3 * width)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Return the next scalars [N, C] and vectors [N, 3, C]."""
        x_NC, vectors_N3C = atoms.scalars_NC, atoms.vectors_NMC
        assert vectors_N3C is not None
        edges = (geometry.source_E, geometry.target_E, geometry.radial_ER, geometry.envelope_E1, geometry.unit_E3)
        given_M4C = geometry.exchange.atoms(torch.cat((self.source(x_NC)[:, None], vectors_N3C), dim=1))
        layers = (*layer_values(self.embed), self.edge.whole_weight(), *layer_values(self.message))
        shared = (given_M4C, self.target(x_NC), self.sharpness, self.filter.whole_weight(), *layers)
        sums = sum_messages(_pnaeq_message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk)
        width = x_NC.shape[1]
        vectors, sums = sums.split((3 * width, 1 + 6 * width), dim=-1)
        found = scaled_aggregations(sums, self.mean_degree, self.scalers)
        x_NC = x_NC + self.gather(torch.cat((x_NC, found), dim=-1))
        vectors_N3C = vectors_N3C + vectors.unflatten(-1, (3, -1)) / self.mean_degree
        return update_vectors(x_NC, vectors_N3C, self.mix, self.update)


def _pnaeq_message(
    source_E: Tensor,
    target_E: Tensor,
    radial_ER: Tensor,
    envelope_E1: Tensor,
    unit_E3: Tensor,
    given_N4C: Tensor,
    to_NC: Tensor,
    sharpness_C: Tensor,
    filter_weight: Tensor,
    embed: Tensor,
    embed_bias: Tensor,
    edge: Tensor,
    weight_1: Tensor,
    bias_1: Tensor,
    weight_2: Tensor,
    bias_2: Tensor,
) -> Tensor:
    """Return vector messages, then `message_powers` of the scalar ones, [E, 3 C + 1 + 6 C]."""
    from_E1C, vector_E3C = given_N4C.index_select(0, source_E).split((1, 3), dim=1)
    seen_EC = cast_linear(torch.tanh(cast_linear(radial_ER, embed, embed_bias)), edge)
    # Tanh in between keeps what a deep network of vectors multiplies from growing (HydraGNN).
    inside_EC = torch.tanh(from_E1C.squeeze(1) + to_NC.index_select(0, target_E) + seen_EC)
    gates = cast_linear(silu(cast_linear(inside_EC, weight_1, bias_1)), weight_2, bias_2)
    kept_E1C, along_E1C, message_E1C = (
        (gates * cast_linear(radial_ER, filter_weight)).unflatten(-1, (3, -1)).split(1, 1)
    )
    vectors_E3C = (vector_E3C * kept_E1C + along_E1C * unit_E3[:, :, None]) * envelope_E1[:, :, None]
    powers = message_powers(message_E1C.squeeze(1), envelope_E1, sharpness_C)
    return torch.cat((vectors_E3C.flatten(1), powers), dim=-1)
