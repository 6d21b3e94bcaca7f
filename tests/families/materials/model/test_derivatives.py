"""Forces and stress against differences of energies, and gradients of losses on forces against differences of losses."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from atom_graphs import CUTOFF, Structure, batch_of, edges_of, moved, random_structure, strained
from phalanx.families.materials.model.geometry import cell_volumes
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.model_config import Electrostatics, EnergyHead, GlobalAttention
from small_networks import BODIES, LIKE_MACE_TORCH, filled_network, small_model

KINDS: list[tuple[str, dict[str, Any]]] = [(body, {}) for body in BODIES]
KINDS += [("schnet", {"attention": GlobalAttention(kind=kind, heads=2)}) for kind in ("softmax", "linear")]
KINDS += [("painn", {"energy": EnergyHead(force_weight=1.0, stress_weight=1.0, repulsion="zbl")})]
KINDS += [("painn", {"electrostatics": Electrostatics(smearing=smearing)}) for smearing in (0.0, 1.0)]
KINDS += [("mace", LIKE_MACE_TORCH)]
NAMES = [f"{body}{''.join(f'+{name}' for name in extra)}" for body, extra in KINDS]
every_body = pytest.mark.parametrize("network", KINDS, ids=NAMES, indirect=True)
STEP = 1e-5


@pytest.fixture(scope="module")
def network(request: pytest.FixtureRequest) -> MaterialsNetwork:
    body, extra = request.param
    return filled_network(small_model(body, electronic_state=["charge", "spin"], **extra))


def energies(network: MaterialsNetwork, structures: list[Structure]) -> np.ndarray:
    with torch.no_grad():
        energy_G = network.predict(**batch_of(structures), forces=False).energy_G
    assert energy_G is not None
    return energy_G.numpy()


@every_body
def test_forces_are_minus_the_numerical_gradient(network: MaterialsNetwork) -> None:
    structure = replace(random_structure(2, 4, periodic=True, source=1), charge=-1.0, multiplicity=2.0)
    ways = [(atom, axis, sign) for atom in (0, 3) for axis in range(3) for sign in (1.0, -1.0)]
    displaced = []
    for atom, axis, sign in ways:
        positions = structure.positions_N3.copy()
        positions[atom, axis] += sign * STEP
        displaced.append(moved(structure, positions))
    up, down = energies(network, displaced).reshape(6, 2).T
    forces_N3 = network.predict(**batch_of([structure])).forces_N3
    assert forces_N3 is not None and forces_N3.abs().max() > 1e-2
    wanted = -(up - down).reshape(2, 3) / (2 * STEP)
    np.testing.assert_allclose(forces_N3.detach().numpy()[[0, 3]], wanted, atol=1e-8)


@every_body
def test_stress_is_the_strain_derivative_over_the_volume(network: MaterialsNetwork) -> None:
    """As in ASE: positive where stretching raises the energy."""
    structure = replace(random_structure(2, 4, periodic=True, source=1), charge=-1.0, multiplicity=2.0)
    stretched = []
    for a, b in [(0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)]:
        for sign in (1.0, -1.0):
            strain = np.zeros((3, 3))
            strain[a, b] += 0.5 * sign * STEP
            strain[b, a] += 0.5 * sign * STEP
            stretched.append(strained(structure, strain))
    up, down = energies(network, stretched).reshape(6, 2).T
    volume = abs(np.linalg.det(structure.cell_33))
    wanted = (up - down) / (2 * STEP) / volume
    stress_G33 = network.predict(**batch_of([structure]), stress=True).stress_G33
    assert stress_G33 is not None
    (found,) = stress_G33.detach().numpy()
    assert np.abs(wanted).max() > 1e-5
    np.testing.assert_allclose(found[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]], wanted, atol=1e-9)
    np.testing.assert_array_equal(found, found.T)


@every_body
def test_forces_of_a_structure_add_up_to_nothing(network: MaterialsNetwork) -> None:
    graphs = [replace(random_structure(1, 6), charge=2.0), random_structure(2, 4, periodic=True, source=1)]
    batch = batch_of(graphs)
    forces_N3 = network.predict(**batch).forces_N3
    assert forces_N3 is not None and forces_N3.abs().max() > 1e-2
    net_G3 = torch.zeros(2, 3, dtype=torch.float64).index_add(0, batch["graph_N"], forces_N3.detach())
    assert net_G3.abs().max() < 1e-12
    # And no torque on what has no cell.
    torque_3 = torch.linalg.cross(batch["positions_N3"][:6], forces_N3.detach()[:6]).sum(0)
    assert torque_3.abs().max() < 1e-12


@every_body
def test_energy_and_forces_are_continuous_at_the_cutoff(network: MaterialsNetwork) -> None:
    """An atom that crosses the cutoff of its only neighbour, and of one among others."""
    gap = 1e-7

    def at(distance: float, others: bool) -> Structure:
        positions = [[0.0, 0.0, 0.0], [distance, 0.0, 0.0]]
        positions += [[-1.0, 0.3, 0.0], [-0.4, -1.0, 0.2]] if others else []
        return Structure([6, 8, 1, 7][: len(positions)], np.array(positions))

    for others in (False, True):
        near, far = at(CUTOFF - gap, others), at(CUTOFF + gap, others)
        assert edges_of(near)[0].shape[1] == edges_of(far)[0].shape[1] + 2
        with torch.no_grad():
            a, b = (network.predict(**batch_of([s])) for s in (near, far))
        assert a.energy_G is not None and b.energy_G is not None
        assert a.forces_N3 is not None and b.forces_N3 is not None
        # Charges act beyond the cutoff: what the force on the atom does on the way is no jump.
        work = 2.0 * gap * float(a.forces_N3[1, 0])
        assert abs(float(a.energy_G - b.energy_G) - work) < 1e-12
        assert (a.forces_N3 - b.forces_N3).abs().max() < 1e-6


def forces_along(
    network: MaterialsNetwork, structure: Structure, direction_N3: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """Forces [places, 3 N] where the structure is moved by each of `places` (A) along a direction."""
    moves = [moved(structure, structure.positions_N3 + place * direction_N3) for place in places]
    with torch.no_grad():
        forces_N3 = network.predict(**batch_of(moves)).forces_N3
    assert forces_N3 is not None
    return forces_N3.reshape(len(places), -1).numpy()


@every_body
def test_forces_do_not_jump_along_a_path(network: MaterialsNetwork) -> None:
    """Where they change most, the path is looked at more and more closely: what is continuous changes less and less.

    On the way neighbours enter and leave the cutoff and become each atom's largest message and cease to be so.
    """
    structure = random_structure(0, 12)
    direction_N3 = np.random.default_rng(9).normal(size=(12, 3))
    direction_N3 /= np.linalg.norm(direction_N3)
    places = np.linspace(0.0, 0.6, 61)
    found = forces_along(network, structure, direction_N3, places)
    steepest = np.argsort(np.abs(np.diff(found, axis=0)).max(1))[-3:]
    for place in steepest:
        first, last = places[place], places[place + 1]
        while last - first > 1e-8:
            near = np.linspace(first, last, 11)
            change = np.abs(np.diff(forces_along(network, structure, direction_N3, near), axis=0)).max(1)
            first, last = near[change.argmax()], near[change.argmax() + 1]
        assert change.max() < 1e-6 * np.abs(found).max()


@every_body
@pytest.mark.parametrize("atoms", [3, 5])
def test_forces_are_those_of_the_energy_where_neighbours_tie(network: MaterialsNetwork, atoms: int) -> None:
    """The atom in the middle passes the point where its neighbours on both sides are equally far.

    Differences of energies are taken across that point: they are those of the force only where it does not jump there.
    (The lengths of PaiNN's vectors, which are 0 at that point, are rounded off within 1e-4 as published: steps are smaller.)
    """
    step = 1e-6
    along = np.array([1.0, 0.0, 0.0])
    neighbours = np.array([along, -along, [0.0, 1.1, 0.3], [0.0, -1.1, -0.3]])[: atoms - 1]
    structure = Structure([6] + [8] * (atoms - 1), np.concatenate((np.zeros((1, 3)), 1.4 * neighbours)))
    direction_N3 = np.zeros((atoms, 3))
    direction_N3[0] = along
    for place in (-3e-7, 0.0, 3e-7, 1e-3):
        at = [structure.positions_N3 + (place + sign * step) * direction_N3 for sign in (1.0, -1.0)]
        up, down = energies(network, [moved(structure, positions) for positions in at])
        force = forces_along(network, structure, direction_N3, np.array([place]))[0, 0]
        assert force == pytest.approx(-(up - down) / (2 * step), abs=2e-7)


@every_body
def test_forces_turn_smoothly_at_the_cutoff(network: MaterialsNetwork) -> None:
    """The energy has a continuous second derivative where an atom enters, by itself or among others."""
    gap = 1e-5
    outward_23 = np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    alone = Structure([6, 8], CUTOFF * outward_23)
    others = Structure(
        [6, 8, 1, 7], np.array([[0.0, 0.0, 0.0], [CUTOFF, 0.0, 0.0], [-1.0, 0.3, 0.0], [-0.4, -1.0, 0.2]])
    )
    for structure in (alone, others):
        outward_N3 = np.zeros((len(structure.species), 3))
        outward_N3[1, 0] = 1.0
        found = forces_along(network, structure, outward_N3, np.array([-gap, 0.0, gap, 2 * gap]))
        inside, at, outside = np.diff(found, axis=0) / gap
        np.testing.assert_allclose(inside, outside, atol=1e-3)
        np.testing.assert_allclose(at, outside, atol=1e-3)


@every_body
def test_gradients_in_float32_are_those_in_float64(network: MaterialsNetwork) -> None:
    """Up to rounding: nothing in a network, in its derivatives least of all, hangs on which of two numbers is larger."""
    species_N, batch = labelled()
    narrow = copy.deepcopy(network).float()
    narrow.dtype = torch.float32
    lists = []
    for one in (network, narrow):
        found = torch.autograd.grad(one(species_N, **batch).sum(), list(one.parameters()), allow_unused=True)
        lists.append(torch.cat([grad.double().flatten() for grad in found if grad is not None]))
    wide, single = lists
    assert (single - wide).norm() < 1e-4 * wide.norm()


def labelled() -> tuple[Tensor, dict[str, Tensor]]:
    """A small mixed batch with labels for energy, forces and stress."""
    batch = batch_of([random_structure(1, 4), random_structure(2, 3, periodic=True, source=1)])
    draw = torch.Generator().manual_seed(0)
    labels = {
        "energy_G": torch.randn(2, generator=draw, dtype=torch.float64),
        "forces_N3": torch.randn(7, 3, generator=draw, dtype=torch.float64),
        "stress_G33": torch.randn(2, 3, 3, generator=draw, dtype=torch.float64) * 0.1,
    }
    labels["stress_G33"][0] = torch.nan
    species_N = batch.pop("species_N")
    return species_N, batch | labels


@every_body
def test_double_backward_is_the_derivative_of_force_and_stress_losses(network: MaterialsNetwork) -> None:
    """Along one random direction in all parameters, each loss by itself."""
    species_N, batch = labelled()
    parameters = list(network.parameters())
    draw = torch.Generator().manual_seed(3)
    direction = [torch.randn(p.shape, generator=draw, dtype=p.dtype) for p in parameters]
    step = 1e-6

    def shifted(by: float) -> Tensor:
        with torch.no_grad():
            for parameter, change in zip(parameters, direction, strict=True):
                parameter += by * change
        result: Tensor = network(species_N, **batch).detach()
        with torch.no_grad():
            for parameter, change in zip(parameters, direction, strict=True):
                parameter -= by * change
        return result

    wanted_T = (shifted(step) - shifted(-step)) / (2 * step)
    losses_T = network(species_N, **batch)
    for task in range(3):
        grads = torch.autograd.grad(losses_T[task], parameters, retain_graph=True, allow_unused=True)
        along = sum(float((g * d).sum()) for g, d in zip(grads, direction, strict=True) if g is not None)
        assert along == pytest.approx(float(wanted_T[task]), rel=2e-6, abs=1e-8), task


@every_body
def test_edge_chunks_give_the_same_losses_and_gradients(network: MaterialsNetwork) -> None:
    species_N, batch = labelled()
    edges = batch["edges_2E"].shape[1]

    def losses_and_gradients(chunk: int | None) -> list[Tensor]:
        network.edge_chunk = chunk
        network.zero_grad(set_to_none=True)
        losses_T = network(species_N, **batch)
        losses_T.sum().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in network.parameters()]
        return [losses_T.detach(), *grads]

    try:
        whole, chunked = losses_and_gradients(None), losses_and_gradients(edges // 3)
    finally:
        network.edge_chunk = None
    assert edges % 3, "the last chunk is to be a short one"
    for a, b in zip(whole, chunked, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("envelope", ["polynomial", "cosine"])
@pytest.mark.parametrize("radial", ["bessel", "gaussian"])
def test_every_radial_basis_under_every_envelope(radial: str, envelope: str) -> None:
    """Forces are right with each, not only with the defaults."""
    network = filled_network(small_model("painn", radial=radial, envelope=envelope))
    test_forces_are_minus_the_numerical_gradient(network)
    test_energy_and_forces_are_continuous_at_the_cutoff(network)


def test_evaluation_gives_forces_without_keeping_a_graph() -> None:
    network = filled_network(small_model("painn"))
    batch = batch_of([random_structure(1, 4)])
    trained = network.predict(**batch)
    with torch.no_grad():
        plain = network.predict(**batch)
    assert trained.forces_N3 is not None and plain.forces_N3 is not None
    assert trained.forces_N3.requires_grad and not plain.forces_N3.requires_grad
    assert all(not value.requires_grad for value in vars(plain).values() if value is not None)
    torch.testing.assert_close(plain.forces_N3, trained.forces_N3.detach(), rtol=1e-12, atol=1e-12)


def test_volumes_do_not_depend_on_the_handedness_of_a_cell() -> None:
    cell = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 0.0], [0.5, 0.5, 4.0]], dtype=torch.float64)
    found = cell_volumes(torch.stack((cell, cell[[1, 0, 2]], torch.zeros(3, 3, dtype=torch.float64))))
    torch.testing.assert_close(found, torch.tensor([24.0, 24.0, 0.0], dtype=torch.float64))


def test_a_structure_without_a_cell_has_no_stress() -> None:
    network = filled_network(small_model("painn"))
    molecule, crystal = random_structure(1, 4), random_structure(2, 4, periodic=True)
    stress_G33 = network.predict(**batch_of([molecule, replace(crystal, source=1)]), stress=True).stress_G33
    assert stress_G33 is not None
    assert stress_G33[0].isnan().all() and stress_G33[1].isfinite().all()
