"""Multi-task (head) parallelism: the backbone of a model on all ranks, the heads of each branch on a sub-group of them.

A rank of a sub-group reads only what its branches learn from, holds only their heads, with their gradients and optimizer
state, and adds up the heads' gradients with its sub-group alone; gradients of the backbone are summed over all ranks. Heads
are plain tensors, alike on all ranks of their sub-group, and FSDP2 leaves them alone; the backbone is replicated or sharded
as `layout` says. Names, initial values and checkpoints are those of the whole model, and losses are divided by the
targets of the whole global batch, so that nothing but places changes.

This module turns `layout.branch_groups` into sub-groups and their sizes; a family says which samples each of them reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from phalanx.families.family import BoundModel
from phalanx.layout.spec import ResolvedLayout


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
        """Sub-groups in the order of their branches, and of their ranks."""
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
        """Return the group of a data-parallel rank."""
        return next(group for group in self.groups if rank in group.ranks)


def sizes_by_cost(costs: Sequence[float], ranks: int) -> tuple[int, ...]:
    """Return the ranks of each branch that leave the busiest rank least to do; see `BranchGroups.sizes`.

    costs: cost of each branch in a mean step, in any unit. With at least as many ranks as branches each branch has at least
    one rank of its own. With fewer, each rank takes some branches that follow one another.
    """
    if ranks < len(costs):
        # Fewer ranks than branches: one rank for each run of branches, the costliest run as cheap as can be.
        # Of `made` runs over the first n branches: cost of the costliest, and the branch with which each begins.
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for made in range(1, ranks + 1):
            best = {
                end: min((max(cost, sum(costs[n:end])), (*starts, n)) for n, (cost, starts) in best.items() if n < end)
                for end in range(made, len(costs) + 1)
            }
        starts = best[len(costs)][1]
        return tuple(int(branch in starts) for branch in range(len(costs)))
    # Greedy is optimal here: each further rank can only help the branch that is busiest without it.
    sizes = [1] * len(costs)
    for _ in range(ranks - len(costs)):
        busiest = max(range(len(costs)), key=lambda branch: costs[branch] / sizes[branch])
        sizes[busiest] += 1
    return tuple(sizes)


def branch_sizes(model: BoundModel, data_ranks: int) -> tuple[int, ...]:
    """Return the ranks of each branch (see `BranchGroups.sizes`) that the run file asks for; none where all hold all heads.

    Sizes are not checked yet. Raises DataError for `auto` where the data are not prepared that costs are read from.
    """
    chosen = model.run.layout.branch_groups
    if isinstance(chosen, list):
        return tuple(chosen)
    if chosen == "off" or data_ranks == 1 or model.branches() == 1:
        return ()
    return sizes_by_cost(model.branch_costs(), data_ranks)


def branch_groups(layout: ResolvedLayout) -> BranchGroups | None:
    """Return the sub-groups of a legal layout; None where it has none."""
    return BranchGroups(layout.branch_groups) if layout.branch_groups else None


def find_group_problems(model: BoundModel, layout: ResolvedLayout) -> Iterator[str]:
    """Yield why the sub-groups that the run file asks for cannot be."""
    run = model.run
    if run.layout.branch_groups == "off" and not layout.branch_groups:
        return
    # Every problem on a line of its own, but none that follows from another one.
    branches, sizes = model.branches(), layout.branch_groups
    name = f"layout.branch_groups={list(sizes) if sizes else run.layout.branch_groups}"
    if branches == 1:
        yield f"{name} needs heads of several branches, of which this model of family {run.model.family} has none"
        return
    if not sizes:
        return
    for axis in ("pp", "tp", "cp"):
        if getattr(layout, axis) > 1:
            yield f"{name} makes sub-groups of data-parallel ranks alone, not with layout.{axis}={getattr(layout, axis)}"
    if len(sizes) != branches:
        yield f"{name} has {len(sizes)} sizes for the {branches} branches of the model; give one for each"
    elif sizes[0] == 0:
        yield f"{name}: 0 puts a branch beside the one before, and before the first there is none"
    elif sum(sizes) != layout.data_ranks:
        yield (
            f"{name} is {sum(sizes)} ranks, but the layout has {layout.data_ranks} data-parallel ones; auto finds sizes by "
            f"cost, and a size of 0 puts a branch on the ranks of the one before"
        )
    elif sizes.count(0) == branches - 1:
        yield f"{name} is a single sub-group with all branches, which off means"
