"""What labels there are, and how a source's own become ours: name, shape, unit.

energy   [ ]     eV        of a structure
forces   [N, 3]  eV/A      minus the gradient of the energy
stress   [3, 3]  eV/A^3    derivative of the energy by strain over the volume: tension is positive, as in ASE
charges  [N]     e         of atoms
dipole   [3]     e*A       of a structure
a property       any unit  one number a structure, under a name of its own
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.errors import ConfigError
from phalanx.families.materials.data.structures.units import (
    CHARGE,
    DIPOLE,
    ENERGY,
    FORCE,
    LENGTH,
    STRESS,
    Dimension,
    parse_unit,
    unit_of,
)
from phalanx.families.materials.data_config import GraphLabel, GraphSource

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Kind:
    """What a label of one name always is."""

    per_atom: bool
    shape: tuple[int, ...]
    """Shape of one structure's value, or of one atom's."""
    dimension: Dimension | None
    """None: any."""


KINDS: dict[str, Kind] = {
    "energy": Kind(False, (), ENERGY),
    "forces": Kind(True, (3,), FORCE),
    "stress": Kind(False, (3, 3), STRESS),
    "charges": Kind(True, (), CHARGE),
    "dipole": Kind(False, (3,), DIPOLE),
    "total_charge": Kind(False, (), CHARGE),
}
_PROPERTY = Kind(False, (), None)
_ATOM_PROPERTY = Kind(True, (), None)
_VOIGT = np.array([[0, 5, 4], [5, 1, 3], [4, 3, 2]])
"""Place of each stress component among xx, yy, zz, yz, xz, xy."""
_ASYMMETRY = 1e-3
"""Largest difference of stress components that should be equal, relative to the largest component."""


@dataclass(frozen=True)
class Label:
    """One label of one source."""

    name: str
    key: str
    """Its name in the files."""
    column: int | None
    kind: Kind
    factor: float
    """From the files' unit to ours."""

    def convert(self, value: Any, atoms: int) -> FloatArray:
        """One structure's value in our units and shape. Raises ValueError naming the shape or text found."""
        try:
            found = np.asarray(value, dtype=np.float64)
        except (TypeError, ValueError):
            raise ValueError(f'{self.name} "{self.key}" holds {str(value)[:40]!r} where numbers are expected') from None
        if self.column is not None:
            found = self._pick(found)
        wanted = (atoms, *self.kind.shape) if self.kind.per_atom else self.kind.shape
        if self.name == "stress" and found.shape == (6,):
            found = found[_VOIGT]
        if found.shape == (*wanted, 1) or (wanted == () and found.shape == (1,)):
            found = found.reshape(wanted)
        if found.shape != wanted:
            raise ValueError(f'{self.name} "{self.key}" has shape {list(found.shape)}, expected {list(wanted)}')
        if np.isinf(found).any():
            raise ValueError(f'{self.name} "{self.key}" holds an infinite number')
        if self.name == "stress" and np.abs(found - found.T).max() > _ASYMMETRY * np.abs(found).max():
            raise ValueError(f'stress "{self.key}" is not symmetric')
        return found * self.factor

    def missing(self, atoms: int) -> FloatArray:
        """What stands for a value that a structure lacks: NaN in its shape."""
        return np.full((atoms, *self.kind.shape) if self.kind.per_atom else self.kind.shape, np.nan)

    def _pick(self, found: FloatArray) -> FloatArray:
        if found.ndim == 0 or found.shape[-1] <= (self.column or 0):
            raise ValueError(f'{self.name} "{self.key}" has shape {list(found.shape)}: no column {self.column} there')
        picked: FloatArray = found[..., self.column]
        return picked


def labels_of(source: GraphSource) -> list[Label]:
    """The labels and properties of a source. Raises ConfigError for a unit that does not fit, or a name given twice."""
    labels = [_label(source, name, given, KINDS[name], "labels") for name, given in source.labels.items()]
    for field, given, kind in (
        ("properties", source.properties, _PROPERTY),
        ("atom_properties", source.atom_properties, _ATOM_PROPERTY),
    ):
        twice = sorted({label.name for label in labels} & given.keys())
        if twice:
            raise ConfigError(f"data.sources.{source.name}.{field}: the name {twice[0]} is taken; give it another")
        labels += [_label(source, name, label, kind, field) for name, label in given.items()]
    return labels


def length_factor(source: GraphSource) -> float:
    """What the source's unit of length is in angstrom. Raises ConfigError for a unit that is none of length."""
    try:
        return unit_of(source.length_unit, LENGTH, "length").factor
    except ValueError as error:
        raise ConfigError(f"data.sources.{source.name}.length_unit: {error}") from None


def _label(source: GraphSource, name: str, given: GraphLabel, kind: Kind, field: str) -> Label:
    try:
        unit = parse_unit(given.unit) if kind.dimension is None else unit_of(given.unit, kind.dimension, name)
    except ValueError as error:
        raise ConfigError(f"data.sources.{source.name}.{field}.{name}: {error}") from None
    return Label(name, given.key or name, given.column, kind, unit.factor * given.factor)
