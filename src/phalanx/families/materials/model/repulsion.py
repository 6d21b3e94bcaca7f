"""Repulsion of nuclei at short range, by the universal potential of Ziegler, Biersack and Littmark (ZBL).

J. F. Ziegler, J. P. Biersack and U. Littmark, The Stopping and Range of Ions in Solids (1985). Data hold no atoms that
nearly touch, so a network alone says anything there, and a simulation may fall into it. What is learned is the rest.
"""

from __future__ import annotations

import torch
from ase.data import covalent_radii
from torch import Tensor

from phalanx.families.materials.model.geometry import Geometry, polynomial_envelope
from phalanx.families.materials.model.layers import Constant
from phalanx.families.materials.model_config import MAX_ATOMIC_NUMBER

COULOMB = 14.3996454
"""Square of the elementary charge over 4 pi epsilon_0, eV angstrom (CODATA 2018)."""
_BOHR = 0.529177211
"""Bohr radius, angstrom (CODATA 2018)."""
_SCREENING = ((0.1818, 3.2), (0.5099, 0.9423), (0.2802, 0.4028), (0.02817, 0.2016))
"""Weights and decays of the universal screening function."""
_RADII = Constant(torch.tensor(covalent_radii[: MAX_ATOMIC_NUMBER + 1], dtype=torch.float64, device="cpu"))
"""Covalent radii by atomic number, angstrom (Cordero et al. 2008)."""


def zbl_energy(geometry: Geometry, cutoff: float) -> Tensor:
    """Return each atom's half of the repulsion of its pairs, float64 [N], eV.

    It fades with two continuous derivatives and is 0 where two atoms are farther apart than their covalent radii add up to,
    or than `cutoff` (angstrom): bonds keep what was learned of them.
    """
    distance_E = geometry.vector_E3.norm(dim=1).double()
    number_N1 = geometry.species_N[:, None].double()
    # Rows of other ranks' atoms travel as features do.
    source_E = geometry.exchange.atoms(number_N1).squeeze(1).index_select(0, geometry.source_E)
    target_E = number_N1.squeeze(1).index_select(0, geometry.target_E)
    screening = 0.8854 * _BOHR / (source_E.pow(0.23) + target_E.pow(0.23))
    screened_E = torch.zeros_like(distance_E)
    for weight, decay in _SCREENING:
        screened_E = screened_E + weight * torch.exp(-decay * distance_E / screening)
    radii = _RADII.on(distance_E.device, torch.float64)
    reach_E = radii.index_select(0, source_E.long()) + radii.index_select(0, target_E.long())
    fade_E = polynomial_envelope(distance_E / reach_E.clamp(max=cutoff))
    pair_E = COULOMB * source_E * target_E / distance_E * screened_E * fade_E
    # Both directed edges of a pair bring half of it.
    halves_N: Tensor = pair_E.new_zeros(geometry.atoms).index_add(0, geometry.target_E, 0.5 * pair_E)
    return halves_N
