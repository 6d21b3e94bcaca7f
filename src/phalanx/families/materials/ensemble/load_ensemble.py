"""An ensemble of materials models on one device, ready to predict with calibrated uncertainties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.ensemble.members import EnsembleFile, LabelEntry, member_checkpoints, read_ensemble
from phalanx.errors import ConfigError
from phalanx.families.materials.ensemble.network_stack import NetworkStack
from phalanx.families.materials.evaluation.network_predictions import LoadedNetwork, load_network
from phalanx.families.materials.model.losses import Predictions

_LABELS = {
    "energy": "energy_G",
    "forces": "forces_N3",
    "stress": "stress_G33",
    "charges": "charges_N",
    "dipole": "dipole_G3",
}
"""Quantities with a field of their own in `Predictions`."""


@dataclass(frozen=True)
class Uncertain:
    """What an ensemble predicts of a batch."""

    mean: Predictions
    std: dict[str, Tensor]
    """Calibrated standard deviation by quantity (energy in eV, not per atom), in the shape of the prediction; of those that
    validation had labels of."""


class LoadedEnsemble:
    """The members of an ensemble, side by side."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """folder: of `ensemble.json`. dtype: as `load_network` has it.

        Raises CheckpointError where the file or a member cannot be read, ConfigError for another family.
        """
        self.folder = folder
        self.document: EnsembleFile = read_ensemble(folder)
        if self.document.family != "materials":
            raise ConfigError(f"{folder} is an ensemble of model.family={self.document.family}; materials is needed")
        self.members: list[LoadedNetwork] = [
            load_network(path, device, dtype) for path in member_checkpoints(folder, self.document)
        ]
        self.weights_K = torch.tensor(
            [member.weight for member in self.document.members], dtype=torch.float64, device=device
        )
        self._stack: NetworkStack | None = None

    def use_edge_chunk(self, edge_chunk: int | None) -> None:
        """Compute that many edges at a time, for structures that would not fit; members then run in turn."""
        for member in self.members:
            member.model.edge_chunk = edge_chunk
        self._stack = None

    def predict(self, species_N: Tensor, *, source_G: Tensor, graph_N: Tensor, **inputs: Any) -> Uncertain:
        """As `MaterialsNetwork.predict`; all graphs are of one branch, so that one calibration belongs to them."""
        if self._stack is None:
            self._stack = NetworkStack([member.model for member in self.members])
        found = self._stack.predict(species_N, source_G=source_G, graph_N=graph_N, **inputs)
        sources = self._sources(int(source_G[0]))
        means: dict[str, Tensor] = {}
        stds: dict[str, Tensor] = {}
        atoms_G = torch.bincount(graph_N, minlength=len(source_G))
        for name, value in vars(found).items():
            if value is None:
                continue
            mean, spread = self._moments(value)
            means[name] = mean.to(value.dtype)
            quantity = next((known for known, label in _LABELS.items() if label == name), None)
            entry = None if quantity is None else self._label(sources, quantity)
            if quantity is not None and entry is not None:
                stds[quantity] = _calibrated(entry, spread, atoms_G if quantity == "energy" else None)
        return Uncertain(Predictions(**means), stds)

    def _sources(self, branch: int) -> list[str]:
        """The data sets of a branch, in the order of `data.sources`: all of them where there is a single branch."""
        run = self.members[0].run
        names = [source.name for source in run.data.sources]
        return names if len(run.model.branches) == 1 else [names[branch]]

    def _label(self, sources: Sequence[str], quantity: str) -> LabelEntry | None:
        """The calibration of the first of these data sets that has labels of a quantity; None where none has."""
        found = (self.document.label(source, quantity) for source in sources)
        return next((entry for entry in found if entry is not None), None)

    def _moments(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation among members, float64; see `residuals.weighted_moments`."""
        weights = self.weights_K.view(-1, *[1] * (values.dim() - 1))
        wide = values.double()
        mean = (weights * wide).sum(0)
        rest = 1.0 - float(self.weights_K.square().sum())
        variance = (weights * (wide - mean).square()).sum(0)
        return mean, (variance / rest).sqrt() if rest > 1e-12 else torch.zeros_like(mean)


def _calibrated(entry: LabelEntry, spread: Tensor, atoms_G: Tensor | None) -> Tensor:
    """atoms_G: atoms of each graph, where the calibration counts per atom."""
    share = spread if atoms_G is None else spread / atoms_G.clamp(min=1)
    std = torch.from_numpy(entry.calibration.std(share.numpy(force=True))).to(spread.device)
    return std if atoms_G is None else std * atoms_G
