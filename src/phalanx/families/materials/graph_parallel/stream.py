"""Shares of batches for ranks of `cp`, cut while training computes with those before."""

from __future__ import annotations

from phalanx.data.batch_stream import SteppedStream
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.graph_stream import GraphBatchStream
from phalanx.families.materials.graph_parallel.batch import Cutting, GraphShare, cut_batch
from phalanx.families.materials.model.network_shapes import block_piece
from phalanx.layout.mesh import Axis


class ShareStream(SteppedStream[GraphShare]):
    """One rank's shares of the batches that the ranks of its `cp` group read alike."""

    def __init__(self, graphs: GraphBatchStream, microbatches: int, how: Cutting, *, pin_memory: bool) -> None:
        """graphs: gives whole batches; it is only asked for steps and reads nothing ahead. microbatches: of each step."""
        super().__init__(graphs.prefetch)
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
        everyone=attention is not None and attention.kind == "softmax",
    )
