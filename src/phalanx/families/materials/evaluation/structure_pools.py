"""Structures to compute, of files and of prepared folders: one sequence, read in part, whatever they are kept in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from phalanx.errors import ConfigError
from phalanx.families.materials.config import GraphSource
from phalanx.families.materials.data.array_files import ragged_offsets
from phalanx.families.materials.data.graph_shards import MANIFEST, SPLITS, PreparedSource, read_manifest
from phalanx.families.materials.data.neighbours import Edges
from phalanx.families.materials.data.structure_files import find_files, open_structures
from phalanx.families.materials.data.structures import RawStructure
from phalanx.remote_files import is_remote, local_path

ELECTRON_LABELS = {"total_charge": {"key": "charge", "unit": "e"}, "multiplicity": {"key": "spin", "unit": "1"}}
"""Labels of a structure's electrons, under the names of OMol25 and of the calculator."""


class StructurePool(ABC):
    """Structures of one file or folder."""

    source: GraphSource
    """The pool as a source, by which structures are checked and converted."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of structures."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[tuple[RawStructure, Edges | None]]:
        """Yield structures start..stop-1, each with its edges where they are known."""


@dataclass(frozen=True)
class PoolPlace:
    """Where a pool lies, not opened yet."""

    path: Path
    prepared: bool
    """Whether it is a folder of prepared structures."""
    cutoff: float
    max_neighbours: int | None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a source, of files that are not in angstrom or whose names are not known."""

    def open(self) -> StructurePool:
        """Open the file or folder. Raises DataError where it cannot be read."""
        if self.prepared:
            return _PreparedPool(self.path, self.cutoff, self.max_neighbours)
        return _FilePool(self.path, self.fields)


def find_pools(
    pools: Sequence[str], cutoff: float, max_neighbours: int | None, fields: Mapping[str, Any] | None = None
) -> list[PoolPlace]:
    """Return files, files that patterns name, and prepared folders (on this machine or at an address), in their order.

    cutoff, max_neighbours: of the edges that are needed. fields: of a source, for all files. Raises DataError where a name
    names nothing, ConfigError for fields that are none of a source.
    """
    fields = fields or {}
    source_of(Path("pool"), fields)
    found: list[PoolPlace] = []
    for pool in pools:
        if is_remote(pool) or (Path(pool) / MANIFEST).is_file():
            found.append(PoolPlace(local_path(pool), True, cutoff, max_neighbours))
        else:
            found += [PoolPlace(path, False, cutoff, max_neighbours, fields) for path in find_files(pool)]
    return found


class PoolSequence:
    """Structures of several pools, counted through from 0. One pool is open at a time, so that memory is bounded by one."""

    def __init__(self, places: Sequence[PoolPlace], lengths: Sequence[int]) -> None:
        """lengths: structures of each pool."""
        self._places = places
        self._starts = ragged_offsets(np.array(lengths, dtype=np.int64)).tolist()
        self._open: tuple[int, StructurePool] | None = None

    def read(self, start: int, stop: int) -> Iterator[tuple[RawStructure, GraphSource]]:
        """Yield structures start..stop-1, each with the source by which it is converted."""
        for number, (before, behind) in enumerate(zip(self._starts, self._starts[1:], strict=False)):
            if before >= stop or behind <= start:
                continue
            pool = self._pool(number)
            for raw, _ in pool.read(max(start, before) - before, min(stop, behind) - before):
                yield raw, pool.source

    def _pool(self, number: int) -> StructurePool:
        if self._open is None or self._open[0] != number:
            # Before the next is opened: some formats hold all of their file.
            self._open = None
            self._open = number, self._places[number].open()
        return self._open[1]


class _FilePool(StructurePool):
    """A file of structures."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self.source = source_of(path, fields)
        self._file = open_structures(path, self.source)

    def __len__(self) -> int:
        return len(self._file)

    def read(self, start: int, stop: int) -> Iterator[tuple[RawStructure, Edges | None]]:
        """See `StructurePool`: a file has no edges."""
        for raw in self._file.read(start, stop):
            yield raw, None


class _PreparedPool(StructurePool):
    """A folder of prepared structures, all of its splits one after another."""

    def __init__(self, folder: Path, cutoff: float, max_neighbours: int | None) -> None:
        """cutoff, max_neighbours: of the edges that are needed; those of the folder are taken where they are the same."""
        self.source = source_of(folder, {})
        settings = read_manifest(folder).settings
        self._has_edges = (settings["cutoff"], settings["max_neighbours"]) == (cutoff, max_neighbours)
        self._splits = [PreparedSource(folder, split) for split in SPLITS]
        self._starts = ragged_offsets(np.array([len(split) for split in self._splits]))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> Iterator[tuple[RawStructure, Edges | None]]:
        """See `StructurePool`."""
        for number in range(start, stop):
            place = int(np.searchsorted(self._starts, number, side="right")) - 1
            split, item = self._splits[place], number - int(self._starts[place])
            shard, row = (int(part[0]) for part in split.locate(np.array([item])))
            arrays = split.shard(shard)
            atoms, edges = (slice(*arrays[name][row : row + 2].tolist()) for name in ("node_starts", "edge_starts"))
            file, origin = arrays["origin"][row].tolist()
            values = {
                ELECTRON_LABELS[name]["key"]: float(arrays[name][row])
                for name in ELECTRON_LABELS
                if name in arrays and np.isfinite(arrays[name][row])
            }
            first, second, third = arrays["periodic"][row].astype(bool).tolist()
            raw = RawStructure(
                split.manifest.inputs[file],
                f"structure {origin}",
                origin,
                arrays["species"][atoms],
                arrays["positions"][atoms],
                arrays["cells"][row],
                (first, second, third),
                values,
            )
            if not self._has_edges:
                yield raw, None
                continue
            source, target = (arrays[name][edges].astype(np.int64) for name in ("source", "target"))
            images = np.zeros((len(source), 3), np.int64)
            if "images" in arrays:
                images = arrays["images"][edges].astype(np.int64)
            # Distances are not stored: in float64, as reading structures anew gives them.
            wide = raw.positions.astype(np.float64)
            vectors = wide[target] + images @ raw.cell.astype(np.float64) - wide[source]
            yield raw, Edges(source, target, images, np.linalg.norm(vectors, axis=1))


def source_of(path: Path, fields: Mapping[str, Any]) -> GraphSource:
    """Return a pool as a source: in angstrom and with labels of its electrons alone, unless `fields` say otherwise.

    Raises ConfigError for fields that are none of a source.
    """
    plain = {"name": "pool", "length_unit": "A", "labels": ELECTRON_LABELS, "no_edges": "allow"}
    try:
        return GraphSource.model_validate(plain | dict(fields) | {"path": str(path)})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "source"
        raise ConfigError(f"{where}: {first['msg']}; give fields of a source, as under data.sources") from None
