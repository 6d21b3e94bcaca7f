"""Virials as labels, made by differences of energies under strain in float64 and read back as the network's stress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ase
import ase.io
import numpy as np
import pytest
import torch

from atom_graphs import batch_of, random_structure, strained
from graph_files import graph_data, write_set
from phalanx.errors import ConfigError, DataError
from phalanx.families.materials.config import GraphSource
from phalanx.families.materials.data.labels import labels_of, length_factor
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.materials.data.structure_files import open_structures
from phalanx.families.materials.data.structures import convert_structure
from small_networks import filled_network, small_model

STEP = 1e-5
STRUCTURE = random_structure(2, 4, periodic=True)
PAIRS = {"xx": (0, 0), "yy": (1, 1), "zz": (2, 2), "yz": (1, 2), "zy": (2, 1), "xz": (0, 2), "xy": (0, 1)}
NETWORK = filled_network(small_model("painn"))


def minus_strain_derivative() -> np.ndarray:
    """-dE/d(strain) [3, 3] in eV, by central differences."""
    found = np.zeros((3, 3))
    for row in range(3):
        for column in range(3):
            strain = np.zeros((3, 3))
            strain[row, column] += 0.5 * STEP
            strain[column, row] += 0.5 * STEP
            batch = batch_of([strained(STRUCTURE, strain), strained(STRUCTURE, -strain)])
            energy_G = NETWORK.predict(**batch, forces=False).energy_G
            assert energy_G is not None
            found[row, column] = -float((energy_G[0] - energy_G[1]).detach()) / (2 * STEP)
    return found


@pytest.fixture(scope="module")
def virial_33() -> np.ndarray:
    return minus_strain_derivative()


@pytest.fixture(scope="module")
def stress_33() -> np.ndarray:
    stress_G33 = NETWORK.predict(**batch_of([STRUCTURE]), stress=True).stress_G33
    assert stress_G33 is not None
    return stress_G33[0].detach().numpy()


def write(path: Path, value: np.ndarray, **changes: Any) -> Path:
    atoms = ase.Atoms(STRUCTURE.species, STRUCTURE.positions_N3, cell=STRUCTURE.cell_33, pbc=True)
    atoms.info["virials"] = value
    for name, changed in changes.items():
        setattr(atoms, name, changed)
    ase.io.write(path, atoms, format="extxyz")
    return path


def read_stress(path: Path, **label: Any) -> np.ndarray:
    given = {"key": "virials", "unit": "eV", "given_as": "virial", **label}
    source = GraphSource.model_validate({"name": "s", "path": str(path), "labels": {"stress": given}})
    (raw,) = open_structures(path, source).read(0, 1)
    return convert_structure(raw, labels_of(source), length_factor(source), missing_allowed=False).labels["stress"]


@pytest.mark.parametrize(
    ("order", "sign", "unit", "scale"),
    [
        (None, 1.0, "eV", 1.0),
        ("xx yy zz xy yz xz", 1.0, "eV", 1.0),
        ("xx yy zz xy xz zy", 1.0, "Ha", 27.211386245988),
        ("xx yy zz yz xz xy", -1.0, "kJ/mol", 1.0 / 96.48533212331),
    ],
)
def test_a_virial_is_minus_stress_times_volume(
    order: str | None,
    sign: float,
    unit: str,
    scale: float,
    virial_33: np.ndarray,
    stress_33: np.ndarray,
    tmp_path: Path,
) -> None:
    given = virial_33 if order is None else np.array([virial_33[PAIRS[name]] for name in order.split()])
    path = write(tmp_path / "one.extxyz", sign * given / scale)
    found = read_stress(path, unit=unit, factor=sign, components=order)
    assert np.abs(stress_33).max() > 1e-4
    # Digits of extended XYZ, and of the differences.
    np.testing.assert_allclose(found, stress_33, atol=2e-8)


def test_nine_numbers_in_a_row_are_a_tensor(virial_33: np.ndarray, stress_33: np.ndarray, tmp_path: Path) -> None:
    arrays = {
        "ptr": np.array([0, 4]),
        "z": np.array(STRUCTURE.species),
        "pos": STRUCTURE.positions_N3,
        "cell": np.asarray(STRUCTURE.cell_33)[None],
        "virials": virial_33.reshape(1, 9),
    }
    np.savez(tmp_path / "one.npz", **arrays)
    np.testing.assert_allclose(read_stress(tmp_path / "one.npz"), stress_33, atol=1e-9)
    # The file's unit of length is that of its volume, too.
    np.savez(tmp_path / "nm.npz", **arrays | {"pos": arrays["pos"] / 10.0, "cell": arrays["cell"] / 10.0})
    label = {"key": "virials", "unit": "eV", "given_as": "virial"}
    source = GraphSource.model_validate(
        {"name": "s", "path": str(tmp_path / "nm.npz"), "length_unit": "nm", "labels": {"stress": label}}
    )
    (raw,) = open_structures(tmp_path / "nm.npz", source).read(0, 1)
    found = convert_structure(raw, labels_of(source), length_factor(source), missing_allowed=False)
    np.testing.assert_allclose(found.labels["stress"], stress_33, atol=1e-9)


def test_what_is_ambiguous_or_has_no_volume_is_refused(virial_33: np.ndarray, tmp_path: Path) -> None:
    six = np.array([virial_33[PAIRS[name]] for name in ["xx", "yy", "zz", "yz", "xz", "xy"]])
    with pytest.raises(
        DataError, match=r'virial "virials" has six numbers, whose order .* set components, such as "xx yy'
    ):
        read_stress(write(tmp_path / "six.extxyz", six))
    with pytest.raises(DataError, match=r"it has a virial, but pbc=\[True, True, False\]: without a volume"):
        read_stress(write(tmp_path / "slab.extxyz", virial_33, pbc=(True, True, False)))
    twisted = virial_33 + np.array([[0, 1, 0], [-1, 0, 0], [0, 0, 0.0]])
    with pytest.raises(DataError, match='virial "virials" is not symmetric'):
        read_stress(write(tmp_path / "twisted.extxyz", twisted))
    with pytest.raises(ConfigError, match=r'labels.stress: unit "eV/A\^3" is .*, not one of virial \(energy\)'):
        read_stress(tmp_path / "six.extxyz", unit="eV/A^3")
    with pytest.raises(ValueError, match=r'components="xx yy zz xy xz": name the six numbers in their order'):
        read_stress(tmp_path / "six.extxyz", components="xx yy zz xy xz")
    bad = {"name": "s", "path": "a.npz", "labels": {"energy": {"unit": "eV", "given_as": "virial"}}}
    with pytest.raises(ValueError, match="energy: given_as and components are of the stress; leave them out"):
        GraphSource.model_validate(bad)


def test_a_stress_in_another_order_is_read_by_its_components(stress_33: np.ndarray, tmp_path: Path) -> None:
    order = "xx yy zz xy yz xz"
    path = write(tmp_path / "one.extxyz", np.array([stress_33[PAIRS[name]] for name in order.split()]))
    found = read_stress(path, given_as="stress", unit="eV/A^3", components=order)
    np.testing.assert_allclose(found, stress_33, atol=1e-8)


def test_folders_prepared_with_stresses_stay_valid_and_others_are_told_apart(tmp_path: Path) -> None:
    write_set(tmp_path / "set.npz", 20, periodic=True)

    def prepare(label: Any) -> None:
        source = {"name": "s", "path": str(tmp_path / "set.npz"), "labels": {"stress": label}}
        data = graph_data(tmp_path / "prepared", [source])
        settings = prepare_graphs(data, workers=1)["s"].settings
        assert "arrays" not in settings and settings["labels"]["stress"].keys() == {"unit", "key", "column", "factor"}

    prepare("eV/A^3")
    with pytest.raises(DataError, match="was prepared with labels="):
        prepare({"unit": "eV", "given_as": "virial", "components": "xx yy zz yz xz xy"})


def test_the_loss_of_a_virial_counts_its_error_by_atom(virial_33: np.ndarray) -> None:
    """mace-torch's: squared differences of virials over the number of atoms, in eV an atom."""
    assert STRUCTURE.cell_33 is not None
    volume, atoms = abs(float(np.linalg.det(STRUCTURE.cell_33))), len(STRUCTURE.species)
    off_33 = np.array([[0.3, 0.1, 0.0], [0.1, -0.2, 0.05], [0.0, 0.05, 0.4]])
    label = torch.tensor(-(virial_33 + off_33) / volume)[None]
    energy = {"stress_weight": 2.0, "stress_as": "virial"}
    network = filled_network(small_model("painn", energy=energy))
    crystal = {**batch_of([STRUCTURE]), "stress_G33": label}
    (loss,) = [one for one in network(**crystal).tolist() if one]
    assert loss == pytest.approx(2.0 * ((off_33 / atoms) ** 2).sum(), rel=1e-6)
    # A molecule beside it has none, and gradients stay finite.
    both = {
        **batch_of([STRUCTURE, random_structure(3, 5)]),
        "stress_G33": torch.cat((label, torch.full_like(label, torch.nan))),
    }
    losses = network(**both)
    assert losses.sum().item() == pytest.approx(loss, rel=1e-9)
    losses.sum().backward()
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    assert gradients and all(bool(gradient.isfinite().all()) for gradient in gradients)
    with pytest.raises(ValueError, match="stress_as=virial says how a stress is learned, and none is"):
        small_model("painn", energy={"stress_as": "virial"})
