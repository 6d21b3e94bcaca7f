"""A trained network, or an ensemble of them, applied to structures: ASE, torch-sim and LAMMPS ask here.

Neighbours are found on the device, anew for each geometry; what a model cannot know is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from ase.data import chemical_symbols
from torch import Tensor

from phalanx.ensemble.members import is_ensemble
from phalanx.errors import ConfigError, DataError
from phalanx.families.materials.data.neighbours import DeviceEdges, device_edges
from phalanx.families.materials.data.structures import SAME_PLACE_A
from phalanx.families.materials.data.trained_elements import TrainedElements, trained_elements
from phalanx.families.materials.ensemble.joint_predictions import LoadedEnsemble
from phalanx.families.materials.evaluation.dispersion import D3Dispersion
from phalanx.families.materials.evaluation.network_predictions import load_network
from phalanx.families.materials.model.heads import sum_by_graph
from phalanx.families.materials.model.losses import Predictions
from phalanx.hardware.device import choose_device
from phalanx.nn.precision import find_number_format


@dataclass(frozen=True)
class GivenStructures:
    """G structures with N atoms in all, on any device."""

    species_N: Tensor
    """int64: atomic numbers."""
    positions_N3: Tensor
    """Float64 as simulations have them, angstrom: these take differences that are far smaller than the positions."""
    cells_G33: Tensor
    """Lattice vectors as rows, angstrom; those of directions that are not periodic count for nothing."""
    periodic_G3: Tensor
    """bool: a direction may be said to be periodic though the cell has no vector there, which is refused."""
    graph_N: Tensor
    """int64: the structure of each atom, ascending."""
    total_charge_G: Tensor
    multiplicity_G: Tensor

    def to(self, device: torch.device) -> GivenStructures:
        """Return the structures on `device`."""
        return GivenStructures(**{name: value.to(device) for name, value in vars(self).items()})


class StructurePredictor:
    """Predicts energies, and what else a model has heads for, with forces and stress."""

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        branch: str | None = None,
        device: str | torch.device = "auto",
        precision: str | None = None,
        edge_chunk: int | None = None,
        untrained_elements: bool = False,
        dispersion: str | None = None,
    ) -> None:
        """checkpoint: folder of a run, of one checkpoint, or of an ensemble. branch: the data set whose energies are meant,
        of a model that has several. device: as `cluster.device`, or that of a rank. precision: fp32 or fp64 instead of the
        run's. edge_chunk:
        edges computed at a time, for structures that would not fit. untrained_elements: compute structures with elements
        that no training structure of the branch had, whatever comes of it. dispersion: functional whose D3 dispersion is
        added, of a model trained on labels without it; that which data.sources took off the labels is added without asking.

        Raises CheckpointError where there is no sound checkpoint, ConfigError for an unknown branch, device, precision or
        functional, and for a model without energies.
        """
        self.device = device if isinstance(device, torch.device) else choose_device(device)
        dtype = find_number_format(precision, "precision")
        self.ensemble: LoadedEnsemble | None = None
        if is_ensemble(Path(checkpoint)):
            self.ensemble = LoadedEnsemble(Path(checkpoint), self.device, dtype)
            self.network = self.ensemble.members[0]
        else:
            self.network = load_network(Path(checkpoint), self.device, dtype)
        model = self.network.run.model
        if model.energy is None:
            raise ConfigError(f"{self.network.where}: its model has no energy, which dynamics and relaxations need")
        # Not in the run file: it changes memory and time of a prediction, and no number.
        self.network.model.edge_chunk = edge_chunk
        if self.ensemble is not None:
            self.ensemble.use_edge_chunk(edge_chunk)
        self.branch = self.network.branch(branch)
        self.branch_name = model.branches[self.branch].name
        self.untaught = self.network.untaught(self.branch)
        """Heads that no label of the branch taught, with the branches that were."""
        self._networks = [self.network] if self.ensemble is None else self.ensemble.members
        # Members were trained on subsets: an element that one of them never saw is refused by all.
        places = [] if untrained_elements else [network.where for network in self._networks]
        known = [(where, trained_elements(where)) for where in places]
        self._known = [(where, elements) for where, elements in known if elements is not None]
        functional = self._choose_dispersion(dispersion)
        self._dispersion = None if functional is None else D3Dispersion(functional, self.device)

    def _choose_dispersion(self, asked: str | None) -> str | None:
        """Return the functional whose dispersion is added: `asked`, or what was taken off the labels of the branch.

        Raises ConfigError where both are given, and where members of an ensemble lack different ones.
        """
        taken = set[str | None]()
        for network in self._networks:
            sources = network.run.data.sources
            # A single branch takes all sources, which then lack the same.
            taken.add(sources[min(self.branch, len(sources) - 1)].dispersion)
        if len(taken) > 1:
            names = ", ".join(sorted(map(str, taken)))
            raise ConfigError(
                f"members of the ensemble learned labels without dispersion={names}; take members that agree"
            )
        (functional,) = taken
        if asked is not None and functional is not None:
            raise ConfigError(
                f"dispersion={asked} would be added twice: {self.network.where} learned labels without that of "
                f"{functional}, which is added anyway; leave it out"
            )
        return asked or functional

    def explain_untaught(self, head: str) -> str | None:
        """Return why `head` cannot be asked, for an error of whoever asks; None where labels of the branch taught it."""
        others = self.untaught.get(head)
        if others is None:
            return None
        instead = f"; ask for branch {' or '.join(others)}" if others else ""
        return (
            f"the data of branch {self.branch_name} of {self.network.where} have no labels that teach its {head} head, "
            f"which would answer at random{instead}"
        )

    def predict(self, given: GivenStructures, *, stress: bool) -> tuple[Predictions, dict[str, Tensor]]:
        """Return all that can be predicted, and by quantity its uncertainty where that is known.

        Forces come with every energy, stress where it is asked for. Both are left out where the branch was taught no
        energies. Raises DataError for an element the model does not know or its branch was not trained on, a position that
        is no number, two atoms on one place, and a periodic cell without volume.
        """
        given, taught = given.to(self.device), "energy" not in self.untaught
        self._require_known(given.species_N)
        cells_G33 = torch.where(given.periodic_G3[:, :, None], given.cells_G33, 0.0)
        edges = device_edges(
            given.positions_N3,
            cells_G33,
            self.network.run.model.cutoff,
            graph_N=given.graph_N,
            periodic_G3=given.periodic_G3,
            max_neighbours=self.network.run.data.max_neighbours,
        )
        _require_apart(given.positions_N3, edges)
        graphs = len(cells_G33)
        inputs: dict[str, Any] = {
            "positions_N3": given.positions_N3,
            "graph_N": given.graph_N,
            "edges_2E": edges.edges_2E,
            "shifts_E3": edges.shifts_E3,
            "cells_G33": cells_G33,
            "source_G": torch.full((graphs,), self.branch, device=self.device),
            "total_charge_G": given.total_charge_G,
            "multiplicity_G": given.multiplicity_G,
            "forces": taught,
            "stress": taught and stress,
        }
        with torch.no_grad():
            if self.ensemble is None:
                found, stds = self.network.model.predict(given.species_N, **inputs), dict[str, Tensor]()
            else:
                uncertain = self.ensemble.predict(given.species_N, **inputs)
                found, stds = uncertain.mean, uncertain.std
        return self._with_dispersion(found, given, cells_G33), stds

    def _with_dispersion(self, found: Predictions, given: GivenStructures, cells_G33: Tensor) -> Predictions:
        if self._dispersion is None:
            return found
        added = self._dispersion(given.species_N, given.positions_N3, cells_G33, given.graph_N)
        assert found.energy_G is not None and found.atom_energies_N is not None
        return replace(
            found,
            energy_G=found.energy_G + sum_by_graph(added.energy_N, given.graph_N, len(cells_G33)),
            atom_energies_N=found.atom_energies_N + added.energy_N,
            forces_N3=None if found.forces_N3 is None else found.forces_N3 + added.forces_N3,
            stress_G33=None if found.stress_G33 is None else found.stress_G33 + added.stress_G33,
        )

    def _require_known(self, species_N: Tensor) -> None:
        """Refuse what is no element, and elements that a network has no row for or was not trained on."""
        least = min(self._networks, key=lambda network: network.run.model.max_atomic_number)
        if len(species_N) and int(species_N.min()) < 1:
            raise DataError(
                f"atom {int(species_N.argmin())} has atomic number {int(species_N.min())}, which is no element; "
                "take it out of the structure"
            )
        heaviest = int(species_N.max()) if len(species_N) else 0
        if heaviest > least.run.model.max_atomic_number:
            raise DataError(
                f"the structure has atomic number {heaviest}; the model of {least.where} knows elements up to "
                f"{least.run.model.max_atomic_number}"
            )
        for where, trained in self._known:
            _require_trained(species_N, trained, self.branch_name, where)


def _require_trained(species_N: Tensor, trained: TrainedElements, branch: str, where: Path) -> None:
    """Refuse an element that no training structure of the branch had. Raises DataError."""
    strange = sorted(set(species_N.tolist()) - trained.of(branch))
    if not strange:
        return
    element = f"atomic number {strange[0]} ({chemical_symbols[strange[0]]})"
    others = trained.branches_with(strange[0])
    if others:
        know = f"branch {others[0]} knows" if len(others) == 1 else f"branches {', '.join(others)} know"
        raise DataError(
            f"the structure has {element}, which no structure that branch {branch} of {where} was trained on has: it would "
            f"answer at random, though {know} it; ask for that branch, train {branch} with such structures, or "
            f"say untrained_elements=True"
        )
    raise DataError(
        f"the structure has {element}, which nothing that the model of {where} was trained on has: it would answer at "
        "random; train with such structures, or say untrained_elements=True"
    )


def _require_apart(positions_N3: Tensor, edges: DeviceEdges) -> None:
    """Refuse two atoms on one place, between which there is no direction. Raises DataError."""
    source_E, target_E = edges.edges_2E
    distance_E = (positions_N3[target_E] + edges.shifts_E3 - positions_N3[source_E]).norm(dim=1)
    if len(distance_E) and float(distance_E.min()) < SAME_PLACE_A:
        nearest = int(distance_E.argmin())
        first, second = sorted((int(source_E[nearest]), int(target_E[nearest])))
        through = ", through the periodic cell" if bool(edges.images_E3[nearest].any()) else ""
        raise DataError(
            f"atoms {first} and {second} are on one place ({float(distance_E[nearest]):.3f} A apart{through}); take one of "
            "them out of the structure"
        )
