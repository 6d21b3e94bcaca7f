"""The model of torch-sim: the numbers of the ASE calculator, dynamics that keep their energy, and relaxations in a batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from materials_runs import crystal_atoms, hardly_trained

ase = pytest.importorskip("ase")
ts = pytest.importorskip("torch_sim", reason="needs the extra torchsim")
from torch_sim.models.interface import validate_model_outputs  # noqa: E402

from phalanx.families.materials.evaluation.calculator import PhalanxCalculator  # noqa: E402
from phalanx.families.materials.evaluation.torch_sim_model import PhalanxTorchSim  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With repulsion: atoms of a network that is next to random fall into each other."""
    energy = {"force_weight": 1.0, "weight": 1.0, "repulsion": "zbl"}
    return hardly_trained(tmp_path_factory.mktemp("torch_sim"), {"model.energy": energy})


@pytest.fixture(scope="module")
def model(run_dir: Path) -> PhalanxTorchSim:
    return PhalanxTorchSim(run_dir, device="cpu", precision="fp64", untrained_elements=True)


def structures() -> list[ase.Atoms]:
    """Crystals of different sizes, one of them skewed."""
    double = crystal_atoms() * (2, 1, 1)
    double.rattle(0.05, seed=1)
    return [crystal_atoms(), double]


def test_numbers_are_those_of_the_calculator(run_dir: Path, model: PhalanxTorchSim) -> None:
    found = model(ts.io.atoms_to_state(structures(), CPU, torch.float64))
    first = 0
    for number, atoms in enumerate(structures()):
        atoms.calc = PhalanxCalculator(run_dir, device="cpu", precision="fp64")
        own = slice(first, first + len(atoms))
        assert float(found["energy"][number]) == pytest.approx(atoms.get_potential_energy(), abs=1e-10)
        np.testing.assert_allclose(found["forces"][own].numpy(), atoms.get_forces(), atol=1e-10)
        np.testing.assert_allclose(found["stress"][number].numpy(), atoms.get_stress(voigt=False), atol=1e-10)
        first = own.stop


def test_molecules_have_no_stress(run_dir: Path, model: PhalanxTorchSim) -> None:
    atoms = crystal_atoms()
    atoms.pbc = False
    found = model(ts.io.atoms_to_state([atoms], CPU, torch.float64))
    atoms.calc = PhalanxCalculator(run_dir, device="cpu", precision="fp64")
    np.testing.assert_allclose(found["forces"].numpy(), atoms.get_forces(), atol=1e-10)
    assert (found["stress"] == 0.0).all()


def test_torch_sim_finds_nothing_to_complain_of(run_dir: Path) -> None:
    """Silicon and iron, which the model has no row for, stand for elements that it has."""
    run = hardly_trained(run_dir.parent / "heavy", {"model.max_atomic_number": 30})
    model = PhalanxTorchSim(run, device="cpu", precision="fp64", untrained_elements=True)
    validate_model_outputs(model, CPU, torch.float64)


@pytest.fixture(scope="module")
def relaxed(model: PhalanxTorchSim) -> ts.SimState:
    fire = ts.Optimizer.fire if hasattr(ts, "Optimizer") else ts.optimizers.fire
    converged = ts.generate_force_convergence_fn(force_tol=0.02, include_cell_forces=False)
    return ts.optimize(structures(), model, optimizer=fire, convergence_fn=converged, max_steps=300)


def test_relaxations_go_downhill_together(model: PhalanxTorchSim, relaxed: ts.SimState) -> None:
    before = model(ts.io.atoms_to_state(structures(), CPU, torch.float64))
    after = model(relaxed)
    assert (after["energy"] < before["energy"]).all()
    assert after["forces"].norm(dim=1).max() < 0.02 < before["forces"].norm(dim=1).max()


def test_a_picosecond_of_dynamics_keeps_its_energy(model: PhalanxTorchSim, relaxed: ts.SimState) -> None:
    nve = ts.Integrator.nve if hasattr(ts, "Integrator") else ts.integrators.nve
    totals: list[float] = []

    def remember(state: ts.SimState, _model: object = None) -> torch.Tensor:
        kinetic = 0.5 * state.momenta.square().sum(1) / state.masses
        totals.append(float(state.energy.sum() + kinetic.sum()))
        return state.energy

    reporter = ts.TrajectoryReporter(None, state_frequency=1000, prop_calculators={1: {"total": remember}})
    ts.integrate(
        relaxed.to_atoms()[:1],
        model,
        integrator=nve,
        n_steps=500,
        temperature=100.0,
        timestep=0.002,
        trajectory_reporter=reporter,
    )
    totals_T = np.array(totals)
    assert len(totals_T) >= 500
    drift = np.polyfit(np.linspace(0.0, 1.0, len(totals_T)), totals_T, 1)[0]
    # eV/atom/ps.
    assert abs(drift) / 8 < 1e-3
