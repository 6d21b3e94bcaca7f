"""Extended XYZ files and ASE databases, read through ase."""

from __future__ import annotations

import io
import itertools
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.graphs.files import StructureFile, Wanted
from phalanx.data.graphs.structures import RawStructure
from phalanx.errors import DataError, PhalanxError

try:
    import ase.db
    import ase.io
    from ase import Atoms
except ImportError as error:
    raise PhalanxError('these files need ase: pip install "phalanx-train[materials]"') from error


class ExtendedXyzFile(StructureFile):
    """Frames one after the other: a line with the number of atoms, a line of properties, a line for each atom."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        """Find where each frame begins. Raises DataError naming the frame and line where the file is cut short."""
        super().__init__(path, wanted)
        self._starts, self._lines = _frame_starts(path)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, start: int, stop: int) -> Iterator[RawStructure]:
        """Frames start..stop-1."""
        with self.path.open("rb") as file:
            for number in range(start, stop):
                file.seek(int(self._starts[number]))
                text = file.read(int(self._starts[number + 1] - self._starts[number])).decode("utf-8", "replace")
                place = f"frame {number} (line {self._lines[number]})"
                try:
                    atoms = ase.io.read(io.StringIO(text), index=0, format="extxyz")
                # ase raises whatever its parser stumbled over.
                except Exception as error:
                    raise DataError(f"{self.path}: {place}: {str(error).splitlines()[0]}") from None
                assert isinstance(atoms, Atoms)
                yield _raw(atoms, self.path, place, number, self.wanted, {})


class AseDatabase(StructureFile):
    """An ASE database in one file (.db); places are row ids."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        """Open it. Raises DataError for a file that is no database or is truncated."""
        super().__init__(path, wanted)
        self._database = ase.db.connect(path, use_lock_file=False)
        try:
            self._count = int(self._database.count())
        except (sqlite3.Error, OSError) as error:
            raise self._broken(error) from None

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> Iterator[RawStructure]:
        """The start-th to the (stop-1)-th row by id."""
        try:
            for number, row in zip(
                itertools.count(start),
                self._database.select(offset=start, limit=stop - start, sort="id"),
                strict=False,
            ):
                atoms = row.toatoms()
                extra = {key: _from_row(row, key) for key in self.wanted.keys}
                yield _raw(atoms, self.path, f"row id {row.id}", number, self.wanted, extra)
        except sqlite3.Error as error:
            raise self._broken(error) from None

    def _broken(self, error: Exception) -> DataError:
        return DataError(f"{self.path}: it cannot be read as an ASE database ({error}); it may be truncated")


def _frame_starts(path: Path) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Byte offsets of all frames and of the end of the file, and the line number of each frame."""
    starts: list[int] = []
    lines: list[int] = []
    place = line = 0
    with path.open("rb") as file:
        while head := file.readline():
            if not head.strip():
                place, line = place + len(head), line + 1
                continue
            starts.append(place)
            lines.append(line + 1)
            try:
                atoms = int(head)
            except ValueError:
                raise DataError(
                    f"{path}: frame {len(starts) - 1} (line {line + 1}): a number of atoms is expected, found "
                    f"{head[:40].decode('utf-8', 'replace').strip()!r}"
                ) from None
            body = list(itertools.islice(file, atoms + 1))
            if len(body) < atoms + 1:
                raise DataError(
                    f"{path}: frame {len(starts) - 1} (line {line + 1}): {atoms} atoms are announced, "
                    f"{max(0, len(body) - 1)} lines follow; the file is truncated"
                )
            place += len(head) + sum(map(len, body))
            line += 1 + len(body)
    return np.array([*starts, place], dtype=np.int64), lines


def _raw(atoms: Atoms, path: Path, place: str, number: int, wanted: Wanted, extra: dict[str, Any]) -> RawStructure:
    values = {key: _from_atoms(atoms, key) for key in wanted.keys}
    values.update({key: value for key, value in extra.items() if value is not None})
    flags = [bool(flag) for flag in atoms.pbc]
    return RawStructure(
        str(path),
        place,
        number,
        atoms.numbers,
        atoms.positions,
        atoms.cell.array,
        (flags[0], flags[1], flags[2]),
        {key: value for key, value in values.items() if value is not None},
    )


def _from_atoms(atoms: Atoms, key: str) -> Any:
    """A value under `key`: of the structure, of its atoms, or of the calculator that ase makes from known names."""
    if key in atoms.info:
        return atoms.info[key]
    if key in atoms.arrays:
        return atoms.arrays[key]
    return None if atoms.calc is None else atoms.calc.results.get(key)


def _from_row(row: Any, key: str) -> Any:
    """A value of a database row: one of its key-value pairs, or of its data."""
    return row.key_value_pairs.get(key, row.data.get(key))
