"""Ragged arrays in one .npz file: atoms of structure i are ptr[i]:ptr[i+1].

ptr [G+1]; z [N] (or numbers, species); pos [N, 3] (or positions); cell [G, 3, 3]; pbc [G, 3], absent means that a
structure is periodic if its cell is not all zeros; any further array has one row an atom or one row a structure.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.graphs.files import StructureFile, Wanted
from phalanx.data.graphs.structures import RawStructure
from phalanx.errors import DataError


class NpzFile(StructureFile):
    """Ragged arrays, read at once: compressed arrays cannot be read in part."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        """Open and check. Raises DataError for a truncated file, a missing array, and one of a wrong length."""
        super().__init__(path, wanted)
        self._arrays = self._load()
        self._ptr = self._array("ptr")
        self._species = self._array("z", "numbers", "species")
        self._positions = self._array("pos", "positions")
        self._cell = self._arrays.get("cell")
        self._periodic = self._arrays.get("pbc")
        self._check_ptr()
        self._check_species()
        self._check_rows("positions", self._positions, len(self._species))
        for name, array in (("cell", self._cell), ("pbc", self._periodic)):
            if array is not None:
                self._check_rows(name, array, len(self))
        for name, array in (("positions", self._positions), ("cell", self._cell), ("pbc", self._periodic)):
            if array is not None and array.dtype.kind not in "biuf":
                raise DataError(f"{path}: {name} holds {array.dtype}, numbers are expected")
        if self._periodic is not None and self._periodic.shape[1:] not in ((), (1,), (3,)):
            raise DataError(f"{path}: pbc has shape {list(self._periodic.shape)}, expected [{len(self)}, 3] flags")
        self._per_atom = {key: self._rows_are_atoms(key) for key in wanted.keys if key in self._arrays}

    def __len__(self) -> int:
        return len(self._ptr) - 1

    def read(self, start: int, stop: int) -> Iterator[RawStructure]:
        """Structures start..stop-1."""
        for number in range(start, stop):
            atoms = slice(int(self._ptr[number]), int(self._ptr[number + 1]))
            cell = np.zeros((3, 3)) if self._cell is None else self._cell[number]
            if self._periodic is not None:
                flags = np.broadcast_to(self._periodic[number], 3)
            else:
                flags = np.full(3, bool(cell.any()))
            yield RawStructure(
                str(self.path),
                f"structure {number}",
                number,
                self._species[atoms].astype(np.int64),
                self._positions[atoms],
                cell,
                (bool(flags[0]), bool(flags[1]), bool(flags[2])),
                {key: self._arrays[key][atoms if per_atom else number] for key, per_atom in self._per_atom.items()},
            )

    def _load(self) -> dict[str, npt.NDArray[Any]]:
        try:
            stored = np.load(self.path, allow_pickle=False)
            if not isinstance(stored, np.lib.npyio.NpzFile):
                raise DataError(
                    f"{self.path}: it holds one array without a name; save ptr, z, pos, ... with numpy.savez"
                )
            with stored:
                return {name: stored[name] for name in stored.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{self.path}: it cannot be read as .npz ({error}); it may be truncated") from None

    def _array(self, *names: str) -> npt.NDArray[Any]:
        for name in names:
            if name in self._arrays:
                return self._arrays[name]
        raise DataError(f"{self.path}: no array {' or '.join(names)}; it has {', '.join(self._arrays)}")

    def _check_species(self) -> None:
        """Atomic numbers may be stored in any format of numbers, but are whole."""
        found = self._species
        if found.ndim != 1 or found.dtype.kind not in "iuf":
            raise DataError(
                f"{self.path}: atomic numbers have shape {list(found.shape)} of {found.dtype}, expected [atoms] integers"
            )
        strange = np.flatnonzero(found != np.floor(found)) if found.dtype.kind == "f" else np.empty(0, dtype=np.int64)
        if strange.size:
            atom = int(strange[0])
            structure = int(np.searchsorted(self._ptr, atom, side="right")) - 1
            raise DataError(
                f"{self.path}: structure {structure}: atom {atom - int(self._ptr[structure])} has atomic number "
                f"{found[atom]}, which is no whole number"
            )

    def _check_ptr(self) -> None:
        steps = np.diff(self._ptr.astype(np.int64)) if self._ptr.ndim == 1 else np.empty(0)
        if self._ptr.ndim != 1 or len(self._ptr) == 0 or self._ptr[0] != 0 or (steps < 0).any():
            raise DataError(f"{self.path}: ptr must rise from 0, one more number than structures")
        if int(self._ptr[-1]) != len(self._species):
            raise DataError(f"{self.path}: ptr ends at {int(self._ptr[-1])} but there are {len(self._species)} atoms")

    def _check_rows(self, name: str, array: npt.NDArray[Any], rows: int) -> None:
        if array.ndim == 0 or len(array) != rows:
            raise DataError(f"{self.path}: {name} has shape {list(array.shape)}, expected {rows} rows")

    def _rows_are_atoms(self, key: str) -> bool:
        """Whether the array has a row an atom, rather than a row a structure."""
        array, atoms = self._arrays[key], len(self._species)
        rows = len(array) if array.ndim else -1
        expected = any(label.kind.per_atom for label in self.wanted.labels if label.key == key)
        if rows == (atoms if expected else len(self)):
            return expected
        wanted = f"{atoms} rows, one an atom" if expected else f"{len(self)} rows, one a structure"
        raise DataError(f'{self.path}: "{key}" has shape {list(array.shape)}, expected {wanted}')
