"""SchNet (Schuett et al. 2017): neighbours' features times filters that are functions of the distance."""

from __future__ import annotations

from torch import Tensor, nn

from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model.layers import Atoms, Mlp, linear, shifted_softplus
from phalanx.families.materials.model.messages import sum_messages
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.nn.layers import Linear


class SchNetBlock(nn.Module):
    """x + update(act(outward(sum of inward(x_j) * filter(d_ij))))."""

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width = config.d_model
        self.scale = 1.0 / config.mean_neighbors
        self.inward = Linear(width, width, bias=False)
        self.filter = Mlp(config.n_radial, width, width)
        self.outward = Linear(width, width, bias=True)
        self.update = Linear(width, width, bias=True)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Next features."""
        edges = (geometry.source_E, geometry.radial_ER, geometry.envelope_E1)
        given_MC = geometry.exchange.atoms(self.inward(atoms.scalars_NC) * self.scale)
        shared = (given_MC, *self.filter.parameters())
        sums_NC = sum_messages(_message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk)
        change_NC: Tensor = self.update(shifted_softplus(self.outward(sums_NC)))
        return atoms._replace(scalars_NC=atoms.scalars_NC + change_NC)


def _message(
    source_E: Tensor,
    radial_ER: Tensor,
    envelope_E1: Tensor,
    x_NC: Tensor,
    weight_1: Tensor,
    bias_1: Tensor,
    weight_2: Tensor,
    bias_2: Tensor,
) -> Tensor:
    filter_EC = linear(shifted_softplus(linear(radial_ER, weight_1, bias_1)), weight_2, bias_2)
    return x_NC.index_select(0, source_E) * (filter_EC * envelope_E1)
