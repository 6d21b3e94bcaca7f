"""What message passing knows of space: edge vectors, and the functions of them that all blocks share, computed once.

Everything a model predicts depends on positions through the edge vectors alone (the dipole aside). Forces and stress are
therefore formed from the derivative by edge vectors, and no net force or torque can arise.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from ase.data import covalent_radii
from torch import Tensor

from phalanx.families.materials.model_config import MAX_ATOMIC_NUMBER, MaterialsModel


class Constant:
    """Fixed numbers that a layer multiplies by; no parameter, no buffer, so nothing to save, shard or initialise."""

    def __init__(self, values: Tensor) -> None:
        # Numpy, which no mode of PyTorch (fake tensors, the meta device) turns into something without values.
        self.values = values.numpy(force=True)
        self._placed: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the numbers in format `dtype` on `device`, placed there once."""
        key = (device, dtype)
        if key in self._placed:
            return self._placed[key]
        placed = torch.from_numpy(self.values).to(device, dtype)
        # A fake tensor belongs to the mode that made it.
        if type(placed) is Tensor:
            self._placed[key] = placed
        return placed


COVALENT_RADII = Constant(torch.tensor(covalent_radii[: MAX_ATOMIC_NUMBER + 1], dtype=torch.float64, device="cpu"))
"""Covalent radii by atomic number, angstrom (Cordero et al. 2008)."""


class Exchange:
    """What a network asks of whatever holds the atoms that are not at hand; here nothing is missing.

    A network may be given a part of the atoms of its structures, with all edges that end at them. Other parts then hold some
    of the atoms that messages come from (`graph_parallel.halo_exchange`). Everything has derivatives of any order. Letters:
    N atoms at hand, M these and then the further atoms that their edges come from, E edges at hand, F these and then further
    ones, A all atoms of all parts.
    """

    def atoms(self, x_NC: Tensor) -> Tensor:
        """Map rows of the atoms at hand to those, then rows of the further atoms that edges come from, [M, ...]."""
        return x_NC

    def to_owners(self, x_MC: Tensor) -> Tensor:
        """Map rows of all atoms that edges touch to their sums where each atom is at hand, [N, ...]: the reverse of
        `atoms`."""
        return x_MC

    def senders(self, atoms: int) -> int:
        """Return how many rows `atoms` gives for this many, M."""
        return atoms

    def edges(self, x_EC: Tensor) -> Tensor:
        """Map rows of the edges at hand to those, then rows of all edges that end at the further atoms, [F, ...]."""
        return x_EC

    def edge_targets(self, target_E: Tensor) -> Tensor:
        """Return where these edges end among the M atoms, int64 [F]."""
        return target_E

    def everyone(self, x_NC: Tensor) -> Tensor:
        """Return rows of all atoms of all parts, [A, ...]; those of one graph together, graphs ascending."""
        return x_NC

    def graph_of_everyone(self, graph_N: Tensor) -> Tensor:
        """Return the graph of each of them, int64 [A]."""
        return graph_N

    def over_graphs(self, sums_G: Tensor) -> Tensor:
        """Map sums over the atoms of each graph that are at hand to sums over all of its atoms, [G, ...]."""
        return sums_G

    def atoms_by_graph(self, graph_N: Tensor, graphs: int) -> Tensor:
        """Return the number of all atoms of each graph, int64 [G]."""
        # Not in place: a program compiled from a graph without such operations is ready sooner.
        return torch.zeros(graphs, dtype=torch.int64, device=graph_N.device).index_add(
            0, graph_N, torch.ones_like(graph_N)
        )

    def largest(self, max_atoms: int | None) -> int | None:
        """Return the most atoms at hand of one graph, where max_atoms is the most of all; None where nobody knows."""
        return max_atoms

    def in_order(self) -> AbstractContextManager[object]:
        """Return the context in which a derivative is formed that will be differentiated again."""
        return nullcontext()


NO_EXCHANGE = Exchange()


class Geometry(NamedTuple):
    """Edges of a batch and the functions of their vectors, in the activation format unless noted."""

    source_E: Tensor
    """int64: the atom a message comes from, a row of `exchange.atoms`."""
    target_E: Tensor
    """int64: the atom it goes to."""
    species_N: Tensor
    """int64: atomic numbers."""
    graph_N: Tensor
    """int64: the graph of each atom, ascending."""
    vector_E3: Tensor
    """From source to target (angstrom), in at least float32."""
    unit_E3: Tensor
    """The same with length 1."""
    envelope_E1: Tensor
    """1 for near atoms, 0 with all derivatives the envelope promises at the cutoff and beyond."""
    radial_ER: Tensor
    """Functions of the distance, without the envelope."""
    harmonics_ES: Tensor | None = None
    """Spherical harmonics of the direction; for backbones that use them."""
    triplets: Triplets | None = None
    """Pairs of edges that meet; for backbones that use them."""
    graphs: int = 1
    """Number of graphs."""
    max_atoms: int | None = None
    """Atoms of the largest graph, where the caller knows; spares the device a wait."""
    chunk: int | None = None
    """Edges whose messages are held at once; None for all."""
    exchange: Exchange = NO_EXCHANGE
    """Where the atoms are that messages come from."""
    total_charge_G: Tensor | None = None
    """Elementary charges; None is 0."""
    multiplicity_G: Tensor | None = None
    """2S + 1; None is 1."""
    node_features_NF: Tensor | None = None
    """Of graphs whose nodes are no atoms; None of structures."""
    edge_features_EF: Tensor | None = None
    """Likewise."""
    graph_features_GF: Tensor | None = None
    """Likewise."""

    @property
    def atoms(self) -> int:
        """Return the number of atoms."""
        return self.graph_N.shape[0]


class Triplets(NamedTuple):
    """Pairs of edges k -> j and j -> i with i and k not the same atom at the same place."""

    incoming_T: Tensor
    """int64: the edge k -> j, a row of `Geometry.exchange.edges`."""
    outgoing_T: Tensor
    """int64: the edge j -> i."""
    cosine_T1: Tensor
    """Cosine of the angle at j."""


def edge_vectors(positions_N3: Tensor, edges_2E: Tensor, shifts_E3: Tensor) -> Tensor:
    """Return vectors from source to target, in at least float32: pos[target] + shift - pos[source] (angstrom)."""
    # Differences of large coordinates: half formats would lose the digits that distances are made of.
    wide = torch.promote_types(positions_N3.dtype, torch.float32)
    positions = positions_N3.to(wide)
    return positions.index_select(0, edges_2E[1]) - positions.index_select(0, edges_2E[0]) + shifts_E3.to(wide)


def cell_volumes(cells_G33: Tensor) -> Tensor:
    """Return volumes (angstrom^3) of cells whose rows are lattice vectors; 0 for a cell of zeros."""
    a, b, c = cells_G33.unbind(1)
    volume_G: Tensor = torch.linalg.vecdot(a, torch.linalg.cross(b, c))
    return volume_G.abs()


def edge_geometry(
    config: MaterialsModel,
    vector_E3: Tensor,
    edges_2E: Tensor,
    species_N: Tensor,
    graph_N: Tensor,
    *,
    dtype: torch.dtype,
    graphs: int,
    max_atoms: int | None = None,
    chunk: int | None = None,
    exchange: Exchange = NO_EXCHANGE,
) -> Geometry:
    """Return all functions of the edge vectors that every backbone needs, in format `dtype`."""
    if config.graph is not None and not config.graph.positions:
        # Edges without a length: what they say is made of their features (`graph_embedding`).
        ones_ER = torch.ones((vector_E3.shape[0], config.n_radial), dtype=dtype, device=vector_E3.device)
        return Geometry(
            edges_2E[0],
            edges_2E[1],
            species_N,
            graph_N,
            vector_E3,
            vector_E3.to(dtype),
            ones_ER[:, :1],
            ones_ER,
            graphs=graphs,
            max_atoms=max_atoms,
            chunk=chunk,
            exchange=exchange,
        )
    # Written out: the derivative of `norm` changes a tensor in place (see `Exchange.atoms_by_graph`).
    distance_E1 = vector_E3.square().sum(dim=1, keepdim=True).sqrt()
    seen_E1 = distance_E1
    if config.distance_transform == "agnesi":
        source_E, target_E = species_of_ends(species_N, edges_2E[0], edges_2E[1], exchange)
        radii = COVALENT_RADII.on(vector_E3.device, vector_E3.dtype)
        mean_E = 0.5 * (radii.index_select(0, source_E) + radii.index_select(0, target_E))
        seen_E1 = agnesi_transform(distance_E1 / mean_E[:, None])
    return Geometry(
        edges_2E[0],
        edges_2E[1],
        species_N,
        graph_N,
        vector_E3,
        (vector_E3 / distance_E1).to(dtype),
        # Edges that are given do not fade.
        (cutoff_envelope(config, distance_E1) if config.graph is None else torch.ones_like(distance_E1)).to(dtype),
        radial_functions(config, seen_E1).to(dtype),
        graphs=graphs,
        max_atoms=max_atoms,
        chunk=chunk,
        exchange=exchange,
    )


def species_of_ends(
    species_N: Tensor, source_E: Tensor, target_E: Tensor, exchange: Exchange = NO_EXCHANGE
) -> tuple[Tensor, Tensor]:
    """Return the atomic numbers, int64 [E], of the atoms where edges come from and of those where they go."""
    # Rows of other ranks' atoms travel as features do.
    number_M = exchange.atoms(species_N[:, None].double()).squeeze(1).long()
    return number_M.index_select(0, source_E), species_N.index_select(0, target_E)


def agnesi_transform(ratio: Tensor) -> Tensor:
    """Return 1 / (1 + a x^q / (1 + x^(q - p))) of distances over the mean covalent radius of their ends.

    1 at 0, falling with distance (Witt et al. 2023, Journal of Chemical Physics 159, 164101); a, q and p are mace-torch's.
    """
    a, q, p = 1.0805, 0.9183, 4.5791
    return (1.0 + a * ratio.pow(q) / (1.0 + ratio.pow(q - p))).reciprocal()


def cutoff_envelope(config: MaterialsModel, distance: Tensor) -> Tensor:
    """Return how messages fade with distance (angstrom): 1 at 0, exactly 0 from the cutoff on.

    polynomial: that of DimeNet (Gasteiger et al. 2020, equation 8); two derivatives vanish at the cutoff. cosine: Behler
    and Parrinello 2007; one derivative vanishes.
    """
    x = distance / config.cutoff
    if config.envelope == "polynomial":
        return polynomial_envelope(x, config.envelope_power)
    return torch.where(x < 1.0, 0.5 * (torch.cos(math.pi * x) + 1.0), 0.0)


def polynomial_envelope(x: Tensor, power: int = 6) -> Tensor:
    """Return 1 at x = 0 and exactly 0 from x = 1 on, where two derivatives vanish; powers of x are `power` and the next two.

    They make forces (first) and their gradients (second) continuous as atoms cross a cutoff.
    """
    first, second, third = (power + 1) * (power + 2) / 2, power * (power + 2), power * (power + 1) / 2
    value = 1.0 - x.pow(power) * (first - second * x + third * x.square())
    # Padded edges lie beyond the cutoff, where the polynomial grows without bound.
    return torch.where(x < 1.0, value, 0.0)


def radial_functions(config: MaterialsModel, distance_E1: Tensor) -> Tensor:
    """Return functions [E, R] of distances [E, 1] (angstrom), without an envelope.

    bessel: sqrt(2/c) sin(n pi d/c) / d (Gasteiger et al. 2020, equation 7), times c/sqrt(2) so that they are of order 1.
    gaussian: R equally spaced from 0 to the cutoff, as wide as they are apart (Schuett et al. 2017).
    """
    dtype, device = distance_E1.dtype, distance_E1.device
    if config.radial == "bessel":
        # In the format of the distances, at least float32: n pi d/c reaches 60, which bfloat16 resolves to a quarter.
        order_R = torch.arange(1, config.n_radial + 1, dtype=dtype, device=device)
        return torch.sin(order_R * (math.pi / config.cutoff) * distance_E1) * (math.sqrt(config.cutoff) / distance_E1)
    center_R = torch.linspace(0.0, config.cutoff, config.n_radial, dtype=dtype, device=device)
    spacing = config.cutoff / max(config.n_radial - 1, 1)
    return torch.exp(-0.5 * ((distance_E1 - center_R) / spacing).square())


def find_triplets(geometry: Geometry) -> Triplets:
    """Return all pairs of edges that meet at an atom. Their number depends on the data, so the device is waited for."""
    exchange, vector_E3 = geometry.exchange, geometry.vector_E3.detach()
    target_F, atoms = exchange.edge_targets(geometry.target_E), exchange.senders(geometry.atoms)
    # All pairs of an edge k -> j and an edge j -> i. Edges sorted by where they end: those that arrive at one atom are a
    # run, found by its first place.
    source_E, device = geometry.source_E, geometry.source_E.device
    order_F = torch.argsort(target_F, stable=True)
    arriving_N = torch.zeros(atoms, dtype=torch.int64, device=device).index_add_(0, target_F, torch.ones_like(target_F))
    first_N = arriving_N.cumsum(0) - arriving_N
    pairs_E = arriving_N.index_select(0, source_E)
    outgoing_T = torch.repeat_interleave(torch.arange(len(source_E), device=device), pairs_E)
    before_T = torch.repeat_interleave(pairs_E.cumsum(0) - pairs_E, pairs_E)
    within_T = torch.arange(len(outgoing_T), device=device) - before_T
    incoming_T = order_F.index_select(0, first_N.index_select(0, source_E.index_select(0, outgoing_T)) + within_T)
    # An edge and its own reverse enclose no angle: k and i are one atom at one place.
    closed_T3 = exchange.edges(vector_E3).index_select(0, incoming_T) + vector_E3.index_select(0, outgoing_T)
    # By position, not by index: in a crystal k and i may be one atom in different cells, which is a real angle.
    kept = (closed_T3.abs().amax(dim=1) > 1e-3).nonzero().squeeze(1)
    incoming_T, outgoing_T = incoming_T[kept], outgoing_T[kept]
    unit_F3 = exchange.edges(geometry.unit_E3)
    cosine_T = -(unit_F3.index_select(0, incoming_T) * geometry.unit_E3.index_select(0, outgoing_T)).sum(1)
    return Triplets(incoming_T, outgoing_T, cosine_T[:, None])
