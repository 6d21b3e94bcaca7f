"""One structure: as a file holds it, and as everything after the readers knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError
from phalanx.families.materials.data.structures.labels import FloatArray, Label

ELEMENTS = 118
"""Atomic numbers run from 1 to this."""


@dataclass(frozen=True)
class RawStructure:
    """What a reader finds, in the file's own units."""

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
    """What the file has under each key asked for; absent keys are absent here."""

    def wrong(self, what: str) -> DataError:
        """The error that names this structure."""
        return DataError(f"{self.file}: {self.place}: {what}")


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


def convert(raw: RawStructure, labels: Sequence[Label], length: float, *, missing_allowed: bool) -> Structure:
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
        values[label.name] = _value(raw, label, atoms, missing_allowed=missing_allowed)
    if not all(raw.periodic) and np.isfinite(values.get("stress", np.nan)).any():
        raise raw.wrong(
            f"it has a stress, but pbc={list(raw.periodic)}: without a volume there is none; take the label out, or make it "
            "NaN here and set missing_labels: allow"
        )
    if any(raw.periodic) and np.isfinite(values.get("dipole", np.nan)).any():
        raise raw.wrong(
            f"it has a dipole, but pbc={list(raw.periodic)}: along a periodic direction that depends on which images the "
            "atoms are written as; take the label out, or make it NaN here and set missing_labels: allow, or say that a "
            "molecule in a box is not periodic"
        )
    return Structure(
        raw,
        raw.species.astype(np.uint8),
        positions.astype(np.float32),
        _cell(raw, length).astype(np.float32),
        raw.periodic,
        values,
    )


def _value(raw: RawStructure, label: Label, atoms: int, *, missing_allowed: bool) -> FloatArray:
    found = raw.values.get(label.key)
    if found is None:
        if missing_allowed:
            return label.missing(atoms)
        raise raw.wrong(f'it has no {label.name} "{label.key}"; take the label out, or set missing_labels: allow')
    try:
        value = label.convert(found, atoms)
    except ValueError as error:
        raise raw.wrong(str(error)) from None
    lacking = np.isnan(value)
    if lacking.any() and not missing_allowed:
        raise raw.wrong(f'its {label.name} "{label.key}" holds NaN; mend it, or set missing_labels: allow')
    if lacking.any() and not lacking.all() and not label.kind.per_atom:
        raise raw.wrong(f'its {label.name} "{label.key}" is NaN in part; a structure has all of it or nothing')
    return value


def _cell(raw: RawStructure, length: float) -> FloatArray:
    """The lattice vectors [3, 3] in A, zeros in directions that are not periodic."""
    if not any(raw.periodic):
        return np.zeros((3, 3))
    if raw.cell.shape != (3, 3) or not np.isfinite(raw.cell).all():
        raise raw.wrong(f"its cell is {raw.cell.tolist()}; three finite lattice vectors are expected")
    cell: FloatArray = np.asarray(raw.cell, dtype=np.float64) * length
    cell[~np.array(raw.periodic)] = 0.0
    vectors = cell[np.array(raw.periodic)]
    lengths = np.linalg.norm(vectors, axis=1)
    # The volume that the periodic vectors span, in units of a rectangular one with the same sides.
    flatness = np.sqrt(max(0.0, np.linalg.det(vectors @ vectors.T))) / max(float(np.prod(lengths)), 1e-300)
    if not lengths.all() or flatness < 1e-6:
        raise raw.wrong(f"it is periodic but its cell {raw.cell.tolist()} has no volume")
    return cell
