"""Graphs written as one .npz file, laid out as `given_graphs.GraphFile` reads it."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


def pack_graphs(graphs: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the bytes of a file of graphs, each given by the names of its arrays: `edges` [E, 2], `pos` [N, D], further
    arrays with a row a node or an edge, and numbers of the graph."""
    arrays: dict[str, Any] = {
        "ptr": np.cumsum([0, *(len(graph["pos"]) for graph in graphs)]),
        "edge_ptr": np.cumsum([0, *(len(graph["edges"]) for graph in graphs)]),
    }
    for name, value in graphs[0].items():
        join = np.concatenate if np.ndim(value) else np.array
        joined = join([graph[name] for graph in graphs])
        # What is learned keeps more digits than any model has.
        arrays[name] = joined.astype(np.float32) if joined.dtype == np.float64 else joined.astype(np.int32)
    content = io.BytesIO()
    save: Callable[..., None] = np.savez_compressed
    save(content, **arrays)
    return content.getvalue()
