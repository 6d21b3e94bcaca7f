"""What networks are verified with: structures of their own, which reduced networks are in the units of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from materials_cases import SIZE, run_of
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.registry import bind
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verifier, reduced_run


def model_of(cutoff: float, **changes: Any) -> VerifiableModel:
    """A run whose file says nothing of its data's units."""
    run = run_of("painn", 1)
    size = {name: value for name, value in SIZE.items() if name != "mean_neighbors"}
    model = {**size, "cutoff": cutoff, **changes}
    data = {**run.data.model_dump(), "cutoff": cutoff}
    return bind(MaterialsRun.model_validate({**run.model_dump(), "model": model, "data": data}), VerifiableModel)


@pytest.mark.parametrize("cutoff", [3.0, 6.0])
def test_reduced_networks_know_how_many_neighbours_their_structures_have(cutoff: float) -> None:
    model = model_of(cutoff, body="painn", energy={})
    batch = model.samples(1, 0, 1024, 1024)
    mean = batch.edges.sum() / batch.atoms.sum()
    assert model.reduced(1)["model"]["mean_neighbors"] == pytest.approx(mean, rel=0.02)


def test_deep_products_of_messages_stay_of_the_size_of_labels() -> None:
    """Sums of numbers of 1e13 would be rounded by more than most mistakes change them."""
    energy = {"loss": "mae", "force_weight": 1.0, "stress_weight": 1.0}
    model = model_of(3.0, body="mace", n_layers=3, energy=energy, electronic_state=["spin"])
    small = model.rebind(reduced_run(model, "fp64", 1, 1))
    reference = Verifier(small, torch.device("cpu"), steps=1, activations=False).reference
    assert reference is not None
    # Labels are normal numbers.
    assert 0.1 < reference.steps[0].loss < 30.0
