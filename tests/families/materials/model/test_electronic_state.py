"""What total charge and spin change of energies and forces, for every body: float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from atom_graphs import Structure, batch_of, random_structure
from phalanx.families.materials.model.network import MaterialsNetwork
from small_networks import BODIES, filled_network, small_model

every_body = pytest.mark.parametrize("network", BODIES, indirect=True)


@pytest.fixture(scope="module")
def network(request: pytest.FixtureRequest) -> MaterialsNetwork:
    return filled_network(small_model(request.param, electronic_state=["charge", "spin"]))


def predict(network: MaterialsNetwork, structures: list[Structure]) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        found = network.predict(**batch_of(structures))
    assert found.energy_G is not None and found.forces_N3 is not None
    return found.energy_G, found.forces_N3


@every_body
def test_each_state_has_energies_and_forces_of_its_own(network: MaterialsNetwork) -> None:
    one = random_structure(6, 5)
    states = [(0.0, 1.0), (1.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (0.0, 2.0), (0.0, 3.0), (1.0, 2.0)]
    energy_G, forces_N3 = predict(network, [replace(one, charge=q, multiplicity=m) for q, m in states])
    for values_G in (energy_G[:, None], forces_N3.view(len(states), -1)):
        distances_GG = torch.cdist(values_G, values_G) + torch.eye(len(states), dtype=torch.float64)
        assert distances_GG.min() > 1e-6


@every_body
def test_neutral_singlets_are_those_of_a_network_without_state(network: MaterialsNetwork) -> None:
    plain = filled_network(small_model(network.config.body))
    missing, unexpected = plain.load_state_dict(network.state_dict(), strict=False)
    assert not missing and all(name.startswith("embedding.state.") for name in unexpected)
    one = random_structure(2, 4, periodic=True, source=1)
    for with_state, without in zip(predict(network, [one]), predict(plain, [one]), strict=True):
        assert torch.equal(with_state, without)
    charged = replace(one, charge=1.0, multiplicity=2.0)
    assert torch.equal(predict(plain, [charged])[0], predict(plain, [one])[0])


@every_body
def test_twice_the_cells_with_twice_the_charge_are_twice_the_energy(network: MaterialsNetwork) -> None:
    cell = random_structure(2, 4, periodic=True, source=1)
    assert cell.cell_33 is not None
    cell = replace(cell, charge=1.0, multiplicity=2.0)
    double = replace(
        cell,
        species=cell.species * 2,
        positions_N3=np.vstack((cell.positions_N3, cell.positions_N3 + cell.cell_33[0])),
        cell_33=cell.cell_33 * np.array([[2.0], [1.0], [1.0]]),
        charge=2.0,
        multiplicity=3.0,
    )
    (once, twice), forces_N3 = predict(network, [cell, double])
    torch.testing.assert_close(twice, 2.0 * once, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(forces_N3[4:], forces_N3[:4].repeat(2, 1), rtol=1e-10, atol=1e-10)
