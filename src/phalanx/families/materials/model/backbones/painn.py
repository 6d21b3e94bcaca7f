"""PaiNN (Schuett, Unke & Gastegger 2021): scalars and vectors on every atom, exchanged through equivariant messages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model.layers import Atoms, Mlp, linear
from phalanx.families.materials.model.messages import sum_messages
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.nn.layers import Linear

_NORM_EPS = 1e-8
"""Under the root of a vector's length: its derivatives stay finite where the vector is 0."""


class PaiNNBlock(nn.Module):
    """One message block and one update block (equations 7 to 9)."""

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width = config.d_model
        self.scale = 1.0 / config.mean_neighbors
        self.inward = Mlp(width, width, 3 * width)
        self.filter = Linear(config.n_radial, 3 * width, bias=True)
        self.mix = Linear(width, 2 * width, bias=False)
        self.update = Mlp(2 * width, width, 3 * width)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Next scalars [N, C] and vectors [N, 3, C]."""
        scalars_NC, vectors_N3C = self._receive(atoms, geometry)
        return self._mix(scalars_NC, vectors_N3C)

    def _receive(self, atoms: Atoms, geometry: Geometry) -> tuple[Tensor, Tensor]:
        scalars_NC, vectors_N3C = atoms.scalars_NC, atoms.vectors_NMC
        assert vectors_N3C is not None
        # What every neighbour reads of an atom, side by side, so that an edge gathers once.
        inward = (self.inward(scalars_NC) * self.scale).unflatten(-1, (3, -1))
        given_N6C = torch.cat((inward, vectors_N3C), dim=1)
        # Fading the radial functions, with a 1 for the bias among them, spares a pass over the filters.
        radial_EX = torch.cat((geometry.radial_ER, torch.ones_like(geometry.envelope_E1)), dim=1) * geometry.envelope_E1
        assert self.filter.bias is not None
        filter_XC = torch.cat((self.filter.weight, self.filter.bias[:, None]), dim=1)
        edges = (geometry.source_E, radial_EX, geometry.unit_E3)
        shared = (geometry.exchange.atoms(given_N6C), filter_XC)
        sums_N4C = sum_messages(_message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk)
        scalar_N1C, vector_N3C = sums_N4C.split((1, 3), dim=1)
        return scalars_NC + scalar_N1C.squeeze(1), vectors_N3C + vector_N3C

    def _mix(self, scalars_NC: Tensor, vectors_N3C: Tensor) -> Atoms:
        left_N3C, right_N3C = self.mix(vectors_N3C).chunk(2, dim=-1)
        length_NC = (right_N3C.square().sum(1) + _NORM_EPS).sqrt()
        update = self.update(torch.cat((scalars_NC, length_NC), dim=-1))
        gate_NC, overlap_NC, change_NC = update.chunk(3, dim=-1)
        scalars_NC = scalars_NC + change_NC + overlap_NC * (left_N3C * right_N3C).sum(1)
        return Atoms(scalars_NC, vectors_N3C + gate_NC[:, None] * left_N3C)


def _message(source_E: Tensor, radial_EX: Tensor, unit_E3: Tensor, given_N6C: Tensor, filter_XC: Tensor) -> Tensor:
    """Scalar and vector messages side by side, [E, 4, C]."""
    filter_E3C = linear(radial_EX, filter_XC).unflatten(-1, (3, -1))
    given_E3C, vector_E3C = given_N6C.index_select(0, source_E).split(3, dim=1)
    scalar, along, kept = (given_E3C * filter_E3C).split(1, dim=1)
    return torch.cat((scalar, kept * vector_E3C + along * unit_E3[:, :, None]), dim=1)
