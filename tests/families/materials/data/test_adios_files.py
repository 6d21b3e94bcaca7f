"""HydraGNN's ADIOS2 files, written by adios2 in its layout: the structures come back, and what is damaged is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graph_files import graph_data, write_set
from phalanx.errors import DataError
from phalanx.families.materials.config import GraphSource
from phalanx.families.materials.data.labels import labels_of
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.materials.data.structure_files import open_structures
from phalanx.families.materials.data.structures import Structure, convert_structure

adios = pytest.importorskip("adios2.bindings", reason="needs the extra adios2")
STRUCTURES = 9
Graph = dict[str, np.ndarray]


def graphs_of(folder: Path, structures: int = STRUCTURES) -> list[Graph]:
    """Graphs as HydraGNN's examples make them of atoms: numbers as columns, flags as integers, a number as a row."""
    made = write_set(folder / "set.npz", structures, periodic=True)
    found = []
    for number in range(structures):
        part = slice(made["ptr"][number], made["ptr"][number + 1])
        species, pos = made["z"][part, None].astype(np.float32), made["pos"][part].astype(np.float32)
        forces = made["forces"][part].astype(np.float32)
        found.append(
            {
                "pos": pos,
                "atomic_numbers": species,
                "x": np.concatenate([species, pos, forces], axis=1),
                "cell": made["cell"][number].astype(np.float32),
                "pbc": np.array([1, 1, 0], dtype=np.int32),
                "energy": made["energy"][number : number + 1],
                "forces": forces,
                "charges": made["charges"][part, None],
                "dipole": made["dipole"][number][None],
                # Joined along its second dimension.
                "edge_index": np.tile(np.arange(len(pos)), (2, 1)),
                "family": np.frombuffer(f"family {number // 3}".encode(), dtype=np.uint8),
            }
        )
    return found


def write_adios(path: Path, parts: dict[str, list[Graph]], without: str = "", **replaced: np.ndarray) -> Path:
    """Write graphs by the layout of HydraGNN's AdiosWriter. without: a variable or attribute to leave out."""
    library = adios.ADIOS()
    io = library.DeclareIO("writer")
    writer = io.Open(str(path), adios.Mode.Write)

    def put(name: str, value: np.ndarray) -> None:
        value = np.ascontiguousarray(replaced.get(name.replace("/", "_"), value))
        if name != without:
            shape = list(value.shape)
            variable = io.DefineVariable(name, value, shape, [0] * len(shape), shape, adios.ConstantDims)
            writer.Put(variable, value, adios.Mode.Sync)

    for part, graphs in parts.items():
        io.DefineAttribute(f"{part}/ndata", np.array(len(graphs)))
        io.DefineAttribute(f"{part}/keys", list(graphs[0]))
        for name in graphs[0]:
            shapes = np.array([graph[name].shape for graph in graphs])
            varying = np.flatnonzero(shapes.min(0) != shapes.max(0))
            along = int(varying[0]) if len(varying) else 0
            put(f"{part}/{name}", np.concatenate([graph[name] for graph in graphs], axis=along))
            if f"{part}/{name}/variable_dim" != without:
                io.DefineAttribute(f"{part}/{name}/variable_dim", np.array(along))
            put(f"{part}/{name}/variable_count", shapes[:, along])
            put(f"{part}/{name}/variable_offset", np.cumsum(shapes[:, along]) - shapes[:, along])
    io.DefineAttribute("total_ndata", np.array(sum(map(len, parts.values()))))
    writer.Close()
    return path


def source_of(path: Path, **changes: Any) -> GraphSource:
    labels = {"energy": "eV", "forces": "eV/A", "charges": "e", "dipole": "e*A"}
    given: dict[str, Any] = {"name": "s", "path": str(path), "labels": labels, "group_by": "family"}
    return GraphSource.model_validate(given | changes)


def read_all(path: Path, **changes: Any) -> list[Structure]:
    source = source_of(path, **changes)
    file = open_structures(path, source)
    # A dipole along a periodic direction is refused elsewhere; here it is read.
    return [convert_structure(raw, labels_of(source), 1.0, missing_allowed=False) for raw in file.read(0, len(file))]


def test_graphs_of_all_parts_come_back(tmp_path: Path) -> None:
    graphs = graphs_of(tmp_path)
    for graph in graphs:
        graph["pbc"] = np.zeros(3, dtype=np.int32)
    # Parts are read in order of their names.
    parts = {"testset": graphs[:2], "trainset": graphs[2:7], "valset": graphs[7:]}
    found = read_all(write_adios(tmp_path / "all.bp", parts))
    assert [one.raw.place for one in found][1:4] == ["testset graph 1", "trainset graph 0", "trainset graph 1"]
    assert [one.raw.number for one in found] == list(range(STRUCTURES))
    for graph, one in zip(graphs, found, strict=True):
        assert np.array_equal(one.species, graph["atomic_numbers"][:, 0])
        assert np.array_equal(one.positions, graph["pos"])
        assert one.labels["energy"] == graph["energy"][0]
        assert np.array_equal(one.labels["forces"], graph["forces"])
        assert np.array_equal(one.labels["charges"], graph["charges"][:, 0])
        assert np.array_equal(one.labels["dipole"], graph["dipole"][0])
        assert one.raw.values["family"] == bytes(graph["family"]).decode()
    source = source_of(tmp_path / "all.bp")
    middle = list(open_structures(tmp_path / "all.bp", source).read(1, 8))
    assert [raw.number for raw in middle] == list(range(1, 8))
    assert np.array_equal(middle[-1].positions, graphs[7]["pos"])


def test_cells_and_flags_are_those_of_each_graph(tmp_path: Path) -> None:
    graphs = graphs_of(tmp_path)
    found = read_all(write_adios(tmp_path / "all.bp", {"trainset": graphs}), labels={"energy": "eV"})
    for graph, one in zip(graphs, found, strict=True):
        assert one.periodic == (True, True, False)
        assert np.array_equal(one.cell, graph["cell"] * np.array([[1], [1], [0]], dtype=np.float32))


def test_elements_and_forces_stand_in_x_too(tmp_path: Path) -> None:
    graphs = graphs_of(tmp_path)
    species = [graph.pop("atomic_numbers") for graph in graphs]
    path = write_adios(tmp_path / "all.bp", {"trainset": graphs})
    found = read_all(path, labels={}, atom_properties={"pull": {"key": "x", "column": 5, "unit": "eV/A"}})
    for graph, numbers, one in zip(graphs, species, found, strict=True):
        assert np.array_equal(one.species, numbers[:, 0])
        assert np.array_equal(one.labels["pull"], graph["forces"][:, 1])
    graphs[3]["x"][1, 0] = 0.25
    path = write_adios(tmp_path / "scaled.bp", {"trainset": graphs})
    with pytest.raises(DataError, match=r'trainset graph 3: atom 1 has atomic number 0\.25 in "x", .* scaled features'):
        read_all(path, labels={})


def test_a_folder_is_prepared_and_prepared_anew_when_it_changes(tmp_path: Path) -> None:
    graphs, path = graphs_of(tmp_path, 30), tmp_path / "all.bp"
    write_adios(path, {"trainset": graphs[:20], "valset": graphs[20:]})
    source = {"name": "s", "path": str(path), "labels": {"energy": "eV", "forces": "eV/A"}, "check_units": False}
    data = graph_data(tmp_path / "prepared", [source])
    manifest = prepare_graphs(data, workers=1)["s"]
    assert sum(split.structures for split in manifest.splits.values()) == 30
    write_adios(path, {"trainset": graphs[:20]})
    with pytest.raises(DataError, match="was prepared from other files"):
        prepare_graphs(data, workers=1)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("trainset/pos", r"no variable trainset/pos; part trainset has atomic_numbers, cell"),
        ("trainset/pos/variable_offset", r"no variable trainset/pos/variable_offset, which HydraGNN's AdiosWriter"),
        ("trainset/forces/variable_count", r"no variable trainset/forces/variable_count"),
        ("trainset/cell/variable_dim", r"no attribute trainset/cell/variable_dim"),
        ("trainset/energy", r'trainset graph 0: it has no energy "energy"'),
    ],
)
def test_what_is_missing_is_named(lost: str, message: str, tmp_path: Path) -> None:
    path = write_adios(tmp_path / "all.bp", {"trainset": graphs_of(tmp_path)}, without=lost)
    with pytest.raises(DataError, match=rf"all\.bp: {message}"):
        read_all(path)


def test_a_part_without_elements_is_named(tmp_path: Path) -> None:
    graphs = [{name: one for name, one in graph.items() if name == "pos"} for graph in graphs_of(tmp_path)]
    path = write_adios(tmp_path / "all.bp", {"trainset": graphs})
    with pytest.raises(DataError, match="no variable trainset/atomic_numbers or z or x; part trainset has pos"):
        read_all(path)


def test_damaged_counts_and_files_are_refused(tmp_path: Path) -> None:
    graphs = graphs_of(tmp_path)
    counts = np.array([len(graph["pos"]) for graph in graphs])
    counts[2] += 1
    path = write_adios(tmp_path / "counts.bp", {"trainset": graphs}, trainset_pos_variable_count=counts)
    with pytest.raises(DataError, match="offsets and counts of trainset/pos do not part its"):
        read_all(path)
    # ADIOS2 would wait for what is cut off.
    path = write_adios(tmp_path / "cut.bp", {"trainset": graphs})
    with (path / "data.0").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(DataError, match="data files hold 1,000; it is truncated"):
        read_all(path)
    (tmp_path / "text.bp").write_text("no such format")
    with pytest.raises(DataError, match=r"text\.bp: it cannot be read as ADIOS2 \(.*\); it may be truncated"):
        read_all(tmp_path / "text.bp")
