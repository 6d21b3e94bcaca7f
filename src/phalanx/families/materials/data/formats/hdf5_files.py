"""Structures of HDF5 files, as ANI-1x, SPICE and others come in: every group that has positions holds structures.

Of a group with C structures of A atoms each, positions are [C, A, 3], or [A, 3] of one structure; elements [A] or [C, A], as
numbers or symbols; cells [3, 3] or [C, 3, 3]. A group with `ptr` [C+1] holds structures of any sizes, as an .npz file does:
atoms of structure i are ptr[i]:ptr[i+1]. Any other array may be a label, with a row a structure (or, under `ptr`, an atom).

Nothing but the file itself is read: links to other files, and arrays whose content lies in others, are refused. Arrays hold
numbers or text; nothing is unpickled.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError, PhalanxError
from phalanx.families.materials.config import ArrayNames
from phalanx.families.materials.data.array_files import Int64Array, ragged_offsets
from phalanx.families.materials.data.labels import LENGTH, Label, Unit, parse_unit
from phalanx.families.materials.data.structure_files import NUMBERS, StructureFile, Wanted, check_unpacked
from phalanx.families.materials.data.structures import RawStructure, periodic_flags

try:
    import h5py
except ImportError as error:
    raise PhalanxError('HDF5 files need h5py: pip install "phalanx-train[hdf5]"') from error

_KNOWN = {
    "positions": ("coordinates", "conformations", "positions", "pos", "coord"),
    "species": ("atomic_numbers", "species", "numbers", "nuclear_charges", "z"),
    "cell": ("cell", "cells"),
    "pbc": ("pbc",),
}
"""Names that arrays of atoms have: ANI-1x, SPICE, Transition1x, our own, AIMNet; ANI-1; rMD17."""
_POINTERS = "ptr"
_GROUP = "group"
"""What `group_by` calls the group of the file that a structure stands in."""
_OF_ALL = ("total_charge", "multiplicity")
"""Labels that a group may have one of for all of its structures."""
_BYTES_AT_ONCE = 2**24
"""Bytes of one array that are held in memory, where more than one structure is."""
_WORDS = {"hartree": "Ha", "hartrees": "Ha", "angstrom": "A", "angstroms": "A", "bohrs": "bohr", "ev": "eV"}
"""How files spell units, in lower case, beside our own spellings."""
_BROKEN = (OSError, RuntimeError, ValueError, TypeError, KeyError, OverflowError, MemoryError)
"""Errors that h5py raises for files that are damaged."""
Rows = list[Any]


@dataclass(frozen=True)
class _Group:
    """One group of structures."""

    path: str
    structures: int
    names: tuple[tuple[str, str], ...]
    """What there is of positions, species, cell and pbc, each with its name in the file."""
    one: bool
    """Whether it is one structure, whose arrays have no axis of structures."""
    ragged: bool
    """Whether it has `ptr`."""


class Hdf5File(StructureFile):
    """Structures of all groups of a file, in order of the groups' names; places are a group and a number in it."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        """Find the groups that hold structures.

        Raises DataError for a file that is none or is damaged, for links to other files, where positions or elements could
        be several arrays, and where the unit of length is not said.
        """
        super().__init__(path, wanted)
        status = path.stat()
        # A file is opened once for every piece of it, and may have a hundred thousand groups.
        self._groups = _find_groups(path, status.st_mtime_ns, status.st_size, wanted.arrays)
        self._starts = ragged_offsets(np.array([group.structures for group in self._groups], dtype=np.int64)).tolist()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> Iterator[RawStructure]:
        """Yield structures start..stop-1 of all groups."""
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        with _opened(self.path) as file:
            for number in range(first, len(self._groups)):
                before = self._starts[number]
                if before >= stop:
                    return
                last = min(stop, self._starts[number + 1]) - before
                yield from self._read_group(file, self._groups[number], max(start - before, 0), last, before)

    def _read_group(self, file: h5py.File, group: _Group, first: int, last: int, before: int) -> Iterator[RawStructure]:
        """Yield structures first..last-1 of a group. before: structures of earlier groups."""
        reader = _GroupReader(self.path, file[group.path], group, self.wanted)
        for some in range(first, last, reader.at_once):
            behind = min(some + reader.at_once, last)
            rows = {name: reader.read(name, some, behind) for name in reader.arrays}
            for number in range(some, behind):
                found = {name: values[number - some] for name, values in rows.items()}
                place = f"group {group.path} structure {number}"
                species = reader.elements(found["species"], place)
                cell = found.get("cell", np.zeros((3, 3)))
                values = {key: found[f"label {key}"] for key in reader.keys}
                if self.wanted.group_by in values:
                    values[self.wanted.group_by] = np.reshape(values[self.wanted.group_by], -1)[0]
                elif self.wanted.group_by == _GROUP:
                    values[_GROUP] = group.path
                yield RawStructure(
                    str(self.path),
                    place,
                    before + number,
                    species,
                    found["positions"],
                    cell,
                    periodic_flags(cell, found.get("pbc")),
                    values,
                )


class _GroupReader:
    """Arrays of one group, opened and checked against each other."""

    def __init__(self, path: Path, group: h5py.Group, known: _Group, wanted: Wanted) -> None:
        self.path, self._known, self._wanted = path, known, wanted
        self.keys = [key for key in wanted.keys if key in group]
        names = dict(known.names)
        self.arrays = {role: _open_array(path, group, name) for role, name in names.items()}
        """Those of atoms by what they are, those of labels as "label KEY"."""
        self._labels = {f"label {key}": self._labels_under(key) for key in self.keys}
        self.arrays |= {f"label {key}": _open_array(path, group, key) for key in self.keys}
        self._starts = None
        positions = self.arrays["positions"]
        self.atoms = int(positions.shape[-2])
        if known.ragged:
            self._starts = self._read_starts(_open_array(path, group, _POINTERS))
        self._check_units()
        self._divided = {name: self._divide(name, array.shape) for name, array in self.arrays.items()}
        self.at_once = self._fitting()

    def _labels_under(self, key: str) -> list[Label]:
        return [label for label in self._wanted.labels if label.key == key]

    def _divide(self, name: str, shape: tuple[int, ...]) -> str:
        """Return how an array belongs to structures: "each" has a row of it, "atoms" a row an atom, or "all" the same.

        Raises DataError for an array that has another number of rows.
        """
        known, labels = self._known, self._labels.get(name, [])
        if known.one:
            return "all"
        # Of one axis less than an array with a row a structure.
        shared = {"species": not known.ragged and len(shape) == 1, "cell": len(shape) == 2, "pbc": len(shape) == 1}
        is_group = name == f"label {self._wanted.group_by}"
        if shared.get(name) or (math.prod(shape) == 1 and (is_group or any(one.name in _OF_ALL for one in labels))):
            return "all"
        per_atom = name in ("positions", "species") or any(label.kind.per_atom for label in labels)
        by_atoms = known.ragged and per_atom
        rows = self.atoms if by_atoms else known.structures
        if not shape or shape[0] != rows:
            named = dict(known.names).get(name, name.removeprefix("label "))
            raise self._wrong(
                f'"{named}" has shape {list(shape)}, expected {rows} rows, one {"an atom" if by_atoms else "a structure"}'
            )
        return "atoms" if by_atoms else "each"

    def _fitting(self) -> int:
        """Return how many structures are read at a time."""
        structures = max(self._known.structures, 1)
        most: int = max(
            math.prod(array.shape) * array.dtype.itemsize // structures
            for name, array in self.arrays.items()
            if self._divided[name] != "all" or self._known.one
        )
        return max(1, _BYTES_AT_ONCE // max(most, 1))

    def read(self, name: str, first: int, last: int) -> Rows:
        """Return what each of the structures first..last-1 has of an array."""
        array, divided = self.arrays[name], self._divided[name]
        if divided == "all":
            return [_plain(array[()])] * (last - first)
        if divided == "each":
            return list(_plain(array[first:last]))
        assert self._starts is not None
        starts = self._starts[first : last + 1]
        return np.split(_plain(array[starts[0] : starts[-1]]), starts[1:-1] - starts[0])

    def elements(self, found: Any, place: str) -> Int64Array:
        """Return atomic numbers [N] of numbers or symbols. Raises DataError for what is neither."""
        given: npt.NDArray[Any] = np.asarray(found).reshape(-1)
        if given.dtype.kind in "OU":
            strange = next((symbol for symbol in given.tolist() if symbol not in NUMBERS), None)
            if strange is not None:
                raise DataError(f"{self.path}: {place}: unknown element {str(strange)[:40]!r}")
            return np.array([NUMBERS[symbol] for symbol in given.tolist()], dtype=np.int64)
        if not np.array_equal(given, np.floor(given)):
            raise DataError(f"{self.path}: {place}: an atomic number is no whole number")
        return given.astype(np.int64)

    def _read_starts(self, array: h5py.Dataset) -> Int64Array:
        starts = np.asarray(array[()])
        if starts.dtype.kind not in "iu" or (np.diff(starts.astype(np.int64)) < 0).any() or starts[0] != 0:
            raise self._wrong(f"{_POINTERS} must rise from 0, one more number than structures")
        if int(starts[-1]) != self.atoms:
            raise self._wrong(f"{_POINTERS} ends at {int(starts[-1])} but there are {self.atoms} atoms")
        return starts.astype(np.int64)

    def _check_units(self) -> None:
        """Refuse units that the file says and that are not those of the run file, and a unit of length that nobody says."""
        length, said = self._wanted.length, _said_unit(self.arrays["positions"])
        if length is None and said is None:
            raise self._wrong(
                "nothing says the unit of its positions, and files of this kind come in angstrom and in bohr; set "
                "length_unit of the source to A or bohr"
            )
        # Without `length_unit` positions are taken for angstrom.
        if said is not None and (
            said.dimension != LENGTH or not math.isclose(said.factor, length or 1.0, rel_tol=1e-3)
        ):
            raise self._wrong(f'its positions have units="{said.text}" in the file; set length_unit to that')
        for name, labels in self._labels.items():
            unit = _said_unit(self.arrays[name])
            for label in labels:
                if unit is None or label.kind.dimension is None:
                    continue
                # A sign is a convention, and no unit.
                if unit.dimension != label.kind.dimension or not math.isclose(
                    unit.factor, abs(label.factor), rel_tol=1e-3
                ):
                    raise self._wrong(
                        f'"{label.key}" has units="{unit.text}" in the file; set unit of its {label.name} to that'
                    )

    def _wrong(self, what: str) -> DataError:
        return DataError(f"{self.path}: group {self._known.path}: {what}")


def _plain(values: Any) -> npt.NDArray[Any]:
    """Return numbers as they are and text, which h5py gives as bytes, as text."""
    array = np.asarray(values)
    if array.dtype.kind not in "SO":
        return array
    words = [bytes(one).decode("utf-8", "replace") if isinstance(one, bytes) else str(one) for one in array.reshape(-1)]
    text = np.empty(len(words), dtype=object)
    text[:] = words
    return text.reshape(array.shape)


def _said_unit(array: h5py.Dataset) -> Unit | None:
    """Return the unit that an array's attribute `units` says; None where it says none that we know."""
    said = array.attrs.get("units", array.attrs.get("unit"))
    text = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
    if not isinstance(text, str) or len(text) > 100:
        return None
    parts = [_WORDS.get(part.strip().lower(), part.strip()) for part in text.replace("/", " / ").split(" ") if part]
    try:
        return parse_unit("".join(parts))
    except ValueError:
        return None


def _open_array(path: Path, group: h5py.Group, name: str) -> h5py.Dataset:
    """Return an array of a group. Raises DataError for one whose content lies elsewhere, or is no numbers or text."""
    where = f'{path}: group {group.name}: "{name}"'
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise DataError(f"{where} is a link; copy the array into the group")
    array = group[name]
    if not isinstance(array, h5py.Dataset):
        raise DataError(f"{where} is a {type(array).__name__.lower()}, an array is expected")
    if array.is_virtual or array.external:
        raise DataError(f"{where} has its content in other files, which are not read; write it into this one")
    if array.dtype.kind not in "biufS" and h5py.check_string_dtype(array.dtype) is None:
        raise DataError(f"{where} holds {array.dtype}, numbers or text are expected")
    if array.shape is None:
        raise DataError(f"{where} is empty")
    # A chunk is unpacked as a whole, however little of it is read.
    declared = max(math.prod(array.shape), math.prod(array.chunks or ())) * array.dtype.itemsize
    check_unpacked(path, declared, f'write "{name}" without compression')
    return array


@functools.lru_cache(maxsize=16)
def _find_groups(path: Path, changed_ns: int, size: int, arrays: ArrayNames | None) -> tuple[_Group, ...]:
    """Return the groups of a file that hold structures, in order of their names. changed_ns, size: of the file as it is.

    Raises DataError where there is none, and as `Hdf5File` says.
    """
    with _opened(path) as file:
        groups = [
            _describe(path, group, found) for group in _walk(path, file) if (found := _roles(path, group, arrays))
        ]
        if not groups:
            names = arrays.positions if arrays is not None and arrays.positions else ", ".join(_KNOWN["positions"])
            there = ", ".join(itertools.islice(file, 5)) or "nothing"
            raise DataError(
                f"{path}: no group has positions ({names}); its root has {there}; name them as arrays.positions of the "
                "source"
            )
        total = sum(math.prod(file[group.path][dict(group.names)["positions"]].shape) for group in groups)
        check_unpacked(path, total * 4, "write positions without compression")
    return tuple(groups)


def _walk(path: Path, file: h5py.File) -> Iterator[h5py.Group]:
    """Yield every group once, in order of their paths. Raises DataError for a link to another file."""
    waiting, seen = [file["/"]], set[Any]()
    while waiting:
        group = waiting.pop()
        yield group
        below = []
        for name in sorted(group):
            link = group.id.links.get_info(name.encode())
            if link.type == h5py.h5l.TYPE_EXTERNAL:
                raise DataError(
                    f"{path}: group {group.name}: {name!r} is a link to another file, which is not read; name that file "
                    "as a source, or copy its content"
                )
            # What a soft link leads to is found where it stands.
            if link.type != h5py.h5l.TYPE_HARD:
                continue
            info = h5py.h5o.get_info(group.id, name.encode())
            if info.type == h5py.h5o.TYPE_GROUP and (info.fileno, info.addr) not in seen:
                # A group may stand in itself.
                seen.add((info.fileno, info.addr))
                below.append(group[name])
        waiting += reversed(below)


def _roles(path: Path, group: h5py.Group, arrays: ArrayNames | None) -> dict[str, str]:
    """Return the names of the arrays of atoms that a group has; empty without positions.

    Raises DataError where several names would do, and where positions have no elements.
    """
    found, stored = {}, set(group)
    for role, known in _KNOWN.items():
        given = None if arrays is None else getattr(arrays, role)
        there = [name for name in (known if given is None else (given,)) if name in stored]
        if role == "positions" and not there:
            return {}
        if len(there) > 1:
            raise DataError(
                f"{path}: group {group.name}: {' and '.join(there)} could be its {role}; name one as arrays.{role} of "
                "the source"
            )
        if there:
            found[role] = there[0]
        elif role == "species":
            raise DataError(
                f"{path}: group {group.name}: no atomic numbers ({', '.join(known if given is None else (given,))}); it has "
                f"{', '.join(sorted(stored)[:10])}; name them as arrays.species of the source"
            )
    return found


def _describe(path: Path, group: h5py.Group, names: dict[str, str]) -> _Group:
    """Return what a group holds, by the shape of its positions. Raises DataError for any other shape."""
    positions = _open_array(path, group, names["positions"])
    shape, ragged = positions.shape, _POINTERS in group
    if (len(shape) != (2 if ragged else 3) and (ragged or len(shape) != 2)) or shape[-1] != 3:
        expected = "[atoms, 3]" if ragged else "[structures, atoms, 3] or [atoms, 3]"
        raise DataError(
            f'{path}: group {group.name}: "{names["positions"]}" has shape {list(shape)}, expected {expected}'
        )
    structures = shape[0] if len(shape) == 3 else 1
    if ragged:
        pointers = _open_array(path, group, _POINTERS)
        if len(pointers.shape) != 1 or not pointers.shape[0]:
            raise DataError(
                f"{path}: group {group.name}: {_POINTERS} must rise from 0, one more number than structures"
            )
        structures = pointers.shape[0] - 1
    return _Group(group.name, structures, tuple(names.items()), not ragged and len(shape) == 2, ragged)


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """Open a file. Raises DataError for what cannot be read as HDF5."""
    try:
        # Without a lock: it is only read, and its folder may not be writable.
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except _BROKEN as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"{path}: it cannot be read as HDF5 ({first}); it may be truncated") from None
