"""One structure: as a file holds it, and as everything after the readers knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError
from phalanx.families.materials.config import GraphSource
from phalanx.families.materials.data.array_files import Int64Array
from phalanx.families.materials.data.labels import FloatArray, Label
from phalanx.families.materials.data.neighbours import Edges

ELEMENTS = 118
"""Atomic numbers run from 1 to this."""


@dataclass(frozen=True)
class RawStructure:
    """A structure as a file holds it, in the file's own units."""

    file: str
    place: str
    """Where in the file, such as "structure 17" or "row id 5"."""
    number: int
    """Number in the file, from 0."""
    species: npt.NDArray[Any]
    """Atomic numbers [N]."""
    positions: npt.NDArray[Any]
    """[N, 3]."""
    cell: npt.NDArray[Any]
    """Lattice vectors as rows [3, 3]; zeros where there are none."""
    periodic: tuple[bool, bool, bool]
    values: Mapping[str, Any]
    """Content of the file under each key asked for; absent keys are absent here."""
    edges: npt.NDArray[Any] | None = None
    """Of graphs whose edges are given: source and target node of each, [E, 2]."""

    def wrong(self, what: str) -> DataError:
        """Return the error that names this structure."""
        return DataError(f"{self.file}: {self.place}: {what}")


def periodic_flags(cell: npt.NDArray[Any], given: npt.NDArray[Any] | None) -> tuple[bool, bool, bool]:
    """Return in which directions a structure is periodic. given: one flag or three; None where a file has none."""
    # Without flags the cell is the only sign.
    x, y, z = np.broadcast_to(bool(cell.any()) if given is None else given, 3).tolist()
    return bool(x), bool(y), bool(z)


@dataclass(frozen=True)
class Structure:
    """A structure in eV, A and e, whose shapes are right and whose numbers are finite."""

    raw: RawStructure
    species: npt.NDArray[np.uint8]
    """Atomic numbers [N]."""
    positions: npt.NDArray[np.float32]
    """[N, 3] in A."""
    cell: npt.NDArray[np.float32]
    """Lattice vectors as rows [3, 3] in A; zeros in directions that are not periodic."""
    periodic: tuple[bool, bool, bool]
    labels: dict[str, FloatArray]
    """Each label by name; NaN where the structure lacks it."""
    features: Mapping[str, FloatArray] = field(default_factory=dict)
    """What the model sees of graphs whose nodes are no atoms: `node_features` [N, F] and the like."""


def convert_structure(raw: RawStructure, labels: Sequence[Label], length: float, *, missing_allowed: bool) -> Structure:
    """Check a raw structure and bring it into our units. length: the file's unit of length in A.

    Raises DataError naming file and structure for an unknown element, a position that is no number, a cell without
    volume, a label of the wrong shape, a stress without a volume, a dipole of a periodic structure, and a label that is
    absent unless that is allowed.
    """
    atoms = len(raw.species)
    if atoms == 0:
        raise raw.wrong("it has no atoms")
    if raw.positions.shape != (atoms, 3):
        raise raw.wrong(f"positions have shape {list(raw.positions.shape)}, expected [{atoms}, 3]")
    unknown = np.flatnonzero((raw.species < 1) | (raw.species > ELEMENTS))
    if unknown.size:
        first = int(unknown[0])
        raise raw.wrong(f"atom {first} has atomic number {raw.species[first]}; elements are 1 to {ELEMENTS}")
    positions = np.asarray(raw.positions, dtype=np.float64) * length
    strange = np.flatnonzero(~np.isfinite(positions).all(axis=1))
    if strange.size:
        first = int(strange[0])
        raise raw.wrong(f"atom {first} has position {raw.positions[first].tolist()}")
    values: dict[str, FloatArray] = {}
    for label in labels:
        values[label.name] = convert_label(raw, label, atoms, missing_allowed=missing_allowed)
    # A stress is an energy over a volume, which a slab or a molecule has not.
    virial = any(label.is_virial for label in labels)
    if not all(raw.periodic) and np.isfinite(values.get("stress", np.nan)).any():
        raise raw.wrong(
            f"it has a {'virial' if virial else 'stress'}, but pbc={list(raw.periodic)}: without a volume there is no "
            "stress; take the label out, or make it NaN here and set missing_labels: allow"
        )
    if any(raw.periodic) and np.isfinite(values.get("dipole", np.nan)).any():
        raise raw.wrong(
            f"it has a dipole, but pbc={list(raw.periodic)}: along a periodic direction that depends on which images the "
            "atoms are written as; take the label out, or make it NaN here and set missing_labels: allow, or say that a "
            "molecule in a box is not periodic"
        )
    cell = _convert_cell(raw, length)
    if virial and all(raw.periodic):
        values["stress"] = -values["stress"] / abs(np.linalg.det(cell))
    return Structure(
        raw,
        raw.species.astype(np.uint8),
        positions.astype(np.float32),
        cell.astype(np.float32),
        raw.periodic,
        values,
    )


def convert_label(raw: RawStructure, label: Label, rows: int, *, missing_allowed: bool) -> FloatArray:
    """Return a structure's label in our units. rows: its atoms, or of a label of edges its edges.

    Raises DataError where it has a wrong shape, or is absent and that is not allowed.
    """
    found = raw.values.get(label.key)
    if found is None:
        if missing_allowed:
            return label.missing(rows)
        raise raw.wrong(f'it has no {label.name} "{label.key}"; take the label out, or set missing_labels: allow')
    try:
        value = label.convert(found, rows)
    except ValueError as error:
        raise raw.wrong(str(error)) from None
    lacking = np.isnan(value)
    if lacking.any() and not missing_allowed:
        raise raw.wrong(f'its {label.name} "{label.key}" holds NaN; mend it, or set missing_labels: allow')
    if lacking.any() and not lacking.all() and value.ndim == len(label.kind.shape):
        raise raw.wrong(f'its {label.name} "{label.key}" is NaN in part; a structure has all of it or nothing')
    return value


def _convert_cell(raw: RawStructure, length: float) -> FloatArray:
    """Return the lattice vectors [3, 3] in A, zeros in directions that are not periodic."""
    if not any(raw.periodic):
        return np.zeros((3, 3))
    if raw.cell.shape != (3, 3) or not np.isfinite(raw.cell).all():
        raise raw.wrong(f"its cell is {raw.cell.tolist()}; three finite lattice vectors are expected")
    cell: FloatArray = np.asarray(raw.cell, dtype=np.float64) * length
    # Files often hold a box around a molecule or slab: it says nothing about the structure.
    cell[~np.array(raw.periodic)] = 0.0
    vectors = cell[np.array(raw.periodic)]
    lengths = np.linalg.norm(vectors, axis=1)
    # The volume that the periodic vectors span, in units of a rectangular one with the same sides.
    # By a Gram determinant, which also one or two periodic vectors have.
    flatness = np.sqrt(max(0.0, np.linalg.det(vectors @ vectors.T))) / max(float(np.prod(lengths)), 1e-300)
    if not lengths.all() or flatness < 1e-6:
        raise raw.wrong(f"it is periodic but its cell {raw.cell.tolist()} has no volume")
    return cell


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
    """Refuse atoms on one place, no edges unless allowed, charges and multiplicities that make no whole, and forces that
    hint at a wrong unit.

    Raises DataError."""
    wrong = structure.raw.wrong
    check_charges(structure, source)
    multiplicity = float(structure.labels.get("multiplicity", np.nan))
    if multiplicity < 1.0 or multiplicity % 1.0 > 0.0:
        raise wrong(
            f"its multiplicity is {multiplicity:g}, which is no whole number from 1 on; it is 2S + 1, the number of "
            "unpaired electrons and one: correct the label"
        )
    if len(edges) == 0:
        if source.no_edges == "refuse":
            raise wrong(
                f"none of its {len(structure.species)} atoms has another within the cutoff of {cutoff:g} A: a graph without "
                f"edges; raise data.cutoff, or set no_edges: allow for source {source.name}"
            )
        return
    nearest = int(edges.distances.argmin())
    if edges.distances[nearest] < SAME_PLACE_A:
        # In order, so that the message does not depend on the direction of the edge.
        first, second = sorted((int(edges.source[nearest]), int(edges.target[nearest])))
        raise wrong(
            f"atoms {first} and {second} are on one place ({edges.distances[nearest]:.3f} A apart"
            f"{', through the periodic cell' if edges.images[nearest].any() else ''})"
        )
    forces = structure.labels.get("forces")
    if not source.check_units or forces is None or np.isnan(forces).all():
        return
    largest = float(np.nanmax(np.abs(forces)))
    if largest > LARGEST_FORCE:
        raise wrong(
            f"a force is {largest:.4g} eV/A with unit {source.labels['forces'].unit}; correct the unit, or set "
            f"check_units: false for source {source.name} if this is meant"
        )


def check_lengths(ratios: Sequence[tuple[RawStructure, float]], source: GraphSource) -> None:
    """Refuse lengths that hint at a wrong unit. ratios: structures with the median of their `bond_ratios`.

    Raises DataError naming the structure in the middle.
    """
    if not ratios or not source.check_units:
        return
    # The median: a few strained structures are no sign of another unit.
    structure, ratio = sorted(ratios, key=lambda pair: pair[1])[len(ratios) // 2]
    if BOND_RANGE[0] <= ratio <= BOND_RANGE[1]:
        return
    guess = "too far for bonds: are they in bohr?" if ratio > 1 else "too near for bonds: are they in angstrom or nm?"
    raise structure.wrong(
        f"with length_unit {source.length_unit}, nearest atoms are {ratio:.2f} covalent distances apart, {guess} "
        f"Set length_unit, or check_units: false for source {source.name} if this is meant"
    )


def bond_ratios(species: npt.NDArray[np.uint8], edges: Edges) -> npt.NDArray[np.float64]:
    """Return for each atom that has neighbours: the smallest distance over the sum of covalent radii."""
    ratios = edges.distances / (_RADII[species[edges.source]] + _RADII[species[edges.target]])
    starts = np.flatnonzero(np.diff(edges.target, prepend=-1))
    smallest: npt.NDArray[np.float64] = np.minimum.reduceat(ratios, starts)
    return smallest


TOLERANCE = 0.1
"""Elementary charges by which a sum of atoms' charges may miss a total charge: rounding of many, or a coarse integration."""


def total_charges(
    given_G: npt.NDArray[np.floating] | None,
    charges_N: npt.NDArray[np.floating] | None,
    graph_N: Int64Array,
    graphs: int,
) -> npt.NDArray[np.float64]:
    """Return the total charge of each structure in elementary charges [G], NaN where neither label says.

    given_G: labels of structures, NaN where missing. charges_N: of atoms, likewise. graph_N: the structure of each atom.
    """
    known_G = np.full(graphs, np.nan) if given_G is None else given_G.astype(np.float64)
    if charges_N is None:
        return known_G
    # One charge that is missing makes the sum NaN, and with it what it would say of the structure.
    # (Of no atoms numpy counts whole numbers, whatever the weights.)
    sums_G = np.bincount(graph_N, weights=charges_N, minlength=graphs).astype(np.float64)
    return np.where(np.isnan(known_G), np.rint(sums_G), known_G)


def agreed_total(found: float, given: float | None) -> float | None:
    """Return the total charge that is given, else the whole number nearest to what atoms' charges add up to.

    None where that sum, `found` elementary charges, misses it, or is no number.
    """
    total = float(np.rint(found)) if given is None else given
    return total if abs(found - total) <= TOLERANCE else None


def check_charges(structure: Structure, source: GraphSource) -> None:
    """Refuse charges that add up to no whole number, or not to the total charge, unless the source allows it.

    Raises DataError.
    """
    charges = structure.labels.get("charges")
    if charges is None or source.charge_sum == "any" or np.isnan(charges).any():
        return
    # In the unit of e: units were converted before.
    found, label = float(charges.sum()), structure.labels.get("total_charge")
    given = None if label is None or np.isnan(label) else float(label)
    if agreed_total(found, given) is not None:
        return
    against = "which is no whole number" if given is None else f"but its total_charge is {given:g} e"
    then = (
        f"{np.rint(found):+.0f} e is then taken for its total charge" if given is None else "total_charge then counts"
    )
    raise structure.raw.wrong(
        f"its charges add up to {found:.3f} e, {against}; correct their unit ({source.labels['charges'].unit}) or the "
        f"label, or set charge_sum: any for source {source.name} ({then})"
    )
