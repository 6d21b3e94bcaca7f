"""Readers: the same structures from every format, and files that are cut short or malformed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ase
import ase.db
import ase.io
import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator

from graph_files import graph_data, write_set
from phalanx.errors import DataError, PhalanxError
from phalanx.families.materials.config import GraphSource
from phalanx.families.materials.data.graph_batches import Collator, graph_columns
from phalanx.families.materials.data.graph_shards import Located, open_prepared
from phalanx.families.materials.data.labels import labels_of
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.materials.data.structure_files import StructureFile, find_files, open_structures
from phalanx.families.materials.data.structures import convert_structure

STRUCTURES = 7


def source_of(path: Path, **changes: Any) -> GraphSource:
    labels = {"energy": "eV", "forces": "eV/A", "charges": "e"}
    given = {"name": "s", "path": str(path), "labels": labels, "properties": {"gap": "Ha"}, "group_by": "family"}
    return GraphSource.model_validate(given | changes)


def atoms_list(folder: Path) -> list[ase.Atoms]:
    """The structures of a made set as ase has them."""
    made = write_set(folder / "set.npz", STRUCTURES, periodic=True)
    found = []
    for number in range(STRUCTURES):
        part = slice(made["ptr"][number], made["ptr"][number + 1])
        atoms = ase.Atoms(made["z"][part], made["pos"][part], cell=made["cell"][number], pbc=(True, True, False))
        atoms.calc = SinglePointCalculator(atoms, energy=made["energy"][number], forces=made["forces"][part])
        found.append(atoms)
    return found


def write(folder: Path, kind: str) -> Path:
    if kind == "npz":
        made = write_set(folder / "set.npz", STRUCTURES, periodic=True)
        flags = np.tile([True, True, False], (STRUCTURES, 1))
        write_set(folder / "all.npz", STRUCTURES, periodic=True, pbc=flags, gap=made["table"][:, 0])
        return folder / "all.npz"
    frames, made = atoms_list(folder), dict(np.load(folder / "set.npz"))
    path = folder / f"all.{kind}"
    for number, atoms in enumerate(frames):
        part = slice(made["ptr"][number], made["ptr"][number + 1])
        extra = {"gap": float(made["table"][number, 0]), "family": int(made["family"][number])}
        if kind == "extxyz":
            atoms.info.update(extra)
            atoms.arrays["charges"] = made["charges"][part]
            ase.io.write(path, atoms, format="extxyz", append=True)
        else:
            with ase.db.connect(path) as database:
                database.write(atoms, key_value_pairs=extra, data={"charges": made["charges"][part]})
    return path


def read_all(file: StructureFile, source: GraphSource) -> list[Any]:
    return [convert_structure(raw, labels_of(source), 1.0, missing_allowed=False) for raw in file.read(0, len(file))]


def write_ions(path: Path, charges: list[int], multiplicities: list[int]) -> None:
    """Hydrogen molecules with what OMol25 calls `charge` and `spin`, where its files and extended XYZ have them."""
    for charge, spin in zip(charges, multiplicities, strict=True):
        told = {"charge": charge, "spin": spin}
        atoms = ase.Atoms("H2", [[0.0, 0.0, 0.0], [0.0, 0.0, 0.8]], info=told)
        # Guesses that a calculation began with are no label.
        atoms.set_initial_charges([3.0, 3.0])
        atoms.set_initial_magnetic_moments([2.0, 2.0])
        if path.suffix == ".extxyz":
            ase.io.write(path, atoms, format="extxyz", append=True)
        else:
            with ase.db.connect(path) as database:
                database.write(atoms, data=told)


@pytest.mark.parametrize("kind", ["extxyz", "db", "aselmdb"])
def test_charge_and_spin_of_omol25_are_read_from_every_format(kind: str, tmp_path: Path) -> None:
    path, charges, multiplicities = tmp_path / f"ions.{kind}", [0, 1, -2, 1], [1, 2, 1, 4]
    write_ions(path, charges, multiplicities)
    labels = {"total_charge": {"key": "charge", "unit": "e"}, "multiplicity": {"key": "spin", "unit": "1"}}
    source = {"name": "ions", "path": str(path), "labels": labels}
    data = graph_data(tmp_path / "prepared", [source], validation_fraction=0.0, test_fraction=0.0)
    statistics = prepare_graphs(data, workers=1)["ions"].statistics
    assert statistics.total_charges == {0: 1, 1: 2, -2: 1} and statistics.taken_for_neutral == 0
    sources, items = open_prepared(data, "train"), np.arange(len(charges))
    batch = Collator(sources, graph_columns(sources))(
        Located(items, np.zeros_like(items), items, *sources[0].sizes(items)), (len(items),)
    )
    assert batch.total_charge_G is not None and batch.total_charge_G.tolist() == charges
    assert batch.multiplicity_G is not None and batch.multiplicity_G.tolist() == multiplicities
    # A structure without a label is refused by file and place.
    unlabelled = {**source, "labels": labels | {"multiplicity": {"key": "mult", "unit": "1"}}}
    with pytest.raises(DataError, match=rf'ions\.{kind}: .*multiplicity "mult"'):
        prepare_graphs(graph_data(tmp_path / "other", [unlabelled]), workers=1)


@pytest.mark.parametrize("kind", ["npz", "extxyz", "db", "aselmdb"])
def test_every_format_gives_the_same_structures(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, kind)
    source = source_of(path)
    file = open_structures(path, source)
    assert len(file) == STRUCTURES
    made = dict(np.load(tmp_path / "set.npz"))
    for number, structure in enumerate(read_all(file, source)):
        part = slice(made["ptr"][number], made["ptr"][number + 1])
        assert np.array_equal(structure.species, made["z"][part])
        assert np.allclose(structure.positions, made["pos"][part], atol=1e-6)
        assert structure.periodic == (True, True, False)
        assert np.allclose(structure.cell, made["cell"][number] * np.array([[1], [1], [0]]), atol=1e-6)
        assert structure.labels["energy"] == pytest.approx(made["energy"][number], abs=1e-6)
        assert np.allclose(structure.labels["forces"], made["forces"][part], atol=1e-6)
        assert np.allclose(structure.labels["charges"], made["charges"][part], atol=1e-6)
        assert structure.labels["gap"] == pytest.approx(made["table"][number, 0] * 27.211386, rel=1e-6)
        assert str(structure.raw.values["family"]) == str(number // 3)
    middle = list(file.read(2, 5))
    assert [raw.number for raw in middle] == [2, 3, 4]
    assert [len(raw.species) for raw in middle] == np.diff(made["ptr"])[2:5].tolist()
    assert len(set(np.diff(made["ptr"]).tolist())) > 3


def test_qm9_rows_are_molecules_with_numbers_as_mathematica_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "part.csv"
    path.write_text(
        "Index,Elements,XYZ_Ang,Mulliken_pop,HOMO_LUMO_gap_au\n"
        "1,\"['O', 'H', 'H']\",\"[[0.,0.,1.5*^-6],\n[0.96,0.,0.],[-.24,0.93,0.]]\",\"[-0.5,0.25,2.5*^-1]\",0.5\n"
        '7,"[\'C\', \'Cl\']","{{0,0,0},{1.8,0,0}}","{0.1,-1*^-1}",0.25\n'
        "\n"
    )
    source = source_of(
        path,
        labels={"charges": {"key": "Mulliken_pop", "unit": "e"}},
        properties={"gap": {"key": "HOMO_LUMO_gap_au", "unit": "Ha"}},
        group_by="Index",
    )
    water, other = read_all(open_structures(path, source), source)
    assert water.species.tolist() == [8, 1, 1] and other.species.tolist() == [6, 17]
    assert np.allclose(water.positions, [[0, 0, 1.5e-6], [0.96, 0, 0], [-0.24, 0.93, 0]])
    assert np.allclose(water.labels["charges"], [-0.5, 0.25, 0.25]) and np.allclose(
        other.labels["charges"], [0.1, -0.1]
    )
    assert other.labels["gap"] == pytest.approx(0.25 * 27.211386)
    assert (water.raw.values["Index"], other.raw.values["Index"]) == ("1", "7")


def test_digits_within_words_are_no_numbers(tmp_path: Path) -> None:
    """A column of SMILES strings under the name of a label would otherwise give its ring numbers."""
    path = tmp_path / "part.csv"
    path.write_text("Elements,XYZ_Ang,smiles\n\"['O','H']\",\"0 0 0 1 0 0\",C1CO\n")
    source = source_of(path, labels={"energy": {"key": "smiles", "unit": "eV"}}, properties={}, group_by=None)
    with pytest.raises(DataError, match="row 0: energy \"smiles\" holds 'C1CO' where numbers are expected"):
        read_all(open_structures(path, source), source)


def test_without_flags_those_structures_are_periodic_that_have_a_cell(tmp_path: Path) -> None:
    made = write_set(tmp_path / "some.npz", STRUCTURES, periodic=True)
    made["cell"][2] = 0.0
    write_set(tmp_path / "some.npz", STRUCTURES, periodic=True, cell=made["cell"])
    source = source_of(tmp_path / "some.npz", properties={}, group_by=None)
    found = [list(one.raw.periodic) for one in read_all(open_structures(tmp_path / "some.npz", source), source)]
    assert found == [[number != 2] * 3 for number in range(STRUCTURES)]


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("npz", r"all\.npz: it cannot be read as \.npz .*; it may be truncated"),
        (
            "extxyz",
            r"all\.extxyz: frame \d+ \(line \d+\): \d+ atoms are announced, \d+ lines follow; the file is truncated",
        ),
        ("aselmdb", r"all\.aselmdb: it cannot be read as an LMDB of ASE .*; it may be truncated"),
        ("db", r"all\.db: it cannot be read as an ASE database .*; it may be truncated"),
    ],
)
def test_a_truncated_file_is_named(kind: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, kind)
    cut(path, 0.6)
    with pytest.raises(DataError, match=message):
        read_all(open_structures(path, source_of(path)), source_of(path))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "aselmdb")
    monkeypatch.setitem(sys.modules, "ase_db_backends.aselmdb", None)
    with pytest.raises(PhalanxError, match=r'all\.aselmdb needs ase-db-backends: pip install "phalanx-train\[lmdb\]"'):
        open_structures(path, source_of(path))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1,\"['O','Xx']\",\"0 0 0 1 0 0\"", "row 0: atom 1 is of unknown element 'Xx'"),
        ("1,\"['O','H']\",\"0 0 0 1 0\"", "row 0: 5 coordinates for 2 atoms"),
        ("1,\"['O','H']\"", "row 0: not as many fields as the header"),
    ],
)
def test_a_malformed_row_is_named(rows: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "part.csv"
    path.write_text(f"Index,Elements,XYZ_Ang\n{rows}\n")
    source = source_of(path, labels={}, properties={}, group_by=None)
    with pytest.raises(DataError, match=message):
        read_all(open_structures(path, source), source)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ptr": None}, "no array ptr; it has z, pos"),
        ({"ptr": np.array([0, 5, 3])}, "ptr must rise from 0"),
        ({"ptr": np.array([0, 5, 9])}, "ptr ends at 9 but there are"),
        ({"forces": np.zeros((4, 3))}, r'"forces" has shape \[4, 3\], expected \d+ rows, one an atom'),
        ({"energy": np.zeros(3)}, r'"energy" has shape \[3\], expected 7 rows, one a structure'),
    ],
)
def test_arrays_that_do_not_fit_each_other_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_set(tmp_path / "set.npz", STRUCTURES, **changes)
    with pytest.raises(DataError, match=message):
        open_structures(tmp_path / "set.npz", source_of(tmp_path / "set.npz"))


def test_paths_and_endings_that_say_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file; name a file of structures or a pattern"):
        find_files(str(tmp_path / "*.xyz"))
    (tmp_path / "set.dat").write_text("")
    with pytest.raises(
        DataError, match=r"ending '\.dat' tells no format; set format of source s to one of npz, extxyz"
    ):
        open_structures(tmp_path / "set.dat", source_of(tmp_path / "set.dat"))
    (tmp_path / "b.xyz").write_text("")
    (tmp_path / "a.xyz").write_text("")
    assert [path.name for path in find_files(str(tmp_path / "*.xyz"))] == ["a.xyz", "b.xyz"]
