"""Neighbour lists: vesin's on the CPU, ours in PyTorch, and ase's as the judge of both."""

from __future__ import annotations

import ase
import numpy as np
import pytest
import torch
from ase.neighborlist import neighbor_list

from phalanx.errors import DataError
from phalanx.families.materials.data import neighbours
from phalanx.families.materials.data.neighbours import device_edges, find_edges

Periodic = tuple[bool, bool, bool]
CASES: dict[str, tuple[int, float, float, Periodic]] = {
    # atoms, side of the cell, skew of its vectors, periodic directions
    "molecule": (18, 6.0, 0.0, (False, False, False)),
    "lone atom": (1, 6.0, 0.0, (False, False, False)),
    "gas in a long box": (40, 60.0, 0.0, (False, False, False)),
    "crystal": (30, 9.0, 0.1, (True, True, True)),
    "large crystal": (400, 26.0, 0.15, (True, True, True)),
    "cell smaller than the cutoff": (3, 2.6, 0.2, (True, True, True)),
    "one atom in a small cell": (1, 1.7, 0.1, (True, True, True)),
    "very skew": (20, 7.0, 0.9, (True, True, True)),
    "slab": (40, 11.0, 0.2, (True, True, False)),
    "wire": (25, 4.0, 0.2, (False, True, False)),
    "tube along the first vector": (60, 14.0, 0.1, (True, False, False)),
}
CUTOFF = 4.0


def make(name: str) -> tuple[np.ndarray, np.ndarray, Periodic]:
    atoms, side, skew, periodic = CASES[name]
    random = np.random.default_rng(sorted(CASES).index(name))
    cell = side * (np.eye(3) + skew * random.uniform(-1, 1, (3, 3)))
    # Beyond the cell on purpose: dynamics do not wrap atoms.
    positions = random.uniform(-1.2, 2.2, (atoms, 3)) @ cell if any(periodic) else random.uniform(0, side, (atoms, 3))
    return positions, cell, periodic


def rows(source: np.ndarray, target: np.ndarray, images: np.ndarray) -> np.ndarray:
    found = np.column_stack((target, source, images)).astype(np.int64)
    return found[np.lexsort(found.T[::-1])]


def by_ase(positions: np.ndarray, cell: np.ndarray, periodic: Periodic) -> np.ndarray:
    atoms = ase.Atoms("H" * len(positions), positions=positions, cell=cell, pbc=periodic)
    source, target, images = neighbor_list("ijS", atoms, CUTOFF)
    return rows(source, target, images)


@pytest.mark.parametrize("name", CASES)
def test_prepared_edges_are_those_of_ase(name: str) -> None:
    positions, cell, periodic = make(name)
    edges = find_edges(positions, cell, periodic, CUTOFF)
    expected = by_ase(positions, cell, periodic)
    assert np.array_equal(np.column_stack((edges.target, edges.source, edges.images)), expected)
    flags = np.array(periodic)[:, None]
    vectors = positions[edges.target] + edges.images @ (cell * flags) - positions[edges.source]
    assert np.allclose(np.linalg.norm(vectors, axis=1), edges.distances)
    assert len(expected) > 0 or name in ("lone atom", "gas in a long box")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_device_edges_are_those_of_ase(name: str, dtype: torch.dtype) -> None:
    positions, cell, periodic = make(name)
    # No pair may lie so near the cutoff that formats disagree.
    positions, cell = positions.astype(np.float32).astype(float), cell.astype(np.float32).astype(float)
    found = device_edges(
        torch.tensor(positions, dtype=dtype),
        torch.tensor(cell, dtype=dtype)[None],
        CUTOFF,
        periodic_G3=torch.tensor(periodic)[None],
    )
    source, target = found.edges_2E.numpy()
    ours = np.column_stack((target, source, found.images_E3.numpy()))
    assert np.array_equal(ours, by_ase(positions, cell, periodic))
    vectors = positions[target] + found.shifts_E3.double().numpy() - positions[source]
    assert len(vectors) == 0 or np.linalg.norm(vectors, axis=1).max() <= CUTOFF * (1 + 1e-5)


def test_structures_of_every_kind_together_are_each_alone() -> None:
    parts = [make(name) for name in CASES]
    graph = np.repeat(np.arange(len(parts)), [len(positions) for positions, _, _ in parts])
    found = device_edges(
        torch.tensor(np.concatenate([positions for positions, _, _ in parts])),
        torch.tensor(np.stack([cell for _, cell, _ in parts])),
        CUTOFF,
        graph_N=torch.tensor(graph),
        periodic_G3=torch.tensor([periodic for _, _, periodic in parts]),
    )
    expected, first = [], 0
    for positions, cell, periodic in parts:
        alone = by_ase(positions, cell, periodic)
        expected.append(alone + np.array([first, first, 0, 0, 0]))
        first += len(positions)
    source, target = found.edges_2E.numpy()
    assert np.array_equal(np.column_stack((target, source, found.images_E3.numpy())), np.concatenate(expected))


def test_edges_found_in_many_small_runs_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    positions, cell, _ = make("large crystal")
    inputs = torch.tensor(positions), torch.tensor(cell)[None], CUTOFF
    whole = device_edges(*inputs)
    monkeypatch.setattr(neighbours, "_CANDIDATES", 500)
    for ours, expected in zip(device_edges(*inputs), whole, strict=True):
        assert torch.equal(ours, expected)


def test_no_atoms_have_no_edges() -> None:
    found = device_edges(torch.empty(0, 3), torch.zeros(1, 3, 3), CUTOFF)
    assert found.edges_2E.shape == (2, 0) and found.shifts_E3.shape == (0, 3)


def test_the_nearest_neighbours_are_kept_with_those_that_tie() -> None:
    # A chain along x: the two nearest of an inner atom are equally far, so asking for one keeps both.
    positions = np.array([[0.0, 0, 0], [1.0, 0, 0], [2.0, 0, 0], [3.5, 0, 0]])
    cell, alone = np.zeros((3, 3)), (False, False, False)
    edges = find_edges(positions, cell, alone, 10.0, max_neighbours=1)
    assert list(zip(edges.source.tolist(), edges.target.tolist(), strict=True)) == [
        (1, 0),
        (0, 1),
        (2, 1),
        (1, 2),
        (2, 3),
    ]
    assert len(find_edges(positions, cell, alone, 10.0, max_neighbours=3)) == 12


@pytest.mark.parametrize("name", ["crystal", "cell smaller than the cutoff", "slab", "molecule", "lone atom"])
def test_both_keep_the_same_nearest_neighbours(name: str) -> None:
    positions, cell, periodic = make(name)
    expected = find_edges(positions, cell, periodic, CUTOFF, max_neighbours=5)
    flags = torch.tensor(periodic)[None]
    found = device_edges(torch.tensor(positions), torch.tensor(cell)[None], CUTOFF, periodic_G3=flags, max_neighbours=5)
    assert np.array_equal(found.edges_2E.numpy(), np.stack((expected.source, expected.target)))
    assert np.array_equal(found.images_E3.numpy(), expected.images)
    degrees = np.bincount(expected.target, minlength=len(positions))
    everything = np.bincount(find_edges(positions, cell, periodic, CUTOFF).target, minlength=len(positions))
    assert (degrees >= np.minimum(everything, 5)).all()
    assert name != "crystal" or (degrees < everything).any()


def test_lost_atoms_and_flat_cells_are_named_on_the_device() -> None:
    positions = torch.tensor([[0.0, 0, 0], [torch.nan, 0, 0]])
    with pytest.raises(DataError, match="atom 1 has position"):
        device_edges(positions, torch.zeros(1, 3, 3), CUTOFF)
    flat = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [1.0, 1.0, 0]])
    with pytest.raises(DataError, match="structure 0 is periodic but its cell"):
        device_edges(torch.zeros(1, 3), flat[None], CUTOFF)
