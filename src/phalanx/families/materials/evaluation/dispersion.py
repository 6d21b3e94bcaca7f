"""D3 dispersion with Becke-Johnson damping: taken off labels before training, or added to what a network predicts.

S. Grimme, J. Antony, S. Ehrlich and H. Krieg, J. Chem. Phys. 132, 154104 (2010); S. Grimme, S. Ehrlich and L. Goerigk,
J. Comput. Chem. 32, 1456 (2011). Pairs of atoms only. Reference values of elements come from the package tad-dftd3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import ConfigError, DataError
from phalanx.families.materials.config import Functional
from phalanx.families.materials.data.neighbours import device_edges
from phalanx.families.materials.data.structures import Structure
from phalanx.families.materials.model.geometry import cell_volumes
from phalanx.families.materials.model.heads import sum_by_graph

_BOHR = 0.529177210903
"""Bohr radius, angstrom (CODATA 2018)."""
_HARTREE = 27.211386245988
"""Hartree, eV (CODATA 2018)."""
_REACH = 60.0 * _BOHR
"""Distance of two atoms beyond which they do not attract each other, angstrom; as in the program s-dftd3."""
_COUNTED = 40.0 * _BOHR
"""Distance beyond which an atom is no neighbour, angstrom; as in s-dftd3."""
_CHUNK = 2**17
"""Pairs whose coefficients are held at once."""


class Damping(NamedTuple):
    """Parameters of Becke-Johnson damping; a2 in bohr."""

    s8: float
    a1: float
    a2: float


FUNCTIONALS: dict[Functional, Damping] = {
    "pbe": Damping(0.7875, 0.4289, 4.4407),
    "pbesol": Damping(2.9491, 0.4466, 6.1742),
    "rpbe": Damping(0.8318, 0.1820, 4.0094),
    "revpbe": Damping(2.3550, 0.5238, 3.5016),
    "pbe0": Damping(1.2177, 0.4145, 4.8593),
    "blyp": Damping(2.6996, 0.4298, 4.2359),
    "b3lyp": Damping(1.9889, 0.3981, 4.4211),
    "tpss": Damping(1.9435, 0.4535, 4.4752),
}
"""Damping by density functional; fits of the second paper and of the program's authors, s6 = 1."""


@dataclass(frozen=True)
class References:
    """Values of elements; atomic units. Z: by atomic number, R = 7 reference compounds, padded."""

    c6_ZZRR: Tensor
    numbers_ZR: Tensor
    """Coordination numbers of the compounds; negative where there is none."""
    radius_Z: Tensor
    """Covalent radii times 4/3."""
    ratio_Z: Tensor
    """Roots of the ratios that C8 follows from."""


class DispersionResult(NamedTuple):
    """Holds what dispersion adds to the predictions for a batch, float64."""

    energy_N: Tensor
    """Each atom's halves of its pairs, eV."""
    forces_N3: Tensor
    stress_G33: Tensor
    """eV/angstrom^3, tension positive; NaN without a cell."""


class D3Dispersion:
    """Computes the dispersion of structures on the device where they are."""

    def __init__(self, functional: str, device: torch.device) -> None:
        """functional: one of `FUNCTIONALS`. Raises ConfigError for another one, and where tad-dftd3 is missing."""
        damping = {str(name): damping for name, damping in FUNCTIONALS.items()}.get(functional)
        if damping is None:
            raise ConfigError(f"dispersion={functional} is not known; choose one of {', '.join(FUNCTIONALS)}")
        self.damping = damping
        self.references = _read_references(device)

    def __call__(self, species_N: Tensor, positions_N3: Tensor, cells_G33: Tensor, graph_N: Tensor) -> DispersionResult:
        """Return energies and their derivatives. Positions and cells (angstrom) as `device_edges` takes them.

        Raises DataError for an element beyond those that D3 has values of.
        """
        heaviest, known = int(species_N.max()) if len(species_N) else 0, len(self.references.numbers_ZR) - 1
        if heaviest > known:
            raise DataError(f"D3 dispersion knows elements up to {known}, and the structure has {heaviest}")
        positions_N3, cells_G33 = positions_N3.detach().double(), cells_G33.detach().double()
        edges = device_edges(positions_N3, cells_G33, _REACH, graph_N=graph_N)
        source_E, target_E = edges.edges_2E
        vector_E3 = (positions_N3[target_E] + edges.shifts_E3.double() - positions_N3[source_E]) / _BOHR
        distance_E = vector_E3.norm(dim=1)
        pairs = _Pairs(source_E, target_E, distance_E, species_N)
        neighbours_N = distance_E.new_zeros(len(species_N))
        for _, chunk in pairs.chunks():
            neighbours_N.index_add_(0, chunk.target_E, self._count(chunk))
        energy_N, slope_E = torch.zeros_like(neighbours_N), torch.zeros_like(distance_E)
        by_neighbours_N = torch.zeros_like(neighbours_N)
        # By chunks, each with its derivative: energies of pairs first, then what they owe to the counts of neighbours.
        for run, chunk in pairs.chunks():
            with torch.enable_grad():
                leaves = chunk.distance_E.clone().requires_grad_(), neighbours_N.clone().requires_grad_()
                pair_E = self._attract(chunk._replace(distance_E=leaves[0]), leaves[1])
            slopes = torch.autograd.grad(pair_E.sum(), leaves)
            energy_N.index_add_(0, chunk.target_E, pair_E.detach())
            slope_E[run] += slopes[0]
            by_neighbours_N += slopes[1]
        for run, chunk in pairs.chunks():
            with torch.enable_grad():
                distance = chunk.distance_E.clone().requires_grad_()
                owed_E = self._count(chunk._replace(distance_E=distance)) * by_neighbours_N[chunk.target_E]
            slope_E[run] += torch.autograd.grad(owed_E.sum(), distance)[0]
        gradient_E3 = (slope_E / distance_E)[:, None] * vector_E3 * (_HARTREE / _BOHR)
        forces_N3 = torch.zeros_like(positions_N3).index_add(0, source_E, gradient_E3)
        forces_N3 = forces_N3.index_add(0, target_E, -gradient_E3)
        virial_E33 = vector_E3[:, :, None] * gradient_E3[:, None, :] * _BOHR
        virial_G33 = sum_by_graph(virial_E33, graph_N[target_E], len(cells_G33))
        volume_G11 = cell_volumes(cells_G33)[:, None, None]
        stress_G33 = torch.where(volume_G11 > 0.0, virial_G33 / volume_G11, torch.nan)
        return DispersionResult(energy_N * _HARTREE, forces_N3, stress_G33)

    def take_off(self, structure: Structure) -> Structure:
        """Return a structure whose energy, forces and stress, as far as it has them, lack its dispersion."""
        species_N = torch.from_numpy(structure.species.astype(np.int64))
        positions_N3, cell_33 = (torch.from_numpy(one) for one in (structure.positions, structure.cell))
        found = self(species_N, positions_N3, cell_33[None], torch.zeros_like(species_N))
        parts = {"energy": found.energy_N.sum(), "forces": found.forces_N3, "stress": found.stress_G33[0]}
        labels = dict(structure.labels)
        for name in labels.keys() & parts.keys():
            labels[name] = labels[name] - parts[name].numpy().reshape(labels[name].shape)
        return replace(structure, labels=labels)

    def _count(self, pairs: _Pairs) -> Tensor:
        """Return how much of a neighbour the source of each edge is."""
        radius_E = self.references.radius_Z[pairs.source_Z] + self.references.radius_Z[pairs.target_Z]
        counted_E = torch.sigmoid(16.0 * (radius_E / pairs.distance_E - 1.0))
        return torch.where(pairs.distance_E <= _COUNTED / _BOHR, counted_E, 0.0)

    def _attract(self, pairs: _Pairs, neighbours_N: Tensor) -> Tensor:
        """Return half of the energy of each pair, hartree."""
        weights_ER = [
            self._weigh(neighbours_N[atom_E], number_E)
            for atom_E, number_E in ((pairs.source_E, pairs.source_Z), (pairs.target_E, pairs.target_Z))
        ]
        c6_ERR = self.references.c6_ZZRR[pairs.source_Z, pairs.target_Z]
        c6_E = torch.einsum("er,ers,es->e", weights_ER[0], c6_ERR, weights_ER[1])
        ratio_E = 3.0 * self.references.ratio_Z[pairs.source_Z] * self.references.ratio_Z[pairs.target_Z]
        floor_E = self.damping.a1 * ratio_E.sqrt() + self.damping.a2
        sixth_E = 1.0 / (pairs.distance_E**6 + floor_E**6)
        eighth_E = self.damping.s8 * ratio_E / (pairs.distance_E**8 + floor_E**8)
        return -0.5 * c6_E * (sixth_E + eighth_E)

    def _weigh(self, neighbours_E: Tensor, number_E: Tensor) -> Tensor:
        """Return how much of each reference compound an atom is, [E, R]."""
        numbers_ER = self.references.numbers_ZR[number_E]
        exponent_ER = -4.0 * (neighbours_E[:, None] - numbers_ER).square()
        # As a softmax: far from all compounds the nearest has all the weight, where exponentials alone are 0.
        return exponent_ER.masked_fill(numbers_ER < 0.0, -math.inf).softmax(1)


class _Pairs(NamedTuple):
    """Edges, distances in bohr."""

    source_E: Tensor
    target_E: Tensor
    distance_E: Tensor
    species_N: Tensor

    @property
    def source_Z(self) -> Tensor:  # noqa: N802
        """Return the atomic numbers of the sources."""
        return self.species_N[self.source_E]

    @property
    def target_Z(self) -> Tensor:  # noqa: N802
        """Return those of the targets."""
        return self.species_N[self.target_E]

    def chunks(self) -> Iterator[tuple[slice, _Pairs]]:
        """Yield where each run of `_CHUNK` pairs stands, and its pairs."""
        for first in range(0, len(self.distance_E), _CHUNK):
            run = slice(first, first + _CHUNK)
            chunk = self._replace(
                source_E=self.source_E[run], target_E=self.target_E[run], distance_E=self.distance_E[run]
            )
            yield run, chunk


def _read_references(device: torch.device) -> References:
    try:
        from tad_dftd3 import data, reference  # noqa: PLC0415
        from tad_mctc.data import radii  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f'dispersion needs the package {error.name}; pip install "phalanx-train[dispersion]"'
        ) from None
    table = reference.Reference(dtype=torch.float64, device=device)
    return References(
        table.c6,
        table.cn,
        radii.COV_D3(dtype=torch.float64, device=device),
        data.R4R2(dtype=torch.float64, device=device),
    )
