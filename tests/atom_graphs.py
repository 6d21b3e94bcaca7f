"""Small batches of atoms for tests: molecules and crystals with all edges within a cutoff, and transformations of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

CUTOFF = 3.0


@dataclass(frozen=True)
class Structure:
    """Atoms of one graph; without a cell it is a molecule."""

    species: list[int]
    positions_N3: np.ndarray
    cell_33: np.ndarray | None = None
    source: int = 0
    charge: float = 0.0
    multiplicity: float = 1.0


def random_structure(
    seed: int, atoms: int, *, periodic: bool = False, source: int = 0, spread: float = 1.2
) -> Structure:
    """Atoms on a jittered grid, so that none are close; the cell, where there is one, is no box."""
    draw = np.random.default_rng(seed)
    side = int(np.ceil(atoms ** (1 / 3)))
    grid = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)[:atoms]
    positions = spread * grid + draw.uniform(-0.25, 0.25, (atoms, 3))
    species = draw.choice([1, 6, 7, 8], atoms).tolist()
    cell = None
    if periodic:
        cell = np.eye(3) * (spread * side + 0.6) + draw.uniform(-0.3, 0.3, (3, 3))
    return Structure(species, positions, cell, source)


def edges_of(structure: Structure, cutoff: float = CUTOFF) -> tuple[np.ndarray, np.ndarray]:
    """All directed edges by comparing everything with everything: pairs [2, E] and shift vectors [E, 3]."""
    positions = structure.positions_N3
    images = np.zeros((1, 3))
    if structure.cell_33 is not None:
        steps = np.stack(np.meshgrid(*[np.arange(-2, 3)] * 3, indexing="ij"), -1).reshape(-1, 3)
        images = steps @ structure.cell_33
    difference = positions[None, :, None] + images[None, None] - positions[:, None, None]
    distance = np.linalg.norm(difference, axis=-1)
    source, target, image = np.nonzero((distance < cutoff) & (distance > 1e-9))
    return np.stack((source, target)), images[image]


def batch_of(structures: Sequence[Structure], cutoff: float = CUTOFF) -> dict[str, Tensor]:
    """Keyword tensors of a network, float64, with `species_N` beside them."""
    edges, shifts, start = [], [], 0
    for structure in structures:
        pairs, vectors = edges_of(structure, cutoff)
        edges.append(pairs + start)
        shifts.append(vectors)
        start += len(structure.species)
    cells = [np.zeros((3, 3)) if s.cell_33 is None else s.cell_33 for s in structures]
    return {
        "species_N": torch.tensor([z for s in structures for z in s.species]),
        "positions_N3": torch.tensor(np.concatenate([s.positions_N3 for s in structures])),
        "graph_N": torch.repeat_interleave(torch.tensor([len(s.species) for s in structures])),
        "edges_2E": torch.tensor(np.concatenate(edges, axis=1)),
        "shifts_E3": torch.tensor(np.concatenate(shifts)),
        "cells_G33": torch.tensor(np.stack(cells)),
        "source_G": torch.tensor([s.source for s in structures]),
        "total_charge_G": torch.tensor([s.charge for s in structures], dtype=torch.float64),
        "multiplicity_G": torch.tensor([s.multiplicity for s in structures], dtype=torch.float64),
    }


def moved(structure: Structure, positions_N3: np.ndarray) -> Structure:
    """The structure with its atoms elsewhere."""
    return replace(structure, positions_N3=positions_N3)


def strained(structure: Structure, strain_33: np.ndarray) -> Structure:
    """The structure, cell included, stretched by 1 + strain."""
    assert structure.cell_33 is not None
    by = np.eye(3) + strain_33
    return replace(structure, positions_N3=structure.positions_N3 @ by, cell_33=structure.cell_33 @ by)


def turned(structure: Structure, rotation_33: np.ndarray) -> Structure:
    """The structure, cell included, turned or reflected: vectors v become rotation v."""
    cell = None if structure.cell_33 is None else structure.cell_33 @ rotation_33.T
    return replace(structure, positions_N3=structure.positions_N3 @ rotation_33.T, cell_33=cell)


def orthogonal(seed: int, *, reflect: bool) -> np.ndarray:
    """A random rotation, or a rotation with a reflection."""
    matrix, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    wanted = -1.0 if reflect else 1.0
    return matrix * (wanted * np.sign(np.linalg.det(matrix)))


def chosen(batch: Mapping[str, Tensor], *names: str) -> dict[str, Tensor]:
    """Some of a batch's tensors."""
    return {name: batch[name] for name in names}
