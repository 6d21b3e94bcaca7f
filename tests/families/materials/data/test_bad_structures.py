"""Bad input: one line that names the file, the structure and the way out; nothing is dropped in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graph_files import graph_data, write_set
from phalanx.errors import DataError
from phalanx.families.materials.config import GraphData
from phalanx.families.materials.data.graph_shards import open_prepared
from phalanx.families.materials.data.prepare_structures import prepare_graphs

BAD = 5
"""Number of the structure that is spoilt, of 8."""


def spoilt(tmp_path: Path, change: Any, *, periodic: bool = False, **source: Any) -> GraphData:
    """A set in which `change(arrays, atoms of the bad structure)` has spoilt one structure."""
    path = tmp_path / "set.npz"
    made = write_set(path, 8, periodic=periodic)
    atoms = np.arange(made["ptr"][BAD], made["ptr"][BAD + 1])
    change(made, atoms)
    np.savez(path, **made)
    labels = {"energy": "eV", "forces": "eV/A"}
    given = {"name": "s", "path": str(path), "labels": labels, **source}
    return graph_data(tmp_path / "prepared", [given], validation_fraction=0.0, test_fraction=0.0)


def nan_position(made: dict[str, Any], atoms: np.ndarray) -> None:
    made["pos"][atoms[1], 2] = np.nan


def unknown_element(made: dict[str, Any], atoms: np.ndarray) -> None:
    made["z"][atoms[0]] = 0


def heavy_element(made: dict[str, Any], atoms: np.ndarray) -> None:
    made["z"][atoms[1]] = 119


def same_place(made: dict[str, Any], atoms: np.ndarray) -> None:
    made["pos"][atoms[2]] = made["pos"][atoms[1]] + 1e-3


def same_place_through_the_cell(made: dict[str, Any], atoms: np.ndarray) -> None:
    made["pos"][atoms[1]] = made["pos"][atoms[0]] + made["cell"][BAD][0]


def flat_cell(made: dict[str, Any], atoms: np.ndarray) -> None:
    made["cell"][BAD][2] = made["cell"][BAD][0] + made["cell"][BAD][1]


def no_cell(made: dict[str, Any], atoms: np.ndarray) -> None:
    made["cell"][BAD] = 0.0
    made["pbc"] = np.ones((len(made["cell"]), 3), dtype=bool)


def scattered(made: dict[str, Any], atoms: np.ndarray) -> None:
    made["pos"][atoms] *= 50.0


def missing_energy(made: dict[str, Any], atoms: np.ndarray) -> None:
    made["energy"][BAD] = np.nan


def missing_force(made: dict[str, Any], atoms: np.ndarray) -> None:
    made["forces"][atoms[0], 0] = np.nan


def infinite_force(made: dict[str, Any], atoms: np.ndarray) -> None:
    made["forces"][atoms[0], 0] = np.inf


def huge_force(made: dict[str, Any], atoms: np.ndarray) -> None:
    made["forces"][atoms[0], 0] = 2e4


def no_forces(made: dict[str, Any], atoms: np.ndarray) -> None:
    del made["forces"]


def flat_forces(made: dict[str, Any], atoms: np.ndarray) -> None:
    made["forces"] = made["forces"][:, :2]


def bohr(made: dict[str, Any], atoms: np.ndarray) -> None:
    made["pos"] /= 0.529177


def broken_element(made: dict[str, Any], atoms: np.ndarray) -> None:
    made["z"] = made["z"].astype("f4")
    made["z"][atoms[1]] = 7.5


def element_of_nan(made: dict[str, Any], atoms: np.ndarray) -> None:
    made["z"] = made["z"].astype("f4")
    made["z"][atoms[1]] = np.nan


def nothing(made: dict[str, Any], atoms: np.ndarray) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "periodic", "message"),
    [
        (nan_position, False, r"structure 5: atom 1 has position \[.*, nan\]"),
        (unknown_element, False, r"structure 5: atom 0 has atomic number 0; elements are 1 to 118"),
        (heavy_element, False, r"structure 5: atom 1 has atomic number 119; elements are 1 to 118"),
        (broken_element, False, r"structure 5: atom 1 has atomic number 7\.5, which is no whole number"),
        (element_of_nan, False, r"structure 5: atom 1 has atomic number nan, which is no whole number"),
        (same_place, False, r"structure 5: atoms 1 and 2 are on one place \(0\.002 A apart\)"),
        (
            same_place_through_the_cell,
            True,
            r"structure 5: atoms 0 and 1 are on one place \(.* A apart, through the per",
        ),
        (flat_cell, True, r"structure 5: it is periodic but its cell \[\[.*\]\] has no volume"),
        (no_cell, True, r"structure 5: it is periodic but its cell \[\[0\.0, .*\]\] has no volume"),
        (
            scattered,
            False,
            r"structure 5: none of its \d+ atoms has another within the cutoff of 3 A: a graph without edges; raise "
            r"data\.cutoff, or set no_edges: allow for source s",
        ),
        (missing_energy, False, r'structure 5: its energy "energy" holds NaN; mend it, or set missing_labels: allow'),
        (missing_force, False, r'structure 5: its forces "forces" holds NaN; mend it, or set missing_labels: allow'),
        (infinite_force, False, r'structure 5: forces "forces" holds an infinite number'),
        (
            huge_force,
            False,
            r"structure 5: a force is 2e\+04 eV/A with unit eV/A; correct the unit, or set check_units",
        ),
        (no_forces, False, r'structure 0: it has no forces "forces"; take the label out, or set missing_labels: allow'),
        (flat_forces, False, r'structure 0: forces "forces" has shape \[\d+, 2\], expected \[\d+, 3\]'),
        (
            bohr,
            False,
            r"structure \d: with length_unit A, nearest atoms are 1\.\d+ covalent distances apart, too far for bonds: are "
            r"they in bohr\? Set length_unit, or check_units: false for source s",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(change: Any, periodic: bool, message: str, tmp_path: Path) -> None:
    data = spoilt(tmp_path, change, periodic=periodic)
    with pytest.raises(DataError, match=rf"^{tmp_path}/set\.npz: {message}") as caught:
        prepare_graphs(data, workers=1)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "prepared/s/manifest.json").exists()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"z": np.array(["O"] * 6)}, r"atomic numbers have shape \[6\] of <U1, expected \[atoms\] integers"),
        (
            {"z": np.ones((6, 1), dtype=int)},
            r"atomic numbers have shape \[6, 1\] of int64, expected \[atoms\] integers",
        ),
        ({"pos": np.array([["a", "b", "c"]] * 6)}, r"positions holds <U1, numbers are expected"),
        ({"pbc": np.ones((2, 2), dtype=bool)}, r"pbc has shape \[2, 2\], expected \[2, 3\] flags"),
    ],
)
def test_arrays_of_another_kind_are_named(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    whole = {"ptr": np.array([0, 3, 6]), "z": np.ones(6), "pos": np.zeros((6, 3)), "cell": np.zeros((2, 3, 3))}
    np.savez(tmp_path / "set.npz", **(whole | arrays))
    data = graph_data(tmp_path / "prepared", [{"name": "s", "path": str(tmp_path / "set.npz")}])
    with pytest.raises(DataError, match=rf"^{tmp_path}/set\.npz: {message}"):
        prepare_graphs(data, workers=1)


def test_one_array_is_no_set_of_arrays(tmp_path: Path) -> None:
    with (tmp_path / "set.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    data = graph_data(tmp_path / "prepared", [{"name": "s", "path": str(tmp_path / "set.npz")}])
    with pytest.raises(DataError, match="it holds one array without a name"):
        prepare_graphs(data, workers=1)


def test_a_stress_takes_a_volume(tmp_path: Path) -> None:
    def zero_stress(made: dict[str, Any], atoms: np.ndarray) -> None:
        made["stress"] = np.zeros((8, 3, 3))

    labels = {"energy": "eV", "stress": "eV/A^3"}
    prepare_graphs(spoilt(tmp_path, zero_stress, periodic=True, labels=labels), workers=1)
    (tmp_path / "open").mkdir()
    with pytest.raises(DataError, match=r"structure 0: it has a stress, but pbc=\[False, False, False\]"):
        prepare_graphs(spoilt(tmp_path / "open", zero_stress, labels=labels), workers=1)


def test_a_worker_says_the_same(tmp_path: Path) -> None:
    data = spoilt(tmp_path, nan_position)
    with pytest.raises(DataError, match=r"set\.npz: structure 5: atom 1 has position"):
        prepare_graphs(data, workers=2, piece_structures=4)


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        (scattered, {"no_edges": "allow"}),
        (missing_energy, {"missing_labels": "allow"}),
        (missing_force, {"missing_labels": "allow"}),
        (huge_force, {"check_units": False}),
        (bohr, {"length_unit": "bohr"}),
        (bohr, {"check_units": False}),
        (nothing, {}),
    ],
)
def test_what_is_allowed_is_kept_whole(change: Any, allowed: dict[str, Any], tmp_path: Path) -> None:
    data = spoilt(tmp_path, change, **allowed)
    manifest = prepare_graphs(data, workers=1)["s"]
    assert manifest.splits["train"].structures == 8
    (source,) = open_prepared(data, "train")
    atoms, edges = source.sizes(np.arange(8))
    assert (edges[BAD] == 0) == (change is scattered)
    shard = source.shard(0)
    assert np.isnan(shard["energy"]).sum() == (change is missing_energy)
    assert np.isnan(shard["forces"]).sum() == (change is missing_force)
    assert manifest.statistics.labels["forces"].numbers == 3 * atoms.sum() - (change is missing_force)


def test_angstrom_taken_for_bohr_is_suspected_too(tmp_path: Path) -> None:
    data = spoilt(tmp_path, nothing, length_unit="bohr")
    with pytest.raises(
        DataError, match=r"length_unit bohr, nearest atoms are 0\.\d+ covalent distances apart, too near"
    ):
        prepare_graphs(data, workers=1)


def test_a_label_that_no_structure_has_is_a_wrong_key(tmp_path: Path) -> None:
    data = spoilt(tmp_path, nothing, labels={"energy": {"key": "E", "unit": "eV"}}, missing_labels="allow")
    with pytest.raises(
        DataError, match=r"set\.npz: no training structure has energy under the name E; correct its key"
    ):
        prepare_graphs(data, workers=1)


def test_a_missing_group_is_named(tmp_path: Path) -> None:
    data = spoilt(tmp_path, nothing, group_by="batch")
    with pytest.raises(DataError, match=r'structure 0: it has no "batch", which group_by asks for'):
        prepare_graphs(data, workers=1)


def test_splits_that_leave_nothing_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path / "set.npz", 3)
    source = {"name": "s", "path": str(tmp_path / "set.npz")}
    with pytest.raises(DataError, match="every structure fell into validation or test; lower"):
        prepare_graphs(graph_data(tmp_path / "p", [source], validation_fraction=0.0, test_fraction=0.999), workers=1)
    with pytest.raises(ValueError, match="leave nothing to train on"):
        graph_data(tmp_path / "p", [source], validation_fraction=0.5, test_fraction=0.5)


def test_the_dipole_of_a_periodic_structure_is_refused(tmp_path: Path) -> None:
    """It depends on the images that atoms are written as; that of a molecule in a box does not."""
    made = write_set(tmp_path / "set.npz", 3, periodic=True)
    source = {"name": "s", "path": str(tmp_path / "set.npz"), "labels": {"dipole": "e*A"}}
    with pytest.raises(
        DataError, match=r"structure 0: it has a dipole, but pbc=\[True, True, True\]: along a periodic"
    ):
        prepare_graphs(graph_data(tmp_path / "prepared", [source]), workers=1)
    made["dipole"][1:] = np.nan
    boxed = np.array([[False] * 3, [True] * 3, [True, False, False]])
    write_set(tmp_path / "set.npz", 3, **(made | {"pbc": boxed}))
    allowed = graph_data(tmp_path / "prepared", [source | {"missing_labels": "allow"}], test_fraction=0.0)
    assert prepare_graphs(allowed, workers=1)["s"].totals.structures == 3
