"""PNA (Corso et al. 2020): mean, largest, smallest and spread of messages, each scaled with the number of neighbours.

A force is a derivative of all of these, so each is smooth. The largest and smallest are softened: means in which messages
count by an exponential of their size (Li et al. 2020, softmax aggregation), so that no force changes hands where two
neighbours tie. How sharply is learned, by channel. The spread has a floor under its root. Neighbours, and the degree that
scales, count with their envelope, and one neighbour that says nothing is always there: nothing jumps as atoms cross the
cutoff, and nothing is undefined without neighbours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model.layers import Atoms, linear, silu
from phalanx.families.materials.model.messages import sum_messages
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.nn.layers import Linear

_LARGEST_SCORE = 10.0
"""Scores are bent to stay below: exponentials then need no maximum over neighbours, which would not be smooth."""
_SPREAD_FLOOR = 0.1
"""Spread of messages that all agree. Its inverse bounds how sharply forces can turn there."""


class PnaBlock(nn.Module):
    """x + update(x, four aggregates under three scalers)."""

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width = config.d_model
        self.mean_log_degree = math.log1p(config.mean_neighbors)
        self.source = Linear(width, width, bias=True)
        self.target = Linear(width, width, bias=False)
        self.edge = Linear(config.n_radial, width, bias=False)
        self.sharpness = nn.Parameter(torch.empty(width))
        self.update = Linear(13 * width, width, bias=True)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Next features."""
        x_NC = atoms.scalars_NC
        edges = (geometry.source_E, geometry.target_E, geometry.radial_ER, geometry.envelope_E1)
        shared = (geometry.exchange.atoms(self.source(x_NC)), self.target(x_NC), self.edge.weight, self.sharpness)
        sums = sum_messages(_message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk)
        degree_N1 = sums[:, :1]
        total, large_weight, small_weight, square, large, small = sums[:, 1:].chunk(6, dim=-1)
        # The neighbour that says nothing adds a message of 0 and a weight of 1.
        mean_NC = total / (degree_N1 + 1.0)
        # Only bfloat16 rounds a variance below 0.
        variance_NC = (square / (degree_N1 + 1.0) - mean_NC.square()).clamp(min=0.0)
        spread_NC = (variance_NC + _SPREAD_FLOOR**2).sqrt()
        found = torch.cat((mean_NC, large / (large_weight + 1.0), small / (small_weight + 1.0), spread_NC), dim=-1)
        # Without neighbours the published attenuation, 1 / more, has no value.
        more_N1 = torch.log1p(degree_N1) / self.mean_log_degree
        scaled = torch.cat((x_NC, found, found * more_N1, found * (2.0 / (1.0 + more_N1))), dim=-1)
        change_NC: Tensor = self.update(scaled)
        return atoms._replace(scalars_NC=x_NC + change_NC)


def _message(
    source_E: Tensor,
    target_E: Tensor,
    radial_ER: Tensor,
    envelope_E1: Tensor,
    from_NC: Tensor,
    to_NC: Tensor,
    edge: Tensor,
    sharpness_C: Tensor,
) -> Tensor:
    """Degree, message and the weights of both extrema, then each of these three times the message: [E, 1 + 6C]."""
    inside = from_NC.index_select(0, source_E) + to_NC.index_select(0, target_E) + linear(radial_ER, edge)
    message_EC = silu(inside)
    score_EC = _LARGEST_SCORE * torch.tanh(message_EC * sharpness_C.to(message_EC.dtype) / _LARGEST_SCORE)
    faded_EC, large_EC, small_EC = (share * envelope_E1 for share in (message_EC, score_EC.exp(), (-score_EC).exp()))
    times = (faded_EC * message_EC, large_EC * message_EC, small_EC * message_EC)
    return torch.cat((envelope_E1, faded_EC, large_EC, small_EC, *times), dim=-1)
