"""The batches of a run on structures: step k reads the same structures whatever the number of ranks, at equal cost for each.

step -> first and last global sample number -> (source, place in its reading) -> item of that source     `GraphOrder`
     -> rank and micro-batch of each structure (`balance`) -> tensors (`graph_batches`)                  `GraphBatchStream`

The order is a pure function of (seed, step, global batch, cost model); neither ranks nor micro-batches occur in it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Literal

import numpy as np

from phalanx.counter_random import stable_key
from phalanx.data.batch_stream import SteppedStream
from phalanx.data.sample_order import ORDER_VERSION, EpochShuffle, Mixture
from phalanx.errors import ConfigError, DataError
from phalanx.families.materials.config import GraphData
from phalanx.families.materials.data.array_files import Int64Array
from phalanx.families.materials.data.balance import (
    BranchGroups,
    CostModel,
    Division,
    assign_by_head_group,
    assign_in_turn,
    assign_longest_first,
    divide_by_cost,
    divide_within_budget,
)
from phalanx.families.materials.data.graph_batches import Collator, Columns, GraphBatch
from phalanx.families.materials.data.graph_shards import Located, PreparedSource
from phalanx.families.materials.data.in_memory.structure_store import StructureStore

_STEPS_KEPT = 128
"""Steps whose imbalance is kept: more than can be read ahead."""


class GraphBatchStream(SteppedStream[GraphBatch]):
    """This rank's share of each global batch, step after step, read ahead in the background."""

    def __init__(
        self,
        order: GraphOrder,
        columns: Columns,
        *,
        parts: int = 1,
        budget: float | None = None,
        oversized_alone: bool = False,
        rank: int = 0,
        ranks: int = 1,
        branches: BranchGroups | None = None,
        share_by: Literal["cost", "number"] = "cost",
        store: StructureStore | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        """Rank `rank` of `ranks` takes structures of about the same cost as every other.

        parts: micro-batches of each rank in each step. budget: most cost of a micro-batch in units of the order's cost
        model; each step then has as many micro-batches as that needs, on every rank the same number, and `parts` is not
        looked at. oversized_alone: whether a structure above the budget is a micro-batch of its own. branches: which ranks
        read which sources; None where all read all. share_by: whether ranks get equal cost, or equal numbers of structures
        (which branches go before). store: what holds the structures in memory; None reads files.

        Raises DataError for a structure above the budget, naming it, unless that is allowed.
        """
        super().__init__(prefetch, together=store is not None)
        assert 0 <= rank < ranks and parts >= 1
        self.order = order
        self.parts = parts
        self.rank = rank
        self.ranks = ranks
        self.pin_memory = pin_memory
        self.fingerprint = order.fingerprint
        self._collate = Collator(order.sources, columns)
        self._store = store
        self.costs: tuple[tuple[int, CostModel], ...] = ((1, order.cost),)
        """First step, and the costs by which structures are shared out from it on; in order."""
        self._imbalances: dict[int, float] = {}
        self._budget = budget
        self.branches = branches
        # Shares of equal number are what other programs give ranks; benchmarks compare the two.
        self._deal = assign_in_turn if share_by == "number" else assign_longest_first
        # Said before training begins, and not in the step that meets the structure.
        if budget is not None and not oversized_alone:
            unit = order.cost.unit
            for source in order.sources:
                atoms, edges = source.sizes(np.arange(len(source), dtype=np.int64))
                costs = order.cost.whole(atoms, edges)
                largest = int(costs.argmax())
                if costs[largest] * unit > budget:
                    over = int((costs * unit > budget).sum())
                    raise DataError(
                        f"{source.name(largest)}: its {atoms[largest]} atoms and {edges[largest]} edges cost "
                        f"{costs[largest] * unit:.6g}, more than data.microbatch_cost={budget:g} (so do {over} of "
                        f"{len(source)} structures of that split); raise it to at least that, or set data.oversized: alone"
                    )

    def batch(self, step: int) -> GraphBatch:
        """Return this rank's structures of optimizer step `step`, counted from 1; ordered by micro-batch, then sample
        number."""
        found = self.order.batch(step)
        division = self._divide(step, found)
        # One thread writes and another reads: single operations alone.
        self._imbalances[step] = division.imbalance
        self._imbalances.pop(step - _STEPS_KEPT, None)
        mine = division.rows(self.rank)
        parts = np.bincount(division.part[mine], minlength=division.loads.shape[1])
        held = None
        if self._store is not None:
            held = self._store.fetch(found, [division.rows(reader) for reader in self._store.readers])
        batch = self._collate(found.take(mine), parts.tolist(), held)
        batch = replace(batch, bounded=self._budget is not None)
        return batch.pinned() if self.pin_memory else batch

    def division(self, step: int) -> Division:
        """Return how the global batch of `step` is divided among all ranks; its costs are those of `use_costs`."""
        return self._divide(step, self.order.batch(step))

    def declared_division(self, step: int) -> Division:
        """Return the same by the declared costs, whatever `use_costs` was told."""
        return self._divide(step, self.order.batch(step), self.order.cost)

    def imbalance(self, step: int) -> float:
        """Return the largest cost of a rank over the mean in `step`, which must be among the last to have been read."""
        return self._imbalances[step]

    @property
    def reach(self) -> int:
        """Return the steps from the last one taken to the first that surely nobody has begun to read: those kept ready lie
        between, and one in the reader's hand."""
        return self.prefetch + 2

    def use_costs(self, costs: CostModel, *, first: int) -> None:
        """Divide step `first` and all later ones by these costs, as measured. All ranks must do so for the same step.

        Which structures a global batch holds does not change: that is cut by the cost model of the order.
        """
        assert self._ahead is None or first >= self._step + self.reach, (first, self._step)
        # Replaced as a whole, never changed: the reading thread may be looking at it.
        before = [entry for entry in self.costs if entry[0] < first]
        past = [entry for entry in before if entry[0] <= self._step]
        self.costs = (*past[-1:], *before[len(past) :], (first, costs))

    def _divide(self, step: int, found: Located, shares: CostModel | None = None) -> Division:
        shares = shares or [costs for first, costs in self.costs if first <= step][-1]
        costs = shares.whole(found.atoms, found.edges)
        deal = self._deal if self.branches is None else assign_by_head_group(self.branches, found.source)
        if self._budget is None:
            return divide_by_cost(costs, self.ranks, self.parts, deal)
        # The budget is about memory, which measured times say nothing of: it keeps to the declared costs.
        sizes = self.order.cost.whole(found.atoms, found.edges)
        return divide_within_budget(costs, self.ranks, sizes, int(self._budget / self.order.cost.unit), deal)


def graph_order(sources: Sequence[PreparedSource], data: GraphData, *, seed: int, global_batch: int) -> GraphOrder:
    """Return the order that a run file asks for. Raises ConfigError, see `GraphOrder`."""
    weights, cost = [source.weight for source in data.sources], CostModel.of(data.cost)
    return GraphOrder(sources, weights, seed=seed, global_batch=global_batch, batch_by=data.batch_by, cost=cost)


_WINDOW = 2**13
"""Samples of a window, about: few enough to be cut in milliseconds."""
_STEPS_A_WINDOW = 16
"""Steps that a window has at least, so that a whole number of them fits well."""
_WINDOWS_KEPT = 4


class GraphOrder:
    """The endless reading of a mixture of sources, and where each step's global batch begins and ends in it."""

    def __init__(
        self,
        sources: Sequence[PreparedSource],
        weights: Sequence[float | None],
        *,
        seed: int,
        global_batch: int,
        batch_by: Literal["cost", "graphs"],
        cost: CostModel,
    ) -> None:
        """weights: one a source, or None for all: then each source is read once an epoch.

        global_batch: structures of a step, on average where batches are cut by cost.

        Raises ConfigError for a source without structures.
        """
        empty = [source for source in sources if len(source) == 0]
        if empty:
            raise ConfigError(f"{empty[0].path} has no structures in its {empty[0].split} split")
        given = [weight for weight in weights if weight is not None]
        assert len(given) in (0, len(sources))
        self.sources = list(sources)
        self.global_batch = global_batch
        self.cost = cost
        self._by_cost = batch_by == "cost"
        self._mixture = Mixture(given or [float(len(source)) for source in sources])
        self._shuffles = [
            EpochShuffle(len(source), stable_key("graphs", seed, index)) for index, source in enumerate(sources)
        ]
        # The number of samples in which the source that takes longest is read once.
        self.epoch_samples = max(
            -(-len(source) * self._mixture.period // weight)
            for source, weight in zip(sources, self._mixture.weights, strict=True)
        )
        # Epochs that are cut together, the windows that they make, and the steps of each window: small data sets are
        # cut several epochs at once, large ones in windows.
        least = _STEPS_A_WINDOW * self.global_batch
        epochs = max(1, -(-least // self.epoch_samples))
        windows = max(1, self.epoch_samples // max(least, _WINDOW)) if epochs == 1 else 1
        samples = epochs * self.epoch_samples / windows
        # The smallest window has a sample for each of its steps, also where the number is rounded up.
        steps = min(math.floor(samples), math.floor(samples / self.global_batch + 0.5))
        self._epochs, self._windows, self._steps = epochs, windows, max(1, steps)
        self._cuts: OrderedDict[int, Int64Array] = OrderedDict()
        """By window: where its batches begin, and where the last one ends [steps + 1], in samples from its first."""
        parts = [source.fingerprint for source in sources]
        # All that decides which structures a step holds, and nothing of ranks: a run may resume on any number of them.
        content = [ORDER_VERSION, seed, global_batch, batch_by, astuple(cost), self._mixture.weights, parts]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def locate(self, numbers: Int64Array) -> Located:
        """Return source, item and size of samples by their global numbers [n]."""
        source, place = self._mixture(numbers)
        item = np.empty_like(place)
        atoms, edges = np.empty_like(place), np.empty_like(place)
        for index, shuffle in enumerate(self._shuffles):
            mine = np.flatnonzero(source == index)
            if mine.size:
                item[mine] = shuffle(place[mine])
                atoms[mine], edges[mine] = self.sources[index].sizes(item[mine])
        return Located(np.asarray(numbers, dtype=np.int64), source, item, atoms, edges)

    def span(self, step: int) -> tuple[int, int]:
        """Return the first global sample number of `step`, counted from 1, and the one after its last."""
        if not self._by_cost:
            return (step - 1) * self.global_batch, step * self.global_batch
        window, place = divmod(step - 1, self._steps)
        first = self._window_start(window)
        if window not in self._cuts:
            found = self.locate(np.arange(first, self._window_start(window + 1), dtype=np.int64))
            self._cuts[window] = _equal_cuts(self.cost.whole(found.atoms, found.edges), self._steps)
            # Steps are read one after another, so the last few windows are all that is asked for again.
            while len(self._cuts) > _WINDOWS_KEPT:
                self._cuts.popitem(last=False)
        cuts = self._cuts[window]
        return first + int(cuts[place]), first + int(cuts[place + 1])

    def batch(self, step: int) -> Located:
        """Return the samples of `step`."""
        first, last = self.span(step)
        return self.locate(np.arange(first, last, dtype=np.int64))

    def _window_start(self, window: int) -> int:
        """Return the global number of the first sample of a window; windows are of one size, but for one sample."""
        return window * self._epochs * self.epoch_samples // self._windows


def _equal_cuts(costs: Int64Array, runs: int) -> Int64Array:
    """Cut a sequence into `runs` runs of nearly equal cost, none empty: a sample belongs where its middle lies."""
    assert 1 <= runs <= len(costs)
    # Twice the middle of each sample, and twice the targets: whole numbers are cut alike on every machine.
    ends = np.cumsum(costs)
    middles = 2 * ends - costs
    total = 2 * int(ends[-1])
    targets = np.array([total * run // runs for run in range(1, runs)], dtype=np.int64)
    cuts = np.searchsorted(middles, targets)
    # A structure that outweighs a whole run would leave the next one empty.
    run = np.arange(1, runs)
    cuts = np.maximum.accumulate(np.maximum(cuts, 1) - run) + run
    cuts = np.minimum(cuts, len(costs) - runs + run)
    return np.concatenate(([0], cuts, [len(costs)])).astype(np.int64)
