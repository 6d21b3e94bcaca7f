"""The batches of a run on structures: step k reads the same structures whatever the number of ranks, at equal cost for each.

step -> global batch (`order`) -> rank and micro-batch of each structure (`balance`) -> tensors (`batches`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from phalanx.data.batch_stream import SteppedStream
from phalanx.errors import ConfigError, DataError
from phalanx.families.materials.data.balance import (
    BranchGroups,
    Division,
    assign_by_branch,
    by_number,
    divide,
    divide_within,
    longest_first,
)
from phalanx.families.materials.data.graph_batches import LABELS, Collator, Columns, GraphBatch
from phalanx.families.materials.data.graph_order import GraphOrder, Located
from phalanx.families.materials.data.graph_shards import PreparedSource
from phalanx.families.materials.data.structure_cost import CostModel
from phalanx.families.materials.data.structures.arrays import Int64Array
from phalanx.families.materials.data_config import GraphData

_STEPS_KEPT = 128
"""Of which the imbalance is known: more than can be read ahead."""


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
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        """Rank `rank` of `ranks` takes structures of about the same cost as every other.

        parts: micro-batches of each rank in each step. budget: most cost of a micro-batch in units of the order's cost
        model; each step then has as many micro-batches as that needs, on every rank the same number, and `parts` is not
        looked at. oversized_alone: whether a structure above the budget is a micro-batch of its own. branches: which ranks
        read which sources; None where all read all. share_by: whether ranks get equal cost, or equal numbers of structures
        (which branches go before).

        Raises DataError for a structure above the budget, naming it, unless that is allowed.
        """
        super().__init__(prefetch)
        assert 0 <= rank < ranks and parts >= 1
        self.order = order
        self.parts = parts
        self.rank = rank
        self.ranks = ranks
        self.pin_memory = pin_memory
        self.fingerprint = order.fingerprint
        self._collate = Collator(order.sources, columns)
        self.costs: tuple[tuple[int, CostModel], ...] = ((1, order.cost),)
        """First step, and the costs by which structures are shared out from it on; in order."""
        self._imbalances: dict[int, float] = {}
        self._budget = budget
        self.branches = branches
        self._deal = by_number if share_by == "number" else longest_first
        if budget is not None and not oversized_alone:
            for source in order.sources:
                _check_budget(source, order.cost, budget)

    def batch(self, step: int) -> GraphBatch:
        """This rank's structures of optimizer step `step`, counted from 1; ordered by micro-batch, then sample number."""
        found = self.order.batch(step)
        division = self._divide(step, found)
        # One thread writes and another reads: single operations alone.
        self._imbalances[step] = division.imbalance
        self._imbalances.pop(step - _STEPS_KEPT, None)
        mine = np.flatnonzero(division.rank == self.rank)
        mine = mine[np.argsort(division.part[mine], kind="stable")]
        parts = np.bincount(division.part[mine], minlength=division.loads.shape[1])
        batch = self._collate(_chosen(found, mine), parts.tolist())
        batch = replace(batch, bounded=self._budget is not None)
        return batch.pinned() if self.pin_memory else batch

    def division(self, step: int) -> Division:
        """How the global batch of `step` is shared out over all ranks; its costs are those of `use_costs`."""
        return self._divide(step, self.order.batch(step))

    def declared_division(self, step: int) -> Division:
        """The same by the declared costs, whatever `use_costs` was told."""
        return self._divide(step, self.order.batch(step), self.order.cost)

    def imbalance(self, step: int) -> float:
        """Largest cost of a rank over the mean in `step`, which must be among the last to have been read."""
        return self._imbalances[step]

    @property
    def reach(self) -> int:
        """Steps from the last one taken to the first that surely nobody has begun to read: those kept ready lie between,
        and one in the reader's hand."""
        return self.prefetch + 2

    def use_costs(self, costs: CostModel, *, first: int) -> None:
        """Share out step `first` and all later ones by these costs, as measured. All ranks must do so for the same step.

        Which structures a global batch holds does not change: that is cut by the cost model of the order.
        """
        assert self._ahead is None or first >= self._step + self.reach, (first, self._step)
        before = [entry for entry in self.costs if entry[0] < first]
        past = [entry for entry in before if entry[0] <= self._step]
        self.costs = (*past[-1:], *before[len(past) :], (first, costs))

    def _divide(self, step: int, found: Located, shares: CostModel | None = None) -> Division:
        shares = shares or [costs for first, costs in self.costs if first <= step][-1]
        costs = shares.whole(found.atoms, found.edges)
        deal = self._deal if self.branches is None else assign_by_branch(self.branches, found.source)
        if self._budget is None:
            return divide(costs, self.ranks, self.parts, deal)
        # The budget is about memory, which measured times say nothing of: it keeps to the declared costs.
        sizes = self.order.cost.whole(found.atoms, found.edges)
        return divide_within(costs, self.ranks, sizes, int(self._budget / self.order.cost.unit), deal)


def graph_columns(
    sources: Sequence[PreparedSource],
    *,
    tasks: Sequence[str] | None = None,
    properties: Sequence[str] | None = None,
    atom_properties: Sequence[str] | None = None,
) -> Columns:
    """What batches of these sources hold.

    tasks: fields of `batches.LABELS` in the order in which a model's losses come; None takes all there are. properties,
    atom_properties: names in the order of a model's heads; None takes all there are, in order.

    Raises ConfigError for a property or task that no source has.
    """
    manifests = [source.manifest for source in sources]
    labels = dict.fromkeys(name for manifest in manifests for name in manifest.labels)
    known = list(dict.fromkeys(name for manifest in manifests for name in manifest.properties))
    known_atom = list(dict.fromkeys(name for manifest in manifests for name in manifest.atom_properties))
    for asked, there, field in ((properties, known, "properties"), (atom_properties, known_atom, "atom_properties")):
        missing = [name for name in asked or () if name not in there]
        if missing:
            raise ConfigError(
                f"model.{field} asks for {missing[0]}, which no source of data has; they have {', '.join(there) or 'none'}"
            )
    chosen = tuple(known if properties is None else properties)
    chosen_atom = tuple(known_atom if atom_properties is None else atom_properties)
    there = [name for name in LABELS if name.rsplit("_", 1)[0] in labels]
    there += ["properties_GP"] * bool(chosen) + ["atom_properties_NP"] * bool(chosen_atom)
    unlabelled = [name for name in tasks or () if name not in there]
    if unlabelled:
        raise ConfigError(
            f"the model learns {unlabelled[0].rsplit('_', 1)[0]}, which no source of data has a label for; "
            f"add it to data.sources.NAME.labels or take it out of the model"
        )
    return Columns(tuple(labels), chosen, chosen_atom, tuple(there if tasks is None else tasks))


def graph_order(sources: Sequence[PreparedSource], data: GraphData, *, seed: int, global_batch: int) -> GraphOrder:
    """The order that a run file asks for. Raises ConfigError, see `GraphOrder`."""
    cost = CostModel(data.cost.node, data.cost.edge, data.cost.graph)
    weights = [source.weight for source in data.sources]
    return GraphOrder(sources, weights, seed=seed, global_batch=global_batch, batch_by=data.batch_by, cost=cost)


def _check_budget(source: PreparedSource, cost: CostModel, budget: float) -> None:
    atoms, edges = source.sizes(np.arange(len(source), dtype=np.int64))
    costs = cost.whole(atoms, edges)
    largest = int(costs.argmax())
    if costs[largest] * cost.unit > budget:
        over = int((costs * cost.unit > budget).sum())
        raise DataError(
            f"{source.name(largest)}: its {atoms[largest]} atoms and {edges[largest]} edges cost "
            f"{costs[largest] * cost.unit:.6g}, more than data.microbatch_cost={budget:g} (so do {over} of {len(source)} "
            f"structures of that split); raise it to at least that, or set data.oversized: alone"
        )


def _chosen(found: Located, rows: Int64Array) -> Located:
    return Located(found.numbers[rows], found.source[rows], found.item[rows], found.atoms[rows], found.edges[rows])
