"""The repulsion of nuclei: the published potential, where atoms nearly touch, and nothing at the length of a bond."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from ase.data import covalent_radii

from atom_graphs import Structure, batch_of
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.model_config import EnergyHead
from small_networks import filled_network, small_model

ZBL = EnergyHead(force_weight=1.0, stress_weight=1.0, repulsion="zbl")
PAIRS = [(1, 1), (1, 8), (6, 7), (8, 8)]


def dimer(pair: tuple[int, int], distance: float) -> Structure:
    return Structure(list(pair), np.array([[0.1, -0.2, 0.3], [0.1, -0.2, 0.3 + distance]]))


def network(repulsion: EnergyHead = ZBL, **fields: Any) -> MaterialsNetwork:
    return filled_network(small_model("painn", energy=repulsion, **fields))


def energies(model: MaterialsNetwork, structures: list[Structure]) -> torch.Tensor:
    with torch.no_grad():
        found = model.predict(**batch_of(structures), forces=False).energy_G
    assert found is not None
    return found


def published(pair: tuple[int, int], distance: float) -> float:
    """Formula of Ziegler, Biersack and Littmark in hartree and bohr, without the fading."""
    bohr, hartree = 0.529177211, 27.2113862
    first, second = pair
    x = distance / bohr / (0.8854 / (first**0.23 + second**0.23))
    terms = [(0.1818, 3.2), (0.5099, 0.9423), (0.2802, 0.4028), (0.02817, 0.2016)]
    return hartree * first * second / (distance / bohr) * sum(a * math.exp(-b * x) for a, b in terms)


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_repel_as_published_and_fade_to_nothing(pair: tuple[int, int]) -> None:
    reach = float(covalent_radii[pair[0]] + covalent_radii[pair[1]])
    distances = [0.1, 0.3, 0.5, 0.99 * reach, reach, 1.2 * reach]
    structures = [dimer(pair, distance) for distance in distances]
    added = energies(network(), structures) - energies(network(EnergyHead()), structures)
    for distance, energy in zip(distances, added.tolist(), strict=True):
        x = min(distance / reach, 1.0)
        fade = 1.0 - 28.0 * x**6 + 48.0 * x**7 - 21.0 * x**8
        assert energy == pytest.approx(published(pair, distance) * fade, rel=1e-6, abs=1e-9)
    assert added[-2:].abs().max() < 1e-9


@pytest.mark.parametrize("pair", PAIRS)
def test_pressed_atoms_are_pushed_apart(pair: tuple[int, int]) -> None:
    distances = np.arange(0.3, 0.1, -0.02)
    model = network()
    rising = energies(model, [dimer(pair, distance) for distance in distances])
    assert bool((rising.diff() > 1.0).all())
    forces_N3 = model.predict(**batch_of([dimer(pair, 0.2)])).forces_N3
    assert forces_N3 is not None
    first, second = forces_N3[:, 2].tolist()
    assert first < -10.0 < 10.0 < second


def test_nothing_reaches_beyond_the_cutoff() -> None:
    short = network(cutoff=0.5)
    without = network(EnergyHead(), cutoff=0.5)
    for distance in (0.499999, 0.6):
        batch = batch_of([dimer((8, 8), distance)], cutoff=0.5)
        with torch.no_grad():
            found = [model.predict(**batch, forces=False).energy_G for model in (short, without)]
        assert found[0] is not None and found[1] is not None
        assert float(found[0] - found[1]) == pytest.approx(0.0, abs=1e-9)
