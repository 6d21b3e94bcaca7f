"""Opening a file of structures by its format."""

from __future__ import annotations

import importlib
from pathlib import Path

from phalanx.errors import DataError
from phalanx.families.materials.data.structures.files import StructureFile, Wanted
from phalanx.families.materials.data.structures.labels import labels_of
from phalanx.families.materials.data_config import GraphSource

_FORMATS = {
    "npz": ("phalanx.families.materials.data.structures.npz", "NpzFile"),
    "extxyz": ("phalanx.families.materials.data.structures.ase_files", "ExtendedXyzFile"),
    "ase": ("phalanx.families.materials.data.structures.ase_files", "AseDatabase"),
    "qm9_csv": ("phalanx.families.materials.data.structures.qm9_csv", "Qm9Csv"),
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
