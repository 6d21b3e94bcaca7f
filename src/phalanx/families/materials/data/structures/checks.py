"""Physical sense: what is refused though it could be computed, each with the structure's file and place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from phalanx.families.materials.data.structures.edges import Edges
from phalanx.families.materials.data.structures.structures import RawStructure, Structure
from phalanx.families.materials.data.structures.total_charge import check_charges
from phalanx.families.materials.data_config import GraphSource

SAME_PLACE_A = 0.05
"""Atoms nearer than this are one atom written twice: nuclei so close have energies of keV."""
BOND_RANGE = (0.62, 1.5)
"""Nearest neighbours lie between these multiples of the sum of covalent radii, in the median over atoms and structures.
A bohr taken for an angstrom stretches bonds by 1.89, an angstrom for a bohr shrinks them by as much; molecules and metals
lie near 1. Solid noble gases (1.8) are taken for a wrong unit and need check_units: false."""
LARGEST_FORCE = 1000.0
"""Largest force component in eV/A that is no sign of a wrong unit."""

_RADII_PM = (
    "31 28 128 96 84 76 71 66 57 58 166 141 121 111 107 105 102 106 203 176 170 160 153 139 "
    "139 132 126 124 132 122 122 120 119 120 120 116 220 195 190 175 164 154 147 146 142 139 145 144 "
    "142 139 139 138 139 140 244 215 207 204 203 201 199 198 198 196 194 192 192 189 190 187 187 175 "
    "170 162 151 144 141 136 136 132 145 146 148 140 150 150 260 221 215 206 200 196 190 187 180 169"
)
"""Covalent radii of elements 1 to 96 in pm: Cordero et al., Dalton Trans. 2008, 2832 (low-spin values)."""
_RADII = np.full(119, 1.6)
_RADII[1:97] = np.array([int(word) for word in _RADII_PM.split()]) / 100.0


def check_structure(structure: Structure, edges: Edges, source: GraphSource, cutoff: float) -> None:
    """Refuse atoms on one place, no edges unless allowed, charges that make no whole, and forces that hint at a wrong unit.

    Raises DataError."""
    wrong = structure.raw.wrong
    check_charges(structure, source)
    if len(edges) == 0:
        if source.no_edges == "refuse":
            raise wrong(
                f"none of its {len(structure.species)} atoms has another within the cutoff of {cutoff:g} A: a graph without "
                f"edges; raise data.cutoff, or set no_edges: allow for source {source.name}"
            )
        return
    nearest = int(edges.distances.argmin())
    if edges.distances[nearest] < SAME_PLACE_A:
        first, second = sorted((int(edges.source[nearest]), int(edges.target[nearest])))
        raise wrong(
            f"atoms {first} and {second} are on one place ({edges.distances[nearest]:.3f} A apart"
            f"{', through the periodic cell' if edges.images[nearest].any() else ''})"
        )
    if source.check_units:
        _check_forces(structure, source)


def check_lengths(ratios: Sequence[tuple[RawStructure, float]], source: GraphSource) -> None:
    """Refuse lengths that hint at a wrong unit. ratios: structures with the median of their `bond_ratios`.

    Raises DataError naming the structure in the middle.
    """
    if not ratios or not source.check_units:
        return
    structure, ratio = sorted(ratios, key=lambda pair: pair[1])[len(ratios) // 2]
    if BOND_RANGE[0] <= ratio <= BOND_RANGE[1]:
        return
    guess = "too far for bonds: are they in bohr?" if ratio > 1 else "too near for bonds: are they in angstrom or nm?"
    raise structure.wrong(
        f"with length_unit {source.length_unit}, nearest atoms are {ratio:.2f} covalent distances apart, {guess} "
        f"Set length_unit, or check_units: false for source {source.name} if this is meant"
    )


def bond_ratios(species: npt.NDArray[np.uint8], edges: Edges) -> npt.NDArray[np.float64]:
    """For each atom that has neighbours: the smallest distance over the sum of covalent radii."""
    ratios = edges.distances / (_RADII[species[edges.source]] + _RADII[species[edges.target]])
    starts = np.flatnonzero(np.diff(edges.target, prepend=-1))
    smallest: npt.NDArray[np.float64] = np.minimum.reduceat(ratios, starts)
    return smallest


def _check_forces(structure: Structure, source: GraphSource) -> None:
    forces = structure.labels.get("forces")
    if forces is None or np.isnan(forces).all():
        return
    largest = float(np.nanmax(np.abs(forces)))
    if largest > LARGEST_FORCE:
        raise structure.raw.wrong(
            f"a force is {largest:.4g} eV/A with unit {source.labels['forces'].unit}; correct the unit, or set "
            f"check_units: false for source {source.name} if this is meant"
        )
