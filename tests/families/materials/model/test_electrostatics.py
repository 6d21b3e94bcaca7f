"""The energy of charges: Madelung's constants, direct sums, charged cells, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import erf

from atom_graphs import Structure, batch_of, random_structure
from phalanx.errors import DataError
from phalanx.families.materials.model.electrostatics import electrostatic_energies
from phalanx.families.materials.model.geometry import edge_geometry, edge_vectors
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.model.repulsion import COULOMB
from phalanx.families.materials.model_config import ChargeHead, Electrostatics, MaterialsModel
from small_networks import filled_network, small_model

POINTS = Electrostatics(smearing=0.0)
WIDE = Electrostatics(smearing=1.0)


def ewald_model(options: Electrostatics = POINTS, cutoff: float = 3.0) -> MaterialsModel:
    return small_model("schnet", electrostatics=options, cutoff=cutoff)


def energies(config: MaterialsModel, structures: list[Structure], charges: list[list[float]]) -> np.ndarray:
    """Of each structure, with these charges."""
    batch = batch_of(structures, config.cutoff)
    vector_E3 = edge_vectors(batch["positions_N3"], batch["edges_2E"], batch["shifts_E3"])
    geometry = edge_geometry(
        config,
        vector_E3,
        batch["edges_2E"],
        batch["species_N"],
        batch["graph_N"],
        dtype=torch.float64,
        graphs=len(structures),
    )
    flat_N = torch.tensor([q for one in charges for q in one], dtype=torch.float64)
    found_N = electrostatic_energies(config, flat_N, geometry, batch["positions_N3"], batch["cells_G33"])
    sums: np.ndarray = torch.zeros(len(structures)).double().index_add(0, batch["graph_N"], found_N).numpy()
    return sums


def rock_salt(bond: float) -> Structure:
    fcc = np.array([[0, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]], dtype=float)
    places = np.concatenate((fcc, fcc + np.array([1.0, 0.0, 0.0])))
    return Structure([1] * 8, bond * places, 2.0 * bond * np.eye(3))


def caesium_chloride(bond: float) -> Structure:
    side = 2.0 * bond / math.sqrt(3.0)
    return Structure([1, 1], side * np.array([[0.0, 0.0, 0.0], [0.5, 0.5, 0.5]]), side * np.eye(3))


CRYSTALS = [(rock_salt, [1.0] * 4 + [-1.0] * 4, 1.747564594633182), (caesium_chloride, [1.0, -1.0], 1.762674773070988)]


@pytest.mark.parametrize(("crystal", "charges", "madelung"), CRYSTALS, ids=["NaCl", "CsCl"])
@pytest.mark.parametrize("smearing", [0.0, 0.1])
@pytest.mark.parametrize("cutoff", [2.5, 4.0])
def test_ionic_crystals_have_the_constants_of_madelung(
    crystal: Any, charges: list[float], madelung: float, smearing: float, cutoff: float
) -> None:
    """Gaussians narrow beside the bond act as points."""
    bond, pairs = 2.2, len(charges) / 2
    (energy,) = energies(ewald_model(Electrostatics(smearing=smearing), cutoff), [crystal(bond)], [charges])
    assert -energy * bond / COULOMB / pairs == pytest.approx(madelung, abs=1e-8)


def test_wide_charges_lack_what_their_overlap_takes_from_points() -> None:
    """All of it is within six of their widths, where it is summed directly."""
    crystal, charges = random_structure(2, 4, periodic=True), [0.4, -0.7, 0.5, -0.2]
    wide, points = (energies(ewald_model(one), [crystal], [charges])[0] for one in (WIDE, POINTS))
    batch = batch_of([crystal])
    steps = np.stack(np.meshgrid(*[np.arange(-5, 6)] * 3, indexing="ij"), -1).reshape(-1, 3) @ crystal.cell_33
    places, missing = batch["positions_N3"].numpy(), 0.0
    for i, first in enumerate(charges):
        for j, second in enumerate(charges):
            distances = np.linalg.norm(places[j] - places[i] + steps, axis=1)
            distances = distances[distances > 1e-9]
            missing += 0.5 * COULOMB * first * second * ((1.0 - erf(distances / 2.0)) / distances).sum()
    assert wide == pytest.approx(points - missing, abs=1e-8)


@pytest.mark.parametrize("smearing", [0.0, 0.2, 1.0])
def test_charges_of_a_molecule_act_in_pairs(smearing: float) -> None:
    """In one batch with a crystal, and beyond the cutoff as within it."""
    molecule = random_structure(1, 6, spread=2.0)
    charges = [0.3, -0.5, 0.9, 0.1, -0.4, -0.1]
    crystal, other = caesium_chloride(2.0), [0.5, -0.5]
    config = ewald_model(Electrostatics(smearing=smearing))
    found = energies(config, [molecule, crystal], [charges, other])
    wanted = 0.0
    for i in range(6):
        for j in range(i):
            r = float(np.linalg.norm(molecule.positions_N3[i] - molecule.positions_N3[j]))
            wanted += COULOMB * charges[i] * charges[j] / r * (float(erf(r / 2.0 / smearing)) if smearing else 1.0)
    assert found[0] == pytest.approx(wanted, abs=1e-9)
    assert found[1] == pytest.approx(energies(config, [crystal], [other])[0], abs=1e-10)


def test_a_charged_cell_does_not_depend_on_where_the_sum_is_parted() -> None:
    crystal, charges = random_structure(2, 4, periodic=True), [0.4, 0.7, -0.5, 0.9]
    found = [
        energies(ewald_model(Electrostatics(smearing=width), cutoff), [crystal], [charges])[0]
        for width, cutoff in ((0.0, 2.5), (0.0, 4.0), (0.0, 6.0))
    ]
    np.testing.assert_allclose(found, found[0], atol=1e-8)
    # A lone charge in a cube: the constant of the simple cubic Wigner lattice.
    cube = Structure([1], np.zeros((1, 3)), 3.0 * np.eye(3))
    (energy,) = energies(ewald_model(), [cube], [[1.0]])
    assert energy * 3.0 / COULOMB == pytest.approx(-2.837297479480619 / 2.0, abs=1e-8)


def network(options: Electrostatics, **changes: Any) -> MaterialsNetwork:
    return filled_network(small_model("painn", electrostatics=options, **changes))


@pytest.mark.parametrize("from_charges", [False, True])
def test_charges_add_up_to_the_total_charge(from_charges: bool) -> None:
    options = Electrostatics(from_charges=from_charges)
    model = network(options, charges=ChargeHead(conserve=False))
    structures = [
        replace(random_structure(1, 5), charge=-1.0),
        replace(random_structure(2, 4, periodic=True, source=1), charge=2.0),
        random_structure(4, 3, periodic=True),
    ]
    batch = batch_of(structures)
    with torch.no_grad():
        found = model.predict(**batch).effective_charges_N
    assert found is not None and found.std() > 1e-3
    sums = torch.zeros(3, dtype=torch.float64).index_add(0, batch["graph_N"], found)
    torch.testing.assert_close(sums, batch["total_charge_G"], rtol=0.0, atol=1e-12)


def test_charges_reach_beyond_the_cutoff() -> None:
    """Two molecules that share no edge: neither feels the other but for its charges."""
    ones, others = random_structure(1, 4), random_structure(4, 5)
    apart = [
        replace(
            ones,
            species=[*ones.species, *others.species],
            positions_N3=np.vstack((ones.positions_N3, others.positions_N3 + np.array([distance, 0.0, 0.0]))),
        )
        for distance in (8.0, 12.0)
    ]
    for options, limit in ((None, 1e-12), (WIDE, None)):
        model = filled_network(small_model("painn", electrostatics=options))
        with torch.no_grad():
            near, far = model.predict(**batch_of(apart), forces=False).energy_G.tolist()  # type: ignore[union-attr]
        assert abs(near - far) < limit if limit else abs(near - far) > 1e-5


def test_a_slab_is_refused() -> None:
    slab = random_structure(2, 4, periodic=True)
    assert slab.cell_33 is not None
    slab.cell_33[2] = 0.0
    with pytest.raises(DataError, match="periodic in one or two directions"):
        network(WIDE).predict(**batch_of([random_structure(1, 3), slab]))


def test_charges_need_what_they_add_to_and_come_from() -> None:
    for changes, message in (
        ({"energy": None}, "electrostatics is part of the energy"),
        ({"charges": None, "electrostatics": Electrostatics(from_charges=True)}, "needs the charge head"),
    ):
        with pytest.raises(ValueError, match=message):
            small_model("painn", **{"electrostatics": WIDE, **changes})
