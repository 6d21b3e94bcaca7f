"""QM9 as CSV, as the qm9pack package ships it: one molecule a row.

Elements  "['C', 'H', ...]"     XYZ_Ang  coordinates in angstrom     any further column holds one number a molecule, or
a list with one an atom. Numbers may be written as Mathematica does: 1.5*^-6.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import DataError
from phalanx.families.materials.data.structures.files import LONGEST_LINE, StructureFile, Wanted, bounded_lines
from phalanx.families.materials.data.structures.labels import FloatArray
from phalanx.families.materials.data.structures.structures import RawStructure

_ELEMENTS, _POSITIONS = "Elements", "XYZ_Ang"
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|NaN")
_WORD = re.compile(r"[A-Za-z]+")
_SYMBOLS = (
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb Mo Tc "
    "Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi "
    "Po At Rn"
)
_NUMBERS = {symbol: number for number, symbol in enumerate(_SYMBOLS.split(), 1)}


class Qm9Csv(StructureFile):
    """One CSV file with a header."""

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
        """Rows start..stop-1 below the header."""
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
        unknown = [symbol for symbol in symbols if symbol not in _NUMBERS]
        if unknown:
            raise DataError(
                f"{self.path}: {place}: atom {symbols.index(unknown[0])} is of unknown element {unknown[0]!r}"
            )
        positions = _numbers(row[_POSITIONS])
        if len(positions) != 3 * len(symbols):
            raise DataError(f"{self.path}: {place}: {len(positions)} coordinates for {len(symbols)} atoms")
        values = {key: self._value(key, row[key]) for key in self.wanted.keys if row.get(key, "").strip()}
        species = np.array([_NUMBERS[symbol] for symbol in symbols], dtype=np.int64)
        cell = np.zeros((3, 3))
        return RawStructure(
            str(self.path), place, number, species, positions.reshape(-1, 3), cell, (False, False, False), values
        )

    def _value(self, key: str, text: str) -> Any:
        if key == self.wanted.group_by:
            return text
        # Digits within words are no numbers: a SMILES string has some, too.
        return text if _WORD.search(_NUMBER.sub("", _plain(text))) else _numbers(text)


def _numbers(text: str) -> FloatArray:
    return np.array([float(word) for word in _NUMBER.findall(_plain(text))], dtype=np.float64)


def _plain(text: str) -> str:
    """Powers of ten as everybody but Mathematica writes them."""
    return text.replace("*^", "e")
