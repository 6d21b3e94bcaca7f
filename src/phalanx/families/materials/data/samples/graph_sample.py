"""Samples of graphs, written as one .npz file, laid out as `given_graphs.GraphFile` reads it."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.prepared_folder import Progress, SampleManifest, write_sample


def write_graphs(
    folder: Path,
    file: str,
    draw: Callable[[np.random.Generator], Mapping[str, Any]],
    *,
    kind: str,
    what: str,
    count: int,
    seed: int,
    progress: Progress,
) -> SampleManifest:
    """Draw `count` graphs, write them into `folder` as the file `file` and return the record of the sample.

    draw: gives one graph by the names of its arrays, see `pack_graphs`. kind: of the sample. what: the graphs, for progress.
    The same seed gives the same bytes on the same machine. Raises DataError where files are already there.
    """

    def make(target: Path) -> None:
        graphs = []
        for number in range(count):
            # A stream of numbers for each: a graph is the same whatever else is asked for.
            graphs.append(draw(np.random.default_rng([seed, number])))
            progress(f"solving {what}", number + 1, count)
        (target / file).write_bytes(pack_graphs(graphs))

    return write_sample(folder, kind, seed, (file,), make)


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
