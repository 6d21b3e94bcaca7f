"""Rules about degrees: their product, what `tp` and `cp` split, the ranks of task heads, and what fits into a node."""

from __future__ import annotations

import numpy as np

from phalanx.layout.data_parallel import task_heads
from phalanx.layout.legality.rule import Fix, Requirements, Rule
from phalanx.layout.spec import DEGREES, Bools, LayoutTable, ResolvedLayout


def _explain_product(needs: Requirements, layout: ResolvedLayout) -> str:
    stated = [name for name in DEGREES if getattr(layout, name) != 1] or ["dp_shard"]
    product = " x ".join(f"layout.{name}={getattr(layout, name)}" for name in stated)
    were = "was" if needs.world_size == 1 else "were"
    return f"{product} = {layout.world_size} ranks, but {needs.world_size} {were} started"


def _explain_axes(needs: Requirements, layout: ResolvedLayout) -> str:
    family, known = needs.run.model.family, ", ".join(name for name in DEGREES if name in needs.axes)
    wrong = [name for name in DEGREES if name not in needs.axes and getattr(layout, name) > 1]
    return "\n".join(
        f"layout.{name}={getattr(layout, name)}: models of family {family} are spread over {known} alone"
        for name in wrong
    )


DEGREE_RULES = (
    Rule(
        reads=DEGREES,
        broken=lambda needs, t: t.world_size != needs.world_size,
        message=_explain_product,
    ),
    Rule(
        reads=DEGREES,
        broken=lambda needs, t: np.logical_or.reduce(
            [getattr(t, x) > 1 for x in DEGREES if x not in needs.axes], axis=0
        ),
        message=_explain_axes,
    ),
)


def _explain_splits(needs: Requirements, layout: ResolvedLayout) -> str:
    lines = []
    for split in needs.split_counts:
        if split.count % layout.tp:
            parts = f"{split.count} parts"
            if split.together > 1:
                parts = f"{split.count * split.together}, in {parts} of {split.together} that stay together"
            lines.append(f"layout.tp={layout.tp} does not divide {split.field} ({parts})")
    return "\n".join(lines)


def _leaves_ranks_without_rows(needs: Requirements, layouts: LayoutTable) -> Bools | bool:
    if needs.split_rows is None:
        return False
    # The first ranks take equally many rows, and the last ones what is left.
    rows_per_rank = -(-needs.split_rows.count // layouts.tp)
    return np.asarray(rows_per_rank * (layouts.tp - 1) >= needs.split_rows.count)


def _is_ring(layouts: LayoutTable) -> Bools:
    return np.asarray((layouts.cp > 1) & layouts.has("context", "ring"))


def _leaves_positions(needs: Requirements, layouts: LayoutTable) -> Bools:
    # Under a causal mask late positions attend to more keys: a rank of a ring takes an early and a late part of each sample.
    unit = np.where(_is_ring(layouts), 2 * layouts.cp, layouts.cp)
    return np.asarray(~layouts.cuts_structures & (needs.positions.count % unit != 0))


def _explain_positions(needs: Requirements, layout: ResolvedLayout) -> str:
    parts, unit = "layout.cp", layout.cp
    if _is_ring(layout.table)[0]:
        parts, unit = "2 x layout.cp (an early and a late part for each rank)", 2 * layout.cp
    return f"{needs.positions.field}={needs.positions.count} is not a multiple of {parts} = {unit}"


def _explain_experts(needs: Requirements, layout: ResolvedLayout) -> str:
    if needs.experts is None:
        wrong = f"layout.ep={layout.ep}" if layout.ep > 1 else f"layout.expert_tp={layout.expert_tp}"
        return f"{wrong} shares out the experts of a mixture, and this model has none (model.experts)"
    if layout.expert_tp > 1 and layout.ep != needs.experts.count:
        return (
            f"layout.expert_tp={layout.expert_tp} shares out single experts, but layout.ep={layout.ep} leaves several of "
            f"{needs.experts.field}={needs.experts.count} on a rank: a larger layout.ep keeps as little on each rank, and "
            "sends each row once"
        )
    if layout.expert_tp > 1 and needs.expert_slices.count % layout.expert_tp:
        count = needs.expert_slices.count
        return f"layout.expert_tp={layout.expert_tp} does not divide {needs.expert_slices.field} ({count} parts)"
    if needs.experts.count % layout.ep:
        return f"layout.ep={layout.ep} does not divide {needs.experts.field}={needs.experts.count}"
    ranks = layout.dp_shard * layout.cp * layout.tp
    product = f"layout.dp_shard={layout.dp_shard} x layout.cp={layout.cp} x layout.tp={layout.tp} = {ranks} ranks"
    over, named = layout.ep * layout.expert_tp, f"layout.ep={layout.ep}"
    if layout.expert_tp > 1:
        named += f" x layout.expert_tp={layout.expert_tp} = {over}"
    if ranks % over:
        return f"{named} does not divide {product}, which it takes its ranks from"
    return f"{named} is not a multiple of layout.tp={layout.tp}: tensor-parallel ranks share out experts first"


def _spreads_wrongly(needs: Requirements, layouts: LayoutTable) -> Bools:
    count = 1 if needs.experts is None else needs.experts.count
    over, slices = layouts.experts_over, layouts.expert_tp
    fits = (count % layouts.ep == 0) & (layouts.expert_ranks % over == 0) & (over % layouts.tp == 0)
    whole = slices == 1
    fits &= whole | ((layouts.ep == count) & (needs.expert_slices.count % slices == 0))
    return np.asarray((over > 1) & ~fits)


def _explain_node(needs: Requirements, layout: ResolvedLayout) -> str:
    over = layout.ep * layout.expert_tp
    if over % layout.ep_node:
        return (
            f"layout.ep_node={layout.ep_node} does not divide layout.ep={layout.ep} x layout.expert_tp={layout.expert_tp} = "
            f"{over} ranks, which it takes to be so many on a node"
        )
    return f"layout.ep_node={layout.ep_node} does not divide the {needs.devices_per_node} ranks of a node"


def _fix_experts(layout: ResolvedLayout) -> list[Fix]:
    whole: Fix = {"layout.expert_tp": 1} if layout.expert_tp > 1 else {}
    together: Fix = {"layout.ep": 1} if layout.ep > 1 else {}
    return [fix for fix in (whole, together | whole) if fix]


SPLIT_RULES = (
    Rule(
        reads=("ep", "expert_tp", "dp_shard", "cp", "tp"),
        broken=_spreads_wrongly,
        message=_explain_experts,
        fixes=_fix_experts,
    ),
    Rule(
        reads=("ep_node", "ep", "expert_tp"),
        broken=lambda needs, t: (
            (t.ep_node > 1)
            & ((t.experts_over % t.ep_node != 0) | ((needs.devices_per_node or t.ep_node) % t.ep_node != 0))
        ),
        message=_explain_node,
        fixes=({"layout.ep_node": "auto"},),
    ),
    Rule(
        reads=("ep", "ep_chunks", "cp", "tp"),
        broken=lambda needs, t: (t.ep > 1) & (needs.positions.count // (t.cp * t.tp) % t.ep_chunks != 0),
        message="layout.ep_chunks={x.ep_chunks} does not divide the positions of a sample on each rank: "
        "{needs.positions.field}={needs.positions.count} over layout.cp={x.cp} x layout.tp={x.tp}",
        fixes=({"layout.ep_chunks": 1},),
    ),
    # Ranks of `tp` and `cp` have parts of a sequence: each would drop what its own part has too much of.
    Rule(
        reads=("tp", "cp"),
        broken=lambda needs, t: (t.tp * t.cp > 1) & (needs.counts_sequences != ""),
        message="{needs.counts_sequences} counts the tokens of whole sequences, of which ranks of layout.tp={x.tp} and "
        "layout.cp={x.cp} have parts; spread experts over layout.dp_shard",
    ),
    Rule(
        reads=("tp",),
        broken=lambda needs, t: np.logical_or.reduce([x.count % t.tp != 0 for x in needs.split_counts], axis=0),
        message=_explain_splits,
    ),
    Rule(
        reads=("tp",),
        broken=_leaves_ranks_without_rows,
        message="layout.tp={x.tp} leaves some ranks without a row of {needs.split_rows.field}={needs.split_rows.count}",
    ),
    Rule(
        reads=("cp", "context", "cuts_structures"),
        broken=_leaves_positions,
        message=_explain_positions,
    ),
    # Between blocks each tensor-parallel rank has a part of the positions (sequence parallelism).
    Rule(
        reads=("tp", "cp", "context", "cuts_structures"),
        broken=lambda needs, t: (
            ~t.cuts_structures & ~_leaves_positions(needs, t) & (needs.positions.count // t.cp % t.tp != 0)
        ),
        message=lambda needs, x: (
            f"{needs.positions.field}={needs.positions.count} over layout.cp={x.cp} ranks leaves "
            f"{needs.positions.count // x.cp} positions, which layout.tp={x.tp} does not divide"
        ),
    ),
    # Graph parallelism exchanges atoms on its own: there is no kind to choose.
    Rule(
        reads=("cp", "cuts_structures"),
        broken=lambda needs, t: (t.cp > 1) & t.cuts_structures & (needs.run.layout.context != "auto"),
        message="layout.context={needs.run.layout.context} joins positions of samples, but over layout.cp={x.cp} ranks "
        "models of family {needs.run.model.family} share out the atoms of structures",
        fixes=({"layout.context": "auto"},),
    ),
    # A rank of Ulysses attends over all positions with its part of the heads. Whether tp divides them is another rule.
    Rule(
        reads=("tp", "cp", "context"),
        broken=lambda needs, t: (
            (t.cp > 1)
            & t.has("context", "all_to_all")
            & (needs.context_heads.count % t.tp == 0)
            & (needs.context_heads.count // t.tp % t.cp != 0)
        ),
        message="layout.context=all_to_all gives each rank whole heads, but layout.cp={x.cp} does not divide "
        "{needs.context_heads.field}={needs.context_heads.count} over layout.tp={x.tp}",
        fixes=({"layout.context": "ring"},),
    ),
)


def _refuses_branch_groups(needs: Requirements, layouts: LayoutTable) -> Bools | bool:
    # Few runs have groups of ranks for their heads, and those have few layouts: asking one by one is quick enough.
    if needs.run.layout.branch_groups == "off" and not any(layouts.branch_groups):
        return False
    rows = [layouts.row(index) for index in range(len(layouts))]
    return np.asarray([any(task_heads.find_group_problems(needs.model, row)) for row in rows], np.bool_)


BRANCH_RULES = (
    # Which groups are possible depends on costs of data and on numbers of ranks: see `task_heads`.
    Rule(
        reads=(*DEGREES, "branch_groups"),
        broken=_refuses_branch_groups,
        message=lambda needs, x: "\n".join(task_heads.find_group_problems(needs.model, x)),
        fixes=({"layout.branch_groups": "off"},),
    ),
)


def _spans_nodes(needs: Requirements, layouts: LayoutTable) -> Bools | bool:
    devices = needs.devices_per_node
    # Tensor parallelism exchanges activations in every layer: most networks between nodes are too slow for it.
    if devices is None or needs.run.layout.tp_across_nodes:
        return False
    return np.asarray((layouts.tp > devices) | (devices % layouts.tp != 0))


NODE_RULES = (
    Rule(
        reads=("tp",),
        broken=_spans_nodes,
        message="layout.tp={x.tp} groups do not fit into nodes of {needs.devices_per_node} devices",
        fixes=({"layout.tp_across_nodes": True},),
    ),
)
