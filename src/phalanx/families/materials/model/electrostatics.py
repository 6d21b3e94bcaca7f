"""Energy of the charges of atoms at any distance: Ewald's sum for crystals, all pairs for molecules. Plain PyTorch, float64.

P. P. Ewald, Annalen der Physik 369, 253 (1921), for charges that are Gaussians as wide as `model.electrostatics.smearing`:
what of their potential is smooth is summed over wave vectors, the rest over the network's own edges. Charges come from a
head, so that forces and stress know how they change with the atoms (as in Ko et al. 2021, Nature Communications 12, 398,
and Cheng 2025, npj Computational Materials 11, 80).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.errors import DataError
from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model.repulsion import COULOMB
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.families.materials.sizes import EWALD_TAIL, edges_sum_charges


class Cells(NamedTuple):
    """The cells of a batch; a cube of 1 angstrom stands where there is none."""

    lengths_G3: Tensor
    """Lengths of the lattice vectors, detached; 0 where there is no cell."""
    inverse_G33: Tensor
    volume_G: Tensor
    periodic_G: Tensor
    """bool: whether there is a cell."""


class Waves(NamedTuple):
    """Waves that fit into the cells of a batch, one of k and -k each."""

    turns_K3: Tensor
    """Periods of each wave along the lattice vectors, whole numbers; those of all cells together."""
    weight_GK: Tensor
    """Energy of a squared structure factor (eV/e^2); 0 where a wave is too short for a cell, or there is no cell."""


def electrostatic_energies(
    config: MaterialsModel, charges_N: Tensor, geometry: Geometry, positions_N3: Tensor, cells_G33: Tensor
) -> Tensor:
    """Return each atom's share of the energy of charges (elementary charges) in each other's potential, float64 [N], eV.

    A crystal of total charge Q stands in an even background of -Q. Atoms have no energy in their own Gaussian.

    Raises DataError for a structure that is periodic in one or two directions.
    """
    assert config.electrostatics is not None
    charges_N, positions_N3, cells = charges_N.double(), positions_N3.double(), _read_cells(cells_G33.double())
    graph_N, smearing = geometry.graph_N, config.electrostatics.smearing
    # erf(own r) / r between two Gaussians; waves and pairs sum erf(decay r) / r, edges the rest if there is any.
    own_decay = 0.5 / smearing if smearing else math.inf
    by_edges = edges_sum_charges(config)
    decay = EWALD_TAIL / config.cutoff if by_edges else own_decay
    energy_N = _energies_of_waves(charges_N, positions_N3, geometry, cells, _find_waves(cells, decay))
    # Waves count each charge in its own potential, and leave out those of infinite length.
    total_G = geometry.exchange.over_graphs(charges_N.new_zeros(geometry.graphs).index_add(0, graph_N, charges_N))
    background_G = math.pi * (1.0 / decay**2 - 1.0 / own_decay**2) * total_G / cells.volume_G
    excess_N = 2.0 * decay / math.sqrt(math.pi) * charges_N + background_G.index_select(0, graph_N)
    in_crystal_N = cells.periodic_G.index_select(0, graph_N)
    energy_N = energy_N - torch.where(in_crystal_N, 0.5 * COULOMB * charges_N * excess_N, 0.0)
    energy_N = energy_N + _energies_of_pairs(charges_N, positions_N3, geometry, cells.periodic_G, decay)
    return energy_N + _energies_of_edges(charges_N, geometry, decay, own_decay) if by_edges else energy_N


def _read_cells(cells_G33: Tensor) -> Cells:
    a, b, c = cells_G33.unbind(1)
    periodic_G = torch.linalg.vecdot(a, torch.linalg.cross(b, c)) != 0.0
    partly_G = ~periodic_G & (cells_G33 != 0.0).flatten(1).any(1)
    if bool(partly_G.any()):
        raise DataError(
            f"structure {int(partly_G.nonzero()[0])} of a batch is periodic in one or two directions, for which "
            "model.electrostatics has no sum; give it a third cell vector with empty space, or leave electrostatics out"
        )
    cube_33 = torch.eye(3, dtype=cells_G33.dtype, device=cells_G33.device)
    a, b, c = torch.where(periodic_G[:, None, None], cells_G33, cube_33).unbind(1)
    # By cross products: derivatives of any order are products again.
    across_G33 = torch.stack((torch.linalg.cross(b, c), torch.linalg.cross(c, a), torch.linalg.cross(a, b)), dim=2)
    volume_G = torch.linalg.vecdot(a, across_G33[:, :, 0])
    return Cells(cells_G33.detach().norm(dim=2), across_G33 / volume_G[:, None, None], volume_G.abs(), periodic_G)


def _find_waves(cells: Cells, decay: float) -> Waves:
    """Return all waves whose weight for potentials erf(decay r) / r is not negligible. Waits for the device."""
    largest_k = 2.0 * decay * EWALD_TAIL
    # A wave vector k has k a / 2 pi periods along a lattice vector a, of which |k| |a| is a bound.
    zero_13 = cells.lengths_G3.new_zeros(1, 3)
    longest_3 = torch.cat((cells.lengths_G3, zero_13)).amax(0)
    most = [int(length * largest_k / (2.0 * math.pi)) for length in longest_3.tolist()]
    turns_K3 = torch.cartesian_prod(*(torch.arange(-n, n + 1, device=longest_3.device) for n in most))
    first, second, third = turns_K3.unbind(1)
    # Of k and -k the one whose first number that is not 0 is positive.
    half_K = (first > 0) | ((first == 0) & ((second > 0) | ((second == 0) & (third > 0))))
    turns_K3 = turns_K3[half_K].to(longest_3.dtype)
    square_GK = (2.0 * math.pi * turns_K3 @ cells.inverse_G33.transpose(1, 2)).square().sum(2)
    fits_GK = (square_GK < largest_k**2) & cells.periodic_G[:, None]
    used = fits_GK.any(0).nonzero().squeeze(1)
    square_GK = square_GK.index_select(1, used)
    weight_GK = 4.0 * math.pi * COULOMB * torch.exp(-square_GK / (4.0 * decay**2)) / square_GK
    weight_GK = torch.where(fits_GK.index_select(1, used), weight_GK / cells.volume_G[:, None], 0.0)
    return Waves(turns_K3.index_select(0, used), weight_GK)


def _energies_of_waves(
    charges_N: Tensor, positions_N3: Tensor, geometry: Geometry, cells: Cells, waves: Waves
) -> Tensor:
    """Return each atom's half of its energy in the waves of all charges of its crystal, its own included."""
    graph_N = geometry.graph_N
    places_N3 = (positions_N3[:, None] @ cells.inverse_G33.index_select(0, graph_N)).squeeze(1)
    phase_NK = 2.0 * math.pi * places_N3 @ waves.turns_K3.T
    parts_N2K = charges_N[:, None, None] * torch.stack((phase_NK.cos(), phase_NK.sin()), dim=1)
    factor_G2K = parts_N2K.new_zeros((geometry.graphs, *parts_N2K.shape[1:])).index_add(0, graph_N, parts_N2K)
    potential_G2K = waves.weight_GK[:, None] * geometry.exchange.over_graphs(factor_G2K)
    return (parts_N2K * potential_G2K.index_select(0, graph_N)).sum((1, 2))


def _energies_of_pairs(
    charges_N: Tensor, positions_N3: Tensor, geometry: Geometry, periodic_G: Tensor, decay: float
) -> Tensor:
    """Return each atom's half of its energy in erf(decay r) / r of all other charges of its molecule; 0 in crystals."""
    exchange, graph_N = geometry.exchange, geometry.graph_N
    charge_A, places_A3 = exchange.everyone(torch.cat((charges_N[:, None], positions_N3), dim=1)).split((1, 3), dim=1)
    count_G = exchange.atoms_by_graph(graph_N, geometry.graphs)
    first_G = count_G.cumsum(0) - count_G
    # Atoms of one graph stand together: the partners of an atom are a run of rows.
    partners_N = torch.where(periodic_G, 0, count_G).index_select(0, graph_N)
    atom_P = torch.repeat_interleave(partners_N)
    within_P = torch.arange(len(atom_P), device=graph_N.device) - (partners_N.cumsum(0) - partners_N)[atom_P]
    partner_P = first_G.index_select(0, graph_N.index_select(0, atom_P)) + within_P
    square_P = (places_A3.index_select(0, partner_P) - positions_N3.index_select(0, atom_P)).square().sum(1)
    # Its own place is no partner's; a distance of 1 keeps derivatives of the root finite there.
    other_P = square_P != 0.0
    distance_P = torch.where(other_P, square_P, 1.0).sqrt()
    potential_P = torch.where(other_P, torch.erf(decay * distance_P) / distance_P, 0.0)
    pair_P = charges_N.index_select(0, atom_P) * charge_A.squeeze(1).index_select(0, partner_P) * potential_P
    return torch.zeros_like(charges_N).index_add(0, atom_P, 0.5 * COULOMB * pair_P)


def _energies_of_edges(charges_N: Tensor, geometry: Geometry, decay: float, own_decay: float) -> Tensor:
    """Return each atom's half of what the charges that edges come from have beyond erf(decay r) / r."""
    distance_E = geometry.vector_E3.norm(dim=1).double()
    rest_E = torch.erfc(decay * distance_E)
    if not math.isinf(own_decay):
        rest_E = rest_E - torch.erfc(own_decay * distance_E)
    source_E = geometry.exchange.atoms(charges_N[:, None]).squeeze(1).index_select(0, geometry.source_E)
    pair_E = source_E * charges_N.index_select(0, geometry.target_E) * rest_E / distance_E
    return torch.zeros_like(charges_N).index_add(0, geometry.target_E, 0.5 * COULOMB * pair_E)
