"""Losses are sums over the labels that are there; counts are how many these are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atom_graphs import batch_of, random_structure
from phalanx.families.materials.model.losses import (
    DatasetUnits,
    Labels,
    Predictions,
    learned_tasks,
    summed_losses,
)
from phalanx.families.materials.model_config import Branch, ChargeHead, EnergyHead
from small_networks import filled_network, small_model

NAN = torch.nan


def target_counts(config: Any, labels: Labels) -> Tensor:
    """Numbers that are there for each task: one an energy, three an atom's force, nine a stress."""
    found = [getattr(labels, task.label) for task in learned_tasks(config)]
    return torch.tensor([0 if label is None else int((~label.isnan()).sum()) for label in found])


def losses(config: Any, predicted: Predictions, labels: Labels, branch: list[int], graph: list[int]) -> Tensor:
    graph_N = torch.tensor(graph)
    atoms_G = torch.bincount(graph_N, minlength=len(branch))
    branch_G = torch.tensor(branch)
    units = DatasetUnits(config)
    return summed_losses(
        config,
        units,
        predicted,
        labels,
        branch_G=branch_G,
        graph_N=graph_N,
        target_E=graph_N,
        atoms_G=atoms_G,
        cells_G33=torch.zeros(len(branch), 3, 3),
    )


def test_tasks_are_what_the_model_has_heads_and_weights_for() -> None:
    assert [task.label for task in learned_tasks(small_model("painn"))] == [
        "energy_G",
        "forces_N3",
        "stress_G33",
        "charges_N",
        "dipole_G3",
        "properties_GP",
        "atom_properties_NP",
    ]
    nothing: dict[str, None] = dict.fromkeys(("dipole", "properties", "atom_properties", "charges"))
    config = small_model("painn", energy=EnergyHead(), branches=[Branch()], **nothing)
    assert [task.label for task in learned_tasks(config)] == ["energy_G"]


def test_missing_labels_take_no_part() -> None:
    config = small_model("painn", energy=EnergyHead(per_atom=False, force_weight=2.0, stress_weight=1.0))
    predicted = Predictions(
        energy_G=torch.tensor([1.0, 5.0], dtype=torch.float64), forces_N3=torch.tensor([[1.0, 2.0, 3.0]] * 3)
    )
    labels = Labels(
        energy_G=torch.tensor([3.0, NAN], dtype=torch.float64),
        forces_N3=torch.tensor([[0.0, 0.0, 0.0], [NAN, NAN, NAN], [1.0, NAN, 1.0]]),
    )
    assert target_counts(config, labels).tolist() == [1, 5, 0, 0, 0, 0, 0]
    found = losses(config, predicted, labels, [0, 1], [0, 0, 1])
    assert found.tolist() == [4.0, 2.0 * (14.0 + 4.0), 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("loss", "wanted"), [("mse", 9.25), ("mae", 3.5), ("huber", 2.5 + 0.125)])
def test_each_kind_of_error(loss: str, wanted: float) -> None:
    config = small_model("painn", charges=ChargeHead(loss=loss))
    predicted = Predictions(charges_N=torch.tensor([1.0, -2.0]))
    labels = Labels(charges_N=torch.tensor([1.5, 1.0]))
    assert losses(config, predicted, labels, [0], [0, 0])[3].item() == pytest.approx(wanted)


def test_energy_errors_may_be_an_atom() -> None:
    config = small_model("painn", energy=EnergyHead(per_atom=True, weight=10.0))
    predicted = Predictions(energy_G=torch.tensor([6.0, 1.0]))
    labels = Labels(energy_G=torch.tensor([0.0, 0.0]))
    assert losses(config, predicted, labels, [0, 0], [0, 0, 1])[0].item() == 10.0 * (9.0 + 1.0)


def test_properties_are_compared_in_units_of_their_branch_and_branches_weigh() -> None:
    branches = [Branch(name="a", weight=3.0), Branch(name="b", properties_scale=[2.0, 10.0])]
    config = small_model("painn", branches=branches)
    predicted = Predictions(properties_GP=torch.tensor([[1.0, 1.0], [4.0, 10.0]]))
    labels = Labels(properties_GP=torch.tensor([[0.0, NAN], [0.0, 0.0]]))
    assert target_counts(config, labels).tolist() == [0, 0, 0, 0, 0, 3, 0]
    assert losses(config, predicted, labels, [0, 1], [0, 1])[5].item() == 3.0 * 1.0 + 4.0 + 1.0


def test_large_total_energies_lose_no_digits() -> None:
    """Differences of a millivolt beside energies of a million eV, with float32 activations."""
    references = {"1": -13.605, "6": -1030.1, "7": -1485.3, "8": -250_000.123}
    config = small_model("painn", branches=[Branch(reference_energies=references)])
    network = filled_network(config, dtype=torch.float32)
    batch = batch_of([random_structure(1, 12)])
    batch["species_N"][:] = 8
    bare = filled_network(small_model("painn", branches=[Branch()]), dtype=torch.float32)
    whole, part = (n.predict(**batch, forces=False).energy_G for n in (network, bare))
    assert whole is not None and part is not None and whole.dtype == torch.float64
    assert (whole - part - 12 * references["8"]).abs().item() < 1e-8


def test_losses_of_a_batch_are_those_of_its_graphs_added_up() -> None:
    network = filled_network(small_model("schnet"))
    graphs = [random_structure(1, 4), random_structure(2, 3, periodic=True, source=1), random_structure(5, 2)]

    def run(chosen: list[int]) -> tuple[Tensor, Tensor]:
        batch = batch_of([graphs[i] for i in chosen])
        labels = Labels(
            energy_G=torch.tensor([1.0, 2.0, NAN])[chosen],
            forces_N3=torch.ones(len(batch["species_N"]), 3),
            stress_G33=torch.stack([torch.full((3, 3), NAN), torch.zeros(3, 3), torch.full((3, 3), NAN)])[chosen],
        )
        given = {name: value for name, value in vars(labels).items() if value is not None}
        return network(batch.pop("species_N"), **batch, **given).detach(), target_counts(network.config, labels)

    together, alone = run([0, 1, 2]), [run([i]) for i in range(3)]
    torch.testing.assert_close(together[0], sum(part[0] for part in alone))
    assert together[1].tolist() == torch.stack([part[1] for part in alone]).sum(0).tolist()
    assert together[1].tolist() == [2, 27, 9, 0, 0, 0, 0]


def test_weights_multiply_the_sums() -> None:
    def forces_loss(weight: float) -> float:
        network = filled_network(small_model("schnet", energy=EnergyHead(force_weight=weight)))
        batch = batch_of([random_structure(1, 4)])
        return float(network(batch.pop("species_N"), **batch, forces_N3=torch.ones(4, 3))[1].detach())

    assert forces_loss(5.0) == pytest.approx(5.0 * forces_loss(1.0), rel=1e-12)


def test_tables_are_read_by_branch_and_element() -> None:
    branches = [Branch(name="a", weight=2.0, reference_energies={"1": -1.5}), Branch(name="b", energy_scale=4.0)]
    units = DatasetUnits(small_model("painn", branches=branches))
    branch = torch.tensor([1, 0, 0])
    assert units.reference_energy(torch.tensor([1, 1, 8]), branch).tolist() == [0.0, -1.5, 0.0]
    assert units.energy_scale(branch).tolist() == [4.0, 1.0, 1.0]
    assert units.weight(branch).tolist() == [1.0, 2.0, 2.0]
    assert units.output_units("properties_GP", branch)[0].tolist() == [[0.0, 0.0]] * 3
