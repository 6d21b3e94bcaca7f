"""Heads: from the features of atoms to numbers, with a copy for each data set where they are not shared.

The first layers of all copies run as one matmul and each atom keeps its own data set's part: no loop over data sets
with waits for the device, and a copy without samples gets gradients of 0. Costs B times a head's work, which is small
beside a block's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from phalanx.families.materials.model.backbones import backbone_of
from phalanx.families.materials.model.electrostatics import electrostatic_energies
from phalanx.families.materials.model.geometry import NO_EXCHANGE, Exchange, Geometry
from phalanx.families.materials.model.layers import Atoms, Mlp, cast_linear, silu
from phalanx.families.materials.model.losses import DatasetUnits, Predictions
from phalanx.families.materials.model.repulsion import repulsion_energy
from phalanx.families.materials.model_config import PROPERTY_HEADS, MaterialsModel
from phalanx.nn.layers import Linear

SHARED = "shared"
"""Stands for a branch's name in a head that all branches share."""


class Heads(nn.Module):
    """All heads of a model, each under its name in the run file."""

    def __init__(self, config: MaterialsModel, units: DatasetUnits) -> None:
        super().__init__()
        self.config = config
        self.units = units
        # Attributes under the names of the run file: they are part of the names in checkpoints.
        for name, outputs in head_outputs(config).items():
            options = getattr(config, name)
            width = config.energy.width if name == "energy" and config.energy is not None else None
            head = build_head(
                config,
                options.layers,
                outputs,
                shared=options.shared,
                width=width,
                inside=2 * config.d_model + config.n_radial if name == "edge_properties" else None,
            )
            self.add_module(name, head)
        energy = config.energy
        early = config.n_layers - 1 if energy is not None and energy.every_block else 0
        self.early_energies = nn.ModuleList(
            build_head(config, 1, 1, shared=energy is not None and energy.shared) for _ in range(early)
        )
        self.dipole_vectors: DipoleVectors | None = None
        channels = backbone_of(config).vectors(config)
        if config.dipole is not None and channels:
            self.dipole_vectors = DipoleVectors(config.d_model, channels)

    def forward(
        self, atoms: Atoms, geometry: Geometry, positions_N3: Tensor, cells_G33: Tensor, branch_G: Tensor
    ) -> Predictions:
        """Predict everything but forces and stress. Sums over atoms are float64."""
        graph_N, graphs, exchange = geometry.graph_N, geometry.graphs, geometry.exchange
        branch_N = branch_G.index_select(0, graph_N)
        # Float64 from here on: sums over many atoms, and total energies of 10^5 eV whose differences count.
        raw = {
            name: module(atoms.scalars_NC, branch_N).double()
            for name, module in self.named_children()
            if isinstance(module, DatasetMlp) and name != "edge_properties"
        }
        found = self._charges(raw, atoms, geometry, positions_N3)
        if self.config.energy is not None:
            early = zip(self.early_energies, atoms.earlier_NC, strict=False)
            parts = [raw["energy"], *(head(scalars_NC, branch_N).double() for head, scalars_NC in early)]
            learned_N = reduce(torch.add, parts).squeeze(1)
            form = self.config.energy.repulsion
            if form == "mace":
                learned_N = learned_N + repulsion_energy(geometry, self.config, form)
            energy_N = learned_N * self.units.energy_scale(branch_N)
            energy_N = energy_N + self.units.reference_energy(geometry.species_N, branch_N)
            if form == "zbl":
                energy_N = energy_N + repulsion_energy(geometry, self.config, form)
            if self.config.electrostatics is not None:
                charges_N = found["effective_charges_N"]
                energy_N = energy_N + electrostatic_energies(self.config, charges_N, geometry, positions_N3, cells_G33)
            found |= {
                "atom_energies_N": energy_N,
                "energy_G": exchange.over_graphs(sum_by_graph(energy_N, graph_N, graphs)),
            }
        if self.config.properties is not None:
            pooled_GP = exchange.over_graphs(sum_by_graph(raw["properties"], graph_N, graphs))
            if self.config.properties.pooling == "mean":
                pooled_GP = pooled_GP / exchange.atoms_by_graph(graph_N, graphs).clamp(min=1)[:, None]
            found["properties_GP"] = self._in_units("properties_GP", pooled_GP, branch_G)
        if "atom_properties" in raw:
            found["atom_properties_NP"] = self._in_units("atom_properties_NP", raw["atom_properties"], branch_N)
        if self.config.edge_properties is not None and atoms.edges_EC is not None:
            target_E = geometry.target_E
            sent_MC = exchange.atoms(atoms.scalars_NC)
            # Both ends, told apart, and what the edge says: a flux has a sign.
            ends = (sent_MC.index_select(0, geometry.source_E), atoms.scalars_NC.index_select(0, target_E))
            branch_E = branch_N.index_select(0, target_E)
            raw_EP = self.get_submodule("edge_properties")(torch.cat((*ends, atoms.edges_EC), dim=1), branch_E).double()
            found["edge_properties_EP"] = self._in_units("edge_properties_EP", raw_EP, branch_E)
        return Predictions(**found)

    def keep(self, branches: range) -> None:
        """Keep, of the heads that data sets do not share, the copies of these branches alone."""
        for module in self._unshared():
            module.keep(branches)

    def branch_parameters(self) -> Iterator[nn.Parameter]:
        """Yield parameters of the heads that data sets do not share."""
        for module in self._unshared():
            yield from module.parameters()

    def _unshared(self) -> Iterator[DatasetMlp]:
        for name, module in self.named_children():
            if isinstance(module, DatasetMlp) and not getattr(self.config, name).shared:
                yield module
        if self.config.energy is not None and not self.config.energy.shared:
            yield from (module for module in self.early_energies if isinstance(module, DatasetMlp))

    def _charges(
        self, raw: dict[str, Tensor], atoms: Atoms, geometry: Geometry, positions_N3: Tensor
    ) -> dict[str, Tensor]:
        """Return charges and dipoles, as far as there are heads for them."""
        graph_N, graphs, exchange = geometry.graph_N, geometry.graphs, geometry.exchange
        atoms_G, total_charge_G = exchange.atoms_by_graph(graph_N, graphs), geometry.total_charge_G
        found: dict[str, Tensor] = {}
        if self.config.charges is not None:
            charges_N = raw["charges"].squeeze(1)
            if self.config.charges.conserve:
                charges_N = conserve_charge(charges_N, total_charge_G, graph_N, atoms_G, exchange)
            found["charges_N"] = charges_N
        if self.config.electrostatics is not None:
            charges_N = raw["electrostatics" if "electrostatics" in raw else "charges"].squeeze(1)
            found["effective_charges_N"] = conserve_charge(charges_N, total_charge_G, graph_N, atoms_G, exchange)
        if self.config.dipole is not None:
            if "dipole" in raw:
                # Charges of its own must be conserved too: a dipole of charges that add up wrongly depends on the origin.
                charges_N = conserve_charge(raw["dipole"].squeeze(1), total_charge_G, graph_N, atoms_G, exchange)
            dipole_G3 = dipole_of_charges(charges_N, positions_N3, graph_N, atoms_G, exchange)
            if self.dipole_vectors is not None:
                vectors_G3 = sum_by_graph(self.dipole_vectors(atoms).double(), graph_N, graphs)
                dipole_G3 = dipole_G3 + exchange.over_graphs(vectors_G3)
            found["dipole_G3"] = dipole_G3
        return found

    def _in_units(self, label: str, values: Tensor, branch: Tensor) -> Tensor:
        shift, scale = self.units.output_units(label, branch)
        return values * scale + shift


def head_outputs(config: MaterialsModel) -> dict[str, int]:
    """Return the heads that are networks of their own, by name in the run file, with the numbers each gives an atom."""
    outputs = {"energy": 1, "charges": 1}
    for name in ("electrostatics", "dipole"):
        options = getattr(config, name)
        if options is not None and not options.from_charges:
            outputs[name] = 1
    for name in PROPERTY_HEADS:
        options = getattr(config, name)
        outputs[name] = 0 if options is None else options.outputs
    return {name: count for name, count in outputs.items() if getattr(config, name) is not None}


class DatasetMlp(nn.Module):
    """An MLP for each branch, under the branch's name; every row is passed through that of its own branch."""

    def __init__(self, branches: Sequence[str], *sizes: int) -> None:
        super().__init__()
        self.copies = nn.ModuleDict({branch: Mlp(*sizes) for branch in branches})
        self.first = 0
        """Number of the branch whose copy comes first."""

    def keep(self, branches: range) -> None:
        """Forget the copies of all other branches; rows of those must not come any more."""
        names = list(self.copies)
        self.copies = nn.ModuleDict({names[branch]: self.copies[names[branch]] for branch in branches})
        self.first = branches.start

    def forward(self, x_NC: Tensor, branch_N: Tensor) -> Tensor:
        """Map [N, C] to [N, out]. branch_N: int64, the branch of each row; ignored where there is but one copy."""
        copies = list(self.copies.values())
        if len(copies) == 1:
            alone: Tensor = copies[0](x_NC)
            return alone
        branch_N = branch_N - self.first
        layers = zip(*(copy.children() for copy in copies), strict=True)
        for number, same in enumerate(layers):
            linears = [layer for layer in same if isinstance(layer, Linear)]
            # One matmul for all data sets: picking rows by data set would wait for the device, and split its work.
            weight = torch.cat([layer.whole_weight() for layer in linears])
            bias = torch.cat([layer.bias for layer in linears if layer.bias is not None])
            all_NC = cast_linear(silu(x_NC) if number else x_NC, weight, bias)
            all_NBC: Tensor = all_NC.unflatten(-1, (len(linears), -1))
            index_N1C = branch_N[:, None, None].expand(-1, 1, all_NBC.shape[-1])
            x_NC = all_NBC.gather(1, index_N1C).squeeze(1)
        return x_NC


def build_head(
    config: MaterialsModel,
    layers: int,
    outputs: int,
    *,
    shared: bool,
    width: int | None = None,
    inside: int | None = None,
) -> DatasetMlp:
    """Build a head of `layers` linear layers, as wide in between as `width`, or half as wide as the backbone.

    inside: numbers that it reads; None for the backbone's.
    """
    branches = [SHARED] if shared else [branch.name for branch in config.branches]
    return DatasetMlp(
        branches, inside or config.d_model, *[width or max(config.d_model // 2, 1)] * (layers - 1), outputs
    )


class DipoleVectors(nn.Module):
    """A vector of each atom: its vector channels, weighed by its scalars and added up."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.gate = Linear(width, channels, bias=True)

    def forward(self, atoms: Atoms) -> Tensor:
        """Return vectors [N, 3]."""
        assert atoms.vectors_NMC is not None
        gate_N1K: Tensor = self.gate(atoms.scalars_NC)[:, None]
        return (atoms.vectors_NMC[:, :3] * gate_N1K).sum(-1)


def sum_by_graph(values: Tensor, graph_N: Tensor, graphs: int) -> Tensor:
    """Return sums [G, ...] over the atoms of each graph."""
    return values.new_zeros((graphs, *values.shape[1:])).index_add(0, graph_N, values)


def conserve_charge(
    charges_N: Tensor, total_G: Tensor | None, graph_N: Tensor, atoms_G: Tensor, exchange: Exchange = NO_EXCHANGE
) -> Tensor:
    """Shift charges, equally in a graph, so that they add up to `total_G` (None: 0). atoms_G: all atoms of each graph."""
    graphs = atoms_G.shape[0]
    excess_G = exchange.over_graphs(sum_by_graph(charges_N, graph_N, graphs))
    if total_G is not None:
        excess_G = excess_G - total_G.to(excess_G.dtype)
    return charges_N - (excess_G / atoms_G.clamp(min=1)).index_select(0, graph_N)


def dipole_of_charges(
    charges_N: Tensor, positions_N3: Tensor, graph_N: Tensor, atoms_G: Tensor, exchange: Exchange = NO_EXCHANGE
) -> Tensor:
    """Return the sum of charge times position about the mean position of the atoms, [G, 3]: so it never depends on the
    origin."""
    graphs, positions = atoms_G.shape[0], positions_N3.to(charges_N.dtype)
    mean_G3 = exchange.over_graphs(sum_by_graph(positions, graph_N, graphs)) / atoms_G.clamp(min=1)[:, None]
    # About the mean position: of a charged structure the dipole would otherwise change as it is moved.
    moments_N3 = charges_N[:, None] * (positions - mean_G3.index_select(0, graph_N))
    return exchange.over_graphs(sum_by_graph(moments_N3, graph_N, graphs))
