"""GATv2 (Brody, Alon & Yahav 2022): attention over neighbours whose scores see both ends and the distance.

An atom attends to itself too, with a weight that does not fade: a lone neighbour that crosses the cutoff then leaves
smoothly, where a softmax over neighbours alone would jump.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model.layers import Atoms, Mlp, linear, silu
from phalanx.families.materials.model.messages import sum_messages
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.nn.layers import Linear

_LARGEST_SCORE = 10.0
"""Scores are bent to stay below: exponentials then need no maximum over neighbours."""


class Gatv2Block(nn.Module):
    """x + mlp(attention over neighbours and the atom itself)."""

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
        """Next features."""
        x_NC = atoms.scalars_NC
        from_NC, to_NC = self.source(x_NC), self.target(x_NC)
        edges = (geometry.source_E, geometry.target_E, geometry.radial_ER, geometry.envelope_E1)
        shared = (geometry.exchange.atoms(from_NC), to_NC, self.edge.weight, self.score)
        sums_NHE = sum_messages(_message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk)
        sums_NHE = sums_NHE + _weighed(from_NC + to_NC, from_NC, self.score)
        mixed_NC = (sums_NHE[..., 1:] / sums_NHE[..., :1]).flatten(1)
        change_NC: Tensor = self.mlp(mixed_NC)
        return atoms._replace(scalars_NC=x_NC + change_NC)


def _message(
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
    seen_EC = given_EC + to_NC.index_select(0, target_E) + linear(radial_ER, edge)
    return _weighed(seen_EC, given_EC, score) * envelope_E1[:, :, None]


def _weighed(seen: Tensor, given: Tensor, score_HE: Tensor) -> Tensor:
    """The weight of each head, then the weighted values: [rows, H, 1 + C/H]."""
    heads = len(score_HE)
    raw = (silu(seen).unflatten(-1, (heads, -1)) * score_HE.to(seen.dtype)).sum(-1, keepdim=True)
    weight = (_LARGEST_SCORE * torch.tanh(raw / _LARGEST_SCORE)).exp()
    return torch.cat((weight, weight * given.unflatten(-1, (heads, -1))), dim=-1)
