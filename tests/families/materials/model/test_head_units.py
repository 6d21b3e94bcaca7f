"""Reference energies by least squares, and tables by branch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx.errors import DataError
from phalanx.families.materials.model.head_units import BranchUnits, fit_reference_energies
from phalanx.families.materials.model_config import Branch
from small_networks import small_model


def test_energies_of_elements_are_found_again() -> None:
    draw = np.random.default_rng(0)
    true = {1: -13.6, 6: -1030.0, 8: -2041.5}
    graph_N = np.repeat(np.arange(40), draw.integers(2, 12, 40))
    species_N = draw.choice(list(true), len(graph_N))
    energy_G = np.zeros(40)
    np.add.at(energy_G, graph_N, [true[z] for z in species_N])
    noise_G = draw.normal(0.0, 0.05, 40)
    size_G = np.bincount(graph_N)
    found, left = fit_reference_energies(species_N, graph_N, energy_G + noise_G * size_G)
    assert found == pytest.approx(true, abs=0.2)
    assert 0.03 < left < 0.06
    exact, nothing = fit_reference_energies(species_N, graph_N, energy_G)
    assert exact == pytest.approx(true, abs=1e-8) and nothing < 1e-8


def test_structures_without_an_energy_take_no_part() -> None:
    found, left = fit_reference_energies(np.array([1, 1, 8, 9]), np.array([0, 0, 1, 2]), np.array([4.0, 7.0, np.nan]))
    assert found == pytest.approx({1: 2.0, 8: 7.0}) and left == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(DataError, match="no structure has an energy"):
        fit_reference_energies(np.array([1]), np.array([0]), np.array([np.nan]))


def test_elements_that_always_come_together_share_their_energy() -> None:
    """CO alone says nothing of C and O apart: neither becomes huge, and the sum is right."""
    found, _ = fit_reference_energies(np.array([6, 8, 6, 8]), np.array([0, 0, 1, 1]), np.array([-10.0, -10.0]))
    assert found == pytest.approx({6: -5.0, 8: -5.0})


def test_tables_are_read_by_branch_and_element() -> None:
    branches = [Branch(name="a", weight=2.0, reference_energies={"1": -1.5}), Branch(name="b", energy_scale=4.0)]
    units = BranchUnits(small_model("painn", branches=branches))
    branch = torch.tensor([1, 0, 0])
    assert units.reference_energy(torch.tensor([1, 1, 8]), branch).tolist() == [0.0, -1.5, 0.0]
    assert units.energy_scale(branch).tolist() == [4.0, 1.0, 1.0]
    assert units.weight(branch).tolist() == [1.0, 2.0, 2.0]
    assert units.column_shift("properties_GP", branch).tolist() == [[0.0, 0.0]] * 3
