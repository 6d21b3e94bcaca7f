"""Small sets of structures for tests, as .npz files and as prepared folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.families.materials.config import GraphData
from phalanx.families.materials.data.prepare_structures import prepare_graphs

ELEMENTS = np.array([6, 7, 8])


def write_set(path: Path, structures: int, *, seed: int = 0, periodic: bool = False, **changes: Any) -> dict[str, Any]:
    """Random structures of 2 to 40 atoms with neighbours 1.4 A apart, and labels of every kind.

    changes: arrays that replace the made ones; None leaves one out.
    """
    random = np.random.default_rng(seed)
    atoms = random.integers(2, 41, structures)
    ptr = np.concatenate(([0], np.cumsum(atoms)))
    total = int(ptr[-1])
    grid = np.stack(np.meshgrid(*[np.arange(4)] * 3, indexing="ij"), -1).reshape(-1, 3) * 1.4
    arrays: dict[str, Any] = {
        "ptr": ptr,
        "z": random.choice(ELEMENTS, total).astype(np.uint8),
        "pos": np.concatenate([grid[:count] for count in atoms]) + random.uniform(-0.1, 0.1, (total, 3)),
        "energy": random.normal(-100.0, 5.0, structures),
        "forces": random.normal(0.0, 1.0, (total, 3)),
        "charges": random.normal(0.0, 0.2, total),
        "dipole": random.normal(0.0, 1.0, (structures, 3)),
        "stress": random.normal(0.0, 0.01, (structures, 6)),
        "table": random.normal(0.0, 1.0, (structures, 3)),
        "spin": random.normal(0.0, 1.0, total),
        "family": np.arange(structures) // 3,
    }
    if periodic:
        arrays["cell"] = np.eye(3) * random.uniform(5.6, 6.5, (structures, 1, 1))
    # Of neutral structures.
    graph = np.repeat(np.arange(structures), atoms)
    arrays["charges"] -= (np.bincount(graph, arrays["charges"], structures) / atoms)[graph]
    arrays.update(changes)
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return arrays


def graph_data(prepared: Path, sources: Sequence[dict[str, Any]], **changes: Any) -> GraphData:
    """The `data` section of a run file for these sources."""
    given = {"sources": list(sources), "prepared": str(prepared), "cutoff": 3.0, "test_fraction": 0.1, **changes}
    return GraphData.model_validate(given)


def two_sources(folder: Path, *, structures: int = 60) -> GraphData:
    """A molecular source with charges and a property, and a periodic one with forces and stress."""
    write_set(folder / "molecules.npz", structures)
    write_set(folder / "crystals.npz", structures // 2, seed=1, periodic=True)
    return graph_data(
        folder / "prepared",
        [
            {
                "name": "molecules",
                "path": str(folder / "molecules.npz"),
                "labels": {"energy": "eV", "charges": "e", "dipole": "e*A"},
                "properties": {
                    "gap": {"key": "table", "column": 1, "unit": "Ha"},
                    "volume": {"key": "table", "column": 2, "unit": "bohr^3"},
                },
                "atom_properties": {"spin": "1"},
            },
            {
                "name": "crystals",
                "path": str(folder / "crystals.npz"),
                "labels": {"energy": "kcal/mol", "forces": "kcal/mol/A", "stress": "GPa"},
            },
        ],
    )


def prepared_sources(folder: Path, *, structures: int = 60) -> GraphData:
    """The same, prepared in several shards."""
    data = two_sources(folder, structures=structures)
    prepare_graphs(data, workers=1, piece_structures=16)
    return data
