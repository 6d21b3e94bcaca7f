"""An ensemble in ASE: one line, and every number with an uncertainty."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.ensemble.family import EnsembleOptions
from phalanx.ensemble.members import open_member
from phalanx.errors import CheckpointError
from phalanx.families.materials.ensemble.build_ensemble import build_ensemble
from phalanx.families.materials.ensemble.joint_predictions import LoadedEnsemble, Uncertain

ase = pytest.importorskip("ase")
from ase.filters import FrechetCellFilter  # noqa: E402
from ase.md.verlet import VelocityVerlet  # noqa: E402
from ase.optimize import BFGS  # noqa: E402
from ase.units import fs, kB  # noqa: E402

from phalanx.families.materials.evaluation.calculator import PhalanxCalculator  # noqa: E402


@pytest.fixture(scope="module")
def ensemble_dir(member_dirs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ensemble") / "three"
    members = [open_member(path) for path in member_dirs]
    build_ensemble(members, EnsembleOptions(weights="fitted"), torch.device("cpu")).document(folder).write(folder)
    return folder


def molecule() -> ase.Atoms:
    grid = np.stack(np.meshgrid(*[np.arange(2)] * 3, indexing="ij"), -1).reshape(-1, 3) * 1.4
    return ase.Atoms("C4O4", positions=grid + np.random.default_rng(5).uniform(-0.1, 0.1, grid.shape))


def test_mean_and_uncertainty_are_those_of_the_members(ensemble_dir: Path) -> None:
    atoms = molecule()
    atoms.calc = PhalanxCalculator(ensemble_dir, device="cpu", precision="fp64")
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    document = atoms.calc.ensemble.document
    weights = np.array([member.weight for member in document.members])
    alone = [
        PhalanxCalculator(ensemble_dir / member.checkpoint, device="cpu", precision="fp64")
        for member in document.members
    ]
    energies = np.array([one.get_potential_energy(atoms) for one in alone])
    each = np.array([one.get_forces(atoms) for one in alone])
    assert energy == pytest.approx(weights @ energies, abs=1e-9)
    np.testing.assert_allclose(forces, np.einsum("m,mij->ij", weights, each), atol=1e-9)
    rest = 1.0 - np.square(weights).sum()
    spread = np.sqrt(np.einsum("m,mij->ij", weights, np.square(each - forces)) / rest)
    calibration = document.label("toy", "forces").calibration
    found = atoms.calc.results["forces_uncertainty"]
    assert found.shape == (8, 3) and (found > 0.0).all()
    np.testing.assert_allclose(found, calibration.std(spread), rtol=1e-6)
    # calibration of an energy counts per atom
    spread = np.sqrt(weights @ np.square(energies - energy) / rest) / 8
    expected = 8 * document.label("toy", "energy").calibration.std(np.array([spread]))[0]
    assert atoms.calc.results["energy_uncertainty"] == pytest.approx(expected, rel=1e-6)
    assert isinstance(atoms.calc.results["energy_uncertainty"], float)
    assert atoms.calc.get_property("charges_uncertainty", atoms).shape == (8,)


def test_an_uncertainty_can_be_asked_for_alone(ensemble_dir: Path) -> None:
    atoms = molecule()
    calculator = PhalanxCalculator(ensemble_dir, device="cpu", edge_chunk=7)
    assert calculator.get_property("forces_uncertainty", atoms).shape == (8, 3)
    assert "stress_uncertainty" in calculator.implemented_properties


def test_ase_gets_its_own_properties_at_once(ensemble_dir: Path) -> None:
    atoms = molecule()
    atoms.calc = PhalanxCalculator(ensemble_dir, device="cpu")
    found = atoms.get_properties(["energy", "forces"])
    assert found["energy"] == atoms.get_potential_energy() and found["forces"].shape == (8, 3)
    assert "forces_uncertainty" in atoms.calc.results


def test_a_cell_relaxation_evaluates_each_geometry_once(ensemble_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    atoms = molecule()
    atoms.set_cell(np.eye(3) * 2.8)
    atoms.pbc = True
    atoms.calc = PhalanxCalculator(ensemble_dir, device="cpu")
    seen: list[bytes] = []
    predict = LoadedEnsemble.predict

    def counting(ensemble: LoadedEnsemble, species_N: torch.Tensor, **named: Any) -> Uncertain:
        seen.append(named["positions_N3"].numpy().tobytes())
        return predict(ensemble, species_N, **named)

    monkeypatch.setattr(LoadedEnsemble, "predict", counting)
    BFGS(FrechetCellFilter(atoms), logfile=None).run(fmax=0.0, steps=2)
    assert len(seen) == len(set(seen)) == 3
    assert {"energy_uncertainty", "forces_uncertainty"} <= atoms.calc.results.keys() and len(seen) == 3


def test_dynamics_conserve_the_energy_of_the_mean(ensemble_dir: Path) -> None:
    atoms = molecule()
    atoms.calc = PhalanxCalculator(ensemble_dir, device="cpu", precision="fp64")
    thermal = np.sqrt(300.0 * kB * atoms.get_masses())[:, None]
    atoms.set_momenta(thermal * np.random.default_rng(0).normal(size=(8, 3)))
    total, potential, uncertain = [], [], []
    for _ in VelocityVerlet(atoms, 0.5 * fs).irun(12):
        total.append(atoms.get_total_energy())
        potential.append(atoms.get_potential_energy())
        uncertain.append(atoms.calc.results["energy_uncertainty"])
    assert np.ptp(potential) > 1e-3
    assert np.ptp(total) < 0.03 * np.ptp(potential)
    assert np.isfinite(uncertain).all() and np.ptp(uncertain) > 0.0


def test_a_member_that_is_gone_is_named(ensemble_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(ensemble_dir, tmp_path / "far" / "away")
    with pytest.raises(CheckpointError, match=r"ensemble.json: its member .* is gone; make the ensemble again"):
        PhalanxCalculator(tmp_path / "far" / "away")
