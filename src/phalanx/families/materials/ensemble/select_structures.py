"""Structures that the members of an ensemble disagree about most: those whose labels would teach them most (active
learning by query by committee: Seung, Opper and Sompolinsky, COLT 1992)."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ase.io
import numpy as np
import torch
import torch.distributed as dist
from ase import Atoms

from phalanx.ensemble.members import ALONE, Share
from phalanx.errors import ConfigError, DataError
from phalanx.families.materials.data.array_files import ragged_offsets
from phalanx.families.materials.data.labels import labels_of
from phalanx.families.materials.data.neighbours import Edges, find_edges
from phalanx.families.materials.data.structures import Structure, check_structure, convert_structure
from phalanx.families.materials.data.trained_elements import trained_elements
from phalanx.families.materials.ensemble.joint_predictions import LoadedEnsemble
from phalanx.families.materials.evaluation.structure_pools import ELECTRON_LABELS, find_pools

_BATCH_ATOMS = 1024
"""Atoms that are computed together, at least: devices wait less, and members beside each other still fit."""
_CHUNK = 16
"""Structures that a rank takes at a time: neighbours are alike, and ranks should have alike work."""

Criterion = Literal["forces", "energy"]


@dataclass(frozen=True)
class Spread:
    """How far members are apart about one structure."""

    structure: Structure
    number: int
    """Number of the structure among all of the pools."""
    energy: float
    """Standard deviation of the energy, eV/atom."""
    forces: float
    """Largest of any atom, eV/A: the root of the mean squared distance of members' forces from their mean, as DP-GEN ranks
    (Zhang et al. 2019, Phys. Rev. Materials 3, 023804)."""


@dataclass(frozen=True)
class Selection:
    """The structures chosen of a pool, the widest spread first."""

    chosen: list[Spread]
    ranked: int
    """Structures that were compared."""
    median: float
    """Median of the spreads of all that were compared, in the unit of the criterion."""
    unknown: dict[int, int]
    """Structures left out, by the atomic number that some member was not trained on."""


def select_structures(
    folder: Path,
    pools: Sequence[str],
    *,
    top: int,
    by: Criterion = "forces",
    branch: str | None = None,
    device: torch.device,
    share: Share = ALONE,
) -> Selection:
    """Return the `top` structures of `pools` that members are farthest apart about. Every rank calls it.

    folder: of an ensemble. pools: files of structures or patterns, in angstrom, and folders of prepared structures; labels
    are not looked at. branch: as of the calculator. share: this rank among those that share the structures; all get the same
    selection. Structures with an element that a member was not trained on are left out, since there it answers at random.

    Raises DataError for a structure that cannot be computed, and where none is left; ConfigError for an ensemble without
    energies or whose members cannot differ.
    """
    ensemble = LoadedEnsemble(folder, device)
    if ensemble.members[0].run.model.energy is None:
        raise ConfigError(f"{folder}: its models have no energy, and so no forces, to disagree about")
    if int((ensemble.weights_K > 0.0).sum()) < 2:
        raise ConfigError(
            f"{folder}: all weight is on one member; build the ensemble with --weights equal, or of others"
        )
    ranking = _Ranking(ensemble, branch)
    spreads: list[float] = []

    def record_spreads() -> Iterator[Spread]:
        for found in ranking.measure_spreads(pools, share):
            spreads.append(getattr(found, by))
            yield found

    def rank_spread(found: Spread) -> tuple[float, int]:
        # Of equal ones the first, whichever rank has it.
        return float(getattr(found, by)), -found.number

    # A pool may be larger than memory: only the best so far are kept.
    mine = _Part(heapq.nlargest(top, record_spreads(), key=rank_spread), spreads, ranking.unknown)
    parts = [mine] * share.ranks
    if share.ranks > 1:
        dist.all_gather_object(parts, mine)
    chosen = heapq.nlargest(top, (found for part in parts for found in part.chosen), key=rank_spread)
    if not chosen:
        raise DataError(
            f"{', '.join(pools)}: no structure is left to choose from; all have elements that a member was not trained on"
        )
    every = np.concatenate([part.spreads for part in parts])
    unknown: Counter[int] = sum((Counter(part.unknown) for part in parts), Counter())
    return Selection(chosen, len(every), float(np.median(every)), dict(unknown))


@dataclass(frozen=True)
class _Part:
    """Holds what one rank found."""

    chosen: list[Spread]
    spreads: list[float]
    unknown: dict[int, int]


def write_selection(selection: Selection, out: Path) -> None:
    """Write the structures as extended XYZ, each with where it comes from and how far members were apart.

    Raises OSError where it cannot be written.
    """
    frames = []
    for found in selection.chosen:
        raw = found.structure.raw
        atoms = Atoms(raw.species, raw.positions, cell=raw.cell, pbc=raw.periodic)
        atoms.info.update({key: raw.values[key] for key in ("charge", "spin") if key in raw.values})
        atoms.info.update(
            file=raw.file, place=raw.place, energy_spread_per_atom=found.energy, forces_spread=found.forces
        )
        frames.append(atoms)
    out.parent.mkdir(parents=True, exist_ok=True)
    ase.io.write(out, frames, format="extxyz")


@dataclass(frozen=True)
class _Candidate:
    """A structure to compare."""

    structure: Structure
    edges: Edges
    number: int
    """Number among all structures of the pools."""


class _Ranking:
    """Spreads of structures, batch by batch."""

    def __init__(self, ensemble: LoadedEnsemble, branch: str | None) -> None:
        self.ensemble = ensemble
        first = ensemble.members[0]
        self.run, self._branch = first.run, first.branch(branch)
        models = [member.run.model for member in ensemble.members]
        self._known = set(range(1, min(model.max_atomic_number for model in models) + 1))
        for member in ensemble.members:
            trained = trained_elements(member.where)
            if trained is not None:
                self._known &= trained.of(first.run.model.branches[self._branch].name)
        self.unknown: dict[int, int] = {}

    def measure_spreads(self, pools: Sequence[str], share: Share) -> Iterator[Spread]:
        """Yield the spread of every structure of this rank that members know the elements of."""
        places = find_pools(pools, self.run.model.cutoff, self.run.data.max_neighbours)
        opened = [place.open() for place in places]
        starts = ragged_offsets(np.array([len(pool) for pool in opened], dtype=np.int64))
        chunks = [
            (number, first, min(first + _CHUNK, len(pool)))
            for number, pool in enumerate(opened)
            for first in range(0, len(pool), _CHUNK)
        ]
        waiting: list[_Candidate] = []
        for number, first, stop in chunks[share.rank :: share.ranks]:
            pool, model = opened[number], self.run.model
            labels = labels_of(pool.source)
            for place, (raw, known_edges) in enumerate(pool.read(first, stop), int(starts[number]) + first):
                strange = set(np.unique(raw.species).tolist()) - self._known
                for element in strange:
                    self.unknown[element] = self.unknown.get(element, 0) + 1
                if strange:
                    continue
                structure = convert_structure(raw, labels, 1.0, missing_allowed=True)
                edges = known_edges
                if edges is None:
                    cell, periodic = structure.cell, structure.periodic
                    most = self.run.data.max_neighbours
                    edges = find_edges(structure.positions, cell, periodic, model.cutoff, most)
                check_structure(structure, edges, pool.source, model.cutoff)
                waiting.append(_Candidate(structure, edges, place))
                # Batched by atoms, not by structures: pools mix molecules and large cells.
                if sum(len(one.structure.species) for one in waiting) >= _BATCH_ATOMS:
                    yield from self._compare(waiting)
                    waiting = []
        if waiting:
            yield from self._compare(waiting)

    def _compare(self, candidates: Sequence[_Candidate]) -> Iterator[Spread]:
        """Yield the spreads of a batch."""
        structures, device = [one.structure for one in candidates], self.ensemble.weights_K.device
        atoms_G = torch.tensor([len(one.species) for one in structures])
        starts = np.cumsum([0, *atoms_G[:-1].tolist()])
        edges_2E = [
            np.stack((one.edges.source, one.edges.target)) + start
            for one, start in zip(candidates, starts, strict=True)
        ]
        cells_G33 = np.stack([one.cell for one in structures]).astype(np.float64)
        shifts_E3 = [one.edges.images @ cell_33 for one, cell_33 in zip(candidates, cells_G33, strict=True)]
        electrons = {name: [float(one.labels[name]) for one in structures] for name in ELECTRON_LABELS}
        inputs: dict[str, Any] = {
            "positions_N3": torch.from_numpy(np.concatenate([one.positions for one in structures])).double(),
            "graph_N": torch.arange(len(structures)).repeat_interleave(atoms_G),
            "edges_2E": torch.from_numpy(np.concatenate(edges_2E, axis=1)),
            "shifts_E3": torch.from_numpy(np.concatenate(shifts_E3)),
            "cells_G33": torch.from_numpy(cells_G33),
            "source_G": torch.full((len(structures),), self._branch),
            # As the calculator takes those that say nothing: neutral singlets.
            "total_charge_G": torch.tensor(electrons["total_charge"], dtype=torch.float64).nan_to_num(0.0),
            "multiplicity_G": torch.tensor(electrons["multiplicity"], dtype=torch.float64).nan_to_num(1.0),
        }
        species_N = torch.from_numpy(np.concatenate([one.species for one in structures]).astype(np.int64))
        placed = {name: value.to(device) for name, value in inputs.items()}
        spread = self.ensemble.predict(species_N.to(device), **placed, forces=True, stress=False).spread
        energy_G = spread["energy"].cpu() / atoms_G
        forces_N = spread["forces"].norm(dim=1).cpu()
        zeros_G = torch.zeros(len(structures), dtype=forces_N.dtype)
        forces_G = zeros_G.scatter_reduce(0, inputs["graph_N"], forces_N, "amax")
        for one, energy, forces in zip(candidates, energy_G.tolist(), forces_G.tolist(), strict=True):
            if not np.isfinite(energy) or not np.isfinite(forces):
                raise one.structure.raw.wrong("a member predicts no finite number; leave the structure out")
            yield Spread(one.structure, one.number, energy, forces)
