"""Multi-task parallelism: the body of a model on all ranks, the heads of each branch on a sub-group of them.

A rank of a sub-group reads only what its branches learn from, holds only their heads, with their gradients and optimizer
state, and adds up the heads' gradients with its sub-group alone; gradients of the body are summed over all ranks as ever.
Heads are plain tensors, alike on all ranks of their sub-group, and FSDP2 leaves them alone; the body is replicated or
sharded as `layout` says. Names, initial values and checkpoints are those of the whole model, and losses are divided by the
targets of the whole global batch, so that nothing but places changes.

This module turns `layout.branch_groups` into sizes of sub-groups (`families.materials.data.balance` says who reads what).
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.config.schema import Run
from phalanx.families.materials.data.balance import BranchGroups, sizes_by_cost
from phalanx.families.registry import bind
from phalanx.layout.spec import ResolvedLayout


def branch_sizes(run: Run, data_ranks: int) -> tuple[int, ...]:
    """Ranks of each branch (see `BranchGroups.sizes`) as `run` asks for them; empty where every rank holds every head.

    Sizes are not checked yet. Raises DataError for `auto` where the data are not prepared that costs are read from.
    """
    chosen = run.layout.branch_groups
    if isinstance(chosen, list):
        return tuple(chosen)
    if chosen == "off" or data_ranks == 1 or bind(run).branches() == 1:
        return ()
    return sizes_by_cost(bind(run).branch_costs(), data_ranks)


def branch_groups(layout: ResolvedLayout) -> BranchGroups | None:
    """Return the sub-groups of a legal layout; None where it has none."""
    return BranchGroups(layout.branch_groups) if layout.branch_groups else None


def refusals(run: Run, layout: ResolvedLayout) -> Iterator[str]:
    """Yield why the sub-groups that `run` asks for cannot be."""
    if run.layout.branch_groups == "off" and not layout.branch_groups:
        return
    branches, sizes = bind(run).branches(), layout.branch_groups
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
