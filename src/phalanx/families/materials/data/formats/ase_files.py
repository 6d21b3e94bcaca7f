"""Extended XYZ files and ASE databases, read through ase."""

from __future__ import annotations

import importlib
import io
import itertools
import re
import sqlite3
import struct
import sys
from array import array
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import DataError, PhalanxError
from phalanx.families.materials.data.structure_files import StructureFile, Wanted, bounded_lines
from phalanx.families.materials.data.structures import RawStructure

try:
    import ase.db
    import ase.io
    from ase import Atoms
except ImportError as error:
    raise PhalanxError('these files need ase: pip install "phalanx-train[materials]"') from error


_LARGEST_FRAME = 2**27
"""Bytes of one frame, of some million atoms: ase takes many times as much memory to read it."""
_PROPERTIES = re.compile(r"Properties\s*=\s*[\"'{]?\s*([^\s\"'}]*)")


class ExtendedXyzFile(StructureFile):
    """Frames one after the other: a line with the number of atoms, a line of properties, a line for each atom."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        """Find where each frame begins. Raises DataError naming the frame and line where the file is cut short."""
        super().__init__(path, wanted)
        starts, numbers = array("q"), array("q")
        place = line = 0
        with path.open("rb") as file:
            lines = bounded_lines(file, path)
            for head in lines:
                if not head.strip():
                    place, line = place + len(head), line + 1
                    continue
                starts.append(place)
                numbers.append(line + 1)
                frame = f"{path}: frame {len(starts) - 1} (line {line + 1})"
                try:
                    atoms = int(head)
                except ValueError:
                    raise DataError(
                        f"{frame}: a number of atoms is expected, found {head[:40].decode('utf-8', 'replace').strip()!r}"
                    ) from None
                if atoms < 1:
                    raise DataError(f"{frame}: {atoms} atoms are announced; a structure has one at least")
                place, line = place + len(head), line + 1
                # Announced atoms are counted as they come: the number itself may be anything.
                found = size = 0
                for row in itertools.islice(lines, min(atoms, sys.maxsize - 1) + 1):
                    found, size = found + 1, size + len(row)
                    if size > _LARGEST_FRAME:
                        raise DataError(
                            f"{frame}: it is larger than {_LARGEST_FRAME / 2**20:.0f} MiB; put structures that large into "
                            ".npz"
                        )
                if found < atoms + 1:
                    raise DataError(
                        f"{frame}: {atoms} atoms are announced, {max(0, found - 1)} lines follow; the file is truncated"
                    )
                place, line = place + size, line + found
        self._starts, self._lines = np.array([*starts, place], dtype=np.int64), numbers

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, start: int, stop: int) -> Iterator[RawStructure]:
        """Yield frames start..stop-1."""
        with self.path.open("rb") as file:
            for number in range(start, stop):
                file.seek(int(self._starts[number]))
                text = file.read(int(self._starts[number + 1] - self._starts[number])).decode("utf-8", "replace")
                place = f"frame {number} (line {self._lines[number]})"
                rows = text.split("\n", 3)
                announced = _PROPERTIES.search(rows[1])
                columns, there = 0, len(rows[2].split())
                # Refused before ase reads it, which makes room for all announced columns first.
                for count in [] if announced is None else announced.group(1).split(":")[2::3]:
                    # As many digits as a number of columns can have.
                    if not (count.isascii() and count.isdecimal() and len(count) <= 6):
                        raise DataError(
                            f"{self.path}: {place}: Properties has {count[:40]!r} where a number of columns is expected"
                        )
                    columns += int(count)
                if columns > there:
                    raise DataError(
                        f"{self.path}: {place}: Properties announces {columns} columns, the line of its first atom has "
                        f"{there}"
                    )
                try:
                    atoms = next(iter(ase.io.iread(io.StringIO(text), index=0, format="extxyz")))
                # ase raises whatever its parser stumbled over.
                except Exception as error:
                    raise DataError(f"{self.path}: {place}: {_first_line(error)}") from None
                yield _to_raw_structure(atoms, self.path, place, number, self.wanted, {})


class AseDatabase(StructureFile):
    """An ASE database in one file (.db); places are row ids."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        """Open it. Raises DataError for a file that is no database or is truncated."""
        super().__init__(path, wanted)
        # Without a lock: it is only read, and its folder may not be writable.
        self._database = ase.db.connect(path, use_lock_file=False)
        try:
            self._count = int(self._database.count())
        except (sqlite3.Error, OSError) as error:
            raise self._broken(error) from None

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> Iterator[RawStructure]:
        """Yield the start-th to the (stop-1)-th row by id."""
        # By row id: a database without an order may give its rows in another one each time.
        rows = self._database.select(offset=start, limit=stop - start, sort="id")
        for number in itertools.count(start):
            try:
                row = next(rows, None)
            except sqlite3.Error as error:
                raise self._broken(error) from None
            # ase raises whatever its decoder stumbled over.
            except Exception as error:
                raise DataError(f"{self.path}: structure {number}: {_first_line(error)}") from None
            if row is None:
                return
            yield _row_structure(row, self.path, number, self.wanted)

    def _broken(self, error: Exception) -> DataError:
        return DataError(f"{self.path}: it cannot be read as an ASE database ({error}); it may be truncated")


class AseLmdb(StructureFile):
    """An ASE database in one LMDB file (.aselmdb), as OMat24 and OMol25 come in; places are row ids."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        """Open it and list its rows. Raises DataError for a file that is none, PhalanxError where the package is missing."""
        super().__init__(path, wanted)
        try:
            database = importlib.import_module("ase_db_backends.aselmdb").LMDBDatabase
        except ImportError as error:
            raise PhalanxError(f'{path} needs ase-db-backends: pip install "phalanx-train[lmdb]"') from error
        _require_whole_lmdb(path)
        try:
            # Without locks: it is only read, and its folder may not be writable.
            self._database = database(path, use_lock_file=False, readonly=True)
            self._ids = sorted(self._database.ids)
        # lmdb has errors of its own, and its decoders others.
        except Exception as error:
            raise DataError(
                f"{path}: it cannot be read as an LMDB of ASE ({_first_line(error)}); it may be truncated"
            ) from None

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, start: int, stop: int) -> Iterator[RawStructure]:
        """Yield the start-th to the (stop-1)-th row by id."""
        for number in range(start, min(stop, len(self._ids))):
            try:
                # Its own select would look through all rows each time.
                row = self._database._get_row(self._ids[number])
            except Exception as error:
                raise DataError(f"{self.path}: structure {number}: {_first_line(error)}") from None
            yield _row_structure(row, self.path, number, self.wanted)


_LMDB_META = struct.Struct("<16x I I 8x 8x I 44x 48x Q Q")
"""Of the page that an LMDB begins with: magic, version, page size, last page in use and transaction (lmdb.h, MDB_meta)."""
_LMDB_MAGIC = 0xBEEFC0DE


def _require_whole_lmdb(path: Path) -> None:
    """Raise DataError for a file that is no LMDB or shorter than it says: reading one ends the process by a signal."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_LMDB_META.size)
        magic, _, page_size, *newest = _LMDB_META.unpack(head) if len(head) == _LMDB_META.size else (0, 0, 0, 0, 0)
        if magic != _LMDB_MAGIC:
            raise DataError(f"{path}: it cannot be read as an LMDB of ASE (it does not begin like one)")
        # Written in turns: the page of the later transaction holds.
        file.seek(page_size)
        other = file.read(_LMDB_META.size)
        if len(other) == _LMDB_META.size and (second := _LMDB_META.unpack(other)[3:])[1] > newest[1]:
            newest = list(second)
    expected = (newest[0] + 1) * page_size
    if size < expected:
        raise DataError(
            f"{path}: it cannot be read as an LMDB of ASE ({size} bytes found, {expected} expected); it may be truncated"
        )


def _row_structure(row: Any, path: Path, number: int, wanted: Wanted) -> RawStructure:
    """Return the structure of a row of a database. Raises DataError for one that cannot be decoded."""
    try:
        atoms, place = row.toatoms(), f"row id {row.id}"
        extra = {key: row.key_value_pairs.get(key, row.data.get(key)) for key in wanted.keys}
    # ase raises whatever its decoder stumbled over.
    except Exception as error:
        raise DataError(f"{path}: structure {number}: {_first_line(error)}") from None
    return _to_raw_structure(atoms, path, place, number, wanted, extra)


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _to_raw_structure(
    atoms: Atoms, path: Path, place: str, number: int, wanted: Wanted, extra: dict[str, Any]
) -> RawStructure:
    # Of the structure, of its atoms, or of the calculator that ase makes from the names that it knows.
    known = ChainMap(atoms.info, atoms.arrays, {} if atoms.calc is None else atoms.calc.results)
    values = {key: known.get(key) for key in wanted.keys}
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
