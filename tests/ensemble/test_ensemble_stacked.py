"""Networks side by side predict what each predicts alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atom_graphs import batch_of, random_structure
from phalanx.families.materials.ensemble.joint_predictions import NetworkStack, can_stack
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.model_config import Electrostatics
from small_networks import BODIES, filled_network, small_model


def batch() -> dict[str, Any]:
    """Molecules and crystals of two data sets, one of them a lone atom."""
    structures = [random_structure(i, 4 + i, periodic=i % 2 == 0, source=i % 2) for i in range(4)]
    return batch_of([*structures, random_structure(9, 1)])


def assert_same(networks: list[MaterialsNetwork], inputs: dict[str, Any]) -> None:
    with torch.no_grad():
        alone = [network.predict(**inputs, forces=True, stress=True) for network in networks]
    found = NetworkStack(networks).predict(**inputs, forces=True, stress=True)
    for name, value in vars(found).items():
        wanted = [one for one in (getattr(one, name) for one in alone) if one is not None]
        assert (value is not None) == (len(wanted) == len(networks)), name
        if value is None:
            continue
        assert not value.requires_grad
        torch.testing.assert_close(value, torch.stack(wanted), rtol=1e-9, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("body", BODIES)
def test_alike_networks_as_one(body: str) -> None:
    networks = [filled_network(small_model(body), seed=seed).eval().requires_grad_(False) for seed in (1, 2)]
    assert can_stack(networks[0]) is (body != "dimenet++")
    assert_same(networks, batch())


def test_mixed_networks_keep_their_order() -> None:
    kinds = ("painn", "schnet", "painn", "gin", "schnet")
    networks = [filled_network(small_model(body), seed=seed).eval() for seed, body in enumerate(kinds)]
    networks[2].edge_chunk = 20
    assert_same(networks, batch())


def test_charges_that_act_at_any_distance_beside_none() -> None:
    """Networks with waves run in turn, and their charges are no prediction of a mixed ensemble."""
    options = [Electrostatics(), Electrostatics(), None]
    models = [small_model("painn", electrostatics=one) for one in options]
    networks = [filled_network(model, seed=seed).eval() for seed, model in enumerate(models)]
    assert [can_stack(network) for network in networks] == [False, False, True]
    assert_same(networks, batch())
    assert_same(networks[:2], batch())


def test_a_structure_without_edges_and_a_model_without_energy() -> None:
    networks = [filled_network(small_model("painn"), seed=seed).eval() for seed in (1, 2)]
    lone = batch_of([random_structure(1, 1)])
    assert_same(networks, lone)
    charges = small_model("schnet").model_copy(update={"energy": None})
    found = NetworkStack([filled_network(charges, seed=seed) for seed in (1, 2)]).predict(**lone, forces=True)
    assert found.energy_G is None and found.forces_N3 is None
    assert found.charges_N is not None and found.charges_N.shape == (2, 1)
