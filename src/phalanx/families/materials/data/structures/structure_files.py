"""Opening a file of structures by its format."""

from __future__ import annotations

import glob
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, AnyStr

from phalanx.errors import DataError
from phalanx.families.materials.data.structures.labels import Label, labels_of
from phalanx.families.materials.data.structures.structures import RawStructure
from phalanx.families.materials.data_config import GraphSource

_FORMATS = {
    "npz": ("phalanx.families.materials.data.structures.npz_files", "NpzFile"),
    "extxyz": ("phalanx.families.materials.data.structures.ase_files", "ExtendedXyzFile"),
    "ase": ("phalanx.families.materials.data.structures.ase_files", "AseDatabase"),
    "qm9_csv": ("phalanx.families.materials.data.structures.qm9_files", "Qm9Csv"),
}
"""Where each format is read; loaded on demand, since some need a package that others do not."""
_ENDINGS = {".npz": "npz", ".xyz": "extxyz", ".extxyz": "extxyz", ".db": "ase", ".csv": "qm9_csv"}


def open_structures(path: Path, source: GraphSource) -> StructureFile:
    """Open `path` as a file of `source`. Raises DataError for an unknown ending or content of another format."""
    kind = _ENDINGS.get(path.suffix) if source.format == "auto" else source.format
    if kind is None:
        raise DataError(
            f"{path}: ending {path.suffix!r} tells no format; set format of source {source.name} to one of "
            f"{', '.join(_FORMATS)}"
        )
    module, name = _FORMATS[kind]
    reader: type[StructureFile] = getattr(importlib.import_module(module), name)
    return reader(path, Wanted(tuple(labels_of(source)), source.group_by))


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
