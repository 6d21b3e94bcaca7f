"""A materials run small enough for a test: molecules of a toy force field with energies, forces and charges."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ase
import numpy as np
import yaml

from phalanx.config.load import load_run
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.training.start import train

CUTOFF = 3.0
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {
        "family": "materials",
        "body": "painn",
        "n_layers": 2,
        "d_model": 16,
        "n_radial": 6,
        "cutoff": CUTOFF,
        "max_atomic_number": 8,
        "mean_neighbors": 5.0,
        "energy": {"force_weight": 1.0, "weight": 1.0},
        "charges": {"weight": 0.5},
    },
    "data": {"cutoff": CUTOFF, "validation_fraction": 0.2, "test_fraction": 0.1},
    "layout": {"global_batch": 8, "microbatch": 2, "precision": "fp32"},
    "optimizer": {"lr": 0.005, "schedule": "constant", "weight_decay": 0.0},
    "training": {"steps": 6, "tensorboard": False},
    "evaluation": {"samples": 12},
}
_REACH = 2.5
"""Angstrom at which the toy force field's pairs end."""


def toy_energy(positions_N3: np.ndarray, species_N: np.ndarray) -> tuple[float, np.ndarray]:
    """Energy (eV) and forces (eV/A) of pairs that repel each other, the heavier the more, smoothly up to 2.5 A."""
    difference = positions_N3[:, None] - positions_N3[None]
    distance = np.linalg.norm(difference, axis=-1) + 10.0 * np.eye(len(positions_N3))
    strength = 0.01 * species_N[:, None] * species_N[None]
    gap = np.maximum(_REACH - distance, 0.0)
    forces = (3.0 * strength * gap**2 / distance)[..., None] * difference
    return 0.5 * float((strength * gap**3).sum()), forces.sum(axis=1)


def write_molecules(path: Path, structures: int, seed: int = 0, elements: Sequence[int] = (1, 6, 8)) -> None:
    """Molecules of 2 to 10 atoms with labels in ragged arrays."""
    random = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[np.arange(3)] * 3, indexing="ij"), -1).reshape(-1, 3) * 1.5
    species, positions, energies, forces, starts = [], [], [], [], [0]
    for count in random.integers(2, 11, structures):
        kinds = random.choice(elements, count)
        places = (grid[:count] + random.uniform(-0.2, 0.2, (count, 3))).astype("f4")
        energy, pull = toy_energy(places.astype("f8"), kinds)
        species.append(kinds.astype(np.uint8))
        positions.append(places)
        energies.append(energy - 2.0 * kinds.sum())
        forces.append(pull.astype("f4"))
        starts.append(starts[-1] + int(count))
    charges = np.concatenate([kinds - kinds.mean() for kinds in species]).astype("f4") / 10.0
    np.savez(
        path,
        ptr=np.array(starts),
        z=np.concatenate(species),
        pos=np.concatenate(positions),
        energy=np.array(energies),
        forces=np.concatenate(forces),
        charges=charges,
    )


def write_materials_run(folder: Path, changes: dict[str, Any] | None = None, *, structures: int = 80) -> Path:
    """A run file in `folder` and the structures it reads, not prepared yet; `changes` replace `section.field`s."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "molecules.npz"
    if not data.exists():
        write_molecules(data, structures)
    sections = {name: dict(fields) for name, fields in SECTIONS.items()}
    labels = {"energy": "eV", "forces": "eV/A", "charges": "e"}
    sections["data"] |= {
        "sources": [{"name": "toy", "path": str(data), "labels": labels, "check_units": False}],
        "prepared": str(folder / "prepared"),
    }
    branch = {"name": "toy", "reference_energies": {"1": -2.0, "6": -12.0, "8": -16.0}, "energy_scale": 0.5}
    sections["model"]["branches"] = [branch]
    for name, value in (changes or {}).items():
        section, field = name.split(".")
        sections[section][field] = value
    path = folder / "run.yaml"
    # By way of JSON: run files know no anchors for what stands in them twice.
    path.write_text(yaml.safe_dump(json.loads(json.dumps(sections))))
    return path


def write_two_branches(folder: Path, changes: dict[str, Any] | None = None, *, structures: int = 30) -> Path:
    """A run file of two sources with a branch each, not prepared yet: `oxides` of H, C and O, `nitrides` of H and N."""
    folder.mkdir(parents=True, exist_ok=True)
    write_molecules(folder / "oxides.npz", structures)
    write_molecules(folder / "nitrides.npz", structures, seed=1, elements=(1, 7))
    labels = {"energy": "eV", "forces": "eV/A", "charges": "e"}
    names = ("oxides", "nitrides")
    sources = [
        {"name": name, "path": str(folder / f"{name}.npz"), "labels": labels, "check_units": False} for name in names
    ]
    both = {"data.sources": sources, "model.branches": [{"name": name} for name in names]}
    return write_materials_run(folder, both | (changes or {}), structures=2)


def hardly_trained(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """The folder of a run of two steps, whose network is next to random."""
    run = load_run(write_materials_run(folder, changes, structures=30), ["training.steps=2"])
    assert isinstance(run, MaterialsRun)
    prepare_graphs(run.data, workers=1)
    train(run, folder / "run")
    return folder / "run"


def crystal_atoms() -> ase.Atoms:
    """Eight atoms in a cell smaller than the cutoff."""
    draw = np.random.default_rng(5)
    grid = np.stack(np.meshgrid(*[np.arange(2)] * 3, indexing="ij"), -1).reshape(-1, 3) * 1.4
    cell = np.eye(3) * 2.8 + draw.uniform(-0.1, 0.1, (3, 3))
    return ase.Atoms("C4O4", positions=grid + draw.uniform(-0.1, 0.1, grid.shape), cell=cell, pbc=True)
