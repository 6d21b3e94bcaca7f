"""A NequIP-class backbone (Batzner et al. 2022, Nature Communications 13, 2453): equivariant convolutions and gates.

Differs from the reference in what is mixed where: elements weigh the skip connection channel by channel, and features of
degree l turn under reflections as (-1)^l alone. Components and couplings are those of `mace`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model.layers import Atoms, ElementTable, Mlp, layer_values, silu
from phalanx.families.materials.model.mace import (
    DegreeLinear,
    by_component,
    component_range,
    count_components,
    couple_messages,
    coupling_paths,
    stack_couplings,
)
from phalanx.families.materials.model.messages import sum_messages
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.nn.layers import Linear

_SILU_SCALE = 1.6765
"""What keeps the mean square of silu of normal numbers at 1."""


class NequipBlock(nn.Module):
    """One interaction: self-interaction, convolution with bonds, skip connection, and gates of scalars on all degrees."""

    def __init__(self, config: MaterialsModel, number: int) -> None:
        super().__init__()
        width, degree = config.d_model, config.nequip.degree
        # Before the first block atoms are scalars from a table of elements.
        inside = 0 if number == 0 else degree
        self.outside = nequip_outgoing_degree(config, number)
        self.scale = config.mean_neighbors**-0.5
        self.paths = coupling_paths(inside, degree, self.outside)
        self.couplings = stack_couplings(tuple(self.paths), count_components(inside), count_components(degree))
        self.inward = DegreeLinear([width] * (inside + 1), width)
        self.radial = Mlp(config.n_radial, config.nequip.radial_width, len(self.paths) * width)
        counts = [sum(path.result == one for path in self.paths) for one in range(self.outside + 1)]
        self.outward = DegreeLinear([count * width for count in counts], width)
        kept = min(inside, self.outside) + 1
        self.skip = DegreeLinear([width] * kept, width)
        self.skip_element = ElementTable(config.max_atomic_number, kept, width)
        self.gates = Linear(width, self.outside * width, bias=True) if self.outside else None

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Return the next features: scalars [N, C] and, above degree 0, components [N, M, C]."""
        features_NSC = atoms.scalars_NC[:, None]
        if atoms.vectors_NMC is not None:
            features_NSC = torch.cat((features_NSC, atoms.vectors_NMC), dim=1)
        features_NSC = features_NSC[:, : count_components(len(self.inward) - 1)]
        assert geometry.harmonics_ES is not None
        couplings, path_Q = self.couplings
        device, dtype = features_NSC.device, features_NSC.dtype
        edges = (geometry.source_E, geometry.radial_ER, geometry.envelope_E1, geometry.harmonics_ES)
        # Sums of independent messages grow as the root of their number.
        given_NSC = self.inward(features_NSC) * self.scale
        shared = (geometry.exchange.atoms(given_NSC), *layer_values(self.radial))
        message = partial(couple_messages, couplings.on(device, dtype), path_Q.on(device, torch.int64))
        sums_NQC = sum_messages(message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk)
        convolved_NSC = self.outward.paths(sums_NQC)
        kept_NSC = self.skip(features_NSC[:, : count_components(len(self.skip) - 1)])
        kept_NSC = kept_NSC * by_component(self.skip_element(geometry.species_N, dtype))
        count = kept_NSC.shape[1]
        joined_NSC = torch.cat((convolved_NSC[:, :count] + kept_NSC, convolved_NSC[:, count:]), dim=1)
        scalars_NC, vectors_NMC = joined_NSC[:, 0], joined_NSC[:, 1:]
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
