"""Sub-groups of the data-parallel ranks, each of which reads the data sets of some branches of a model and no others.

Which structures a global batch holds is not touched: only who gets them. Knows nothing of models or process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from phalanx.families.materials.data.balance import Deal, longest_first
from phalanx.families.materials.data.structures.ragged import Int64Array


@dataclass(frozen=True)
class BranchGroup:
    """Ranks that read the same branches."""

    branches: range
    """Numbers of branches, which are numbers of sources."""
    ranks: range
    """Data-parallel ranks."""


@dataclass(frozen=True)
class BranchGroups:
    """All sub-groups of a layout; each data-parallel rank and each branch is in one."""

    sizes: tuple[int, ...]
    """Ranks of each branch; 0: it shares the ranks of the branch before."""

    def __post_init__(self) -> None:
        assert self.sizes and self.sizes[0] > 0 and min(self.sizes) >= 0, self.sizes

    @cached_property
    def groups(self) -> tuple[BranchGroup, ...]:
        """In the order of their branches, and of their ranks."""
        first = [branch for branch, size in enumerate(self.sizes) if size]
        found, rank = [], 0
        for branch, following in zip(first, [*first[1:], len(self.sizes)], strict=True):
            found.append(BranchGroup(range(branch, following), range(rank, rank + self.sizes[branch])))
            rank += self.sizes[branch]
        return tuple(found)

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return sum(self.sizes)

    def of_rank(self, rank: int) -> BranchGroup:
        """The group of a data-parallel rank."""
        return next(group for group in self.groups if rank in group.ranks)

    def deal(self, source: Int64Array) -> Deal:
        """What deals structures of these sources [n], which are their branches, out to ranks; see `balance.divide`."""
        return partial(self._deal, source)

    def _deal(self, source: Int64Array, costs: Int64Array, ranks: int) -> Int64Array:
        """The rank [n] of each structure: longest first among the ranks of its branch."""
        assert ranks == self.ranks
        rank = np.empty(len(costs), dtype=np.int64)
        for group in self.groups:
            rows = np.flatnonzero((source >= group.branches.start) & (source < group.branches.stop))
            rank[rows] = group.ranks.start + longest_first(costs[rows], len(group.ranks))
        return rank


def sizes_by_cost(costs: Sequence[float], ranks: int) -> tuple[int, ...]:
    """Ranks for each branch such that the busiest rank has as little to do as can be; see `BranchGroups.sizes`.

    costs: of each branch in a mean step, in any unit. With at least as many ranks as branches each branch has ranks of its
    own, one at least. With fewer, each rank takes some branches that follow one another.
    """
    if ranks < len(costs):
        return _shared(costs, ranks)
    sizes = [1] * len(costs)
    for _ in range(ranks - len(costs)):
        busiest = max(range(len(costs)), key=lambda branch: costs[branch] / sizes[branch])
        sizes[busiest] += 1
    return tuple(sizes)


def _shared(costs: Sequence[float], ranks: int) -> tuple[int, ...]:
    """One rank for each of `ranks` runs of branches, the costliest run being as cheap as can be."""
    # Of `made` runs over the first n branches: cost of the costliest, and the branch with which each begins.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for made in range(1, ranks + 1):
        best = {
            end: min((max(cost, sum(costs[n:end])), (*starts, n)) for n, (cost, starts) in best.items() if n < end)
            for end in range(made, len(costs) + 1)
        }
    starts = best[len(costs)][1]
    return tuple(int(branch in starts) for branch in range(len(costs)))
