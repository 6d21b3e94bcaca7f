"""Structures of HydraGNN's ADIOS2 files (.bp folders, as its AdiosWriter leaves them).

A file has parts, mostly trainset, valset and testset. Of each part and each name of a graph's data, PART/NAME holds the
arrays of all graphs, joined along the dimension PART/NAME/variable_dim; graph i has PART/NAME/variable_count[i] rows of it
from PART/NAME/variable_offset[i] on. Atoms are pos and atomic_numbers (or z, or else the first column of x), with cell and
pbc where there are such; any other name can be a label. Edges are not read: neighbours are found anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError, PhalanxError
from phalanx.families.materials.data.array_files import Int64Array
from phalanx.families.materials.data.structure_files import StructureFile, Wanted
from phalanx.families.materials.data.structures import RawStructure, periodic_flags

try:
    from adios2 import FileReader
except ImportError as error:
    raise PhalanxError('ADIOS2 files need adios2: pip install "phalanx-train[adios2]"') from error

_SPECIES = ("atomic_numbers", "z", "x")
"""Where atomic numbers may stand, the best first; of x it is the first column."""
_GRAPHS_AT_ONCE = 1024
"""Graphs whose arrays are held in memory."""


@dataclass(frozen=True)
class _Joined:
    """Arrays of all graphs of one part, joined along one dimension."""

    name: str
    shape: tuple[int, ...]
    dimension: int
    offset_G: Int64Array
    count_G: Int64Array


@dataclass(frozen=True)
class _Part:
    """One part of a file, such as trainset."""

    name: str
    species: str
    """Name that has its atomic numbers."""
    joined: dict[str, _Joined]


class AdiosGraphs(StructureFile):
    """All parts of one file, one after the other in order of their names; places are a part and a graph's number in it."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        """Open and check. Raises DataError for a file that is none or truncated, a part without positions or elements, and
        graphs that begin or end where nothing is."""
        super().__init__(path, wanted)
        with self._open() as file:
            variables = file.available_variables()
            self._require_whole(variables)
            parts = sorted({name.split("/")[0] for name in variables if "/" in name})
            if not parts:
                raise DataError(f"{path}: no variable PART/pos; it has {', '.join(sorted(variables)) or 'none'}")
            self._parts = [self._open_part(file, part, variables) for part in parts]
        starts = np.cumsum([0, *(len(part.joined["pos"].count_G) for part in self._parts)])
        self._starts: list[int] = starts.tolist()

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> Iterator[RawStructure]:
        """Yield graphs start..stop-1 of all parts."""
        with self._open() as file:
            for part, before, behind in zip(self._parts, self._starts, self._starts[1:], strict=False):
                first, last = max(start, before) - before, min(stop, behind) - before
                for some in range(first, last, _GRAPHS_AT_ONCE):
                    yield from self._read_part(file, part, some, min(some + _GRAPHS_AT_ONCE, last), before)

    def _read_part(self, file: FileReader, part: _Part, first: int, last: int, before: int) -> Iterator[RawStructure]:
        """Yield graphs first..last-1 of a part. before: graphs of earlier parts."""
        arrays = {name: _read_rows(file, joined, first, last) for name, joined in part.joined.items()}
        for number in range(first, last):
            found, where = {name: rows[number - first] for name, rows in arrays.items()}, f"{part.name} graph {number}"
            cell = found["cell"].reshape(-1, 3) if "cell" in found else np.zeros((3, 3))
            flags = found["pbc"].reshape(-1) if "pbc" in found else None
            if flags is not None and flags.size not in (1, 3):
                raise DataError(f"{self.path}: {where}: pbc has {flags.size} flags, expected 3")
            yield RawStructure(
                str(self.path),
                where,
                before + number,
                self._species(found[part.species], part.species, where),
                found["pos"],
                cell,
                periodic_flags(cell, flags),
                {key: self._value(key, found[key]) for key in self.wanted.keys if key in found},
            )

    def _value(self, key: str, found: npt.NDArray[Any]) -> Any:
        """Return a label as other files have it: HydraGNN writes text as bytes, and what a graph has one of as a row."""
        if key == self.wanted.group_by:
            return bytes(found).decode("utf-8", "replace") if found.dtype == np.uint8 else found.reshape(-1).tolist()[0]
        per_atom = any(label.kind.per_atom for label in self.wanted.labels if label.key == key)
        return found if per_atom or len(found) != 1 else found[0]

    def _species(self, found: npt.NDArray[Any], key: str, where: str) -> Int64Array:
        """Return atomic numbers [N]. Raises DataError for what is none."""
        numbers = found.reshape(len(found), -1)[:, 0]
        strange = np.flatnonzero(~np.isfinite(numbers) | (numbers != np.floor(numbers)))
        if strange.size:
            raise DataError(
                f'{self.path}: {where}: atom {strange[0]} has atomic number {numbers[strange[0]]:g} in "{key}", which is no '
                "whole number; scaled features of atoms say no elements: write atomic_numbers beside them"
            )
        return numbers.astype(np.int64)

    def _open_part(self, file: FileReader, part: str, variables: dict[str, Any]) -> _Part:
        """Return the names to read of a part."""
        there = [name.split("/")[1] for name in variables if name.count("/") == 1 and name.startswith(f"{part}/")]
        species = next((name for name in _SPECIES if name in there), None)
        if "pos" not in there or species is None:
            lacking = "pos" if "pos" not in there else " or ".join(_SPECIES)
            raise DataError(f"{self.path}: no variable {part}/{lacking}; part {part} has {', '.join(there) or 'none'}")
        wanted = dict.fromkeys(
            ["pos", species, *(name for name in ("cell", "pbc", *self.wanted.keys) if name in there)]
        )
        names = {name: self._open_joined(file, f"{part}/{name}") for name in wanted}
        atoms, graphs = names["pos"].count_G, len(names["pos"].count_G)
        if names["pos"].dimension != 0 or names["pos"].shape[1:] != (3,):
            raise DataError(f"{self.path}: {part}/pos has shape {list(names['pos'].shape)}, expected [atoms, 3]")
        for name, joined in names.items():
            if len(joined.count_G) != graphs:
                raise DataError(f"{self.path}: {part}/{name} has {len(joined.count_G)} graphs, {part}/pos {graphs}")
        if not np.array_equal(names[species].count_G, atoms):
            graph = int(np.flatnonzero(names[species].count_G != atoms)[0])
            raise DataError(
                f"{self.path}: {part} graph {graph}: {names[species].count_G[graph]} atomic numbers in {species} for "
                f"{atoms[graph]} positions"
            )
        return _Part(part, species, names)

    def _open_joined(self, file: FileReader, name: str) -> _Joined:
        """Return where each graph's rows lie. Raises DataError where the file does not say so, or something else."""
        variable = file.inquire_variable(name)
        found = {}
        for field in ("variable_offset", "variable_count"):
            if file.inquire_variable(f"{name}/{field}") is None:
                raise DataError(f"{self.path}: no variable {name}/{field}, which HydraGNN's AdiosWriter writes")
            found[field] = np.asarray(file.read(f"{name}/{field}"), dtype=np.int64).reshape(-1)
        if f"{name}/variable_dim" not in file.available_attributes():
            raise DataError(f"{self.path}: no attribute {name}/variable_dim, which HydraGNN's AdiosWriter writes")
        shape = tuple(variable.shape())
        dimension = int(np.asarray(file.read_attribute(f"{name}/variable_dim")).reshape(-1)[0])
        offset_G, count_G = found["variable_offset"], found["variable_count"]
        if not 0 <= dimension < len(shape) or len(offset_G) != len(count_G):
            raise DataError(
                f"{self.path}: {name} of shape {list(shape)} is joined along dimension {dimension}, with "
                f"{len(offset_G)} offsets and {len(count_G)} counts; it is damaged"
            )
        # Graphs lie one behind the other, as they are written, so that many are one read.
        if not np.array_equal(offset_G, np.cumsum(count_G) - count_G) or count_G.sum() != shape[dimension]:
            raise DataError(
                f"{self.path}: offsets and counts of {name} do not part its {shape[dimension]} rows; it is damaged"
            )
        if (count_G < 0).any():
            raise DataError(f"{self.path}: {name} has a graph of {count_G.min()} rows; it is damaged")
        return _Joined(name, shape, dimension, offset_G, count_G)

    def _require_whole(self, variables: dict[str, Any]) -> None:
        """Refuse a folder that holds fewer bytes than its arrays have: ADIOS2 waits for the rest for ever."""
        declared = sum(
            math.prod(int(size) for size in one["Shape"].split(",")) * _bytes_each(one["Type"])
            for one in variables.values()
            if one["Shape"]
        )
        files = self.path.glob("data.*") if self.path.is_dir() else [self.path]
        there = sum(file.stat().st_size for file in files)
        if there < declared:
            raise DataError(
                f"{self.path}: its arrays take {declared:,} bytes and its data files hold {there:,}; it is truncated, or "
                "compressed, which HydraGNN does not do"
            )

    @contextmanager
    def _open(self) -> Iterator[FileReader]:
        """Open the file. Raises DataError for what ADIOS2 cannot read."""
        try:
            with FileReader(str(self.path)) as file:
                yield file
        except RuntimeError as error:
            words = " ".join(str(error).split("[0m")[-2 if "[0m" in str(error) else -1].split())
            raise DataError(f"{self.path}: it cannot be read as ADIOS2 ({words}); it may be truncated") from None


def _read_rows(file: FileReader, joined: _Joined, first: int, last: int) -> list[npt.NDArray[Any]]:
    """Return the arrays of graphs first..last-1, by one read."""
    counts = joined.count_G[first:last]
    total = int(counts.sum())
    start, count = [0] * len(joined.shape), list(joined.shape)
    start[joined.dimension], count[joined.dimension] = int(joined.offset_G[first]), total
    rows = np.asarray(file.read(joined.name, start, count)) if total else np.empty(count)
    return np.split(rows, np.cumsum(counts)[:-1], axis=joined.dimension)


def _bytes_each(kind: str) -> int:
    """Return the bytes of one number of a type as ADIOS2 names it."""
    names = {"float": 4, "double": 8, "char": 1}
    return names.get(kind) or int("".join(one for one in kind if one.isdigit()) or 8) // 8
