"""Repulsion of nuclei at short range, by the universal potential of Ziegler, Biersack and Littmark (ZBL).

J. F. Ziegler, J. P. Biersack and U. Littmark, The Stopping and Range of Ions in Solids (1985). Data hold no atoms that
nearly touch, so a network alone says anything there, and a simulation may fall into it. What is learned is the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.families.materials.model.geometry import COVALENT_RADII, Geometry, polynomial_envelope, species_of_ends
from phalanx.families.materials.model_config import MaterialsModel

COULOMB = 14.3996454
"""Square of the elementary charge over 4 pi epsilon_0, eV angstrom (CODATA 2018)."""
_BOHR = 0.529177211
"""Bohr radius, angstrom (CODATA 2018)."""
_SCREENING = ((0.1818, 3.2), (0.5099, 0.9423), (0.2802, 0.4028), (0.02817, 0.2016))
"""Weights and decays of the universal screening function."""


class PairPotential(NamedTuple):
    """Constants in which forms of the potential differ."""

    coulomb: float
    """Square of the elementary charge over 4 pi epsilon_0, eV angstrom."""
    length: float
    """Screening length of a pair times the sum of both powers of atomic numbers, angstrom."""
    exponent: float
    """The power of atomic numbers."""


_POTENTIALS = {
    "zbl": PairPotential(COULOMB, 0.8854 * _BOHR, 0.23),
    # Defaults of mace-torch 0.3.16, mace/modules/radial.py.
    "mace": PairPotential(14.3996, 0.4543 * 0.529, 0.3),
}


def repulsion_energy(geometry: Geometry, config: MaterialsModel, form: str) -> Tensor:
    """Return each atom's half of the repulsion of its pairs, float64 [N]: in eV, of form `mace` in units of energy_scale.

    It fades with two continuous derivatives and is 0 where two atoms are farther apart than their covalent radii add up to,
    or, of form `zbl`, than the cutoff: bonds keep what was learned of them.
    """
    potential = _POTENTIALS[form]
    distance_E = geometry.vector_E3.norm(dim=1).double()
    ends = species_of_ends(geometry.species_N, geometry.source_E, geometry.target_E, geometry.exchange)
    source_E, target_E = (number_E.double() for number_E in ends)
    screening = potential.length / (source_E.pow(potential.exponent) + target_E.pow(potential.exponent))
    screened_E = torch.zeros_like(distance_E)
    for weight, decay in _SCREENING:
        screened_E = screened_E + weight * torch.exp(-decay * distance_E / screening)
    radii = COVALENT_RADII.on(distance_E.device, torch.float64)
    reach_E = radii.index_select(0, ends[0]) + radii.index_select(0, ends[1])
    if form == "zbl":
        fade_E = polynomial_envelope(distance_E / reach_E.clamp(max=config.cutoff))
    else:
        fade_E = polynomial_envelope(distance_E / reach_E, config.envelope_power)
    pair_E = potential.coulomb * source_E * target_E / distance_E * screened_E * fade_E
    # Both directed edges of a pair bring half of it.
    halves_N: Tensor = pair_E.new_zeros(geometry.atoms).index_add(0, geometry.target_E, 0.5 * pair_E)
    return halves_N
