"""A file of structures, whatever its format: how many there are, and a range of them.

Formats: `npz` (ragged arrays), `ase_files` (extended XYZ, ASE databases), `qm9_csv`. Told apart by the ending or by name.
"""

from __future__ import annotations

import glob
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, AnyStr

from phalanx.errors import DataError
from phalanx.families.materials.data.structures.labels import Label
from phalanx.families.materials.data.structures.structures import RawStructure


@dataclass(frozen=True)
class Wanted:
    """What to read besides atoms."""

    labels: tuple[Label, ...]
    group_by: str | None

    @property
    def keys(self) -> tuple[str, ...]:
        """Every name to look up in the file."""
        names = [label.key for label in self.labels]
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
        """Structures in the file."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[RawStructure]:
        """Structures start..stop-1, in order. Raises DataError for a malformed one, naming it."""


def find_files(pattern: str) -> list[Path]:
    """The files that a path or a pattern names, in order of their names. Raises DataError when there is none."""
    found = [Path(pattern)] if Path(pattern).is_file() else [Path(name) for name in sorted(glob.glob(pattern))]
    files = [path for path in found if path.is_file()]
    if not files:
        raise DataError(f"{pattern}: no such file; name a file of structures or a pattern such as runs/*.extxyz")
    return files
