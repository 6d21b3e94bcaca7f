"""Labels without their dispersion: prepared ones lack it, calculators add it, errors are those of whole labels."""

from __future__ import annotations

from pathlib import Path

import ase
import numpy as np
import pytest
import torch
from ase.data import chemical_symbols

from graph_files import graph_data
from materials_runs import hardly_trained, write_molecules
from phalanx.config.load import load_run
from phalanx.errors import ConfigError
from phalanx.families.materials.config import GraphData, MaterialsRun
from phalanx.families.materials.data.graph_shards import open_prepared
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.materials.evaluation.calculator import PhalanxCalculator
from phalanx.families.materials.evaluation.dispersion import D3Dispersion
from phalanx.families.materials.evaluation.network_predictions import split_errors

CPU = torch.device("cpu")


def test_prepared_labels_lack_their_dispersion(tmp_path: Path) -> None:
    pos, forces = np.array([[0.0, 0.0, 0.0], [0.7, 0.7, 0.6]]), np.array([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]])
    cell, stress = 4.0 * np.eye(3), 0.01 * np.eye(3)
    arrays = {"ptr": [0, 2], "z": [6, 8], "pos": pos, "cell": [cell]}
    np.savez(tmp_path / "crystal.npz", **arrays, energy=[-7.0], forces=forces, stress=[stress])
    labels = {"energy": "eV", "forces": "eV/A", "stress": "eV/A^3"}
    source = {"name": "crystal", "path": str(tmp_path / "crystal.npz"), "labels": labels, "dispersion": "pbe"}
    data = graph_data(tmp_path / "prepared", [source], test_fraction=0.0, validation_fraction=0.0)
    prepare_graphs(data, workers=1)
    rest, species = open_prepared(data, "train")[0].shard(0), torch.tensor([6, 8])
    taken = D3Dispersion("pbe", CPU)(species, torch.tensor(pos), torch.tensor(cell)[None], torch.zeros_like(species))
    assert float(taken.energy_N.sum()) < -0.05
    assert rest["energy"][0] == pytest.approx(-7.0 - float(taken.energy_N.sum()), rel=1e-6)
    np.testing.assert_allclose(rest["forces"], forces - taken.forces_N3.numpy(), atol=1e-6)
    np.testing.assert_allclose(rest["stress"][0].reshape(3, 3), stress - taken.stress_G33[0].numpy(), atol=1e-7)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dispersion")
    write_molecules(folder / "molecules.npz", 80)
    labels = {"energy": "eV", "forces": "eV/A", "charges": "e"}
    source = {"name": "toy", "path": str(folder / "molecules.npz"), "labels": labels, "check_units": False}
    return hardly_trained(folder, {"data.sources": [{**source, "dispersion": "b3lyp"}]})


def test_a_calculator_adds_it_so_that_errors_are_those_of_whole_labels(run_dir: Path) -> None:
    run = load_run(run_dir)
    assert isinstance(run, MaterialsRun)
    source = open_prepared(run.data, "test")[0]
    raw = np.load(run.data.sources[0].path)
    calculator = PhalanxCalculator(run_dir, device="cpu", precision="fp64")
    errors = []
    for shard, row in zip(*source.locate(np.arange(len(source))), strict=True):
        number = int(source.shard(int(shard))["origin"][row, 1])
        part = slice(*raw["ptr"][number : number + 2])
        atoms = ase.Atoms([chemical_symbols[z] for z in raw["z"][part]], raw["pos"][part], calculator=calculator)
        errors.append(abs(atoms.get_potential_energy() - raw["energy"][number]) / len(atoms))
    _, found = split_errors(run_dir, "test", CPU)
    assert len(errors) > 3
    energy = next(row for row in found.rows if row.quantity == "energy")
    assert energy.mae == pytest.approx(float(np.mean(errors)), rel=1e-3)


def test_dispersion_is_not_added_twice(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="would be added twice"):
        PhalanxCalculator(run_dir, device="cpu", dispersion="pbe")


def test_sources_of_one_branch_lack_one_dispersion(run_dir: Path) -> None:
    run = load_run(run_dir)
    assert isinstance(run, MaterialsRun)
    sources = [*run.data.sources, run.data.sources[0].model_copy(update={"name": "other", "dispersion": None})]
    data: GraphData = run.data.model_copy(update={"sources": sources})
    problems = [problem.text for problem in run.model_copy(update={"data": data}).find_problems()]
    assert any("data.sources.dispersion=None, b3lyp" in message for message in problems)
