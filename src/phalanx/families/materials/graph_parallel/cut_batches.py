"""A batch of structures cut into shares of about equal cost, one for each rank of `cp`, with what a rank's halo must know.

The atoms of a micro-batch stand in one order (`graph_parallel.spatial_order`), which is cut into runs: small structures
mostly stay whole, large ones fall into compact pieces. A rank has the edges that end at its atoms. Every rank is given the
whole micro-batch, in host memory, and works out the same cut; only its share goes to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from phalanx.data.batch_stream import SteppedStream
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.array_files import Int64Array, ragged_ranges
from phalanx.families.materials.data.graph_batches import LABELS, PER_ATOM, PER_EDGE, GraphBatch
from phalanx.families.materials.data.graph_stream import GraphBatchStream
from phalanx.families.materials.graph_parallel.halo_exchange import Gathering, Halo, Plan, Sending
from phalanx.families.materials.graph_parallel.spatial_order import spatial_order
from phalanx.families.materials.sizes import block_piece
from phalanx.layout.mesh import Axis

_GATHER_ABOVE = 0.75
"""Share of all foreign rows that ranks must want on average for one all-gather to bring them: it then carries little in
vain, and is one message along a ring instead of one to each rank."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class Cutting:
    """How micro-batches are cut, the same on all ranks of `cp`."""

    rank: int
    size: int
    node_cost: float = 1.0
    """Cost of an atom."""
    edge_cost: float = 0.3
    """Cost of an edge, for the rank at whose atom it ends."""
    triplet_cost: float = 0.0
    """Cost of a pair of edges, the second of which ends at the rank's atom."""
    edges: bool = False
    """Whether the network asks for edges that end at the halo's atoms."""
    everyone: bool = False
    """Whether it asks for all atoms."""


@dataclass(frozen=True)
class GraphShare:
    """One rank's share of some micro-batches; see `data.batch.Batch`."""

    parts: tuple[SharePart, ...]
    counts: Tensor
    """Targets of the whole micro-batches, int64 [T]."""
    sample_indices: Tensor

    def to(self, device: torch.device) -> GraphShare:
        """Return the share on `device`, copied without waiting when it lies in pinned memory."""
        return _map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> GraphShare:
        """Return a copy in pinned memory."""
        return _map_tensors(self, Tensor.pin_memory)

    def split(self, parts: int) -> Iterator[GraphShare]:
        """Return the micro-batches that it was cut from."""
        for part in self.parts:
            yield GraphShare((part,), part.counts, part.sample_indices)

    def target_counts(self) -> Tensor:
        """Return the targets of the whole micro-batches: ranks of `cp` have them together."""
        return self.counts

    def inputs(self) -> tuple[Tensor, dict[str, Any]]:
        """Return, of one micro-batch, atomic numbers of this rank's atoms; and all else that the stage takes, by name."""
        (part,) = self.parts
        return part.species_N, {**part.named, "halo": part.halo}


@dataclass(frozen=True)
class SharePart:
    """One rank's share of a micro-batch."""

    species_N: Tensor
    named: dict[str, Any]
    """See `MaterialsNetwork.forward`. Positions are of this rank's atoms and then of its halo; labels of a structure are NaN
    on all ranks but that of its first atom, so that they count once."""
    halo: Halo
    counts: Tensor
    sample_indices: Tensor


def cut_batch(batch: GraphBatch, microbatches: int, how: Cutting) -> GraphShare:
    """Return the share of rank `how.rank`. microbatches: as for `GraphBatch.split`."""
    parts = tuple(cut_microbatch(part, how) for part in batch.split(microbatches))
    return GraphShare(parts, batch.target_counts(), batch.sample_indices)


def cut_microbatch(batch: GraphBatch, how: Cutting) -> SharePart:
    """Return the share of one micro-batch."""
    cut = _Cut.of(batch, how)
    species_N, named = batch.inputs()
    halo, edges_E = cut.halo(how), cut.edges(how.rank)
    own = cut.atoms(how.rank)
    atoms_M = torch.from_numpy(np.concatenate((cut.order_A[own], cut.order_A[cut.foreign(how.rank)])))
    atoms_N, edges = atoms_M[: halo.own], torch.from_numpy(edges_E)
    for name in (field for field in PER_ATOM if field in named and field != "positions_N3"):
        named[name] = named[name].cpu()[atoms_N]
    for name in (field for field in PER_EDGE if field in named):
        named[name] = named[name].cpu()[edges]
    elsewhere_G = torch.from_numpy(cut.keeper_G != how.rank)
    for name in (label for label in LABELS if label in named and "_G" in label):
        label_G = named[name].cpu().clone()
        # A structure's label counts on one rank alone: losses are summed over ranks.
        label_G[elsewhere_G] = torch.nan
        named[name] = label_G
    named["positions_N3"] = named["positions_N3"].cpu()[atoms_M]
    named["edges_2E"] = torch.from_numpy(cut.local_ends(how.rank, edges_E))
    return SharePart(species_N.cpu()[atoms_N], named, halo, batch.target_counts(), batch.sample_indices)


class _Cut(NamedTuple):
    """A micro-batch cut for all ranks. A place is a number along the order of atoms; edges are ordered by where they end."""

    order_A: Int64Array
    """The atom at each place."""
    rank_A: Int64Array
    """Its rank, ascending."""
    first_R: Int64Array
    """First place of each rank, then the number of atoms."""
    edge_E: Int64Array
    """Edges in the order of the places they end at."""
    ends_2E: Int64Array
    """Places of their source and target, in that order."""
    first_edge_A: Int64Array
    """The first edge that ends at each place, in that order; then the number of edges."""
    wants_P2: Int64Array
    """Pairs of a rank and a foreign place that its edges come from, ordered."""
    graph_A: Int64Array
    keeper_G: Int64Array
    """The rank that counts the labels of each structure."""

    @classmethod
    def of(cls, batch: GraphBatch, how: Cutting) -> _Cut:
        graph_N, edges_2E = batch.graph_N.numpy(force=True), batch.edges_2E.numpy(force=True)
        positions, cells = batch.positions_N3.numpy(force=True), batch.cells_G33.numpy(force=True)
        atoms = len(graph_N)
        order_A = spatial_order(positions, cells, graph_N)
        place_N = np.empty(atoms, dtype=np.int64)
        place_N[order_A] = np.arange(atoms)
        arriving_A = np.bincount(place_N[edges_2E[1]], minlength=atoms)
        edge_E = np.argsort(place_N[edges_2E[1]], kind="stable")
        ends_2E = place_N[edges_2E[:, edge_E]]
        cost_A = how.node_cost + how.edge_cost * arriving_A
        if how.triplet_cost:
            cost_A += how.triplet_cost * np.bincount(ends_2E[1], weights=arriving_A[ends_2E[0]], minlength=atoms)
        total = float(cost_A.sum())
        # An atom belongs where its middle lies: runs of places whose costs differ by one atom's at most.
        middles = np.cumsum(cost_A) - cost_A / 2
        parts_A = middles * (how.size / total) if total else middles
        rank_A: Int64Array = np.minimum(parts_A.astype(np.int64), how.size - 1)
        # A row of flags for each rank: cheaper than sorting edges, which are many times as many.
        wanted = np.zeros((how.size, atoms), dtype=bool)
        wanted[rank_A[ends_2E[1]], ends_2E[0]] = True
        # A rank's own atoms are at hand.
        wanted[rank_A, np.arange(atoms)] = False
        graph_A = graph_N[order_A]
        first_G = np.searchsorted(graph_A, np.arange(len(batch.cells_G33)))
        return cls(
            order_A,
            rank_A,
            np.searchsorted(rank_A, np.arange(how.size + 1)),
            edge_E,
            ends_2E,
            np.concatenate(([0], np.cumsum(arriving_A))),
            np.stack(wanted.nonzero(), axis=1),
            graph_A,
            np.append(rank_A, 0)[first_G],
        )

    def atoms(self, rank: int) -> slice:
        """Return places of a rank."""
        return slice(self.first_R[rank], self.first_R[rank + 1])

    def foreign(self, rank: int) -> Int64Array:
        """Return places of a rank's halo, ordered, and so by rank."""
        places: Int64Array = self.wants_P2[self.wants_P2[:, 0] == rank, 1]
        return places

    def edges(self, rank: int) -> Int64Array:
        """Return edges that end at a rank's atoms, ordered."""
        first, last = self.first_edge_A[self.first_R[rank : rank + 2]].tolist()
        mine: Int64Array = self.edge_E[first:last]
        return mine

    def local_ends(self, rank: int, edges_E: Int64Array) -> Int64Array:
        """Return their source and target among the rank's atoms and its halo."""
        own, foreign = self.atoms(rank), self.foreign(rank)
        local_A = np.full(len(self.order_A), -1, dtype=np.int64)
        local_A[own] = np.arange(own.stop - own.start)
        local_A[foreign] = own.stop - own.start + np.arange(len(foreign))
        first = int(self.first_edge_A[self.first_R[rank]])
        ends_2E: Int64Array = local_A[self.ends_2E[:, first : first + len(edges_E)]]
        return ends_2E

    def halo(self, how: Cutting) -> Halo:
        own, foreign = self.atoms(how.rank), self.foreign(how.rank)
        held_R = np.diff(self.first_R)
        count, graphs = int(held_R[how.rank]), len(self.keeper_G)
        held_G = np.bincount(self.graph_A[own], minlength=graphs)
        halo = Halo(
            atoms=_plan_exchange(how, self.wants_P2[:, 0], self.wants_P2[:, 1], self.rank_A, self.first_R),
            own=count,
            senders=count + len(foreign),
            atoms_G=torch.from_numpy(np.bincount(self.graph_A, minlength=graphs)),
            largest=int(held_G.max(initial=0)),
        )
        if how.edges:
            # Every pair of a rank and a foreign atom stands for all edges that end there.
            arriving_A, place_P = np.diff(self.first_edge_A), self.wants_P2[:, 1]
            edges = ragged_ranges(self.first_edge_A[place_P], arriving_A[place_P])
            ranks = np.repeat(self.wants_P2[:, 0], arriving_A[place_P])
            rank_E = self.rank_A[self.ends_2E[1]]
            targets = np.repeat(count + np.arange(len(foreign)), arriving_A[foreign])
            plan = _plan_exchange(how, ranks, edges, rank_E, self.first_edge_A[self.first_R])
            halo = replace(halo, edges=plan, edge_targets=torch.from_numpy(targets))
        if how.everyone:
            every = np.arange(len(self.order_A))
            taken = _plan_gathering(every, self.rank_A, self.first_R)
            halo = replace(halo, everyone=taken, graph_A=torch.from_numpy(self.graph_A))
        return halo


def _plan_exchange(how: Cutting, ranks: Int64Array, rows: Int64Array, holder: Int64Array, first_R: Int64Array) -> Plan:
    """Return how rows numbered through all ranks come to the ranks that want them: pairs of both, ordered.

    holder: the rank of each row. first_R: first row of each rank, then the number of rows.
    """
    if not len(rows):
        return None
    wanted = rows[ranks == how.rank]
    foreign = (how.size - 1) * int(first_R[-1])
    if len(rows) > _GATHER_ABOVE * foreign:
        return _plan_gathering(wanted, holder, first_R)
    given = holder[rows] == how.rank
    return Sending(
        torch.from_numpy(rows[given] - first_R[how.rank]),
        np.bincount(ranks[given], minlength=how.size).tolist(),
        np.bincount(holder[wanted], minlength=how.size).tolist(),
    )


def _plan_gathering(rows: Int64Array, holder: Int64Array, first_R: Int64Array) -> Gathering:
    widest = int(np.diff(first_R).max(initial=0))
    return Gathering(widest, torch.from_numpy(holder[rows] * widest + rows - first_R[holder[rows]]))


def _map_tensors(value: Value, move: Callable[[Tensor], Tensor]) -> Value:
    """Return `value` with every tensor in it moved."""
    moved: Any = value
    if isinstance(value, Tensor):
        moved = move(value)
    elif isinstance(value, dict):
        moved = {name: _map_tensors(item, move) for name, item in value.items()}
    elif isinstance(value, tuple):
        moved = tuple(_map_tensors(item, move) for item in value)
    elif is_dataclass(value) and not isinstance(value, type):
        moved = replace(
            value, **{field.name: _map_tensors(getattr(value, field.name), move) for field in fields(value)}
        )
    return moved  # type: ignore[no-any-return]


class ShareStream(SteppedStream[GraphShare]):
    """One rank's shares of the batches that the ranks of its `cp` group read alike."""

    def __init__(self, graphs: GraphBatchStream, microbatches: int, how: Cutting, *, pin_memory: bool) -> None:
        """graphs: gives whole batches; it is only asked for steps and reads nothing ahead. microbatches: of each step."""
        super().__init__(graphs.prefetch, together=graphs.together)
        self.fingerprint = graphs.fingerprint
        self._graphs = graphs
        self._microbatches = microbatches
        self._how = how
        self._pin_memory = pin_memory

    def batch(self, step: int) -> GraphShare:
        """Return this rank's share of optimizer step `step`, counted from 1."""
        share = cut_batch(self._graphs.batch(step), self._microbatches, self._how)
        return share.pinned() if self._pin_memory else share


def cutting_of(run: MaterialsRun, cp: Axis) -> Cutting:
    """Return how a run's micro-batches are cut over `cp`, by the costs that it declares.

    A triplet costs as much of an edge as its matrices give numbers beside those of an edge.
    """
    attention, cost = run.model.attention, run.data.cost
    numbers = {"atom": 0, "edge": 0, "triplet": 0}
    for matmul in block_piece(run.model, 0).matmuls:
        numbers[matmul.row] += matmul.outside * matmul.times
    return Cutting(
        cp.rank,
        cp.size,
        node_cost=cost.node,
        edge_cost=cost.edge,
        triplet_cost=cost.edge * numbers["triplet"] / max(numbers["edge"], 1),
        edges=run.model.body == "dimenet++",
        everyone=(attention is not None and attention.kind == "softmax") or run.model.electrostatics is not None,
    )
