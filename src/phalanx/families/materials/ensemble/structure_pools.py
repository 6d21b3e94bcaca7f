"""Pools of structures to choose from: files of any format, and folders of prepared structures with their edges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from phalanx.families.materials.config import GraphSource
from phalanx.families.materials.data.array_files import Int64Array, ragged_offsets
from phalanx.families.materials.data.graph_shards import MANIFEST, SPLITS, PreparedSource, read_manifest
from phalanx.families.materials.data.neighbours import Edges
from phalanx.families.materials.data.structure_files import find_files, open_structures
from phalanx.families.materials.data.structures import RawStructure
from phalanx.remote_files import is_remote, local_path

ELECTRON_LABELS = {"total_charge": {"key": "charge", "unit": "e"}, "multiplicity": {"key": "spin", "unit": "1"}}
"""Labels of a structure's electrons, under the names of OMol25 and of the calculator."""
_CHUNK = 16
"""Structures that a rank takes at a time: neighbours are alike, and ranks should have alike work."""


class StructurePool(ABC):
    """Structures of one file or folder, in angstrom."""

    source: GraphSource
    """The pool as a source, by which structures are checked."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of structures."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[tuple[RawStructure, Edges | None]]:
        """Yield structures start..stop-1, each with its edges where they are known."""


class _FilePool(StructurePool):
    """A file of structures."""

    def __init__(self, path: Path) -> None:
        self.source = _source_of(path)
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
        self.source = _source_of(folder)
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


def open_pools(pools: Sequence[str], cutoff: float, max_neighbours: int | None) -> list[StructurePool]:
    """Open files, patterns of files, and prepared folders (on this machine or at an address), in their order.

    Raises DataError where one cannot be read.
    """
    found: list[StructurePool] = []
    for pool in pools:
        if is_remote(pool) or (Path(pool) / MANIFEST).is_file():
            found.append(_PreparedPool(local_path(pool), cutoff, max_neighbours))
        else:
            found += [_FilePool(path) for path in find_files(pool)]
    return found


def shared_chunks(pools: Sequence[StructurePool], rank: int, ranks: int) -> list[tuple[int, int, int]]:
    """Return the chunks of this rank: number of the pool, first structure, and one after the last."""
    chunks = [
        (number, first, min(first + _CHUNK, len(pool)))
        for number, pool in enumerate(pools)
        for first in range(0, len(pool), _CHUNK)
    ]
    return chunks[rank::ranks]


def pool_starts(pools: Sequence[StructurePool]) -> Int64Array:
    """Return the number, among all structures, of the first one of each pool, and their number in all."""
    return ragged_offsets(np.array([len(pool) for pool in pools], dtype=np.int64))


def _source_of(path: Path) -> GraphSource:
    return GraphSource.model_validate(
        {"name": "pool", "path": str(path), "labels": ELECTRON_LABELS, "no_edges": "allow"}
    )
