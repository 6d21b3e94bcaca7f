"""Graphs whose nodes are no atoms and whose edges a file gives: how a file holds them, and what of them is refused.

They are kept in the same shards as structures: nodes in the place of atoms, of element 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError
from phalanx.families.materials.config import GivenGraphs, GraphSource
from phalanx.families.materials.data.array_files import Int64Array
from phalanx.families.materials.data.labels import FloatArray, Label
from phalanx.families.materials.data.neighbours import Edges
from phalanx.families.materials.data.structure_files import RaggedArrays, Wanted
from phalanx.families.materials.data.structures import RawStructure, Structure, convert_label

FEATURES = {"nodes": "node_features", "edges": "edge_features", "graphs": "graph_features"}
"""Field of `GivenGraphs`, and array of a shard, by what the features belong to."""


class GraphFile(RaggedArrays):
    """Graphs in one .npz file: nodes of graph i are ptr[i]:ptr[i+1], its edges edge_ptr[i]:edge_ptr[i+1].

    ptr [G+1], edge_ptr [G+1]; edges [E, 2], the nodes that each edge leads from and to, counted within their graph: a
    message goes one way, so an edge without direction stands there twice; pos [N, 2] or [N, 3]; any further array has one
    row a node, an edge or a graph, as the run file uses it.
    """

    arrays = ("ptr", "edge_ptr", "edges", "pos")

    def __init__(self, path: Path, wanted: Wanted) -> None:
        """Open and check. Raises DataError for a truncated file, a missing array, and one of a wrong length."""
        super().__init__(path, wanted)
        assert wanted.graph is not None
        self._starts = {"nodes": self._array("ptr"), "edges": self._array("edge_ptr")}
        edges = self._array("edges")
        if edges.ndim != 2 or edges.shape[1] != 2 or edges.dtype.kind not in "iu":
            raise DataError(
                f"{path}: edges have shape {list(edges.shape)} of {edges.dtype}, expected [edges, 2] integers: the nodes "
                "that each leads from and to"
            )
        levels = _levels_of(wanted)
        rows = {level: self._rows(levels, level) for level in FEATURES}
        self._check_starts("ptr", self._starts["nodes"], rows["nodes"], "nodes")
        self._check_starts("edge_ptr", self._starts["edges"], len(edges), "edges")
        if len(self._starts["edges"]) != len(self._starts["nodes"]):
            raise DataError(
                f"{path}: edge_ptr has {len(self._starts['edges'])} numbers and ptr {len(self._starts['nodes'])}; both have "
                "one more than there are graphs"
            )
        if wanted.graph.positions:
            positions = self._array("pos")
            self._check_rows("pos", positions, rows["nodes"])
            if positions.shape[1:] not in ((2,), (3,)) or positions.dtype.kind not in "iuf":
                raise DataError(
                    f"{path}: pos has shape {list(positions.shape)}, expected [nodes, 2] or [nodes, 3] numbers"
                )
        rows |= {"edges": len(edges), "graphs": len(self)}
        for key, level in levels.items():
            if key in self._arrays and (self._arrays[key].ndim == 0 or len(self._arrays[key]) != rows[level]):
                raise DataError(
                    f'{path}: "{key}" has shape {list(self._arrays[key].shape)}, expected {rows[level]} rows, one for each '
                    f"of the {level}"
                )
        self._levels = levels

    def __len__(self) -> int:
        return len(self._starts["nodes"]) - 1

    def read(self, start: int, stop: int) -> Iterator[RawStructure]:
        """Yield graphs start..stop-1."""
        assert self.wanted.graph is not None
        for number in range(start, stop):
            places: dict[str, slice | int] = {
                level: slice(int(starts[number]), int(starts[number + 1])) for level, starts in self._starts.items()
            }
            places["graphs"] = number
            nodes = int(np.diff(self._starts["nodes"][number : number + 2].astype(np.int64))[0])
            positions = np.zeros((nodes, 3))
            if self.wanted.graph.positions:
                given = self._arrays["pos"][places["nodes"]]
                positions[:, : given.shape[1]] = given
            yield RawStructure(
                str(self.path),
                f"graph {number}",
                number,
                np.zeros(nodes, dtype=np.int64),
                positions,
                np.zeros((3, 3)),
                (False, False, False),
                {key: self._arrays[key][places[level]] for key, level in self._levels.items() if key in self._arrays},
                self._arrays["edges"][places["edges"]],
            )

    def _rows(self, levels: dict[str, str], level: str) -> int:
        """Return the rows of the first array of `level`; 0 where there is none."""
        known = (key for key, of in levels.items() if of == level and key in self._arrays)
        key = next(known, None)
        return 0 if key is None or self._arrays[key].ndim == 0 else len(self._arrays[key])


def _levels_of(wanted: Wanted) -> dict[str, str]:
    """Return whether each array has rows of nodes, edges or graphs."""
    assert wanted.graph is not None
    found: dict[str, str] = {}
    for level, field in FEATURES.items():
        found |= dict.fromkeys(getattr(wanted.graph, field), level)
    for label in wanted.labels:
        found[label.key] = "edges" if label.kind.per_edge else "nodes" if label.kind.per_atom else "graphs"
    return found if wanted.group_by is None else found | {wanted.group_by: "graphs"}


def _check_edges(raw: RawStructure, source: GraphSource, nodes: int, edges_E2: Int64Array) -> None:
    """Raise DataError for a graph without nodes or edges, and for an edge that leads to no node or to its own."""
    if nodes == 0:
        raise raw.wrong("it has no nodes")
    if not len(edges_E2) and source.no_edges == "refuse":
        raise raw.wrong(
            f"none of its {nodes} nodes has an edge; set no_edges: allow for source {source.name} to keep it"
        )
    outside = np.flatnonzero(((edges_E2 < 0) | (edges_E2 >= nodes)).any(axis=1))
    if outside.size:
        first = int(outside[0])
        raise raw.wrong(
            f"edge {first} joins nodes {edges_E2[first].tolist()}, and its nodes are 0 to {nodes - 1}; edges count the "
            "nodes of their own graph"
        )
    loops = np.flatnonzero(edges_E2[:, 0] == edges_E2[:, 1])
    if loops.size:
        raise raw.wrong(f"edge {int(loops[0])} leads from node {edges_E2[loops[0], 0]} to itself; leave it out")


def convert_graph(
    raw: RawStructure, labels: Sequence[Label], source: GraphSource, given: GivenGraphs, longest: float
) -> tuple[Structure, Edges]:
    """Check a graph and return it with its edges, ordered by target, then source.

    longest: length that no edge may exceed, where nodes have positions. Raises DataError naming file and graph for an edge
    that leads to no node or to its own, features that are absent, differ in shape or are no numbers, and labels that are
    absent unless that is allowed.
    """
    nodes, edges_E2 = len(raw.species), np.asarray(raw.edges, dtype=np.int64)
    _check_edges(raw, source, nodes, edges_E2)
    # Messages to one node lie together, as those that `find_edges` finds do.
    order_E = np.lexsort((edges_E2[:, 0], edges_E2[:, 1]))
    edges_E2 = edges_E2[order_E]
    positions = np.asarray(raw.positions, dtype=np.float64)
    strange = np.flatnonzero(~np.isfinite(positions).all(axis=1))
    if strange.size:
        raise raw.wrong(f"node {int(strange[0])} has position {positions[strange[0]].tolist()}")
    lengths = np.linalg.norm(positions[edges_E2[:, 1]] - positions[edges_E2[:, 0]], axis=1)
    # Models look along edges where nodes have places; without these no edge has a length.
    if given.positions and len(lengths):
        if lengths.min() == 0.0:
            ends = edges_E2[int(lengths.argmin())].tolist()
            raise raw.wrong(f"nodes {ends[0]} and {ends[1]} share an edge and are on one place: it has no direction")
        if lengths.max() > longest:
            raise raw.wrong(
                f"an edge is {lengths.max():.4g} long, more than data.cutoff={longest:g}; raise data.cutoff and model.cutoff"
            )
    rows = {"nodes": nodes, "edges": len(edges_E2), "graphs": 1}
    features = {field: _join_features(raw, getattr(given, field), rows[level]) for level, field in FEATURES.items()}
    features["edge_features"] = features["edge_features"][order_E]
    values: dict[str, FloatArray] = {}
    for label in labels:
        count = len(edges_E2) if label.kind.per_edge else nodes
        value = convert_label(raw, label, count, missing_allowed=source.missing_labels == "allow")
        values[label.name] = value[order_E] if label.kind.per_edge else value
    structure = Structure(
        raw,
        raw.species.astype(np.uint8),
        positions.astype(np.float32),
        np.zeros((3, 3), dtype=np.float32),
        raw.periodic,
        values,
        features,
    )
    # No edge passes the boundary of a cell: graphs have none.
    images = np.zeros((len(edges_E2), 3), dtype=np.int64)
    return structure, Edges(edges_E2[:, 0], edges_E2[:, 1], images, lengths)


def _join_features(raw: RawStructure, keys: Sequence[str], rows: int) -> FloatArray:
    """Return the columns of arrays `keys` side by side, [rows, F]."""
    columns: list[npt.NDArray[np.float64]] = [np.zeros((rows, 0))]
    for key in keys:
        if key not in raw.values:
            raise raw.wrong(f'the file has no array "{key}", which graph of its source names')
        found = np.asarray(raw.values[key])
        if found.dtype.kind not in "biuf":
            raise raw.wrong(f'"{key}" holds {found.dtype}, numbers are expected')
        columns.append(found.astype(np.float64).reshape(rows, -1) if found.size else np.zeros((rows, 0)))
        strange = np.flatnonzero(~np.isfinite(columns[-1]).all(axis=1))
        if strange.size:
            raise raw.wrong(
                f'"{key}" is {columns[-1][strange[0]].tolist()} in row {int(strange[0])}; features are finite'
            )
    return np.concatenate(columns, axis=1)
