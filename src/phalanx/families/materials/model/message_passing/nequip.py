"""A NequIP-class backbone (Batzner et al. 2022, Nature Communications 13, 2453): equivariant convolutions and gates.

Differs from the reference in what is mixed where: elements weigh the skip connection channel by channel, and features of
degree l turn under reflections as (-1)^l alone. Components and couplings are those of `mace`.
"""

from __future__ import annotations

import torch

from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model.layers import Atoms, silu
from phalanx.families.materials.model.message_passing.equivariant_constants import component_range
from phalanx.families.materials.model.message_passing.mace import EquivariantConvolution, by_component
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.nn.layers import Linear

_SILU_SCALE = 1.6765
"""Factor that keeps the mean square of silu of normal numbers at 1."""


class NequipBlock(EquivariantConvolution):
    """One interaction: self-interaction, convolution with bonds, skip connection, and gates of scalars on all degrees."""

    def __init__(self, config: MaterialsModel, number: int) -> None:
        width, degree = config.d_model, config.nequip.degree
        # Before the first block atoms are scalars from a table of elements.
        inside = 0 if number == 0 else degree
        outside = nequip_outgoing_degree(config, number)
        # Sums of independent messages grow as the root of their number.
        scale = config.mean_neighbors**-0.5
        super().__init__(config, inside, degree, outside, radial_widths=[config.nequip.radial_width], scale=scale)
        self.outside = outside
        self.add_skip(config, inside, outside)
        self.gates = Linear(width, outside * width, bias=True) if outside else None

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Return the next features: scalars [N, C] and, above degree 0, components [N, M, C]."""
        features_NSC, convolved_NSC = self.convolve(atoms, geometry)
        joined_NSC = self.join_skip(features_NSC, convolved_NSC, geometry.species_N)
        scalars_N1C, vectors_NMC = joined_NSC.split((1, joined_NSC.shape[1] - 1), dim=1)
        scalars_NC = scalars_N1C.squeeze(1)
        activated_NC = _SILU_SCALE * silu(scalars_NC)
        if self.gates is None:
            return Atoms(activated_NC)
        gates_NLC = _SILU_SCALE * silu(self.gates(scalars_NC).unflatten(-1, (self.outside, -1)))
        # A first row for degree 0, which the components of higher degrees leave out again.
        gates_NSC = by_component(torch.cat((gates_NLC[:, :1], gates_NLC), dim=1))[:, component_range(0).stop :]
        return Atoms(activated_NC, vectors_NMC * gates_NSC)


def nequip_outgoing_degree(config: MaterialsModel, number: int) -> int:
    """Return the largest degree that block `number` gives: none but scalars from the last, unless a dipole is made of its
    vectors."""
    last = number == config.n_layers - 1
    return 0 if last and config.dipole is None else config.nequip.degree
