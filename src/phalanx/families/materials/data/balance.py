"""Sharing out one global batch: equal cost for every rank, and for every micro-batch of a rank.

Longest first: structures in falling order of cost, each to the rank that has least so far (Graham, SIAM J. Appl. Math.
17, 416, 1969: at most 4/3 of the optimum, and within one small structure of it where there are many). Ranks come before
micro-batches, since ranks wait for each other once a step and micro-batches of one rank do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from heapq import heapreplace

import numpy as np

from phalanx.families.materials.config import GraphCost
from phalanx.families.materials.data.array_files import Int64Array
from phalanx.layout.data_parallel.task_heads import BranchGroups

AssignRanks = Callable[[Int64Array, int], Int64Array]
"""The rank [n] of structures of these costs [n], of so many ranks."""


@dataclass(frozen=True)
class Division:
    """Which rank and micro-batch each structure of a global batch goes to."""

    rank: Int64Array
    """[n]."""
    part: Int64Array
    """[n]: micro-batch of that rank."""
    loads: Int64Array
    """[ranks, parts]: summed cost."""

    def rows(self, rank: int) -> Int64Array:
        """Return the structures of a rank in the order of its batch: by micro-batch, then as they come."""
        rows = np.flatnonzero(self.rank == rank)
        return rows[np.argsort(self.part[rows], kind="stable")]

    @property
    def imbalance(self) -> float:
        """Return the largest cost of a rank over the mean: 1 is perfect."""
        ranks = self.loads.sum(axis=1)
        return float(ranks.max() / ranks.mean())


def divide_by_cost(costs: Int64Array, ranks: int, parts: int, deal: AssignRanks | None = None) -> Division:
    """Assign structures of these costs [n], each > 0, to `ranks` ranks with `parts` micro-batches each.

    A micro-batch is empty only where there are fewer structures than micro-batches, or some that outweigh all others.
    deal: chooses ranks; longest first among all of them where it is None.
    """
    rank = (deal or assign_longest_first)(costs, ranks)
    return _make_division(costs, rank, _assign_microbatches(costs, rank, ranks, parts), ranks, parts)


def divide_within_budget(
    costs: Int64Array, ranks: int, sizes: Int64Array, budget: int, deal: AssignRanks | None = None
) -> Division:
    """Assign structures to ranks by `costs`, and to micro-batches of each rank by `sizes` [n], as few as `budget` allows.

    No micro-batch is larger than the budget, except a structure that is so alone and is then a micro-batch of its own.
    deal: as in `divide_by_cost`.
    """
    rank = (deal or assign_longest_first)(costs, ranks)
    # What the fullest rank needs at least; longest first may need more, one at a time.
    parts = max(1, -(-int(_sum_at_places(sizes, rank, ranks).max()) // budget))
    while True:
        part = _assign_microbatches(sizes, rank, ranks, parts)
        place = rank * parts + part
        over = _sum_at_places(sizes, place, ranks * parts) > budget
        if not (over & (np.bincount(place, minlength=ranks * parts) > 1)).any():
            return _make_division(costs, rank, part, ranks, parts)
        parts += 1


def divide_in_turn(costs: Int64Array, ranks: int, parts: int) -> Division:
    """Assign equal numbers of structures in the order in which they come, whatever they cost: the usual way, for
    comparison."""
    place = np.arange(len(costs), dtype=np.int64) * (ranks * parts) // len(costs)
    rank, part = np.divmod(place, parts)
    return _make_division(costs, rank, part, ranks, parts)


def assign_in_turn(costs: Int64Array, ranks: int) -> Int64Array:
    """Return the rank [n] of each structure of a plain sampler: equal numbers in the order in which they come."""
    return np.arange(len(costs), dtype=np.int64) * ranks // max(len(costs), 1)


def assign_longest_first(costs: Int64Array, bins: int) -> Int64Array:
    """Return the bin [n] of each item: the costliest first, each to the bin that is emptiest then, of equal ones the
    first."""
    if bins == 1:
        return np.zeros(len(costs), dtype=np.int64)
    order = np.argsort(-costs, kind="stable")
    return _fill_one_by_one(costs, order, bins) if bins < _MANY_BINS else _fill_many_at_once(costs, order, bins)


_MANY_BINS = 32
"""From here on it takes less time to serve many bins at once."""


def _fill_one_by_one(costs: Int64Array, order: Int64Array, bins: int) -> Int64Array:
    # Ties go to the lower number, so that every rank finds the same.
    heap = [(0, number) for number in range(bins)]
    found = []
    for cost in costs[order].tolist():
        load, emptiest = heap[0]
        found.append(emptiest)
        heapreplace(heap, (load + cost, emptiest))
    chosen = np.empty(len(costs), dtype=np.int64)
    chosen[order] = found
    return chosen


def _fill_many_at_once(costs: Int64Array, order: Int64Array, bins: int) -> Int64Array:
    """Give one item to each bin at once, as long as no bin that was just served is emptier than the next one."""
    chosen = np.zeros(len(costs), dtype=np.int64)
    loads = np.zeros(bins, dtype=np.int64)
    place = 0
    while place < len(order):
        by_load = np.argsort(loads, kind="stable")
        items = order[place : place + bins]
        before = loads[by_load[: len(items)]]
        # A bin is next as long as none of those just served has become emptier than it.
        emptiest = np.minimum.accumulate(before + costs[items])
        late = np.flatnonzero(before[1:] >= emptiest[:-1])
        served = int(late[0]) + 1 if late.size else len(items)
        chosen[items[:served]] = by_load[:served]
        loads[by_load[:served]] += costs[items[:served]]
        place += served
    return chosen


def _assign_microbatches(sizes: Int64Array, rank: Int64Array, ranks: int, parts: int) -> Int64Array:
    """Return the micro-batch [n] of each structure: longest first in every rank, all ranks side by side."""
    if parts == 1:
        return np.zeros_like(rank)
    if ranks == 1:
        return assign_longest_first(sizes, parts)
    # Structures by rank, the largest first; ranks then take their next one in lockstep.
    order = np.lexsort((-sizes, rank))
    counts = np.bincount(rank, minlength=ranks)
    starts = np.cumsum(counts) - counts
    part = np.zeros(len(sizes), dtype=np.int64)
    loads = np.zeros((ranks, parts), dtype=np.int64)
    for turn in range(int(counts.max(initial=0))):
        rows = np.flatnonzero(counts > turn)
        items = order[starts[rows] + turn]
        emptiest = loads[rows].argmin(axis=1)
        part[items] = emptiest
        loads[rows, emptiest] += sizes[items]
    return part


def _make_division(costs: Int64Array, rank: Int64Array, part: Int64Array, ranks: int, parts: int) -> Division:
    return Division(rank, part, _sum_at_places(costs, rank * parts + part, ranks * parts).reshape(ranks, parts))


def _sum_at_places(values: Int64Array, place: Int64Array, places: int) -> Int64Array:
    """Return sums of the values at each place [places]; whole numbers, unlike those of bincount with weights."""
    # bincount would add in float64, which does not hold all whole numbers of 64 bits.
    sums = np.zeros(places, dtype=np.int64)
    np.add.at(sums, place, values)
    return sums


@dataclass(frozen=True)
class StepBalance:
    """One step, in which every rank waits for the one with most to do."""

    imbalance: float
    """Cost of the heaviest rank over the mean."""
    seconds: float
    """Cost of the heaviest rank: how long the step takes, in seconds, or in units of cost where costs are no seconds."""
    wait_seconds: float
    """Mean wait of a rank for the heaviest; same unit."""


def step_balance(division: Division, unit: float = 1.0) -> StepBalance:
    """Return the balance of one step. unit: seconds of one of the whole-number costs (`CostModel.unit` of a fit)."""
    ranks = division.loads.sum(axis=1)
    longest, mean = float(ranks.max()), float(ranks.mean())
    return StepBalance(
        longest / mean,
        longest * unit,
        (longest - mean) * unit,
    )


@dataclass(frozen=True)
class BalanceReport:
    """Many steps together."""

    steps: int
    imbalance_mean: float
    imbalance_p95: float
    imbalance_max: float
    wait_mean: float
    """Share of all time that ranks wait: long steps count more."""
    wait_seconds_mean: float
    """Mean wait of a rank in a step, in seconds or units of cost."""

    def as_dict(self) -> dict[str, float]:
        """Return plain values, for JSON."""
        return asdict(self)


def summarise_balance(steps: Iterable[StepBalance]) -> BalanceReport:
    """Return the balance of several steps, at least one, together."""
    seen = list(steps)
    imbalance = np.array([step.imbalance for step in seen])
    waited = np.array([step.wait_seconds for step in seen])
    return BalanceReport(
        len(seen),
        float(imbalance.mean()),
        float(np.percentile(imbalance, 95)),
        float(imbalance.max()),
        float(waited.sum()) / sum(step.seconds for step in seen),
        float(waited.mean()),
    )


def assign_by_head_group(groups: BranchGroups, source: Int64Array) -> AssignRanks:
    """Return what assigns structures of these sources [n] to the ranks that hold their task heads; see `divide_by_cost`."""

    def assign(costs: Int64Array, ranks: int) -> Int64Array:
        """Return the rank [n] of each structure: longest first among the ranks of its branch."""
        assert ranks == groups.ranks
        rank = np.empty(len(costs), dtype=np.int64)
        for group in groups.groups:
            rows = np.flatnonzero((source >= group.branches.start) & (source < group.branches.stop))
            # Only these ranks hold the heads that the structures teach.
            rank[rows] = group.ranks.start + assign_longest_first(costs[rows], len(group.ranks))
        return rank

    return assign


_SCALE = 2**16
"""The largest coefficient as a whole number. A million structures of a million edges each cost 10^17, below 2^63."""


@dataclass(frozen=True)
class CostModel:
    """Cost of a structure in any unit; only ratios decide how batches are cut and shared out."""

    node: float
    """Cost of an atom."""
    edge: float
    """Cost of a directed edge."""
    graph: float = 0.0
    """Cost of a structure whatever its size."""

    def __post_init__(self) -> None:
        assert min(self.node, self.edge, self.graph) >= 0.0, self
        assert max(self.node, self.edge) > 0.0, self

    @classmethod
    def of(cls, declared: GraphCost) -> CostModel:
        """Return the costs that a run file declares."""
        return cls(declared.node, declared.edge, declared.graph)

    @property
    def unit(self) -> float:
        """Return the cost, in the unit of the coefficients, that 1 of `whole` stands for."""
        return max(self.node, self.edge, self.graph) / _SCALE

    def whole(self, atoms: Int64Array, edges: Int64Array) -> Int64Array:
        """Return costs of structures as whole numbers, at least 1 each. atoms, edges: counts (any shape)."""
        # Whole numbers: sums of floats depend on their order, and all ranks must find the same.
        node, edge, graph = (round(value / self.unit) for value in (self.node, self.edge, self.graph))
        costs: Int64Array = np.maximum(node * atoms + edge * edges + graph, 1)
        return costs
