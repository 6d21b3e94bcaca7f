"""What turning, reflecting, shifting and renumbering atoms may change of a prediction, for every body: float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from atom_graphs import Structure, batch_of, moved, orthogonal, random_structure, turned
from phalanx.families.materials.model.losses import Predictions
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.model_config import Electrostatics, GlobalAttention
from small_networks import BODIES, LIKE_MACE_TORCH, filled_network, small_model

SCALARS = ("energy_G", "charges_N", "properties_GP", "atom_properties_NP", "atom_energies_N")
KINDS: list[tuple[str, dict[str, Any]]] = [(body, {}) for body in BODIES]
KINDS += [("painn", {"attention": GlobalAttention(kind=kind, heads=2)}) for kind in ("softmax", "linear")]
KINDS += [("painn", {"electrostatics": Electrostatics(smearing=smearing)}) for smearing in (0.0, 1.0)]
KINDS += [("mace", LIKE_MACE_TORCH)]
NAMES = [f"{body}{''.join(f'+{name}' for name in extra)}" for body, extra in KINDS]
every_body = pytest.mark.parametrize("network", KINDS, ids=NAMES, indirect=True)


@pytest.fixture(scope="module")
def network(request: pytest.FixtureRequest) -> MaterialsNetwork:
    body, extra = request.param
    return filled_network(small_model(body, electronic_state=["charge", "spin"], **extra))


def structures() -> list[Structure]:
    return [
        random_structure(1, 5),
        replace(random_structure(2, 4, periodic=True, source=1), charge=-1.0, multiplicity=2.0),
        replace(random_structure(3, 1), charge=2.0),
        replace(random_structure(4, 7, source=1), multiplicity=3.0),
    ]


def predict(network: MaterialsNetwork, graphs: Sequence[Structure]) -> Predictions:
    with torch.no_grad():
        return network.predict(**batch_of(graphs), stress=True)


def predicted_values(found: Predictions) -> dict[str, torch.Tensor]:
    """What the network predicts, by name; every label but those of given edges, and the energies of atoms are among it."""
    there = {name: value for name, value in vars(found).items() if value is not None}
    assert len(there) >= len(vars(found)) - 2
    return there


def assert_close(a: torch.Tensor | None, b: torch.Tensor | None, what: str) -> None:
    assert a is not None and b is not None, what
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, equal_nan=True, msg=lambda text: f"{what}: {text}")


def assert_turned(before: Predictions, after: Predictions, matrix_33: np.ndarray) -> None:
    turn = torch.from_numpy(matrix_33)
    for name in SCALARS:
        assert_close(getattr(after, name), getattr(before, name), name)
    for name in ("forces_N3", "dipole_G3"):
        assert_close(getattr(after, name), getattr(before, name) @ turn.T, name)
    assert before.stress_G33 is not None
    assert_close(after.stress_G33, turn @ before.stress_G33 @ turn.T, "stress_G33")


@every_body
@pytest.mark.parametrize("reflect", [False, True], ids=["rotation", "reflection"])
def test_predictions_turn_with_the_atoms(network: MaterialsNetwork, reflect: bool) -> None:
    matrix_33 = orthogonal(7, reflect=reflect)
    before = predict(network, structures())
    assert before.energy_G is not None and before.forces_N3 is not None and before.stress_G33 is not None
    # What must turn is there to be turned.
    assert before.forces_N3.abs().max() > 1e-2 and before.stress_G33[1].abs().max() > 1e-5
    assert before.energy_G.std() > 1e-3
    assert_turned(before, predict(network, [turned(s, matrix_33) for s in structures()]), matrix_33)


@every_body
def test_shifting_a_structure_changes_nothing(network: MaterialsNetwork) -> None:
    shifted = [moved(s, s.positions_N3 + np.array([3.0, -1.0, 0.5])) for s in structures()]
    assert_turned(predict(network, structures()), predict(network, shifted), np.eye(3))


@every_body
def test_renumbering_atoms_renumbers_predictions(network: MaterialsNetwork) -> None:
    before = predict(network, structures())
    order = [np.random.default_rng(5).permutation(len(s.species)) for s in structures()]
    mixed = [
        replace(s, species=[s.species[i] for i in p], positions_N3=s.positions_N3[p])
        for s, p in zip(structures(), order, strict=True)
    ]
    starts = np.cumsum([0, *(len(p) for p in order)])
    places = torch.from_numpy(np.concatenate([p + start for p, start in zip(order, starts, strict=False)]))
    after = predict(network, mixed)
    for name, value in predicted_values(before).items():
        assert_close(getattr(after, name), value[places] if "_N" in name else value, name)


@every_body
def test_a_prediction_does_not_depend_on_its_batch(network: MaterialsNetwork) -> None:
    """Alone, in another order, beside other graphs: the same numbers."""
    graphs = structures()
    together, reverse = predict(network, graphs), predict(network, graphs[::-1])
    alone = [predict(network, [graph]) for graph in graphs]
    for name in predicted_values(together):
        assert_close(getattr(together, name), torch.cat([getattr(p, name) for p in alone]), name)
        assert_close(getattr(reverse, name), torch.cat([getattr(p, name) for p in alone[::-1]]), name)


@every_body
def test_without_edges_there_are_energies_and_no_forces(network: MaterialsNetwork) -> None:
    far = [random_structure(1, 3, spread=9.0), random_structure(2, 1, source=1), random_structure(3, 1)]
    batch = batch_of(far)
    assert batch["edges_2E"].shape == (2, 0)
    predicted = network.predict(**batch, stress=True)
    assert predicted.energy_G is not None and predicted.forces_N3 is not None
    assert predicted.energy_G.isfinite().all()
    # Charges act without edges.
    assert (predicted.forces_N3 == 0.0).all() == (network.config.electrostatics is None)
    assert all(value.isfinite().all() for name, value in predicted_values(predicted).items() if name != "stress_G33")
    predicted.energy_G.sum().backward()


@every_body
def test_isolated_atoms_beside_bonded_ones(network: MaterialsNetwork) -> None:
    """An atom out of reach of all others has the energy of a lone atom, and no force."""
    bonded = random_structure(1, 5)
    with_guest = replace(
        bonded, species=[*bonded.species, 8], positions_N3=np.vstack((bonded.positions_N3, [[20.0, 0.0, 0.0]]))
    )
    lone = Structure([8], np.zeros((1, 3)))
    predicted = predict(network, [with_guest, lone])
    assert predicted.forces_N3 is not None and predicted.atom_energies_N is not None
    charged = network.config.electrostatics is not None
    assert (predicted.forces_N3[5] == 0.0).all() or charged
    assert predicted.atom_energies_N.isfinite().all()
    if network.config.attention is None and not charged:
        assert_close(predicted.atom_energies_N[5], predicted.atom_energies_N[6], "energy of a lone atom")


@every_body
def test_a_batch_of_nothing(network: MaterialsNetwork) -> None:
    """A rank may get no structures: losses are 0, and every parameter still gets a gradient or none, without an error."""
    batch = batch_of([random_structure(1, 2)])
    empty = {name: value[:0] for name, value in batch.items()} | {"edges_2E": batch["edges_2E"][:, :0]}
    species_N = empty.pop("species_N")
    labels = {"energy_G": torch.zeros(0), "forces_N3": torch.zeros(0, 3), "stress_G33": torch.zeros(0, 3, 3)}
    losses = network(species_N, **empty, **labels, max_atoms=0)
    assert losses.shape == (7,) and (losses == 0.0).all()
    losses.sum().backward()


def test_turning_is_seen_by_the_test() -> None:
    """A network whose forces do not turn fails the comparison above."""
    network = filled_network(small_model("schnet"))
    before = predict(network, structures())
    with pytest.raises(AssertionError, match="forces_N3"):
        assert_turned(before, before, orthogonal(7, reflect=False))
