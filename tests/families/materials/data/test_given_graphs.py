"""Graphs whose nodes are no atoms: what is read of a file, what is refused of it, and what a batch of them holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.errors import ConfigError, DataError
from phalanx.families.materials.config import GraphData
from phalanx.families.materials.data.graph_batches import GraphBatch, graph_columns
from phalanx.families.materials.data.graph_shards import open_prepared
from phalanx.families.materials.data.graph_stream import GraphBatchStream, graph_order
from phalanx.families.materials.data.prepare_structures import prepare_graphs

GRAPHS = 12


def make_rings() -> dict[str, Any]:
    """Rings of 3 to 6 nodes, each edge both ways, in no order; the flux of an edge tells which nodes it joins."""
    random = np.random.default_rng(3)
    sizes = 3 + np.arange(GRAPHS) % 4
    edges = []
    for size in sizes:
        one = np.stack((np.arange(size), (np.arange(size) + 1) % size), axis=1)
        edges.append(random.permutation(np.concatenate((one, one[:, ::-1]))))
    nodes, joined = int(sizes.sum()), np.concatenate(edges)
    return {
        "ptr": np.concatenate(([0], sizes.cumsum())),
        "edge_ptr": np.concatenate(([0], (2 * sizes).cumsum())),
        "edges": joined,
        "pos": random.normal(size=(nodes, 2)),
        "volume": random.normal(size=nodes),
        "axis": random.normal(size=(nodes, 3)),
        "area": (10 * joined[:, 0] + joined[:, 1]).astype(float),
        "load": np.arange(GRAPHS, dtype=float),
        "flux": (10 * joined[:, 0] + joined[:, 1]).astype(float),
        "phase": np.array(["cubic", "hexagonal", "cubic", ""] * (GRAPHS // 4)),
        "hot": np.arange(nodes) % 3 - 1,
    }


def write_rings(path: Path, **changes: Any) -> dict[str, Any]:
    """Write them; changes: arrays that replace the made ones, None leaves one out."""
    arrays = make_rings() | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return arrays


def ring_data(folder: Path, **changes: Any) -> GraphData:
    source = {
        "name": "rings",
        "path": str(folder / "rings.npz"),
        "graph": {
            "node_features": ["volume", "axis"],
            "edge_features": ["area"],
            "graph_features": ["load"],
            "positions": True,
        },
        "properties": {"phase": {"classes": ["cubic", "hexagonal"]}},
        "atom_properties": {"hot": {"classes": ["no", "yes"]}},
        "edge_properties": {"flux": "1"},
        "missing_labels": "allow",
    } | changes
    given = {"sources": [source], "prepared": str(folder / "prepared"), "cutoff": 20.0}
    return GraphData.model_validate({**given, "validation_fraction": 0.0, "test_fraction": 0.0})


def read_all(data: GraphData) -> GraphBatch:
    prepare_graphs(data, workers=1, piece_structures=5)
    sources = open_prepared(data, "train")
    order = graph_order(sources, data.model_copy(update={"batch_by": "graphs"}), seed=0, global_batch=GRAPHS)
    return GraphBatchStream(order, graph_columns(sources), prefetch=0).batch(1)


def test_a_batch_holds_what_the_file_does(tmp_path: Path) -> None:
    arrays = write_rings(tmp_path / "rings.npz")
    batch = read_all(ring_data(tmp_path))
    assert len(batch.atoms) == GRAPHS and not batch.species_N.any()
    assert batch.graph_features_GF is not None and batch.node_features_NF is not None
    assert batch.edge_features_EF is not None and batch.edge_properties_EP is not None
    assert batch.properties_GP is not None and batch.atom_properties_NP is not None
    # The graph feature tells which graph of the file each is.
    graphs = batch.graph_features_GF[:, 0].long().numpy()
    assert sorted(graphs) == list(range(GRAPHS))
    nodes = np.concatenate([np.arange(arrays["ptr"][g], arrays["ptr"][g + 1]) for g in graphs])
    features = np.column_stack((arrays["volume"], arrays["axis"]))[nodes]
    assert np.allclose(batch.node_features_NF, features, atol=1e-6)
    assert np.allclose(batch.positions_N3[:, :2], arrays["pos"][nodes], atol=1e-6)
    first_E = np.repeat(np.cumsum(batch.atoms) - batch.atoms, batch.edges)
    joined = 10 * (batch.edges_2E[0].numpy() - first_E) + batch.edges_2E[1].numpy() - first_E
    assert np.array_equal(batch.edge_features_EF[:, 0], joined)
    assert np.array_equal(batch.edge_properties_EP[:, 0], joined)
    assert (np.diff(batch.edges_2E[1]) >= 0).all()
    expected = np.array([0.0, 1.0, 0.0, np.nan] * (GRAPHS // 4))[graphs]
    assert np.array_equal(batch.properties_GP[:, 0], expected, equal_nan=True)
    hot = np.where(arrays["hot"] < 0, np.nan, arrays["hot"])[nodes]
    assert np.array_equal(batch.atom_properties_NP[:, 0], hot, equal_nan=True)
    assert batch.target_counts().tolist() == [9, int((~np.isnan(hot)).sum()), len(joined)]
    # A part of a batch has its own edges' numbers.
    part = batch.take_graphs(3, 5)
    first, last = int(batch.edges[:3].sum()), int(batch.edges[:5].sum())
    assert part.edge_features_EF is not None
    assert np.array_equal(part.edge_features_EF[:, 0], joined[first:last])


def changed(name: str, place: tuple[int, ...], value: float) -> dict[str, Any]:
    """The array `name` with one number changed."""
    array = make_rings()[name].copy()
    array[place] = value
    return {name: array}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (changed("edges", (0, 1), 3), r"graph 0: edge 0 joins nodes \[\d, 3\], and its nodes are 0 to 2"),
        (changed("edges", (0, 0), -1), r"graph 0: edge 0 joins nodes \[-1, \d\]"),
        (changed("volume", (4,), np.nan), r'graph 1: "volume" is \[nan\] in row 1; features are finite'),
        (changed("pos", (0, 0), np.inf), r"graph 0: node 0 has position"),
        (changed("pos", (slice(0, 3),), 0.0), r"share an edge and are on one place"),
        (changed("pos", (0, 0), 99.0), r"more than data.cutoff=20"),
        (changed("hot", (0,), 2), r'graph 0: hot "hot" has class 2, which is none of no, yes \(0 to 1\)'),
        ({"edges": np.zeros((4, 3), dtype=int)}, r"edges have shape \[4, 3\]"),
        ({"edge_ptr": np.array([0, 4])}, r"edge_ptr ends at 4 but there are \d+ edges"),
        ({"area": np.zeros(5)}, r'"area" has shape \[5\], expected \d+ rows, one for each of the edges'),
        ({"axis": None}, r'graph 0: the file has no array "axis"'),
        (
            {"phase": np.array(["cubic"] * 11 + ["cubik"])},
            r"graph 11: phase .* has class cubik, which is none of cubic",
        ),
    ],
)
def test_what_makes_no_graph_is_refused_by_its_place(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_rings(tmp_path / "rings.npz", **changes)
    with pytest.raises(DataError, match=message):
        prepare_graphs(ring_data(tmp_path), workers=1)


def test_missing_labels_are_refused_unless_allowed(tmp_path: Path) -> None:
    write_rings(tmp_path / "rings.npz")
    with pytest.raises(DataError, match=r'hot "hot" holds NaN; mend it, or set missing_labels: allow'):
        prepare_graphs(ring_data(tmp_path, missing_labels="refuse"), workers=1)


def test_sources_say_either_unit_or_classes_and_labels_of_atoms_are_none_of_nodes(tmp_path: Path) -> None:
    for changes, message in (
        ({"properties": {"phase": {"classes": ["cubic"]}}}, "at least two are needed"),
        ({"properties": {"phase": {"classes": ["a", "b"], "unit": "1"}}}, "either unit"),
        ({"labels": {"energy": "eV"}}, "labels are of atoms"),
        ({"graph": None}, "edge_properties need edges that files give"),
    ):
        with pytest.raises(ValueError, match=message):
            ring_data(tmp_path, **changes)
    write_rings(tmp_path / "rings.npz")
    data = ring_data(tmp_path)
    prepare_graphs(data, workers=1)
    with pytest.raises(ConfigError, match=r"model\.edge_properties asks for heat"):
        graph_columns(open_prepared(data, "train"), properties={"edge_properties": ["heat"]})
