"""Predictions of several networks on one device: all of them at once, and joined with calibrated uncertainties.

Equal networks run as one with stacked parameters, others in turn. What K small networks cost apart is mostly waiting for the
device to be told what to do; stacked they are told once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from phalanx.ensemble.members import EnsembleFile, member_checkpoints, read_ensemble
from phalanx.errors import ConfigError
from phalanx.families.materials.evaluation.network_predictions import LoadedNetwork, load_network
from phalanx.families.materials.model.geometry import cell_volumes, edge_vectors
from phalanx.families.materials.model.losses import Predictions
from phalanx.families.materials.model.network import AtomGraphs, MaterialsNetwork, energy_gradients

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
    """Predictions of an ensemble for a batch."""

    mean: Predictions
    std: dict[str, Tensor]
    """Calibrated standard deviation by quantity (energy in eV, not per atom), in the shape of the prediction; of those that
    validation had labels of."""
    spread: dict[str, Tensor]
    """Standard deviation among the members as they are, alike, of every quantity."""


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
        """Predict as `MaterialsNetwork.predict` does; all graphs are of one branch, so that one calibration belongs to
        them."""
        if self._stack is None:
            self._stack = NetworkStack([member.model for member in self.members])
        found = self._stack.predict(species_N, source_G=source_G, graph_N=graph_N, **inputs)
        run = self.members[0].run
        sources = [source.name for source in run.data.sources]
        # A single branch takes all data sets, others one each.
        if len(run.model.branches) > 1:
            sources = [sources[int(source_G[0])]]
        means: dict[str, Tensor] = {}
        stds: dict[str, Tensor] = {}
        spreads: dict[str, Tensor] = {}
        atoms_G = torch.bincount(graph_N, minlength=len(source_G))
        for name, value in vars(found).items():
            if value is None:
                continue
            # Among members, in float64; see `residuals.weighted_moments`.
            weights, wide = self.weights_K.view(-1, *[1] * (value.dim() - 1)), value.double()
            mean = (weights * wide).sum(0)
            variance = (weights * (wide - mean).square()).sum(0)
            # The unbiased variance of weighted members (reliability weights); K/(K-1) where all weigh the same.
            rest = 1.0 - float(self.weights_K.square().sum())
            spread = (variance / rest).sqrt() if rest > 1e-12 else torch.zeros_like(mean)
            means[name] = mean.to(value.dtype)
            quantity = next((known for known, label in _LABELS.items() if label == name), None)
            if quantity is None:
                continue
            spreads[quantity] = spread
            # Of a branch with several data sets, the first that has labels of the quantity is calibrated on.
            entries = [self.document.label(source, quantity) for source in sources]
            entry = next((one for one in entries if one is not None), None)
            if entry is not None:
                # Energies are calibrated per atom, and stated as a whole.
                share = spread / atoms_G.clamp(min=1) if quantity == "energy" else spread
                std = torch.from_numpy(entry.calibration.std(share.numpy(force=True))).to(spread.device)
                stds[quantity] = std * atoms_G if quantity == "energy" else std
        return Uncertain(Predictions(**means), stds, spreads)


_IN_TURN = ("dimenet++",)
"""Bodies that count what the data hold while they run, which nothing stacked can."""


def can_stack(network: MaterialsNetwork) -> bool:
    """Return whether a network can run as one of a stack."""
    counts = network.config.body in _IN_TURN or network.config.electrostatics is not None
    return not counts and network.edge_chunk is None


class NetworkStack:
    """K whole networks in evaluation mode. Networks that are alike run as one, whatever their order."""

    def __init__(self, networks: Sequence[MaterialsNetwork]) -> None:
        groups: dict[object, list[int]] = {}
        for number, network in enumerate(networks):
            # Of equal description they compute the same function of their parameters.
            kind = (network.config.model_dump_json(), network.dtype) if can_stack(network) else number
            groups.setdefault(kind, []).append(number)
        together = [[networks[number] for number in group] for group in groups.values()]
        self._parts = [_InTurn(some) if len(some) == 1 else _Stacked(some) for some in together]
        order = [number for group in groups.values() for number in group]
        self._places = [order.index(number) for number in range(len(networks))]

    @torch.no_grad()
    def predict(self, species_N: Tensor, **inputs: Any) -> Predictions:
        """Predict as `MaterialsNetwork.predict` does, each tensor with a first dimension of K members, in the order they
        were given."""
        found = [part(species_N, **inputs) for part in self._parts]
        if len(found) == 1:
            return found[0]
        names = [name for name in vars(found[0]) if all(getattr(one, name) is not None for one in found)]
        joined = {name: torch.cat([getattr(one, name) for one in found]) for name in names}
        # Groups of equal networks came together: back into the order of members.
        index = torch.tensor(self._places)
        return Predictions(**{name: value.index_select(0, index.to(value.device)) for name, value in joined.items()})


class _InTurn:
    """Networks one after another."""

    def __init__(self, networks: Sequence[MaterialsNetwork]) -> None:
        self._networks = list(networks)

    def __call__(self, species_N: Tensor, **inputs: Any) -> Predictions:
        found = [vars(network.predict(species_N, **inputs)) for network in self._networks]
        there = [name for name, value in found[0].items() if value is not None]
        return Predictions(**{name: torch.stack([one[name] for one in found]) for name in there})


class _Stacked:
    """Equal networks as one: vmap over parameters; forces and stress from each member's own copy of the edge vectors."""

    def __init__(self, networks: Sequence[MaterialsNetwork]) -> None:
        self._size = len(networks)
        modules = [_FromVectors(network) for network in networks]
        parameters, buffers = stack_module_state(modules)
        self._state = {name: value.detach() for name, value in parameters.items()}, buffers
        self._module = modules[0]

    def __call__(
        self, species_N: Tensor, *, forces: bool = True, stress: bool = False, **graphs: Unpack[AtomGraphs]
    ) -> Predictions:
        derived = self._module.network.config.energy is not None and (forces or stress)
        edges_2E, cells_G33 = graphs["edges_2E"], graphs["cells_G33"]
        vectors_E3 = edge_vectors(graphs["positions_N3"], edges_2E, graphs["shifts_E3"])
        # A copy for each member: the derivative by one member's vectors is then of that member's energy alone.
        vectors_KE3 = vectors_E3.expand(self._size, -1, -1).contiguous()

        def predict_one(state: Any, vector_E3: Tensor) -> dict[str, Tensor]:
            found: dict[str, Tensor] = functional_call(self._module, state, (vector_E3, species_N), dict(graphs))
            return found

        with torch.set_grad_enabled(derived):
            vectors_KE3.requires_grad_(derived)
            found = torch.vmap(predict_one)(self._state, vectors_KE3)
        if derived:
            # By plain autograd on the stacked energies: one derivative for all members.
            (gradient_KE3,) = energy_gradients(found["energy_G"], [vectors_KE3], differentiable=False)
            if forces:
                zeros = gradient_KE3.new_zeros((len(gradient_KE3), len(species_N), 3))
                # As `model.network.with_derivatives` has it, with a first dimension of members.
                pulls_KN3 = zeros.index_add(1, edges_2E[0], gradient_KE3)
                found["forces_N3"] = pulls_KN3.index_add(1, edges_2E[1], -gradient_KE3)
            if stress:
                graph_E = graphs["graph_N"].index_select(0, edges_2E[1])
                pull_KE33 = vectors_KE3.detach()[..., :, None] * gradient_KE3[..., None, :]
                pull_KE33 = 0.5 * (pull_KE33 + pull_KE33.transpose(-1, -2))
                nothing = pull_KE33.new_zeros((len(pull_KE33), len(cells_G33), 3, 3))
                virial_KG33 = nothing.index_add(1, graph_E, pull_KE33)
                volume_G11 = cell_volumes(cells_G33).to(virial_KG33.dtype)[:, None, None]
                periodic = volume_G11 > 0.0
                found["stress_G33"] = torch.where(
                    periodic, virial_KG33 / torch.where(periodic, volume_G11, 1.0), torch.nan
                )
        return Predictions(**{name: value.detach() for name, value in found.items()})


class _FromVectors(nn.Module):
    """A network whose forward pass begins at edge vectors."""

    def __init__(self, network: MaterialsNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, vector_E3: Tensor, species_N: Tensor, **inputs: Any) -> dict[str, Tensor]:
        found = self.network.predict_from_vectors(
            vector_E3, species_N, **inputs, forces=False, stress=False, differentiable=False
        )
        return {name: value for name, value in vars(found).items() if value is not None}
