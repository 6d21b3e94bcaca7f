"""HDF5 files as ANI-1x, ANI-1, SPICE and AIMNet write them, and our own arrays: the structures come back, and what is
ambiguous, damaged or hostile is refused."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graph_files import graph_data, write_set
from phalanx.errors import ConfigError, DataError, PhalanxError
from phalanx.families.materials.config import GraphSource
from phalanx.families.materials.data import structure_files
from phalanx.families.materials.data.formats import hdf5_files
from phalanx.families.materials.data.labels import labels_of, length_factor
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.materials.data.structure_files import open_structures
from phalanx.families.materials.data.structures import Structure, convert_structure

h5py = pytest.importorskip("h5py", reason="needs the extra hdf5")
RANDOM = np.random.default_rng(0)
HARTREE, BOHR = 27.211386245988, 0.529177210903
MOLECULES = {"CH4": [6, 1, 1, 1, 1], "H2O": [8, 1, 1]}


def molecule(name: str, conformations: int) -> dict[str, np.ndarray]:
    """Conformations of a molecule: numbers [A], positions [C, A, 3] (A), energies [C] (Ha), forces [C, A, 3] (Ha/A)."""
    atoms = len(MOLECULES[name])
    grid = np.stack(np.meshgrid(*[np.arange(2)] * 3, indexing="ij"), -1).reshape(-1, 3)[:atoms] * 1.1
    return {
        "numbers": np.array(MOLECULES[name], dtype=np.uint8),
        "positions": grid + RANDOM.uniform(-0.1, 0.1, (conformations, atoms, 3)),
        "energy": RANDOM.normal(-40.0, 1.0, conformations),
        "forces": RANDOM.normal(0.0, 0.1, (conformations, atoms, 3)),
    }


def ani_1x(file: Any, path: str, made: dict[str, np.ndarray]) -> None:
    """A group a formula, names of the method in front of the label; a label that some conformations lack."""
    group = file.create_group(path)
    group["atomic_numbers"], group["coordinates"] = made["numbers"], made["positions"]
    group["wb97x_dz.energy"], group["wb97x_dz.forces"] = made["energy"], made["forces"]


def ani_1(file: Any, path: str, made: dict[str, np.ndarray]) -> None:
    """Groups within groups, elements as symbols, text beside them."""
    group = file.create_group(f"set/{path}")
    symbols = {1: b"H", 6: b"C", 8: b"O"}
    group["species"] = np.array([symbols[int(number)] for number in made["numbers"]])
    group["coordinates"], group["energies"] = made["positions"], made["energy"]
    group["smiles"] = np.array([b"[", b"H", b"]"])


def spice(file: Any, path: str, made: dict[str, np.ndarray]) -> None:
    """Atomic units, said by attributes, and a gradient in place of forces."""
    group = file.create_group(path)
    group["atomic_numbers"], group["conformations"] = made["numbers"], made["positions"] / BOHR
    group["dft_total_energy"], group["dft_total_gradient"] = made["energy"], -made["forces"] * BOHR
    group.create_dataset("smiles", data=[path], dtype=h5py.string_dtype())
    for name, unit in (
        ("conformations", "bohr"),
        ("dft_total_energy", "hartree"),
        ("dft_total_gradient", "hartree/bohr"),
    ):
        group[name].attrs["units"] = unit


def sizes(file: Any, path: str, made: dict[str, np.ndarray]) -> None:
    """As AIMNet: groups of one size, with elements of each conformation."""
    group = file.create_group(f"{len(made['numbers']):03}")
    group["numbers"], group["coord"] = np.tile(made["numbers"], (len(made["energy"]), 1)), made["positions"]
    group["energy"], group["forces"] = made["energy"], made["forces"]


FORCES = {"unit": "Ha/A"}
SPICE_LABELS = {
    "energy": {"key": "dft_total_energy", "unit": "Ha"},
    "forces": {"key": "dft_total_gradient", "unit": "Ha/bohr", "factor": -1},
}
LAYOUTS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "ani-1x": (
        ani_1x,
        {"energy": {"key": "wb97x_dz.energy", "unit": "Ha"}, "forces": {"key": "wb97x_dz.forces", **FORCES}},
    ),
    "ani-1": (ani_1, {"energy": {"key": "energies", "unit": "Ha"}}),
    "spice": (spice, SPICE_LABELS),
    "sizes": (sizes, {"energy": "Ha", "forces": "Ha/A"}),
}


def write(path: Path, layout: str, conformations: int = 4) -> list[dict[str, np.ndarray]]:
    """Write the molecules in a layout; return them in the order in which groups are read."""
    made = [molecule(name, conformations) for name in MOLECULES]
    with h5py.File(path, "w") as file:
        for name, one in zip(MOLECULES, made, strict=True):
            LAYOUTS[layout][0](file, name, one)
    return made[::-1] if layout == "sizes" else made


def source_of(path: Path, **changes: Any) -> GraphSource:
    return GraphSource.model_validate({"name": "s", "path": str(path), "length_unit": "A"} | changes)


def read(source: GraphSource, start: int = 0, stop: int | None = None) -> list[Structure]:
    file = open_structures(Path(source.path), source)
    found = file.read(start, len(file) if stop is None else stop)
    return [convert_structure(raw, labels_of(source), length_factor(source), missing_allowed=False) for raw in found]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_structures_of_every_layout_come_back(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two conformations at a time.
    monkeypatch.setattr(hdf5_files, "_BYTES_AT_ONCE", 2 * 5 * 3 * 8)
    made = write(tmp_path / "all.h5", layout)
    unit = {"length_unit": "bohr"} if layout == "spice" else {}
    source = source_of(tmp_path / "all.h5", labels=LAYOUTS[layout][1], group_by="group", **unit)
    found = read(source)
    assert [one.raw.number for one in found] == list(range(8))
    for number, one in enumerate(found):
        expected, row = made[number // 4], number % 4
        assert np.array_equal(one.species, expected["numbers"]) and one.periodic == (False, False, False)
        assert np.allclose(one.positions, expected["positions"][row], atol=1e-6)
        assert one.labels["energy"] == pytest.approx(expected["energy"][row] * HARTREE, rel=1e-12)
        if "forces" in source.labels:
            assert np.allclose(one.labels["forces"], expected["forces"][row] * HARTREE, rtol=1e-9)
        assert one.raw.place == f"group {one.raw.values['group']} structure {row}"
    middle = read(source, 3, 6)
    assert [one.raw.number for one in middle] == [3, 4, 5]
    assert np.array_equal(middle[2].positions, found[5].positions)


def test_arrays_as_in_npz_are_structures_of_any_size(tmp_path: Path) -> None:
    made = write_set(tmp_path / "set.npz", 7, periodic=True)
    with h5py.File(tmp_path / "set.hdf5", "w") as file:
        for name, array in made.items():
            file[name] = array
        file["pbc"] = np.tile([True, True, False], (7, 1))
    labels = {"energy": "eV", "forces": "eV/A", "charges": "e"}
    changes = {
        "labels": labels,
        "group_by": "family",
        "properties": {"gap": {"key": "table", "column": 1, "unit": "Ha"}},
    }
    expected = read(source_of(tmp_path / "set.npz", **changes))
    found = read(source_of(tmp_path / "set.hdf5", **changes))
    assert len(found) == len(expected) == 7
    for one, other in zip(found, expected, strict=True):
        assert one.periodic == (True, True, False) and other.periodic == (True, True, True)
        assert np.array_equal(one.positions, other.positions) and np.array_equal(one.species, other.species)
        assert np.array_equal(one.cell, other.cell * [[1], [1], [0]])
        assert str(one.raw.values["family"]) == str(other.raw.values["family"])
        for name, value in one.labels.items():
            assert np.array_equal(value, other.labels[name])
    assert [one.raw.number for one in read(source_of(tmp_path / "set.hdf5"), 5, 7)] == [5, 6]


def test_names_are_given_where_they_cannot_be_known(tmp_path: Path) -> None:
    path = tmp_path / "odd.h5"
    with h5py.File(path, "w") as file:
        group = file.create_group("Geom-m1/opt")
        group["atNUM"], group["atXYZ"] = np.array([8, 1, 1]), np.array([[0, 0, 0], [0.96, 0, 0], [0, 0.96, 0.0]])
        group["ePBE0"], group["box"] = np.array([-76.0]), np.eye(3) * 9.0
    with pytest.raises(DataError, match=r"no group has positions \(coordinates, .*its root has Geom-m1; name them as"):
        read(source_of(path))
    with pytest.raises(DataError, match=r"group /Geom-m1/opt: no atomic numbers \(.*it has atNUM, atXYZ, box, ePBE0"):
        read(source_of(path, arrays={"positions": "atXYZ"}))
    names = {"positions": "atXYZ", "species": "atNUM", "cell": "box"}
    (one,) = read(source_of(path, arrays=names, labels={"energy": {"key": "ePBE0", "unit": "eV"}}))
    assert one.species.tolist() == [8, 1, 1] and one.labels["energy"] == -76.0 and one.periodic == (True, True, True)
    write_set(tmp_path / "set.npz", 2)
    with pytest.raises(ConfigError, match=r"arrays names those of HDF5 files, and .* is npz; leave arrays out"):
        read(source_of(tmp_path / "set.npz", arrays=names))
    with pytest.raises(ValueError, match="arrays names those of HDF5 files, and format=npz"):
        source_of(path, arrays=names, format="npz")


def test_units_are_explicit_and_refused_where_they_contradict_the_file(tmp_path: Path) -> None:
    write(tmp_path / "ani.h5", "ani-1x")
    silent = GraphSource.model_validate({"name": "s", "path": str(tmp_path / "ani.h5")})
    with pytest.raises(DataError, match=r"group /CH4: nothing says the unit of its positions, .* set length_unit"):
        read(silent)
    write(tmp_path / "spice.h5", "spice")
    path = tmp_path / "spice.h5"
    with pytest.raises(DataError, match=r'its positions have units="bohr" in the file; set length_unit to that'):
        read(GraphSource.model_validate({"name": "s", "path": str(path)}))
    wrong = {"energy": {"key": "dft_total_energy", "unit": "eV"}}
    with pytest.raises(DataError, match=r'"dft_total_energy" has units="Ha" in the file; set unit of its energy'):
        read(source_of(path, length_unit="bohr", labels=wrong))
    signless = {"forces": {"key": "dft_total_gradient", "unit": "Ha/bohr"}}
    with pytest.raises(ConfigError, match=r'"dft_total_gradient" is a gradient by its name, .* set factor: -1'):
        read(source_of(path, length_unit="bohr", labels=signless))
    # A factor is as good as a unit.
    scaled = {"energy": {"key": "dft_total_energy", "unit": "eV", "factor": HARTREE}}
    assert len(read(source_of(path, length_unit="bohr", labels=scaled))) == 8


def test_a_file_is_prepared_with_groups_in_one_split(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "all.h5", "w") as file:
        for number in range(12):
            ani_1x(file, f"molecule {number}", molecule("CH4", 5))
    source = {"name": "s", "path": str(tmp_path / "all.h5"), "length_unit": "A", "labels": LAYOUTS["ani-1x"][1]}
    data = graph_data(tmp_path / "prepared", [source | {"group_by": "group"}], test_fraction=0.3)
    manifest = prepare_graphs(data, workers=1, piece_structures=7)["s"]
    counts = {name: split.structures for name, split in manifest.splits.items()}
    assert sum(counts.values()) == 60 and all(count % 5 == 0 for count in counts.values())
    assert counts["train"] and counts["test"]


def raw_group(file: Any) -> Any:
    group = file.create_group("H2")
    group["atomic_numbers"], group["coordinates"] = [1, 1], [[[0, 0, 0], [0.0, 0, 0.8]]] * 3
    group["energy"] = [1.0, 2.0, 3.0]
    return group


def damage(file: Any, kind: str, folder: Path) -> None:
    group = raw_group(file)
    if kind == "external link":
        group["forces"] = h5py.ExternalLink("/etc/passwd", "/")
    elif kind == "soft link":
        del group["energy"]
        group["energy"] = h5py.SoftLink("/H2/coordinates")
    elif kind == "external storage":
        del group["energy"]
        group.create_dataset("energy", (3,), "f8", external=[(str(folder / "secret"), 0, 24)])
    elif kind == "virtual":
        del group["energy"]
        layout = h5py.VirtualLayout((3,), "f8")
        layout[:] = h5py.VirtualSource(str(folder / "secret"), "x", (3,))
        group.create_virtual_dataset("energy", layout)
    elif kind == "pickle":
        del group["energy"]
        group.create_dataset("energy", data=np.void(pickle.dumps([1.0])))
    elif kind == "reference":
        del group["energy"]
        group.create_dataset("energy", data=np.array([group.ref] * 3, dtype=h5py.ref_dtype))
    elif kind == "compound":
        del group["energy"]
        group.create_dataset("energy", data=np.zeros(3, dtype=[("a", "f8")]))
    elif kind == "huge":
        del group["coordinates"]
        group.create_dataset("coordinates", (10**15, 2, 3), "f8", chunks=(1024, 2, 3))
    elif kind == "huge label":
        del group["energy"]
        group.create_dataset("energy", (3, 10**12), "f8", chunks=(1, 1024))
    elif kind == "group":
        del group["energy"]
        group.create_group("energy")
    elif kind == "rows":
        del group["energy"]
        group["energy"] = [1.0, 2.0]
    elif kind == "two names":
        group["conformations"] = [[[0, 0, 0], [0.0, 0, 0.9]]]
    elif kind == "shape":
        del group["coordinates"]
        group["coordinates"] = np.zeros((3, 6))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("external link", "group /H2: 'forces' is a link to another file, which is not read"),
        ("soft link", 'group /H2: "energy" is a link; copy the array into the group'),
        ("external storage", 'group /H2: "energy" has its content in other files'),
        ("virtual", 'group /H2: "energy" has its content in other files'),
        ("pickle", r'group /H2: "energy" holds \|V\d+, numbers or text are expected'),
        ("reference", 'group /H2: "energy" holds object, numbers or text are expected'),
        ("compound", r'group /H2: "energy" holds \[\(.*, numbers or text are expected'),
        ("huge", r"[\d,]+ bytes unpack to 48,000,000,000,000,000, more than 20 times as many"),
        ("huge label", r"[\d,]+ bytes unpack to 24,000,000,000,000, more than 20 times .* write \"energy\" without"),
        ("group", 'group /H2: "energy" is a group, an array is expected'),
        ("rows", r'group /H2: "energy" has shape \[2\], expected 3 rows, one a structure'),
        ("two names", "group /H2: coordinates and conformations could be its positions; name one as arrays.positions"),
        ("shape", r'group /H2: "coordinates" has shape \[3, 6\], expected \[structures, atoms, 3\] or \[atoms, 3\]'),
    ],
)
def test_what_is_hostile_or_wrong_is_refused(kind: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.h5"
    (tmp_path / "secret").write_bytes(b"0" * 24)
    with h5py.File(path, "w") as file:
        damage(file, kind, tmp_path)
    with pytest.raises(DataError, match=f"^{path}: {message}"):
        read(source_of(path, labels={"energy": "eV"}))


def test_a_group_within_itself_is_read_once(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "loop.h5", "w") as file:
        group = raw_group(file)
        group["again"], file["train"] = group, h5py.SoftLink("/H2")
    assert len(read(source_of(tmp_path / "loop.h5"))) == 3


def test_files_that_are_cut_short_or_none_are_named(tmp_path: Path) -> None:
    write(tmp_path / "all.h5", "ani-1x", conformations=500)
    content = (tmp_path / "all.h5").read_bytes()
    for name, part in (("cut.h5", content[: len(content) // 2]), ("text.h5", b"no such format"), ("none.h5", b"")):
        (tmp_path / name).write_bytes(part)
        with pytest.raises(DataError, match=rf"{name}: it cannot be read as HDF5 \(.*\); it may be truncated"):
            read(source_of(tmp_path / name))


def test_many_bytes_that_are_nothing_are_refused_by_their_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure_files, "_UNPACKED_BYTES", 2**20)
    with h5py.File(tmp_path / "many.h5", "w") as file:
        for number in range(20):
            group = file.create_group(str(number))
            group["atomic_numbers"] = [1, 1]
            group.create_dataset("coordinates", (20000, 2, 3), "f8", chunks=(1024, 2, 3))
    with pytest.raises(DataError, match="write positions without compression"):
        read(source_of(tmp_path / "many.h5"))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "all.h5", "ani-1x")
    monkeypatch.setitem(sys.modules, "h5py", None)
    monkeypatch.delitem(sys.modules, hdf5_files.__name__)
    with pytest.raises(PhalanxError, match=r'HDF5 files need h5py: pip install "phalanx-train\[hdf5\]"'):
        read(source_of(tmp_path / "all.h5"))
