"""Every body of the materials family on the device, step by step, captured and compiled, beside float64 on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from atom_graphs import CUTOFF, batch_of, random_structure
from device_runs import CPU, accelerator, relative_error
from materials_runs import write_materials_run
from phalanx.cli.main import run_command_line as call
from phalanx.config.load import load_run
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.materials.evaluation.network_predictions import split_errors
from phalanx.families.materials.model.message_passing.segmented_products import why_no_kernels
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.model_config import Branch, EnergyHead, MaceOptions
from phalanx.families.materials.step_capture import StepCapture
from small_networks import BODIES, filled_network, small_model

pytestmark = pytest.mark.gpu

STEPS = 5
RECORDED = [body for body in BODIES if body != "dimenet++"]
"""Bodies whose steps can be one program: DimeNet++ pairs as many edges as the data have."""
PLACES = ("positions_N3", "shifts_E3", "cells_G33")
EXACT, SINGLE = 1e-9, 1e-3
"""Largest relative error of a float64 and of a float32 computation."""


def network(body: str, dtype: torch.dtype, device: torch.device, **changes: Any) -> MaterialsNetwork:
    """The same network in any format on any device."""
    found = filled_network(small_model(body, **{"d_model": 16, "branches": [Branch()], **changes})).to(device, dtype)
    found.dtype = dtype
    return found


def labelled(*, stress: bool = True) -> dict[str, Tensor]:
    """Two molecules and two crystals with energies and forces; float64, on the CPU."""
    structures = [random_structure(seed, 4 + seed, periodic=seed > 2) for seed in range(1, 5)]
    batch = batch_of(structures)
    # Places that float32 holds exactly, as prepared data have them.
    batch |= {name: batch[name].float().double() for name in PLACES}
    draw = torch.Generator().manual_seed(0)
    batch["energy_G"] = torch.randn(4, generator=draw, dtype=torch.float64)
    batch["forces_N3"] = torch.randn(len(batch["species_N"]), 3, generator=draw, dtype=torch.float64)
    if stress:
        batch["stress_G33"] = torch.randn(4, 3, 3, generator=draw, dtype=torch.float64)
        batch["stress_G33"][:2] = torch.nan
    return batch


def placed(batch: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The batch on a device, its places in a format."""
    return {name: value.to(device, dtype if name in PLACES else None) for name, value in batch.items()}


def gradients(losses: Tensor, net: MaterialsNetwork) -> Tensor:
    """All gradients of the summed losses, one behind the other; parameters that nothing depends on are left out."""
    found = torch.autograd.grad(losses.sum(), list(net.parameters()), allow_unused=True)
    return torch.cat([grad.flatten() for grad in found if grad is not None])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, SINGLE)], ids=str)
@pytest.mark.parametrize("body", BODIES)
def test_predictions_and_gradients_are_those_of_the_cpu(body: str, dtype: torch.dtype, tolerance: float) -> None:
    """Kernel by kernel: energies, forces, stress, the other heads, and gradients of losses on all of them."""
    batch, device = labelled(), accelerator()
    exact, found = network(body, torch.float64, CPU), network(body, dtype, device)
    labels = ("energy_G", "forces_N3", "stress_G33")
    seen = {name: value for name, value in batch.items() if name not in labels}
    wanted, given = exact.predict(**seen, stress=True), found.predict(**placed(seen, device, dtype), stress=True)
    for name, value in vars(wanted).items():
        if value is not None:
            there = ~value.isnan()
            assert relative_error(getattr(given, name).detach().cpu()[there], value.detach()[there]) < tolerance, name
    wanted_losses, losses = exact(**batch), found(**placed(batch, device, dtype))
    assert relative_error(losses.detach(), wanted_losses.detach()) < tolerance
    assert relative_error(gradients(losses, found), gradients(wanted_losses, exact)) < tolerance


@pytest.mark.parametrize(
    ("compiled", "dtype", "tolerance"),
    [(False, torch.float64, EXACT), (True, torch.float32, SINGLE)],
    ids=["captured", "compiled"],
)
@pytest.mark.parametrize("body", RECORDED)
def test_captured_steps_are_those_of_the_cpu(body: str, compiled: bool, dtype: torch.dtype, tolerance: float) -> None:
    """As one program, replayed with other parameters and on a smaller batch; compiled in the format of most runs."""
    device = accelerator()
    # Forces alone, of one block: a compiler takes the longer the more there is.
    only: dict[str, Any] = {
        "energy": EnergyHead(force_weight=1.0),
        "charges": None,
        "dipole": None,
        "properties": None,
        "atom_properties": None,
        "n_layers": 1 if compiled else 2,
    }

    def replica() -> MaterialsNetwork:
        return network(body, dtype, device, **only)

    capture = StepCapture(replica, source=0, cutoff=CUTOFF, compiled=compiled)
    exact, found, batch = network(body, torch.float64, CPU, **only), replica(), labelled(stress=False)
    for _ in range(2):
        wanted = exact(**batch)
        losses = capture.losses(placed(batch, device, dtype), list(found.parameters()), 1.0)
        assert relative_error(losses.detach(), wanted.detach()) < tolerance
        assert relative_error(gradients(losses, found), gradients(wanted, exact)) < tolerance
        with torch.no_grad():
            for net in (exact, found):
                for parameter in net.parameters():
                    parameter.mul_(1.1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, SINGLE)], ids=str)
def test_cuequivariances_kernels_give_our_predictions_and_gradients(dtype: torch.dtype, tolerance: float) -> None:
    pytest.importorskip("cuequivariance_ops_torch", reason="needs cuequivariance-torch and cuequivariance-ops-torch")
    batch, device = labelled(stress=False), accelerator()
    # Small enough for their compilation to take seconds.
    options = MaceOptions(degree=2, hidden_degree=1, correlation=2, kernels="cuequivariance")
    fields: dict[str, Any] = {
        "d_model": 32,
        "charges": None,
        "dipole": None,
        "properties": None,
        "atom_properties": None,
    }
    exact, found = (
        network("mace", given, place, **fields, mace=options)
        for given, place in ((torch.float64, CPU), (dtype, device))
    )
    assert not why_no_kernels(device, dtype, 32)
    seen = {name: value for name, value in batch.items() if name not in ("energy_G", "forces_N3")}
    wanted, predicted = exact.predict(**seen, forces=True), found.predict(**placed(seen, device, dtype), forces=True)
    for ours, theirs in ((wanted.energy_G, predicted.energy_G), (wanted.forces_N3, predicted.forces_N3)):
        assert relative_error(theirs.detach().cpu(), ours.detach()) < tolerance
    losses, given_losses = exact(**batch), found(**placed(batch, device, dtype))
    assert relative_error(given_losses.detach(), losses.detach()) < tolerance
    assert relative_error(gradients(given_losses, found), gradients(losses, exact)) < tolerance


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Molecules with energies, forces and charges, prepared."""
    changes = {"optimizer.eps": 1e-3, "evaluation.every": STEPS}
    path = write_materials_run(tmp_path_factory.mktemp("materials"), changes, structures=60)
    run = load_run(path)
    assert isinstance(run, MaterialsRun)
    prepare_graphs(run.data, workers=1)
    return path


def train(run_file: Path, run_dir: Path, *words: str) -> list[float]:
    """Train for a few steps; returns their losses."""
    code = call(["train", str(run_file), "--run-dir", str(run_dir), f"training.steps={STEPS}", *words])
    assert code == 0
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("body", BODIES)
def test_training_and_errors_are_those_of_the_cpu(run_file: Path, tmp_path: Path, body: str) -> None:
    """Steps are captured where they can be; the weights are then measured on either device."""
    words = [f"model.body={body}"]
    if body == "nequip":
        words.append("model.nequip={degree: 2, radial_width: 8}")
    if body == "mace":
        words.append("model.mace={degree: 2, hidden_degree: 1, correlation: 2, radial_width: 8}")
    found = train(run_file, tmp_path / "device", *words)
    wanted = train(run_file, tmp_path / "cpu", *words, "layout.precision=fp64", "cluster.device=cpu")
    assert len(found) == STEPS
    assert found == pytest.approx(wanted, rel=SINGLE)
    _, here = split_errors(tmp_path / "device", "validation", accelerator())
    _, there = split_errors(tmp_path / "device", "validation", CPU)
    assert [row.mae for row in here.rows] == pytest.approx([row.mae for row in there.rows], rel=SINGLE)
    assert here.structures == there.structures > 0


@pytest.mark.parametrize("compiled", ["auto", "true"])
def test_adapters_are_trained_as_on_the_cpu(run_file: Path, tmp_path: Path, compiled: str) -> None:
    """Captured programs read the adapters that a step is given, and form no gradients of what is frozen."""
    lora = 'training.lora={rank: 2, matrices: ["*"]}'
    found = train(run_file, tmp_path / "device", lora, f"training.compile={compiled}")
    wanted = train(run_file, tmp_path / "cpu", lora, "layout.precision=fp64", "cluster.device=cpu")
    assert found == pytest.approx(wanted, rel=SINGLE)
    _, here = split_errors(tmp_path / "device", "validation", accelerator())
    _, there = split_errors(tmp_path / "device", "validation", CPU)
    assert [row.mae for row in here.rows] == pytest.approx([row.mae for row in there.rows], rel=SINGLE)


def test_the_calculator_gives_the_forces_of_the_cpu(run_file: Path, tmp_path: Path) -> None:
    ase = pytest.importorskip("ase")
    from phalanx.families.materials.evaluation.calculator import PhalanxCalculator  # noqa: PLC0415

    train(run_file, tmp_path / "run")
    grid = np.stack(np.meshgrid(*[np.arange(2)] * 3, indexing="ij"), -1).reshape(-1, 3) * 1.4
    atoms = ase.Atoms("C4O4", positions=grid + 0.05 * np.sin(np.arange(24.0)).reshape(8, 3), cell=[2.8] * 3, pbc=True)
    values: dict[str, list[Any]] = {}
    for device in (accelerator().type, "cpu"):
        atoms.calc = PhalanxCalculator(tmp_path / "run", device=device, precision="fp64")
        asked: list[Callable[[], Any]] = [atoms.get_potential_energy, atoms.get_forces, atoms.get_stress]
        values[device] = [ask() for ask in asked]
    for found, wanted in zip(values[accelerator().type], values["cpu"], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-8, atol=1e-10)
