"""Weights of mace-torch in our network: its energies, forces and stresses, and models that compute something else refused.

The files in `mace_torch/` were made by `make_fixtures.py` beside them, with mace-torch itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.families.materials.data.trained_elements import trained_elements
from phalanx.families.materials.evaluation.calculator import PhalanxCalculator
from phalanx.families.materials.evaluation.mace_torch import import_mace_torch

MODELS = Path(__file__).with_name("mace_torch")
HEADS = {"first": "head_0", "second": "head_1", "Default": "main"}


def calculated(where: Path, expected: dict[str, Any], precision: str) -> Atoms:
    periodic = expected["cell"] is not None
    atoms = Atoms(expected["numbers"], expected["positions"], cell=expected["cell"], pbc=periodic)
    atoms.calc = PhalanxCalculator(where, branch=HEADS[expected["head"]], precision=precision)
    return atoms


@pytest.mark.parametrize("name", ["two_heads", "repulsive", "residual"])
def test_energies_forces_and_stresses_are_those_of_mace_torch(name: str, tmp_path: Path) -> None:
    written = import_mace_torch(MODELS / f"{name}.safetensors", tmp_path / "own", torch.float64)
    known = trained_elements(written.target)
    assert known is not None and known.everywhere == {1, 6, 8}
    structures = json.loads((MODELS / f"{name}.json").read_text())
    assert {one["head"] for one in structures} >= ({"first", "second"} if name == "two_heads" else {"Default"})
    for expected in structures:
        atoms = calculated(written.target, expected, "fp64")
        assert atoms.get_potential_energy() == pytest.approx(expected["energy"], abs=1e-9)
        np.testing.assert_allclose(atoms.get_forces(), expected["forces"], atol=1e-8)
        if expected["stress"] is not None:
            np.testing.assert_allclose(atoms.get_stress(voigt=False), expected["stress"], atol=1e-9)


def test_weights_in_float32_come_close(tmp_path: Path) -> None:
    import_mace_torch(MODELS / "repulsive.safetensors", tmp_path / "own")
    for expected in json.loads((MODELS / "repulsive.json").read_text()):
        atoms = calculated(tmp_path / "own", expected, "fp64")
        assert atoms.get_potential_energy() == pytest.approx(expected["energy"], abs=1e-5)
        np.testing.assert_allclose(atoms.get_forces(), expected["forces"], atol=1e-5)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "mace.model")
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        import_mace_torch(tmp_path / "mace.model", tmp_path / "own")


def changed(tensors: dict[str, Tensor], name: str, change: Tensor | None) -> dict[str, Tensor]:
    return {**tensors, name: change} if change is not None else {k: v for k, v in tensors.items() if k != name}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("avg_num_neighbors", None, "has no avg_num_neighbors; it is needed"),
        ("apply_cutoff", torch.tensor(False), "apply_cutoff=False fades radial weights"),
        ("num_interactions", torch.tensor(1), "num_interactions=1 has no block"),
        (
            "interactions.0.linear_down.weight",
            torch.ones(3),
            r"interactions\.0\.linear_down\.weight stands for something",
        ),
        ("interactions.1.linear_up.weight", torch.ones(100), "linear_up.weight has 100 numbers, 2 x 4 x 4 are read"),
        ("interactions.0.conv_tp_weights.layer1.weight", torch.ones(5, 6), r"radial_MLP=\[5, 6, 5\]"),
        ("radial_embedding.distance_transform.a", torch.tensor(1.2), "distance_transform.a is not the constant"),
        ("radial_embedding.bessel_fn.bessel_weights", torch.ones(4), "bessel_weights is not the constant"),
        ("pair_repulsion_fn.a_exp", torch.tensor(0.23), "pair_repulsion_fn.a_exp is not the constant"),
        ("scale_shift.scale", torch.tensor(-1.0), "energy_scale: Input should be greater than 0"),
        (
            "products.0.symmetric_contractions.contractions.1.U_matrix_2",
            torch.ones(3, 4, 4, 2),
            "does not turn like degree 1",
        ),
    ],
)
def test_models_that_compute_something_else_are_refused(
    name: str, change: Tensor | None, message: str, tmp_path: Path
) -> None:
    tensors = load_file(MODELS / "repulsive.safetensors")
    save_file(changed(tensors, name, change), tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=message):
        import_mace_torch(tmp_path / "other.safetensors", tmp_path / "own")
    assert not (tmp_path / "own").exists()
