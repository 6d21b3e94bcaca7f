"""EGNN (Satorras, Hoogeboom & Welling 2021): invariant messages that also move the atoms.

Atoms keep how far they have moved rather than where they are, so that periodic images move with them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model.layers import Atoms, Mlp, linear, silu
from phalanx.families.materials.model.messages import sum_messages
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.nn.layers import Linear

_LENGTH_EPS = 1e-8


class EgnnBlock(nn.Module):
    """Equations 3 to 6, with radial functions of the true distance beside the squared distance after moving.

    Messages fade towards the cutoff of the true distance; a step is along r / (|r| + 1), as in the authors' own code.
    """

    def __init__(self, config: MaterialsModel, number: int) -> None:
        super().__init__()
        width = config.d_model
        # Behind the last block nobody asks where atoms went, unless a dipole does.
        self.moves = number < config.n_layers - 1 or config.dipole is not None
        self.scale = 1.0 / config.mean_neighbors
        self.inverse_cutoff = 1.0 / config.cutoff
        self.ends = Linear(width, 2 * width, bias=True)
        self.distances = Linear(config.n_radial + 1, width, bias=False)
        self.message = Linear(width, width, bias=True)
        if self.moves:
            self.coordinate = Mlp(width, width, 1)
        self.update = Mlp(2 * width, width, width)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Next scalars [N, C] and displacements [N, 3, 1] in units of the cutoff."""
        moved_N31 = atoms.vectors_NMC
        assert moved_N31 is not None
        # The first layer of the message's network, before its inputs are gathered: atoms are fewer than edges.
        from_NC, to_NC = self.ends(atoms.scalars_NC).chunk(2, dim=-1)
        moved_N3 = moved_N31.squeeze(-1)
        vector_E3 = (geometry.vector_E3 * self.inverse_cutoff).to(moved_N3.dtype)
        edges = (geometry.source_E, geometry.target_E, geometry.radial_ER, geometry.envelope_E1, vector_E3)
        given = geometry.exchange.atoms(torch.cat((from_NC, moved_N3), dim=1))
        from_MC, moved_M3 = given.split((from_NC.shape[1], 3), dim=1)
        shared = (from_MC, to_NC, moved_M3, self.distances.weight, *self.message.parameters())
        if self.moves:
            shared = (*shared, *self.coordinate.parameters())
        sums = sum_messages(_message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk) * self.scale
        step, received_NC = sums.split((3 * self.moves, atoms.scalars_NC.shape[1]), dim=-1)
        change_NC: Tensor = self.update(torch.cat((atoms.scalars_NC, received_NC), dim=-1))
        return Atoms(atoms.scalars_NC + change_NC, moved_N31 + step[:, :, None] if self.moves else None)


def _message(
    source_E: Tensor,
    target_E: Tensor,
    radial_ER: Tensor,
    envelope_E1: Tensor,
    vector_E3: Tensor,
    from_NC: Tensor,
    to_NC: Tensor,
    moved_N3: Tensor,
    distances: Tensor,
    weight: Tensor,
    bias: Tensor,
    *coordinate: Tensor,
) -> Tensor:
    """The step of the target, where atoms move, then the message to it, [E, 3 + C]. Lengths in units of the cutoff."""
    now_E3 = vector_E3 + moved_N3.index_select(0, target_E) - moved_N3.index_select(0, source_E)
    squared_E1 = now_E3.square().sum(1, keepdim=True)
    inside = linear(torch.cat((radial_ER, squared_E1), dim=-1), distances)
    inside = inside + from_NC.index_select(0, source_E) + to_NC.index_select(0, target_E)
    message_EC = silu(linear(silu(inside), weight, bias)) * envelope_E1
    if not coordinate:
        return message_EC
    weight_1, bias_1, weight_2, bias_2 = coordinate
    size_E1 = linear(silu(linear(message_EC, weight_1, bias_1)), weight_2, bias_2) * envelope_E1
    step_E3 = now_E3 * (size_E1 / ((squared_E1 + _LENGTH_EPS).sqrt() + 1.0))
    return torch.cat((step_E3, message_EC), dim=-1)
