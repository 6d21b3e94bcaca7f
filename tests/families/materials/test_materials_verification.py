"""What networks are verified with: structures of their own, which reduced networks are in the units of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from materials_cases import SIZE, run_of
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.registry import bind
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verifier, full_run, reduced_run


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


def test_a_whole_network_whose_file_counts_no_neighbours_has_those_of_the_samples() -> None:
    energy = {"loss": "mae", "force_weight": 1.0}
    narrow = {"degree": 2, "hidden_degree": 1, "correlation": 3, "radial_width": 8}
    model = model_of(3.0, body="mace", n_layers=3, energy=energy, mace=narrow)

    def first_loss(fitted: dict[str, Any]) -> float:
        whole = model.rebind(full_run(model.run, "fp64", 1, fitted))
        reference = Verifier(whole, torch.device("cpu"), steps=1, activations=False).reference
        assert reference is not None
        return reference.steps[0].loss

    fitted = model.fitted_to_samples()
    assert fitted == {"model": {"mean_neighbors": pytest.approx(8.4)}}
    # Sums over neighbours that nothing divides grow from block to block.
    assert first_loss(fitted) < 30.0 and first_loss({}) > 1e3
    stated = model_of(3.0, body="mace", n_layers=3, energy=energy, mace=narrow, mean_neighbors=20.0)
    assert stated.fitted_to_samples() == {}
