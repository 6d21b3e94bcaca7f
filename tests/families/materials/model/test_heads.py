"""Branches, charges, dipoles and units: what each head promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from atom_graphs import Structure, batch_of, random_structure
from phalanx.families.materials.model.heads import DatasetMlp, build_head, conserve_charge, dipole_of_charges
from phalanx.families.materials.model_config import Branch, ChargeHead, DipoleHead, EnergyHead, PropertyHead
from small_networks import filled_network, small_model


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_each_row_passes_through_its_own_branch(layers: int) -> None:
    config = small_model("schnet", branches=[Branch(name=name) for name in ("a", "b", "c")])
    head = build_head(config, layers, 2, shared=False).double()
    draw = torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, generator=draw)
    x_NC = torch.randn(7, 8, generator=draw, dtype=torch.float64)
    branch_N = torch.tensor([2, 0, 1, 1, 2, 0, 2])
    found = head(x_NC, branch_N)
    wanted = torch.stack([list(head.copies.values())[b](x) for x, b in zip(x_NC, branch_N.tolist(), strict=True)])
    torch.testing.assert_close(found, wanted)


def test_a_branch_without_samples_gets_gradients_of_zero() -> None:
    network = filled_network(small_model("schnet"))
    energy_G = network.predict(**batch_of([random_structure(1, 3)]), forces=False).energy_G
    assert energy_G is not None
    energy_G.sum().backward()
    grads = {name: parameter.grad for name, parameter in network.head.energy.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    assert all((grad == 0.0).all() == ("second" in name) for name, grad in grads.items() if grad is not None)


def test_a_shared_head_is_one_for_all_branches() -> None:
    config = small_model("schnet", energy=EnergyHead(shared=True), branches=[Branch(name="a"), Branch(name="b")])
    network = filled_network(config)
    assert {name.split(".")[1] for name, _ in network.head.energy.named_parameters()} == {"shared"}
    one, two = random_structure(1, 4), random_structure(1, 4, source=1)
    energy_G = network.predict(**batch_of([one, two]), forces=False).energy_G
    assert energy_G is not None and energy_G[0] == energy_G[1]


def test_energies_are_in_the_units_of_their_branch() -> None:
    """What the head gives is scaled; the elements' reference energies are added as they are."""
    plain = filled_network(small_model("painn", branches=[Branch(name="first")]))
    branch = Branch(name="first", energy_scale=3.0, reference_energies={"1": -13.5, "8": -2000.25})
    scaled = filled_network(small_model("painn", branches=[branch]))
    structure = Structure([8, 1, 1], np.array([[0.0, 0, 0], [0.9, 0, 0], [0, 0.9, 0.2]]))
    a, b = (network.predict(**batch_of([structure])) for network in (plain, scaled))
    assert a.energy_G is not None and b.energy_G is not None
    assert a.forces_N3 is not None and b.forces_N3 is not None
    torch.testing.assert_close(b.energy_G, 3.0 * a.energy_G - 2000.25 - 2 * 13.5, rtol=1e-14, atol=1e-12)
    torch.testing.assert_close(b.forces_N3, 3.0 * a.forces_N3)


@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_structures_far_apart_pool_as_they_should(pooling: str) -> None:
    """Two copies out of each other's reach: an extensive property doubles, an intensive one stays."""
    config = small_model("painn", properties=PropertyHead(names=["gap", "moment"], pooling=pooling))
    network = filled_network(config.model_copy(update={"branches": [Branch()]}))
    one = random_structure(1, 4)
    two = Structure(one.species * 2, np.vstack((one.positions_N3, one.positions_N3 + 50.0)))
    found_GP = network.predict(**batch_of([one, two]), forces=False).properties_GP
    assert found_GP is not None and found_GP[0].abs().min() > 1e-4
    torch.testing.assert_close(found_GP[1], found_GP[0] * (2.0 if pooling == "sum" else 1.0))


def test_charges_add_up_to_the_total_charge() -> None:
    network = filled_network(small_model("painn"))
    total_G = torch.tensor([0.0, -2.0, 1.0])
    graphs = [random_structure(1, 5), random_structure(2, 3, source=1), random_structure(4, 1)]
    batch = batch_of([replace(one, charge=charge) for one, charge in zip(graphs, total_G.tolist(), strict=True)])
    charges_N = network.predict(**batch, forces=False).charges_N
    assert charges_N is not None and charges_N.std() > 1e-3
    sums_G = torch.zeros(3, dtype=torch.float64).index_add(0, batch["graph_N"], charges_N)
    torch.testing.assert_close(sums_G, total_G.double(), rtol=0, atol=1e-12)


def test_charges_may_be_left_alone() -> None:
    network = filled_network(small_model("painn", charges=ChargeHead(conserve=False)))
    charges_N = network.predict(**batch_of([random_structure(1, 5)]), forces=False).charges_N
    assert charges_N is not None and charges_N.sum().abs() > 1e-3


def test_conserved_charges_keep_their_differences() -> None:
    graph_N, atoms_G = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([2, 0, 3])
    charges_N = torch.tensor([0.5, 0.1, 1.0, 2.0, 3.0])
    found = conserve_charge(charges_N, torch.tensor([1.0, 0.0, 0.0]), graph_N, atoms_G)
    torch.testing.assert_close(found, torch.tensor([0.7, 0.3, -1.0, 0.0, 1.0]))


def test_the_dipole_of_two_charges() -> None:
    """Charge times distance, from minus to plus; the origin does not matter even for an ion."""
    charges_N, graph_N = torch.tensor([1.0, -1.0, 2.0]), torch.tensor([0, 0, 1])
    positions_N3 = torch.tensor([[5.0, 1.0, 0.0], [5.0, 3.0, 0.0], [7.0, 7.0, 7.0]])
    found = dipole_of_charges(charges_N, positions_N3, graph_N, torch.tensor([2, 1]))
    assert found.tolist() == [[0.0, -2.0, 0.0], [0.0, 0.0, 0.0]]


def test_a_dipole_of_predicted_charges() -> None:
    network = filled_network(small_model("schnet", dipole=DipoleHead(from_charges=True)))
    assert not any(name.startswith("head.dipole") for name, _ in network.named_parameters())
    batch = batch_of([random_structure(1, 5)])
    predicted = network.predict(**batch, forces=False)
    assert predicted.charges_N is not None and predicted.dipole_G3 is not None
    wanted = (predicted.charges_N[:, None] * batch["positions_N3"]).sum(0)
    torch.testing.assert_close(predicted.dipole_G3[0], wanted)


def test_heads_of_one_branch_take_no_detour() -> None:
    head = DatasetMlp(["only"], 4, 1)
    torch.nn.init.constant_(next(iter(head.parameters())), 0.5)
    torch.nn.init.zeros_(list(head.parameters())[1])
    assert head(torch.ones(2, 4), torch.tensor([0, 0])).flatten().tolist() == [2.0, 2.0]
