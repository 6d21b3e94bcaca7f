"""Structures of one source in this process's memory, laid out as one shard, and bytes of them for other ranks.

Knows nothing of ranks: see `structure_store`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from phalanx.families.materials.data.array_files import Arrays, Int64Array, ragged_offsets, ragged_ranges
from phalanx.families.materials.data.graph_batches import ShardRows
from phalanx.families.materials.data.graph_shards import Located, PreparedSource
from phalanx.families.materials.data.labels import KINDS

Bytes = npt.NDArray[np.uint8]
Fields = dict[str, tuple[str, tuple[int, ...]]]
"""Number format, and shape of a row, of the arrays that a source's structures have."""
_Rows = Literal["structures", "atoms", "edges"]
_ROWS: dict[str, _Rows] = {
    "species": "atoms",
    "positions": "atoms",
    "cells": "structures",
    "periodic": "structures",
    "source": "edges",
    "target": "edges",
    "images": "edges",
    "properties": "structures",
    "atom_properties": "atoms",
    "edge_properties": "edges",
    "node_features": "atoms",
    "edge_features": "edges",
    "graph_features": "structures",
}
_ROWS |= {name: "atoms" if kind.per_atom else "structures" for name, kind in KINDS.items()}
"""What the rows of an array of a shard are, of all arrays that batches are made of."""
_ALIGNMENT = 8


def shard_fields(shard: Arrays) -> Fields:
    """Return the fields of one shard's structures."""
    return {name: (array.dtype.str, array.shape[1:]) for name, array in shard.items() if name in _ROWS}


def join_fields(several: Sequence[Fields]) -> Fields:
    """Return fields that the structures of all these shards fit in, in one order.

    Shards count atoms in the narrowest integers that hold their own, and those without a periodic structure have no images.
    """
    joined: Fields = {}
    for fields in several:
        for name, (dtype, shape) in fields.items():
            before = joined.get(name, (dtype, shape))[0]
            joined[name] = np.result_type(np.dtype(before), np.dtype(dtype)).str, shape
    return dict(sorted(joined.items()))


def structure_bytes(fields: Fields, atoms: Int64Array, edges: Int64Array) -> Int64Array:
    """Return the bytes that structures of these sizes [n] take in memory [n]."""
    rows: dict[_Rows, Int64Array] = {"structures": np.ones_like(atoms), "atoms": atoms, "edges": edges}
    # Where its atoms and edges begin, and its number in the source.
    total = np.full_like(atoms, 3 * np.dtype(np.int64).itemsize)
    for name, (dtype, shape) in fields.items():
        total += rows[_ROWS[name]] * (np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64)))
    return total


class HeldStructures:
    """Some structures of one source in memory."""

    def __init__(self, source: PreparedSource, items: Int64Array, fields: Fields) -> None:
        """Read `items` of the source, ascending. fields: of all shards of the source."""
        self.items = items
        atoms, edges = source.sizes(items)
        starts: Arrays = {"node_starts": ragged_offsets(atoms), "edge_starts": ragged_offsets(edges)}
        counts = {"structures": len(items), "atoms": int(atoms.sum()), "edges": int(edges.sum())}
        self.arrays: Arrays = dict(starts)
        for name, (dtype, shape) in fields.items():
            # Zeros: images of a shard without a periodic structure are not written.
            self.arrays[name] = np.zeros((counts[_ROWS[name]], *shape), dtype)
        shards, rows = source.locate(items)
        for number in np.unique(shards).tolist():
            first, last = np.searchsorted(shards, (number, number + 1)).tolist()
            places: dict[_Rows, slice] = {
                "structures": slice(first, last),
                "atoms": slice(*starts["node_starts"][[first, last]].tolist()),
                "edges": slice(*starts["edge_starts"][[first, last]].tolist()),
            }
            for name, values in _take_structures(source.shard(number), rows[first:last], fields).items():
                self.arrays[name][places[_ROWS[name]]] = values
        source.close_shards()

    def rows(self, items: Int64Array) -> Int64Array:
        """Return the rows of items of the source, all of which are here."""
        return np.searchsorted(self.items, items)

    def pack(self, items: Int64Array, fields: Fields) -> Iterator[Bytes]:
        """Yield the bytes of these structures, array after array, each padded as `unpack` expects it."""
        taken = _take_structures(self.arrays, self.rows(items), fields)
        for name in fields:
            content = np.ascontiguousarray(taken[name]).reshape(-1).view(np.uint8)
            yield content
            yield np.zeros(-len(content) % _ALIGNMENT, np.uint8)


def packed_bytes(fields: Fields, atoms: Int64Array, edges: Int64Array) -> int:
    """Return the length of what `pack` gives for structures of these sizes."""
    return sum(_padded(size) for _, size in _array_sizes(fields, atoms, edges))


def unpack(content: Bytes, fields: Fields, atoms: Int64Array, edges: Int64Array) -> Arrays:
    """Return structures of these sizes, as arrays of a shard, from what `pack` gave; nothing is copied."""
    arrays: Arrays = {"node_starts": ragged_offsets(atoms), "edge_starts": ragged_offsets(edges)}
    first = 0
    for name, size in _array_sizes(fields, atoms, edges):
        dtype, shape = fields[name]
        arrays[name] = content[first : first + size].view(dtype).reshape(-1, *shape)
        first += _padded(size)
    return arrays


def held_rows(held: Sequence[HeldStructures], found: Located, graphs: Int64Array) -> Iterator[ShardRows]:
    """Yield where structures `graphs` of a batch are, all of them held; held: by source."""
    for number, structures in enumerate(held):
        mine = graphs[found.source[graphs] == number]
        if mine.size:
            yield ShardRows(number, structures.arrays, structures.rows(found.item[mine]), mine)


def _take_structures(arrays: Arrays, rows: Int64Array, fields: Mapping[str, object]) -> Arrays:
    """Return copies of the rows of structures `rows` of a shard, by array."""
    atoms, edges = arrays["node_starts"], arrays["edge_starts"]
    taken: dict[_Rows, Int64Array] = {
        "structures": rows,
        "atoms": ragged_ranges(atoms[rows], atoms[rows + 1] - atoms[rows]),
        "edges": ragged_ranges(edges[rows], edges[rows + 1] - edges[rows]),
    }
    return {name: arrays[name].take(taken[_ROWS[name]], axis=0) for name in fields if name in arrays}


def _array_sizes(fields: Fields, atoms: Int64Array, edges: Int64Array) -> Iterator[tuple[str, int]]:
    """Yield the bytes of each array of structures of these sizes."""
    counts = {"structures": len(atoms), "atoms": int(atoms.sum()), "edges": int(edges.sum())}
    for name, (dtype, shape) in fields.items():
        yield name, counts[_ROWS[name]] * np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))


def _padded(size: int) -> int:
    # So that every array begins where its numbers may.
    return -(-size // _ALIGNMENT) * _ALIGNMENT
