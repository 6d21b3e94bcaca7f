"""The network: embedding, message-passing blocks, heads. Plain PyTorch for one device; knows no mesh, rank or layout.

Forces and stress are derivatives of the energy, taken inside the forward pass; a training step differentiates them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor, nn

from phalanx.families.materials.model.backbones import backbone_of
from phalanx.families.materials.model.geometry import (
    NO_EXCHANGE,
    Exchange,
    Geometry,
    cell_volumes,
    edge_geometry,
    edge_vectors,
)
from phalanx.families.materials.model.heads import Heads, sum_by_graph
from phalanx.families.materials.model.layers import Atoms, InvariantAttention
from phalanx.families.materials.model.losses import DatasetUnits, Predictions, split_labels, summed_losses
from phalanx.families.materials.model.pooling import TopKPooling, keep_nodes
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.nn.layers import NumberedBlocks
from phalanx.nn.splits import ModelChunk


class AtomGraphs(TypedDict):
    """A batch of structures as the network takes it, by name; lengths in angstrom."""

    positions_N3: Tensor
    graph_N: Tensor
    """int64: the graph of each atom, ascending."""
    edges_2E: Tensor
    """int64: source and target of every directed edge."""
    shifts_E3: Tensor
    """What is added to the target's position for its periodic image."""
    cells_G33: Tensor
    """Lattice vectors as rows, zeros where not periodic."""
    source_G: Tensor
    """int64: the branch of each graph."""
    total_charge_G: NotRequired[Tensor | None]
    """Elementary charges; None is 0."""
    multiplicity_G: NotRequired[Tensor | None]
    """2S + 1; None is 1."""
    node_features_NF: NotRequired[Tensor | None]
    """Of graphs whose nodes are no atoms; None of structures."""
    edge_features_EF: NotRequired[Tensor | None]
    """Likewise."""
    graph_features_GF: NotRequired[Tensor | None]
    """Likewise."""
    max_atoms: NotRequired[int | None]
    """Atoms of the largest graph, where known; spares global attention a wait for the device."""


class MaterialsBlock(nn.Module):
    """One block of a backbone and, where the model has it, attention among all atoms beside it."""

    attention: InvariantAttention | None

    def __init__(self, config: MaterialsModel, number: int) -> None:
        super().__init__()
        self.messages = backbone_of(config).block(config, number)
        self.attention = None if config.attention is None else InvariantAttention(config, config.attention)
        pools = config.pooling is not None and config.pools_behind(number)
        self.pooling = TopKPooling(config, config.pooling) if pools and config.pooling is not None else None

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Return the next features of all atoms, or of those that stay."""
        after: Atoms = self.messages(atoms, geometry)
        if self.attention is not None:
            # Beside the messages and from the same input, as in GPS: neither waits for the other.
            scalars_NC = after.scalars_NC + self.attention(atoms.scalars_NC, geometry)
            after = after._replace(scalars_NC=scalars_NC + self.attention.feed(scalars_NC))
        if self.pooling is None:
            return after
        pooled: Atoms = self.pooling(after, geometry)
        return pooled


class MaterialsNetwork(nn.Module):
    """The model that `config` describes; the whole of it or one part.

    Parameters are uninitialised (see `layout.initial_values`); build under `torch.device("meta")` to allocate nothing.
    dtype: format of activations. edge_chunk: edges whose messages are held at once, for graphs that would not fit.
    """

    def __init__(
        self,
        config: MaterialsModel,
        *,
        dtype: torch.dtype = torch.float32,
        edge_chunk: int | None = None,
        part: ModelChunk | None = None,
    ) -> None:
        super().__init__()
        self.part = part = part or ModelChunk(range(config.n_layers))
        self.config = config
        self.dtype = dtype
        self.edge_chunk = edge_chunk
        self.units = DatasetUnits(config)
        if part.first:
            self.embedding = backbone_of(config).embedding(config)
        self.blocks = NumberedBlocks(lambda number: MaterialsBlock(config, number), part.blocks)
        if part.last:
            self.head = Heads(config, self.units)

    def forward(self, species_N: Tensor, *, exchange: Exchange = NO_EXCHANGE, **inputs: Any) -> Tensor:
        """Return weighted losses summed over labels, float64 [T], in the order of `learned_tasks`.

        inputs: the fields of `AtomGraphs` and of `Labels`, by name. See `predict`.
        """
        labels, graphs = split_labels(inputs)
        energy = self.config.energy
        predicted = self.predict(
            species_N,
            exchange=exchange,
            forces=energy is not None and energy.force_weight is not None and labels.forces_N3 is not None,
            stress=energy is not None and energy.stress_weight is not None and labels.stress_G33 is not None,
            **graphs,
        )
        branch_G, graph_N = graphs["source_G"], graphs["graph_N"]
        # Not len(): it would fix a size that programs for batches of all sizes keep open.
        atoms_G = exchange.atoms_by_graph(graph_N, branch_G.shape[0])
        return summed_losses(
            self.config,
            self.units,
            predicted,
            labels,
            branch_G=branch_G,
            graph_N=graph_N,
            target_E=graphs["edges_2E"][1],
            atoms_G=atoms_G,
            cells_G33=graphs["cells_G33"],
        )

    def predict(
        self,
        species_N: Tensor,
        *,
        exchange: Exchange = NO_EXCHANGE,
        forces: bool = True,
        stress: bool = False,
        **graphs: Unpack[AtomGraphs],
    ) -> Predictions:
        """Predict a batch, in the units of `Labels`.

        species_N: int64 atomic numbers. exchange: where atoms are that are not at hand; positions of those that edges come
        from then follow those of the atoms at hand. forces, stress: whether they are formed.
        """
        derived = self.config.energy is not None and (forces or stress)
        training = torch.is_grad_enabled()
        vector_E3 = edge_vectors(graphs["positions_N3"], graphs["edges_2E"], graphs["shifts_E3"])
        if derived:
            # A leaf of its own: the derivative ends at edge vectors, of which forces are sums.
            vector_E3 = _as_leaf(vector_E3)
        if derived and self.config.electrostatics is not None:
            graphs["positions_N3"], graphs["cells_G33"] = (
                _as_leaf(graphs["positions_N3"]),
                _as_leaf(graphs["cells_G33"]),
            )
        with torch.set_grad_enabled(training or derived):
            predicted = self.predict_from_vectors(
                vector_E3,
                species_N,
                exchange=exchange,
                forces=forces and derived,
                stress=stress and derived,
                differentiable=training,
                **graphs,
            )
        if training:
            return predicted
        return Predictions(**{name: value.detach() for name, value in vars(predicted).items() if value is not None})

    def predict_from_vectors(
        self,
        vector_E3: Tensor,
        species_N: Tensor,
        *,
        exchange: Exchange = NO_EXCHANGE,
        forces: bool,
        stress: bool,
        differentiable: bool,
        **graphs: Unpack[AtomGraphs],
    ) -> Predictions:
        """Predict from edge vectors, which require a gradient where forces or stress are formed; so do positions and cells
        of a model with electrostatics.

        All the work, and nothing that a compiler cannot take as a whole: the first derivative is traced like any other
        operation, so that a compiled training step has no second derivative to find.
        """
        assert self.part.first and self.part.last and len(self.blocks) == self.config.n_layers
        cells_G33, source_G = graphs["cells_G33"], graphs["source_G"]
        geometry = edge_geometry(
            self.config,
            vector_E3,
            graphs["edges_2E"],
            species_N,
            graphs["graph_N"],
            dtype=self.dtype,
            graphs=cells_G33.shape[0],
            max_atoms=graphs.get("max_atoms"),
            chunk=self.edge_chunk,
            exchange=exchange,
        )._replace(
            total_charge_G=graphs.get("total_charge_G"),
            multiplicity_G=graphs.get("multiplicity_G"),
            node_features_NF=graphs.get("node_features_NF"),
            edge_features_EF=graphs.get("edge_features_EF"),
            graph_features_GF=graphs.get("graph_features_GF"),
        )
        # Positions beyond those of the atoms at hand were needed for edge vectors alone.
        positions_N3 = graphs["positions_N3"][: geometry.atoms]
        atoms, geometry = self.features(geometry)
        predicted: Predictions = self.head(atoms, geometry, positions_N3, cells_G33, source_G)
        if not (forces or stress):
            return predicted
        beyond = self.config.electrostatics is not None
        return with_derivatives(
            predicted,
            geometry,
            cells_G33,
            positions_N3 if beyond else None,
            forces=forces,
            stress=stress,
            differentiable=differentiable,
        )

    def features(self, geometry: Geometry) -> tuple[Atoms, Geometry]:
        """Return features of all atoms behind the last block, or of those that stay; and the geometry of these."""
        geometry = backbone_of(self.config).prepare(self.config, geometry)
        atoms: Atoms = self.embedding(geometry)
        if self.config.graph is not None and atoms.edges_EC is not None:
            # What given edges say, where blocks read functions of the distance.
            geometry = geometry._replace(radial_ER=atoms.edges_EC)
        scalars: list[Tensor] = []
        for block in self.blocks:
            atoms = block(atoms, geometry)
            if atoms.kept_K is not None:
                geometry, atoms = keep_nodes(geometry, atoms.kept_K), atoms._replace(kept_K=None)
            scalars.append(atoms.scalars_NC)
        said_ER = None if self.config.graph is None else geometry.radial_ER
        return atoms._replace(earlier_NC=tuple(scalars[:-1]), edges_EC=said_ER), geometry


def with_derivatives(
    predicted: Predictions,
    geometry: Geometry,
    cells_G33: Tensor,
    positions_N3: Tensor | None,
    *,
    forces: bool,
    stress: bool,
    differentiable: bool,
) -> Predictions:
    """Return the predictions with forces -dE/dx and stress (1/V) dE/d(strain), both from the derivative by edge vectors.

    An atom's force is the sum of what its edges pull, so forces of a graph add up to 0. Strain acts on an edge vector v as
    v + strain v, so dE/d(strain) is the sum of outer products of v and dE/dv; its symmetric part is taken. As in ASE the
    stress is positive under tension; it is NaN for graphs without a cell. positions_N3: where energies depend on positions
    and cells beyond the edges, too; strain acts on both as on edges. differentiable: keep what training needs.
    """
    assert predicted.atom_energies_N is not None
    vector_E3, graph_N, exchange = geometry.vector_E3, geometry.graph_N, geometry.exchange
    inputs = [vector_E3] if positions_N3 is None else [vector_E3, positions_N3, cells_G33]
    # Collectives of this derivative are differentiated again, and must come in one order on all ranks.
    with exchange.in_order():
        gradient_E3, *beyond = energy_gradients(predicted.atom_energies_N, inputs, differentiable=differentiable)
    forces_N3 = stress_G33 = None
    if forces:
        pulls_M3 = gradient_E3.new_zeros((exchange.senders(geometry.atoms), 3))
        forces_N3 = exchange.to_owners(pulls_M3.index_add(0, geometry.source_E, gradient_E3))
        forces_N3 = forces_N3.index_add(0, geometry.target_E, -gradient_E3)
        forces_N3 = forces_N3 - beyond[0] if beyond else forces_N3
    if stress:
        graph_E = graph_N.index_select(0, geometry.target_E)
        virial_G33 = sum_by_graph(vector_E3[:, :, None] * gradient_E3[:, None, :], graph_E, geometry.graphs)
        if positions_N3 is not None:
            pull_N33 = positions_N3[:, :, None] * beyond[0][:, None, :]
            virial_G33 = virial_G33 + sum_by_graph(pull_N33, graph_N, geometry.graphs)
            virial_G33 = virial_G33 + cells_G33.transpose(1, 2) @ beyond[1]
        # Symmetric: an antisymmetric strain is a rotation, which changes no energy.
        virial_G33 = exchange.over_graphs(0.5 * (virial_G33 + virial_G33.transpose(1, 2)))
        volume_G11 = cell_volumes(cells_G33).to(virial_G33.dtype)[:, None, None]
        periodic = volume_G11 > 0.0
        # Divided by 1 where there is no volume: NaN gradients of a branch not taken would spread through `where`.
        stress_G33 = torch.where(periodic, virial_G33 / torch.where(periodic, volume_G11, 1.0), torch.nan)
    return replace(predicted, forces_N3=forces_N3, stress_G33=stress_G33)


def energy_gradients(energies: Tensor, inputs: Sequence[Tensor], *, differentiable: bool) -> list[Tensor]:
    """Return the gradients of summed energies by edge vectors and whatever else is given, in their shapes; zeros where no
    energy depends on one.

    energies: of the atoms at hand [N] rather than of graphs, whose energy may be other ranks' too; or of any such set.
    """
    # A batch without edges, or of lone atoms.
    if not energies.requires_grad:
        return [torch.zeros_like(one) for one in inputs]
    found = torch.autograd.grad(
        energies, inputs, torch.ones_like(energies), create_graph=differentiable, allow_unused=True
    )
    return [torch.zeros_like(x) if gradient is None else gradient for x, gradient in zip(inputs, found, strict=True)]


def _as_leaf(x: Tensor) -> Tensor:
    """Return `x`, made a leaf that derivatives end at unless they pass through it already."""
    return x if x.requires_grad else x.detach().requires_grad_()
