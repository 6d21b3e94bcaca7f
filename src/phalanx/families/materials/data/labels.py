"""What labels there are, and how a source's own become ours: name, shape, unit.

energy   [ ]     eV        of a structure
forces   [N, 3]  eV/A      minus the gradient of the energy
stress   [3, 3]  eV/A^3    derivative of the energy by strain over the volume: tension is positive, as in ASE; files may give
                           the virial (eV) instead, which is minus that derivative
charges  [N]     e         of atoms
dipole   [3]     e*A       of a structure
multiplicity [ ] 1         2S + 1 of a structure: unpaired electrons and one
a property       any unit  one number a structure, an atom or an edge, under a name of its own; or the number of a class

A unit is written as symbols joined by `*` and `/`, each with an optional `^power`: "Ha/bohr", "eV/A^3", "kcal/mol".
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.errors import ConfigError
from phalanx.families.materials.config import GraphLabel, GraphSource

_JOULE = 1.0 / 1.602176634e-19
_BOHR = 0.529177210903
_HARTREE = 27.211386245988
_AVOGADRO = 6.02214076e23
Dimension = tuple[int, int, int, int]
"""Powers of energy, length, charge and temperature."""
ENERGY: Dimension = (1, 0, 0, 0)
LENGTH: Dimension = (0, 1, 0, 0)
CHARGE: Dimension = (0, 0, 1, 0)
FORCE: Dimension = (1, -1, 0, 0)
STRESS: Dimension = (1, -3, 0, 0)
DIPOLE: Dimension = (0, 1, 1, 0)
_PRESSURE = _JOULE * 1e-30
"""One pascal in eV/A^3."""
SYMBOLS: dict[str, tuple[float, Dimension]] = {
    "1": (1.0, (0, 0, 0, 0)),
    "eV": (1.0, ENERGY),
    "meV": (1e-3, ENERGY),
    "Ha": (_HARTREE, ENERGY),
    "mHa": (_HARTREE * 1e-3, ENERGY),
    "Ry": (_HARTREE / 2, ENERGY),
    "J": (_JOULE, ENERGY),
    "kJ": (_JOULE * 1e3, ENERGY),
    "cal": (_JOULE * 4.184, ENERGY),
    "kcal": (_JOULE * 4184.0, ENERGY),
    "mol": (_AVOGADRO, (0, 0, 0, 0)),
    "A": (1.0, LENGTH),
    "bohr": (_BOHR, LENGTH),
    "nm": (10.0, LENGTH),
    "pm": (0.01, LENGTH),
    "Pa": (_PRESSURE, STRESS),
    "GPa": (_PRESSURE * 1e9, STRESS),
    "bar": (_PRESSURE * 1e5, STRESS),
    "kbar": (_PRESSURE * 1e8, STRESS),
    "e": (1.0, CHARGE),
    "D": (0.20819433270935603, DIPOLE),
    "K": (1.0, (0, 0, 0, 1)),
}
"""Value of one of each symbol in eV, A, e and K, and its dimension.

Values are the CODATA 2018 recommended ones (Tiesinga et al., Rev. Mod. Phys. 93, 025010, 2021); eV, J, mol and e are exact.
The debye is 1e-21 C m^2/s divided by c and e."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Kind:
    """Shape and dimension that every label of one name has."""

    per_atom: bool
    shape: tuple[int, ...]
    """Shape of one structure's value, or of one atom's."""
    dimension: Dimension | None
    """None: any."""
    per_edge: bool = False


KINDS: dict[str, Kind] = {
    "energy": Kind(False, (), ENERGY),
    "forces": Kind(True, (3,), FORCE),
    "stress": Kind(False, (3, 3), STRESS),
    "charges": Kind(True, (), CHARGE),
    "dipole": Kind(False, (3,), DIPOLE),
    "total_charge": Kind(False, (), CHARGE),
    "multiplicity": Kind(False, (), (0, 0, 0, 0)),
}
_PROPERTY = Kind(False, (), None)
_ATOM_PROPERTY = Kind(True, (), None)
_EDGE_PROPERTY = Kind(False, (), None, per_edge=True)
VOIGT = "xx yy zz yz xz xy"
"""Order of the six numbers of a stress where the run file says no other."""
_MOST_EV = 1e9
"""Largest unit of energies and forces, in eV and eV/A: a joule or a kilocalorie is one of matter by the gram."""
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
    classes: tuple[str, ...] = ()
    """Names of the classes whose numbers the values are; empty for numbers that mean themselves."""
    is_virial: bool = False
    """Whether it is minus the stress times the volume, which the structure says."""
    components: str | None = None
    """Order of six numbers of a stress, or none that is said."""

    def convert(self, value: Any, rows: int) -> FloatArray:
        """Return one structure's value in our units and shape. Raises ValueError naming the shape or text found.

        rows: its atoms, or of a label of edges its edges.
        """
        try:
            named = bool(self.classes) and np.asarray(value).dtype.kind in "US"
            given: npt.NDArray[Any] = np.asarray(value, dtype=np.str_ if named else np.float64)
        except (TypeError, ValueError):
            raise ValueError(f'{self.name} "{self.key}" holds {str(value)[:40]!r} where numbers are expected') from None
        found: FloatArray = self._number_classes(given) if self.classes else given
        if self.column is not None:
            if found.ndim == 0 or found.shape[-1] <= self.column:
                shape = list(found.shape)
                raise ValueError(f'{self.name} "{self.key}" has shape {shape}: no column {self.column} there')
            found = found[..., self.column]
        wanted = self._shape(rows)
        if self.name == "stress":
            found = self._tensor(found)
        # Tables write a number as a row of one.
        if found.shape == (*wanted, 1) or (wanted == () and found.shape == (1,)):
            found = found.reshape(wanted)
        if found.shape != wanted:
            raise ValueError(f'{self.name} "{self.key}" has shape {list(found.shape)}, expected {list(wanted)}')
        if np.isinf(found).any():
            raise ValueError(f'{self.name} "{self.key}" holds an infinite number')
        if self.name == "stress" and np.abs(found - found.T).max() > _ASYMMETRY * np.abs(found).max():
            raise ValueError(f'{"virial" if self.is_virial else "stress"} "{self.key}" is not symmetric')
        return found * self.factor

    def _tensor(self, found: FloatArray) -> FloatArray:
        """Return a stress of six or nine numbers as [3, 3], and any other as it is."""
        if found.shape == (9,):
            return found.reshape(3, 3)
        if found.shape != (6,):
            return found
        # Six numbers are how most codes write a symmetric tensor; those that give virials do not agree on their order.
        if self.is_virial and self.components is None:
            raise ValueError(
                f'virial "{self.key}" has six numbers, whose order files do not agree on; set components, such as "{VOIGT}"'
            )
        places = {frozenset(pair): place for place, pair in enumerate((self.components or VOIGT).split())}
        order = np.array([[places[frozenset(row + column)] for column in "xyz"] for row in "xyz"])
        tensor: FloatArray = found[order]
        return tensor

    def missing(self, rows: int) -> FloatArray:
        """Return what stands for a value that a structure lacks: NaN in its shape."""
        return np.full(self._shape(rows), np.nan)

    def _shape(self, rows: int) -> tuple[int, ...]:
        return (rows, *self.kind.shape) if self.kind.per_atom or self.kind.per_edge else self.kind.shape

    def _number_classes(self, given: npt.NDArray[Any]) -> FloatArray:
        """Return the numbers of classes given as numbers or as names; NaN for -1, NaN and empty names."""
        if given.dtype.kind == "U":
            unknown = given == ""
            numbers = np.full(given.shape, np.nan)
            for number, name in enumerate(self.classes):
                numbers[given == name] = number
        else:
            numbers = np.where(given == -1, np.nan, given)
            unknown = np.isnan(numbers)
        declared = unknown | np.isin(numbers, np.arange(len(self.classes)))
        if not declared.all():
            strange = given[~declared].flat[0]
            raise ValueError(
                f'{self.name} "{self.key}" has class {strange if isinstance(strange, str) else f"{strange:g}"}, which is '
                f"none of {', '.join(self.classes)} (0 to {len(self.classes) - 1})"
            )
        return numbers


def labels_of(source: GraphSource) -> list[Label]:
    """Return labels and properties of a source. Raises ConfigError for a unit that does not fit, or a name given twice."""
    labels = [_make_label(source, name, given, KINDS[name], "labels") for name, given in source.labels.items()]
    for field, given, kind in (
        ("properties", source.properties, _PROPERTY),
        ("atom_properties", source.atom_properties, _ATOM_PROPERTY),
        ("edge_properties", source.edge_properties, _EDGE_PROPERTY),
    ):
        twice = sorted({label.name for label in labels} & given.keys())
        if twice:
            raise ConfigError(f"data.sources.{source.name}.{field}: the name {twice[0]} is taken; give it another")
        labels += [_make_label(source, name, label, kind, field) for name, label in given.items()]
    return labels


def length_factor(source: GraphSource) -> float:
    """Return the source's unit of length in angstrom. Raises ConfigError for a unit that is none of length."""
    try:
        return parse_unit_of(source.length_unit, LENGTH, "length").factor
    except ValueError as error:
        raise ConfigError(f"data.sources.{source.name}.length_unit: {error}") from None


def _make_label(source: GraphSource, name: str, given: GraphLabel, kind: Kind, field: str) -> Label:
    if given.classes and field == "labels":
        raise ConfigError(f"data.sources.{source.name}.labels.{name}: it is a number, and no class; give its unit")
    if given.classes:
        return Label(name, given.key or name, given.column, kind, 1.0, tuple(given.classes))
    try:
        what, is_virial = name, given.given_as == "virial"
        if is_virial:
            what, kind = "virial", replace(kind, dimension=ENERGY)
        unit = parse_unit(given.unit) if kind.dimension is None else parse_unit_of(given.unit, kind.dimension, what)
        factor = unit.factor * given.factor
        if kind.dimension in (ENERGY, FORCE) and factor > _MOST_EV:
            raise ValueError(
                f'unit "{given.unit}" is {factor:.1e} {"eV" if kind.dimension == ENERGY else "eV/A"}, far beyond any {name} '
                "of a structure; tables are per mole, as in kcal/mol or kJ/mol/nm"
            )
    except ValueError as error:
        raise ConfigError(f"data.sources.{source.name}.{field}.{name}: {error}") from None
    key = given.key or name
    if name == "forces" and "grad" in key.lower() and factor > 0 and source.check_units:
        raise ConfigError(
            f'data.sources.{source.name}.{field}.{name}: "{key}" is a gradient by its name, and forces are minus it; set '
            f"factor: -1, or check_units: false if it holds forces"
        )
    return Label(name, key, given.column, kind, factor, is_virial=is_virial, components=given.components)


_FACTOR = re.compile(r"([A-Za-z]+|1)(?:\^(-?[1-9]))?")


@dataclass(frozen=True)
class Unit:
    """A unit that was understood."""

    text: str
    """Unit as it was written."""
    factor: float
    """Value of one of it in eV, A, e and K."""
    dimension: Dimension


# Asked for each structure that is predicted.
@cache
def parse_unit(text: str) -> Unit:
    """Return the unit that `text` writes. Raises ValueError naming the part that is not understood."""
    factor, powers, sign = 1.0, [0, 0, 0, 0], 1
    for part in re.split(r"([*/])", text.replace(" ", "")):
        if part in ("*", "/"):
            sign = 1 if part == "*" else -1
            continue
        found = _FACTOR.fullmatch(part)
        if found is None or found[1] not in SYMBOLS:
            near = difflib.get_close_matches(part, SYMBOLS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(
                f'unit "{text}": "{part}" is not known; {hint}known are {", ".join(SYMBOLS)}, joined by * and /, with '
                "powers as in A^3"
            )
        value, dimension = SYMBOLS[found[1]]
        # A slash is about the next symbol alone: a/b*c is (a/b)*c.
        power = sign * int(found[2] or 1)
        factor *= value**power
        powers = [total + power * one for total, one in zip(powers, dimension, strict=True)]
    return Unit(text, factor, (powers[0], powers[1], powers[2], powers[3]))


def parse_unit_of(text: str, dimension: Dimension, what: str) -> Unit:
    """Return the unit `text`, which must be one of `what`. Raises ValueError for a unit of something else."""
    unit = parse_unit(text)
    if unit.dimension != dimension:
        raise ValueError(
            f'unit "{text}" is {_name_dimension(unit.dimension)}, not one of {what} ({_name_dimension(dimension)})'
        )
    return unit


def _name_dimension(dimension: Dimension) -> str:
    names = ("energy", "length", "charge", "temperature")
    parts = [name if power == 1 else f"{name}^{power}" for name, power in zip(names, dimension, strict=True) if power]
    return " * ".join(parts) or "a pure number"
