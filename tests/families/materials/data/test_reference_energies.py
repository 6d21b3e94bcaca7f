"""Energies of elements by least squares over the energies of structures."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from phalanx.families.materials.data.graph_statistics import fit_reference_energies


def fitted(
    species_N: npt.ArrayLike, graph_N: npt.ArrayLike, energy_G: npt.ArrayLike
) -> tuple[dict[int, float], float | None]:
    """Fit to the structures of one shard, all of which are trained on."""
    species, energies = np.asarray(species_N, dtype=np.uint8), np.asarray(energy_G, dtype=np.float64)
    shard = {
        "node_starts": np.concatenate(([0], np.cumsum(np.bincount(graph_N)))),
        "species": species,
        "energy": energies,
        "split": np.zeros(len(energies), dtype=np.uint8),
    }
    return fit_reference_energies([shard], np.unique(species).astype(np.int64))


def test_energies_of_elements_are_found_again() -> None:
    draw = np.random.default_rng(0)
    true = {1: -13.6, 6: -1030.0, 8: -2041.5}
    graph_N = np.repeat(np.arange(40), draw.integers(2, 12, 40))
    species_N = draw.choice(list(true), len(graph_N))
    energy_G = np.zeros(40)
    np.add.at(energy_G, graph_N, [true[z] for z in species_N])
    noise_G = draw.normal(0.0, 0.05, 40)
    size_G = np.bincount(graph_N)
    found, left = fitted(species_N, graph_N, energy_G + noise_G * size_G)
    assert found == pytest.approx(true, abs=0.2)
    assert left is not None and 0.03 < left < 0.06
    exact, nothing = fitted(species_N, graph_N, energy_G)
    assert exact == pytest.approx(true, abs=1e-8) and nothing is not None and nothing < 1e-8


def test_structures_without_an_energy_take_no_part() -> None:
    found, left = fitted([1, 1, 8, 9], [0, 0, 1, 2], [4.0, 7.0, np.nan])
    assert {z: found[z] for z in (1, 8)} == pytest.approx({1: 2.0, 8: 7.0}) and left == pytest.approx(0.0, abs=1e-12)
    assert fitted([1], [0], [np.nan]) == ({}, None)


def test_elements_that_always_come_together_share_their_energy() -> None:
    """CO alone says nothing of C and O apart: neither becomes huge, and the sum is right."""
    found, _ = fitted([6, 8, 6, 8], [0, 0, 1, 1], [-10.0, -10.0])
    assert found == pytest.approx({6: -5.0, 8: -5.0})
