"""PNA (Corso et al. 2020): mean, maximum, minimum and spread of messages, each scaled with the number of neighbours.

Neighbours count with their envelope, and one neighbour that says nothing is always there: all four are then continuous
as atoms cross the cutoff, and defined without neighbours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from phalanx.config.materials import MaterialsModel
from phalanx.models.language.layers import Linear
from phalanx.models.materials.activations import silu
from phalanx.models.materials.geometry import Geometry
from phalanx.models.materials.layers import Atoms, linear
from phalanx.models.materials.messages import reduce_messages

_VARIANCE_EPS = 1e-6


class PnaBlock(nn.Module):
    """x + update(x, four aggregates under three scalers)."""

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width = config.d_model
        self.mean_log_degree = math.log1p(config.mean_neighbors)
        self.source = Linear(width, width, bias=True)
        self.target = Linear(width, width, bias=False)
        self.edge = Linear(config.n_radial, width, bias=False)
        self.update = Linear(13 * width, width, bias=True)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Next features."""
        x_NC = atoms.scalars_NC
        edges = (geometry.source_E, geometry.target_E, geometry.radial_ER, geometry.envelope_E1)
        shared = (geometry.exchange.atoms(self.source(x_NC)), self.target(x_NC), self.edge.weight)
        sums, extremes = reduce_messages(
            _message, edges, shared, geometry.target_E, geometry.atoms, ("sum", "amax"), geometry.chunk
        )
        degree_N1 = sums[:, :1]
        mean_NC, square_NC = (sums[:, 1:] / (degree_N1 + 1.0)).chunk(2, dim=-1)
        spread_NC = ((square_NC - mean_NC.square()).clamp(min=0.0) + _VARIANCE_EPS).sqrt()
        largest_NC, smallest_NC = extremes.chunk(2, dim=-1)
        found = torch.cat((mean_NC, largest_NC, -smallest_NC, spread_NC), dim=-1)
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
) -> tuple[Tensor, Tensor]:
    """What is summed (degree, message, its square) and what is maximised (message, its negative)."""
    inside = from_NC.index_select(0, source_E) + to_NC.index_select(0, target_E) + linear(radial_ER, edge)
    message_EC = silu(inside)
    faded_EC = message_EC * envelope_E1
    return torch.cat((envelope_E1, faded_EC, faded_EC * message_EC), dim=-1), torch.cat((faded_EC, -faded_EC), dim=-1)
