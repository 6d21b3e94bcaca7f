"""Files of structures by format: opened lazily, read structure by structure, damaged ones refused with their place.

Extended XYZ and ASE databases are read by `formats.ase_files`, ADIOS2 by `formats.adios_files`, HDF5 by
`formats.hdf5_files`: each needs another package.
"""

from __future__ import annotations

import csv
import glob
import importlib
import itertools
import math
import re
import struct
import tokenize
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, AnyStr

import numpy as np
import numpy.lib.format as npy
import numpy.typing as npt

from phalanx.errors import ConfigError, DataError
from phalanx.families.materials.config import ArrayNames, GivenGraphs, GraphSource
from phalanx.families.materials.data.labels import FloatArray, Label, labels_of, length_factor
from phalanx.families.materials.data.structures import RawStructure, periodic_flags

_FORMATS = {
    "npz": ("phalanx.families.materials.data.structure_files", "NpzFile"),
    "extxyz": ("phalanx.families.materials.data.formats.ase_files", "ExtendedXyzFile"),
    "ase": ("phalanx.families.materials.data.formats.ase_files", "AseDatabase"),
    "aselmdb": ("phalanx.families.materials.data.formats.ase_files", "AseLmdb"),
    "qm9_csv": ("phalanx.families.materials.data.structure_files", "Qm9Csv"),
    "graphs": ("phalanx.families.materials.data.given_graphs", "GraphFile"),
    "adios": ("phalanx.families.materials.data.formats.adios_files", "AdiosGraphs"),
    "hdf5": ("phalanx.families.materials.data.formats.hdf5_files", "Hdf5File"),
}
"""Where each format is read; loaded on demand, since some need a package that others do not."""
_ENDINGS = {
    ".npz": "npz",
    ".xyz": "extxyz",
    ".extxyz": "extxyz",
    ".db": "ase",
    ".aselmdb": "aselmdb",
    ".csv": "qm9_csv",
    ".bp": "adios",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
}


def open_structures(path: Path, source: GraphSource) -> StructureFile:
    """Open `path` as a file of `source`.

    Raises DataError for an unknown ending or content of another format, ConfigError for fields that are of another format.
    """
    kind = _ENDINGS.get(path.suffix) if source.format == "auto" else source.format
    if kind is None:
        raise DataError(
            f"{path}: ending {path.suffix!r} tells no format; set format of source {source.name} to one of "
            f"{', '.join(_FORMATS)}"
        )
    if source.arrays is not None and kind != "hdf5":
        raise ConfigError(
            f"data.sources.{source.name}.arrays names those of HDF5 files, and {path} is {kind}; leave arrays out"
        )
    module, name = _FORMATS["graphs" if source.graph is not None else kind]
    reader: type[StructureFile] = getattr(importlib.import_module(module), name)
    length = length_factor(source) if "length_unit" in source.model_fields_set else None
    return reader(path, Wanted(tuple(labels_of(source)), source.group_by, source.graph, source.arrays, length))


@dataclass(frozen=True)
class Wanted:
    """Labels and groups to read besides atoms."""

    labels: tuple[Label, ...]
    group_by: str | None
    graph: GivenGraphs | None = None
    """Of graphs whose nodes are no atoms: what stands in the files."""
    arrays: ArrayNames | None = None
    """Names that the run file gives to arrays of atoms."""
    length: float | None = None
    """Unit of length in angstrom; None where the run file does not say it."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Return every name to look up in the file."""
        names = [label.key for label in self.labels]
        if self.graph is not None:
            names += [*self.graph.node_features, *self.graph.edge_features, *self.graph.graph_features]
        return tuple(dict.fromkeys(names if self.group_by is None else [*names, self.group_by]))


LONGEST_LINE = 2**20
"""Characters of a line of a text file: far more than a structure's properties take."""


def bounded_lines(file: IO[AnyStr], path: Path) -> Iterator[AnyStr]:
    """Give the lines of an open file one by one. Raises DataError for a line that does not end within `LONGEST_LINE`."""
    number = 0
    while line := file.readline(LONGEST_LINE):
        number += 1
        if len(line) == LONGEST_LINE and line[-1:] not in ("\n", b"\n"):
            raise DataError(
                f"{path}: line {number} is longer than {LONGEST_LINE:,} characters; it is damaged, or no file of structures"
            )
        yield line


class StructureFile(ABC):
    """One open file of structures."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self.path = path
        self.wanted = wanted

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of structures in the file."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[RawStructure]:
        """Yield structures start..stop-1, in order. Raises DataError for a malformed one, naming it."""


def find_files(pattern: str) -> list[Path]:
    """Return the files that a path or a pattern names, in order of their names. Raises DataError when there is none."""
    found = [Path(pattern)] if Path(pattern).exists() else [Path(name) for name in sorted(glob.glob(pattern))]
    # What ADIOS2 writes is a folder of that ending.
    files = [path for path in found if path.is_file() or path.suffix == ".bp"]
    if not files:
        raise DataError(f"{pattern}: no such file; name a file of structures or a pattern such as runs/*.extxyz")
    return files


_UNPACKED_BYTES = 2**30
"""Unpacked size that is read whatever the file's own is."""
_UNPACKED_TIMES = 20
"""Most times its own size that a larger file may unpack to: coordinates and forces hardly shrink at all."""


def check_unpacked(path: Path, unpacked: int, remedy: str) -> None:
    """Refuse a file that unpacks to `unpacked` bytes, far more than it holds. remedy: what to do if that is meant.

    Raises DataError.
    """
    packed = path.stat().st_size
    if unpacked > max(_UNPACKED_BYTES, _UNPACKED_TIMES * packed):
        raise DataError(
            f"{path}: {packed:,} bytes unpack to {unpacked:,}, more than {_UNPACKED_TIMES} times as many; if that is meant, "
            f"{remedy}"
        )


_BROKEN = (
    OSError,
    ValueError,
    TypeError,
    EOFError,
    KeyError,
    OverflowError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    struct.error,
    tokenize.TokenError,
    zlib.error,
    zipfile.BadZipFile,
)
"""Errors that zipfile and numpy raise for files that are damaged, encrypted, or packed in a way of their own."""


class RaggedArrays(StructureFile):
    """Arrays in one .npz file, read at once: compressed arrays cannot be read in part."""

    arrays: tuple[str, ...]
    """Names that are read whatever labels are wanted."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        """Read. Raises DataError for a truncated file."""
        super().__init__(path, wanted)
        self._arrays = self._load()

    def _load(self) -> dict[str, npt.NDArray[Any]]:
        """Read the arrays that are wanted, none before its size is known to be that of what is stored."""
        try:
            with self.path.open("rb") as file:
                if file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX:
                    raise DataError(
                        f"{self.path}: it holds one array without a name; save ptr, z, pos, ... with numpy.savez"
                    )
            with zipfile.ZipFile(self.path) as stored:
                members = {info.filename.removesuffix(".npy"): info for info in stored.infolist()}
                self._names = list(members)
                wanted = {name: members[name] for name in (*self.arrays, *self.wanted.keys) if name in members}
                unpacked = sum(info.file_size for info in wanted.values())
                check_unpacked(self.path, unpacked, "save it with numpy.savez instead of numpy.savez_compressed")
                found: dict[str, npt.NDArray[Any]] = {}
                for name, info in wanted.items():
                    with stored.open(info) as member:
                        version = npy.read_magic(member)
                        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                        shape, _, dtype = read_header(member)
                        # numpy makes room for what the header says before it reads.
                        declared, there = math.prod(shape) * dtype.itemsize, info.file_size - member.tell()
                    if not dtype.hasobject and declared != there:
                        raise DataError(
                            f"{self.path}: {info.filename} declares {list(shape)} of {dtype}, {declared:,} bytes, and holds "
                            f"{there:,}; it is damaged"
                        )
                    with stored.open(info) as member:
                        found[name] = npy.read_array(member, allow_pickle=False)
                return found
        except _BROKEN as error:
            raise DataError(f"{self.path}: it cannot be read as .npz ({error}); it may be truncated") from None

    def _array(self, *names: str) -> npt.NDArray[Any]:
        for name in names:
            if name in self._arrays:
                return self._arrays[name]
        raise DataError(f"{self.path}: no array {' or '.join(names)}; it has {', '.join(self._names)}")

    def _check_rows(self, name: str, array: npt.NDArray[Any], rows: int) -> None:
        if array.ndim == 0 or len(array) != rows:
            raise DataError(f"{self.path}: {name} has shape {list(array.shape)}, expected {rows} rows")

    def _check_starts(self, name: str, starts: npt.NDArray[Any], rows: int, what: str) -> None:
        """Refuse numbers that do not part all rows into structures: a wrong one would mix structures up."""
        numbers = starts.ndim == 1 and starts.dtype.kind in "iuf"
        if not numbers or len(starts) == 0 or starts[0] != 0 or (np.diff(starts.astype(np.int64)) < 0).any():
            raise DataError(f"{self.path}: {name} must rise from 0, one more number than structures")
        if int(starts[-1]) != rows:
            raise DataError(f"{self.path}: {name} ends at {int(starts[-1])} but there are {rows} {what}")


class NpzFile(RaggedArrays):
    """Ragged arrays in one .npz file: atoms of structure i are ptr[i]:ptr[i+1].

    ptr [G+1]; z [N] (or numbers, species); pos [N, 3] (or positions); cell [G, 3, 3]; pbc [G, 3], absent means that a
    structure is periodic if its cell is not all zeros; any further array has one row an atom or one row a structure.
    """

    arrays = ("ptr", "z", "numbers", "species", "pos", "positions", "cell", "pbc")

    def __init__(self, path: Path, wanted: Wanted) -> None:
        """Open and check. Raises DataError for a truncated file, a missing array, and one of a wrong length."""
        super().__init__(path, wanted)
        self._ptr = self._array("ptr")
        self._species = self._array("z", "numbers", "species")
        self._positions = self._array("pos", "positions")
        self._cell = self._arrays.get("cell")
        self._periodic = self._arrays.get("pbc")
        self._check_atoms()
        self._check_rows("positions", self._positions, len(self._species))
        for name, array in (("cell", self._cell), ("pbc", self._periodic)):
            if array is not None:
                self._check_rows(name, array, len(self))
        for name, array in (("positions", self._positions), ("cell", self._cell), ("pbc", self._periodic)):
            if array is not None and array.dtype.kind not in "biuf":
                raise DataError(f"{path}: {name} holds {array.dtype}, numbers are expected")
        if self._periodic is not None and self._periodic.shape[1:] not in ((), (1,), (3,)):
            raise DataError(f"{path}: pbc has shape {list(self._periodic.shape)}, expected [{len(self)}, 3] flags")
        self._per_atom = self._find_label_rows()

    def __len__(self) -> int:
        return len(self._ptr) - 1

    def read(self, start: int, stop: int) -> Iterator[RawStructure]:
        """Yield structures start..stop-1."""
        for number in range(start, stop):
            atoms = slice(int(self._ptr[number]), int(self._ptr[number + 1]))
            cell = np.zeros((3, 3)) if self._cell is None else self._cell[number]
            flags = None if self._periodic is None else self._periodic[number]
            yield RawStructure(
                str(self.path),
                f"structure {number}",
                number,
                self._species[atoms].astype(np.int64),
                self._positions[atoms],
                cell,
                periodic_flags(cell, flags),
                {key: self._arrays[key][atoms if per_atom else number] for key, per_atom in self._per_atom.items()},
            )

    def _check_atoms(self) -> None:
        """Refuse atomic numbers that are none, and a ptr that does not part all atoms into structures."""
        species, ptr = self._species, self._ptr
        if species.ndim != 1 or species.dtype.kind not in "iuf":
            raise DataError(
                f"{self.path}: atomic numbers have shape {list(species.shape)} of {species.dtype}, expected [atoms] integers"
            )
        self._check_starts("ptr", ptr, len(species), "atoms")
        # Atomic numbers may be stored in any format of numbers, but are whole.
        strange = (
            np.flatnonzero(species != np.floor(species)) if species.dtype.kind == "f" else np.empty(0, dtype=np.int64)
        )
        if strange.size:
            atom = int(strange[0])
            structure = int(np.searchsorted(ptr, atom, side="right")) - 1
            raise DataError(
                f"{self.path}: structure {structure}: atom {atom - int(ptr[structure])} has atomic number {species[atom]}, "
                "which is no whole number"
            )

    def _find_label_rows(self) -> dict[str, bool]:
        """Return whether each array of labels has a row an atom, else a row a structure; refuse other counts."""
        found = {}
        for key in (key for key in self.wanted.keys if key in self._arrays):
            array = self._arrays[key]
            per_atom = any(label.kind.per_atom for label in self.wanted.labels if label.key == key)
            rows = len(self._species) if per_atom else len(self)
            if array.ndim == 0 or len(array) != rows:
                unit = "an atom" if per_atom else "a structure"
                raise DataError(f'{self.path}: "{key}" has shape {list(array.shape)}, expected {rows} rows, one {unit}')
            found[key] = per_atom
        return found


_ELEMENTS, _POSITIONS = "Elements", "XYZ_Ang"
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|NaN")
_WORD = re.compile(r"[A-Za-z]+")
_SYMBOLS = (
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb Mo Tc "
    "Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi "
    "Po At Rn"
)
NUMBERS = {symbol: number for number, symbol in enumerate(_SYMBOLS.split(), 1)}
"""Atomic numbers by symbol."""


class Qm9Csv(StructureFile):
    """QM9 as CSV, as the qm9pack package ships it: one molecule a row below a header.

    Elements is "['C', 'H', ...]", XYZ_Ang has coordinates in angstrom; any further column holds one number a molecule, or a
    list with one an atom. Numbers may be written as Mathematica does: 1.5*^-6.
    """

    def __init__(self, path: Path, wanted: Wanted) -> None:
        """Read the header and count rows. Raises DataError naming columns that are missing."""
        super().__init__(path, wanted)
        # Lines are bounded, and fields with them.
        csv.field_size_limit(LONGEST_LINE)
        with self._lines() as lines:
            rows = csv.reader(lines)
            self._columns = next(rows, [])
            absent = [name for name in (_ELEMENTS, _POSITIONS) if name not in self._columns]
            if absent:
                raise DataError(f"{path}: no column {absent[0]}; its columns are {', '.join(self._columns) or 'none'}")
            # Empty lines are no rows to DictReader either.
            self._count = sum(1 for row in rows if row)

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> Iterator[RawStructure]:
        """Yield rows start..stop-1 below the header."""
        with self._lines() as lines:
            for number, row in enumerate(itertools.islice(csv.DictReader(lines), start, stop), start):
                yield self._structure(number, row)

    @contextmanager
    def _lines(self) -> Iterator[Iterator[str]]:
        """Give the file's lines. Raises DataError for what is no text of rows."""
        with self.path.open(newline="", encoding="utf-8") as file:
            try:
                yield bounded_lines(file, self.path)
            except UnicodeDecodeError as error:
                raise DataError(f"{self.path}: it is not UTF-8 text ({error.reason}); it may be compressed") from None
            except csv.Error as error:
                raise DataError(f"{self.path}: it cannot be read as CSV ({error})") from None

    def _structure(self, number: int, row: dict[str, Any]) -> RawStructure:
        place = f"row {number}"
        if None in row.values() or None in row:
            raise DataError(
                f"{self.path}: {place}: not as many fields as the header; the file is truncated or malformed"
            )
        symbols = _WORD.findall(row[_ELEMENTS])
        unknown = [symbol for symbol in symbols if symbol not in NUMBERS]
        if unknown:
            raise DataError(
                f"{self.path}: {place}: atom {symbols.index(unknown[0])} is of unknown element {unknown[0]!r}"
            )
        positions = _parse_numbers(row[_POSITIONS])
        if len(positions) != 3 * len(symbols):
            raise DataError(f"{self.path}: {place}: {len(positions)} coordinates for {len(symbols)} atoms")
        values: dict[str, Any] = {}
        for key in self.wanted.keys:
            content = row.get(key, "")
            if content.strip():
                # Digits within words are no numbers: a SMILES string has some, too.
                is_text = key == self.wanted.group_by or _WORD.search(_NUMBER.sub("", _plain_powers(content)))
                values[key] = content if is_text else _parse_numbers(content)
        species = np.array([NUMBERS[symbol] for symbol in symbols], dtype=np.int64)
        cell = np.zeros((3, 3))
        return RawStructure(
            str(self.path), place, number, species, positions.reshape(-1, 3), cell, (False, False, False), values
        )


def _parse_numbers(text: str) -> FloatArray:
    return np.array([float(word) for word in _NUMBER.findall(_plain_powers(text))], dtype=np.float64)


def _plain_powers(text: str) -> str:
    """Write powers of ten as everybody but Mathematica does."""
    return text.replace("*^", "e")
