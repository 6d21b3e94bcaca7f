"""The ASE calculator: dynamics conserve energy, and its numbers are those of the stage that trains."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from materials_runs import crystal_atoms, hardly_trained, write_molecules, write_two_branches
from phalanx.config.load import load_run, parse_run
from phalanx.errors import CheckpointError, ConfigError, DataError
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.graph_shards import open_prepared
from phalanx.families.materials.data.graph_stream import GraphBatchStream, graph_order
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.materials.data.trained_elements import trained_elements
from phalanx.families.materials.inputs import columns_of
from phalanx.families.materials.model.losses import Predictions
from phalanx.training.start import train

ase = pytest.importorskip("ase")
from ase.calculators.calculator import PropertyNotImplementedError  # noqa: E402
from ase.filters import FrechetCellFilter  # noqa: E402
from ase.md.verlet import VelocityVerlet  # noqa: E402
from ase.optimize import BFGS, BFGSLineSearch  # noqa: E402
from ase.optimize.optimize import Optimizer  # noqa: E402
from ase.phonons import Phonons  # noqa: E402
from ase.units import _amu, _e, _hbar, fs, kB  # noqa: E402

from phalanx.families.materials.evaluation.calculator import PhalanxCalculator  # noqa: E402


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hardly_trained(tmp_path_factory.mktemp("calculator"))


@pytest.fixture(scope="module")
def pna_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hardly_trained(tmp_path_factory.mktemp("pna"), {"model.body": "pna"})


@pytest.fixture(scope="module")
def dipole_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Energies and dipoles."""
    folder = tmp_path_factory.mktemp("dipole")
    write_molecules(folder / "molecules.npz", 30)
    arrays = dict(np.load(folder / "molecules.npz"))
    np.savez(folder / "molecules.npz", **arrays, dipole=np.zeros((30, 3)))
    labels = {"energy": "eV", "forces": "eV/A", "dipole": "e*A"}
    source = {"name": "toy", "path": str(folder / "molecules.npz"), "labels": labels, "check_units": False}
    return hardly_trained(folder, {"data.sources": [source], "model.dipole": {}, "model.charges": None})


def test_numbers_are_those_of_the_stage(run_dir: Path) -> None:
    run = load_run(run_dir)
    assert isinstance(run, MaterialsRun)
    sources = open_prepared(run.data, "train")
    order = graph_order(sources, run.data, seed=1, global_batch=4)
    batch = GraphBatchStream(order, columns_of(run, sources), prefetch=0).batch(1)
    calculator = PhalanxCalculator(run_dir, device="cpu")
    x, inputs = batch.inputs()
    labels = set(batch.tasks)
    seen = {name: value for name, value in inputs.items() if name not in labels}
    with torch.no_grad():
        predicted = calculator.network.model.predict(x, **seen)
    assert predicted.energy_G is not None and predicted.forces_N3 is not None and predicted.charges_N is not None
    for graph in range(len(batch.atoms)):
        rows = batch.graph_N == graph
        atoms = ase.Atoms(x[rows].numpy(), positions=batch.positions_N3[rows].numpy(), calculator=calculator)
        assert atoms.get_potential_energy() == pytest.approx(float(predicted.energy_G[graph]), abs=1e-4)
        np.testing.assert_allclose(atoms.get_forces(), predicted.forces_N3[rows].numpy(), atol=1e-4)
        np.testing.assert_allclose(atoms.get_charges(), predicted.charges_N[rows].numpy(), atol=1e-5)


@pytest.mark.parametrize("folder", ["run_dir", "pna_dir"])
@pytest.mark.parametrize("periodic", [False, True])
def test_dynamics_conserve_energy(folder: str, periodic: bool, request: pytest.FixtureRequest) -> None:
    atoms = crystal_atoms()
    atoms.pbc = periodic
    atoms.calc = PhalanxCalculator(request.getfixturevalue(folder), device="cpu", precision="fp64")
    thermal = np.sqrt(300.0 * kB * atoms.get_masses())[:, None]
    atoms.set_momenta(thermal * np.random.default_rng(0).normal(size=(8, 3)))

    def energies(step_fs: float, steps: int) -> tuple[float, float]:
        """Largest change of the total energy, and of the potential energy alone."""
        moved = atoms.copy()
        moved.calc = atoms.calc
        total, potential = [], []
        dynamics = VelocityVerlet(moved, step_fs * fs)
        for _ in dynamics.irun(steps):
            total.append(moved.get_total_energy())
            potential.append(moved.get_potential_energy())
        return float(np.ptp(total)), float(np.ptp(potential))

    coarse, exchanged = energies(0.5, 40)
    fine, _ = energies(0.25, 80)
    assert exchanged > 1e-3
    assert coarse < 0.02 * exchanged
    # Verlet's error falls with the square of the time step where forces belong to an energy.
    assert fine < 0.35 * coarse


def test_stress_is_the_derivative_of_the_energy_by_strain(run_dir: Path) -> None:
    atoms = crystal_atoms()
    atoms.calc = PhalanxCalculator(run_dir, device="cpu", precision="fp64")
    stress = atoms.get_stress(voigt=False)
    for row, column in ((0, 0), (1, 2)):
        values = []
        for step in (1e-4, -1e-4):
            strain = np.eye(3)
            strain[row, column] += step / 2
            strain[column, row] += step / 2
            moved = atoms.copy()
            moved.set_cell(atoms.cell.array @ strain, scale_atoms=True)
            moved.calc = atoms.calc
            values.append(moved.get_potential_energy())
        expected = (values[0] - values[1]) / 2e-4 / atoms.get_volume()
        assert stress[row, column] == pytest.approx(expected, rel=1e-4, abs=1e-8)


def test_long_phonons_are_the_sound_of_a_stretched_crystal(tmp_path: Path) -> None:
    """By displaced atoms, and by the energy of a crystal that is stretched along the wave."""
    calculator = PhalanxCalculator(hardly_trained(tmp_path, {"model.body": "schnet"}), device="cpu", precision="fp64")
    # At this length the crystal gives way in no direction.
    length, waves = 1.8, 16
    atoms = ase.Atoms("C", cell=np.eye(3) * length, pbc=True)
    phonons = Phonons(atoms, calculator, supercell=(waves, 1, 1), delta=1e-3, name=tmp_path / "phonons")
    phonons.run()
    phonons.read(acoustic=True)

    def energy(stretch: float) -> float:
        moved = ase.Atoms("C", cell=np.diag([length * stretch, length, length]), pbc=True, calculator=calculator)
        return float(moved.get_potential_energy())

    stiffness = (energy(1.001) - 2.0 * energy(1.0) + energy(0.999)) / 1e-6
    # One wave over the whole supercell; ASE gives energies of quanta, the least first.
    frequency = 2.0 * np.pi / (waves * length) * np.sqrt(stiffness / atoms.get_masses()[0])
    expected = frequency * _hbar * 1e10 / np.sqrt(_e * _amu)
    still, moving = phonons.band_structure([[0.0, 0.0, 0.0], [1.0 / waves, 0.0, 0.0]])
    assert np.abs(still).max() < 1e-6 * expected
    # A wave of 16 atoms is slower than an endless one by some tenths of a percent.
    assert moving[2] == pytest.approx(expected, rel=0.01)
    assert 0.0 < moving[0] < moving[2]


def test_relaxation_lowers_the_energy(run_dir: Path) -> None:
    atoms = crystal_atoms()
    atoms.calc = PhalanxCalculator(run_dir, device="cpu")
    before, pull = atoms.get_potential_energy(), np.abs(atoms.get_forces()).max()
    BFGS(atoms, logfile=None).run(fmax=0.0, steps=5)
    assert atoms.get_potential_energy() < before
    assert pull > 0.0


def counted(calculator: PhalanxCalculator, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The positions of every evaluation of the network from now on."""
    seen: list[np.ndarray] = []
    predict = calculator.network.model.predict

    def counting(*given: Any, **named: Any) -> Predictions:
        seen.append(named["positions_N3"].numpy())
        return predict(*given, **named)

    monkeypatch.setattr(calculator.network.model, "predict", counting)
    return seen


@pytest.mark.parametrize("optimizer", [BFGS, BFGSLineSearch], ids=lambda kind: kind.__name__)
def test_a_cell_relaxation_evaluates_each_geometry_once(
    run_dir: Path, optimizer: type[Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Energy, forces and stress of a geometry are asked for one after another, in any order."""
    atoms = crystal_atoms()
    atoms.calc = PhalanxCalculator(run_dir, device="cpu", precision="fp64")
    seen = counted(atoms.calc, monkeypatch)
    optimizer(FrechetCellFilter(atoms), logfile=None).run(fmax=0.0, steps=3)
    assert len(seen) == len({positions.tobytes() for positions in seen}) >= 4
    done = len(seen)
    atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress(), atoms.get_charges()
    assert len(seen) == done
    # A molecule has no stress, and the same holds for the rest.
    atoms.pbc = False
    atoms.get_potential_energy(), atoms.get_forces(), atoms.get_charges()
    assert len(seen) == done + 1


def test_a_relaxation_of_pna_ends(pna_dir: Path) -> None:
    atoms = crystal_atoms()
    atoms.calc = PhalanxCalculator(pna_dir, device="cpu", precision="fp64")
    assert BFGS(atoms, logfile=None).run(fmax=1e-5, steps=200)


def test_the_dipole_of_a_crystal_is_refused_and_that_of_a_slab_is_across_it(dipole_dir: Path) -> None:
    calculator = PhalanxCalculator(dipole_dir, device="cpu", precision="fp64")
    atoms = crystal_atoms()
    with pytest.raises(PropertyNotImplementedError, match=r"dipole: with pbc=\[True, True, True\] it depends on which"):
        calculator.get_property("dipole", atoms)
    # Energy and forces are there, and no dipole beside them.
    assert np.isfinite(calculator.get_property("forces", atoms)).all() and "dipole" not in calculator.results
    atoms.pbc = False
    assert np.isfinite(calculator.get_property("dipole", atoms)).all()
    # Of the slab the component along its normal, which is the same for all images that it is written as.
    atoms.set_cell([[2.8, 0.0, 0.0], [0.3, 2.9, 0.0], [0.0, 0.0, 20.0]])
    atoms.pbc = (True, True, False)
    dipole = calculator.get_property("dipole", atoms)
    assert np.isnan(dipole[:2]).all() and np.isfinite(dipole[2])
    other = atoms.copy()
    other.positions[3] += atoms.cell[0] - 2 * atoms.cell[1]
    assert calculator.get_property("dipole", other)[2] == pytest.approx(dipole[2], abs=1e-10)
    atoms.info["charge"] = 1.0
    with pytest.raises(PropertyNotImplementedError, match="and a total charge of 1 e it depends"):
        calculator.get_property("dipole", atoms)
    del atoms.info["charge"]
    atoms.set_cell([[2.8, 0.0, 0.5], [0.3, 2.9, 0.0], [0.0, 0.0, 20.0]])
    with pytest.raises(PropertyNotImplementedError, match="whose surface is normal to x, y or z"):
        calculator.get_property("dipole", atoms)


def test_a_lone_atom_has_its_own_energy_and_no_force(run_dir: Path) -> None:
    atoms = ase.Atoms("O", calculator=PhalanxCalculator(run_dir, device="cpu"))
    assert np.isfinite(atoms.get_potential_energy())
    assert not atoms.get_forces().any()


def test_another_total_charge_is_another_structure(run_dir: Path) -> None:
    atoms = crystal_atoms()
    atoms.calc = PhalanxCalculator(run_dir, device="cpu")
    seen = []
    plain = atoms.calc._predict
    atoms.calc._predict = lambda *given, **how: (seen.append(given[0].info.get("charge")), plain(*given, **how))[1]
    for charge in (None, 0.0, 1.0, 1.0, -1.0):
        if charge is not None:
            atoms.info["charge"] = charge
        atoms.get_potential_energy()
    assert seen == [None, 1.0, -1.0]


def test_the_total_charge_is_what_atoms_say(run_dir: Path) -> None:
    atoms = crystal_atoms()
    calculator = PhalanxCalculator(run_dir, device="cpu", precision="fp64")
    assert calculator.get_property("charges", atoms).sum() == pytest.approx(0.0)
    atoms.set_initial_charges([0.5, 0.52, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert calculator.get_property("charges", atoms).sum() == pytest.approx(1.0)
    atoms.info["charge"] = 1
    assert calculator.get_property("charges", atoms).sum() == pytest.approx(1.0)
    atoms.set_initial_charges(None)
    atoms.info["charge"] = -2.0
    assert calculator.get_property("charges", atoms).sum() == pytest.approx(-2.0)


def test_what_is_no_element_is_refused(run_dir: Path) -> None:
    atoms = crystal_atoms()
    atoms.numbers[3] = 0
    atoms.calc = PhalanxCalculator(run_dir, device="cpu")
    with pytest.raises(DataError, match="atom 3 has atomic number 0, which is no element"):
        atoms.get_potential_energy()


def test_an_element_that_no_training_structure_had_is_refused_unless_asked_for(run_dir: Path) -> None:
    known = trained_elements(run_dir)
    assert known is not None and {6, 8} <= known.of("toy") == known.everywhere
    assert trained_elements(newest_checkpoint(run_dir)) == known
    strange = min(set(range(1, 9)) - known.everywhere)
    atoms = crystal_atoms()
    atoms.numbers[2] = strange
    atoms.calc = PhalanxCalculator(run_dir, device="cpu")
    with pytest.raises(
        DataError, match=rf"atomic number {strange} \(He\), which nothing that the model of .* was trained on"
    ):
        atoms.get_potential_energy()
    atoms.calc = PhalanxCalculator(run_dir, device="cpu", untrained_elements=True)
    assert np.isfinite(atoms.get_potential_energy())


@pytest.fixture(scope="module")
def branched_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two branches, hardly trained: one of H, C and O, one of H and N."""
    folder = tmp_path_factory.mktemp("branches")
    run = load_run(write_two_branches(folder), ["training.steps=1"])
    assert isinstance(run, MaterialsRun)
    prepare_graphs(run.data, workers=1)
    train(run, folder / "run")
    return folder / "run"


def test_a_branch_knows_the_elements_of_its_own_data(branched_dir: Path) -> None:
    oxide, nitride = ase.Atoms("OH", [(0, 0, 0), (0, 0, 1.2)]), ase.Atoms("NH", [(0, 0, 0), (0, 0, 1.2)])
    for branch, own, foreign, other in (
        (
            "oxides",
            oxide,
            nitride,
            "7 (N), which no structure that branch oxides of .* though branch nitrides knows it",
        ),
        (
            "nitrides",
            nitride,
            oxide,
            "8 (O), which no structure that branch nitrides of .* though branch oxides knows it",
        ),
    ):
        calculator = PhalanxCalculator(branched_dir, branch=branch, device="cpu")
        assert np.isfinite(calculator.get_potential_energy(own))
        with pytest.raises(DataError, match=other.replace("(", r"\(").replace(")", r"\)")):
            calculator.get_potential_energy(foreign)
    with pytest.raises(DataError, match=r"atomic number 3 \(Li\), which nothing that the model of"):
        calculator.get_potential_energy(ase.Atoms("LiH", [(0, 0, 0), (0, 0, 1.2)]))
    calculator = PhalanxCalculator(branched_dir, branch="oxides", device="cpu", untrained_elements=True)
    assert np.isfinite(calculator.get_potential_energy(nitride))


def test_a_branch_says_nothing_of_what_its_data_do_not_teach(tmp_path: Path) -> None:
    run_file = write_two_branches(tmp_path, {"training.steps": 1})
    text = yaml.safe_load(run_file.read_text())
    text["model"]["energy"] = {"weight": 1.0}
    text["data"]["sources"][0]["labels"] = {"charges": "e"}
    text["data"]["sources"][1]["labels"] = {"energy": "eV"}
    run = parse_run(yaml.safe_dump(text), "run")
    assert isinstance(run, MaterialsRun)
    prepare_graphs(run.data, workers=1)
    train(run, tmp_path / "run")
    oxide, nitride = ase.Atoms("OH", [(0, 0, 0), (0, 0, 1.2)]), ase.Atoms("NH", [(0, 0, 0), (0, 0, 1.2)])
    oxide.calc = PhalanxCalculator(tmp_path / "run", branch="oxides", device="cpu")
    assert oxide.get_charges().sum() == pytest.approx(0.0) and set(oxide.calc.results) == {"charges"}
    said = r"energy: the data of branch oxides of .* have no labels that teach its energy head, .*; ask for branch nitrides"
    with pytest.raises(PropertyNotImplementedError, match=said):
        oxide.get_potential_energy()
    with pytest.raises(PropertyNotImplementedError, match="forces: the data of branch oxides"):
        oxide.get_forces()
    nitride.calc = PhalanxCalculator(tmp_path / "run", branch="nitrides", device="cpu")
    assert np.isfinite(nitride.get_potential_energy()) and np.isfinite(nitride.get_forces()).all()
    with pytest.raises(PropertyNotImplementedError, match="charges: the data of branch nitrides"):
        nitride.get_charges()
    # A head that branches share was taught by the others' data.
    text["model"]["energy"]["shared"] = text["model"]["charges"]["shared"] = True
    train(parse_run(yaml.safe_dump(text), "run"), tmp_path / "shared")
    oxide.calc = PhalanxCalculator(tmp_path / "shared", branch="oxides", device="cpu")
    assert np.isfinite(oxide.get_potential_energy())


def test_a_run_that_does_not_tell_branches_apart_is_taken_at_its_word(branched_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(branched_dir, tmp_path / "old")
    (tmp_path / "old" / "elements.json").write_text('{"atomic_numbers": [1, 6, 7, 8]}')
    calculator = PhalanxCalculator(tmp_path / "old", branch="oxides", device="cpu")
    nitride = ase.Atoms("NH", [(0, 0, 0), (0, 0, 1.2)])
    assert np.isfinite(calculator.get_potential_energy(nitride))
    (tmp_path / "old" / "elements.json").unlink()
    calculator = PhalanxCalculator(tmp_path / "old", branch="oxides", device="cpu")
    assert np.isfinite(calculator.get_potential_energy(nitride))


def newest_checkpoint(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda atoms: atoms.set_cell(None), r"periodic but its cell .* has no volume"),
        (lambda atoms: atoms.set_cell([5.0, 5.0, 0.0]), r"periodic but its cell .* has no volume"),
        (lambda atoms: atoms.positions.__setitem__(3, atoms.positions[1]), r"atoms 1 and 3 are on one place \(0.000 A"),
        (
            lambda atoms: atoms.positions.__setitem__(3, atoms.positions[1] + atoms.cell.array[0]),
            r"atoms 1 and 3 are on one place \(0.000 A apart, through the periodic cell\)",
        ),
        (lambda atoms: atoms.info.update(charge=None), r'info\["charge"\] is None; give the total charge as a number'),
        (lambda atoms: atoms.info.update(charge=np.nan), r'info\["charge"\] is nan'),
        (lambda atoms: atoms.info.update(spin=1.5), r'info\["spin"\] is 1.5; give the multiplicity 2S \+ 1'),
        (
            lambda atoms: atoms.set_initial_charges([0.4] + 7 * [0.0]),
            r"adds up to 0.4 e, which is no whole number; give",
        ),
        (lambda atoms: atoms.set_initial_charges([np.nan] + 7 * [0.0]), r"adds up to nan e, which is no whole number"),
        (
            lambda atoms: (atoms.set_initial_charges([1.0] + 7 * [0.0]), atoms.info.update(charge=-1)),
            r'adds up to 1 e, but atoms.info\["charge"\] is -1; give the total charge',
        ),
    ],
    ids=[
        "no cell",
        "flat cell",
        "one place",
        "one place through the cell",
        "no charge",
        "charge of nan",
        "half a spin",
        "charges of no whole",
        "charges of nan",
        "two charges",
    ],
)
def test_a_structure_that_makes_no_sense_is_refused(
    run_dir: Path, change: Callable[[ase.Atoms], None], said: str
) -> None:
    atoms = crystal_atoms()
    change(atoms)
    atoms.calc = PhalanxCalculator(run_dir, device="cpu")
    with pytest.raises(DataError, match=said):
        atoms.get_potential_energy()


def test_what_cannot_be_computed_is_refused(run_dir: Path, tmp_path: Path) -> None:
    calculator = PhalanxCalculator(run_dir, device="cpu")
    with pytest.raises(PropertyNotImplementedError, match="periodic in all three"):
        ase.Atoms("CO", [(0, 0, 0), (0, 0, 1.1)], calculator=calculator).get_stress()
    with pytest.raises(DataError, match=r"atomic number 79; the model of .* knows elements up to 8"):
        ase.Atoms("Au", calculator=calculator).get_potential_energy()
    with pytest.raises(ConfigError, match="there is no branch gold; choose one of toy"):
        PhalanxCalculator(run_dir, branch="gold")
    with pytest.raises(CheckpointError, match=r"holds no whole checkpoint|not a folder"):
        PhalanxCalculator(tmp_path)
