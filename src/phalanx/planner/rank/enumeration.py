"""Every legal layout of a run on a number of ranks, as a table; and a chosen one as fields of its run file.

Fields are chosen one after the other, and after each choice the rules of `layout.legality` drop what cannot become legal.
Of layouts that mean the same only one is listed: a run without pipeline stages has the schedule 1f1b, one whose ranks share
nothing the ZeRO level 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
import yaml

from phalanx.config.check import global_batch_samples
from phalanx.config.load import dump_run
from phalanx.config.schema import Run
from phalanx.families.family import BoundModel
from phalanx.layout.legality import is_legal
from phalanx.layout.legality.rule import Requirements
from phalanx.layout.resolve import MOST_SAMPLES, all_factorisations, list_divisors, ranks_of_node
from phalanx.layout.spec import (
    CONTEXTS,
    DEGREES,
    GATHERS,
    OFFLOADS,
    RECOMPUTES,
    SCHEDULES,
    Bools,
    LayoutTable,
    ResolvedLayout,
)

Fixed = Mapping[str, Any]
"""Fields of the run file's `layout` with the only value they may have."""

CHOSEN = (
    *DEGREES,
    *(
        "ep",
        "expert_tp",
        "ep_chunks",
        "zero",
        "schedule",
        "stages_per_rank",
        "context",
        "microbatch",
        "recompute",
        "gather",
        "reshard_after_forward",
        *OFFLOADS,
    ),
)
"""Fields of `layout` that enumeration chooses, unless they are fixed; all else stays as the run file has it."""


SELDOM = ("ep", "expert_tp", "ep_chunks", *OFFLOADS)
"""Fields of CHOSEN that lists of choices leave out where there is no choice: models without experts, and what stays on the
device."""
EFFECTIVE_WITH = {"ep_chunks": "ep", "context": "cp", "schedule": "pp", "stages_per_rank": "pp"}
"""Fields that have no effect where this degree is 1: there they are not varied."""


@dataclass(frozen=True)
class Limits:
    """How far free choices go. Fixed fields know no limits."""

    microbatch: float = MOST_SAMPLES
    """Most samples a rank computes at a time."""
    stages_per_rank: float = 8
    """Most pipeline stages of a rank."""
    positions: int = 2048
    """Fewest positions of a sample that a context-parallel rank keeps."""
    streamed: float = 64
    """Most ranks around which the chunks of a block go."""
    expert_tp: float = 8
    """Most ranks over which one expert is sharded."""
    ep_chunks: float = 2
    """Most chunks in which tokens travel to their experts: between the H100s of a host four took a third longer than one
    (`benchmarks/results/experts`)."""
    offload_optimizer: bool = False
    """Whether layouts are listed with optimizer state in host memory and on the device; else as the run file says alone."""
    offload_activations: bool = False
    """The same for activations."""

    @classmethod
    def none(cls) -> Limits:
        """Return limits that leave out nothing that is legal, but for what the run file says of offloading."""
        return cls(inf, inf, 1, inf, inf, inf)


def enumerate_layouts(
    model: BoundModel,
    world_size: int,
    devices_per_node: int | None = None,
    fixed: Fixed | None = None,
    limits: Limits | None = None,
) -> LayoutTable:
    """Return all legal layouts of `model` on `world_size` ranks.

    fixed: fields of `layout` that keep these values, each one of CHOSEN and as in the run file, without `auto`. As in a run
    file, `stages_per_rank` has no effect where `pp` is 1, and `context` none where `cp` is. What the run file itself says of
    the fields in CHOSEN is not looked at, but for OFFLOADS, which are varied where the limits say so alone.
    devices_per_node: as for `layout.resolve.resolve_layout`.
    """
    fixed, limits = fixed or {}, limits or Limits()
    needs = Requirements.of_model(model, world_size, devices_per_node)
    options = list_options(model, fixed, limits)
    table = list_splits(model, world_size, fixed)
    table = table.take(keeps_positions(model, table, fixed, limits))
    decided = {"global_batch", "cuts_structures", "branch_groups", *DEGREES}
    # Before anything else is chosen: every choice multiplies what is left.
    table = table.take(is_legal(needs, table, decided))

    def choose(field: str, where: Bools | None = None, among: Sequence[Any] | None = None) -> LayoutTable:
        """Return the legal layouts with each of its options, or of `among`, at the places of `where`."""
        varied = table.vary(field, among or options[field], where)
        decided.add(field)
        return varied.take(is_legal(needs, varied, decided, changed=field))

    table = choose("ep")
    # An expert is sharded where ranks have one each.
    table = choose("expert_tp", table.ep == (0 if needs.experts is None else needs.experts.count))
    for field, degree in EFFECTIVE_WITH.items():
        table = choose(field, getattr(table, degree) > 1)
    table = choose("microbatch")
    # ZeRO 0 differs from 3 for replicas as well: their gradients are reduced by DDP.
    replicas = (table.sharding_ranks == 1) & (table.dp_replicate > 1)
    table = choose("zero", replicas, None if "zero" in fixed else (0, 3))
    table = choose("zero", table.sharding_ranks > 1)
    table = choose("reshard_after_forward", table.sharding_ranks > 1)
    table = choose("recompute")
    table = choose("gather", table.sharding_ranks > 1)
    for name in OFFLOADS:
        table = choose(name)
    if needs.experts is not None:
        table = replace(table, ep_node=ranks_of_node(model, table, devices_per_node))
        table = table.take(is_legal(needs, table, {*decided, "ep_node"}, changed="ep_node"))
    # Fixed fields know no limits.
    return table if "gather" in fixed else table.take(table.streamed <= limits.streamed)


def list_splits(model: BoundModel, world_size: int, fixed: Fixed) -> LayoutTable:
    """Return a layout for each choice of degrees whose product is `world_size`, legal or not; all else is plain or fixed."""
    # Where these have no effect they stay as they are fixed; others are normalized when they are chosen.
    kept = {
        name: fixed[name]
        for name in ("schedule", "zero", "reshard_after_forward", "ep", "expert_tp", "ep_chunks")
        if name in fixed
    }
    first = ResolvedLayout(global_batch_samples(model.run), **kept)
    order = ("tp", "pp", "cp", "dp_replicate", "dp_shard")
    splits: Iterator[dict[str, Any]] = (
        dict(zip(order, degrees, strict=True)) for degrees in all_factorisations(world_size, len(order))
    )
    return LayoutTable.from_rows(
        [
            replace(first, **split)
            for split in splits
            if all(fixed.get(name, degree) == degree for name, degree in split.items())
        ]
    )


def keeps_positions(model: BoundModel, splits: LayoutTable, fixed: Fixed, limits: Limits) -> Bools:
    """Return where context-parallel ranks keep as many positions as the limits ask for, [splits]."""
    kept = model.positions().count // splits.cp
    return np.asarray((splits.cp == 1) | (kept >= limits.positions) | ("cp" in fixed))


def list_options(model: BoundModel, fixed: Fixed, limits: Limits) -> dict[str, Sequence[Any]]:
    """Return the values each field of CHOSEN but the degrees is chosen among: the fixed one, or those within the limits."""
    experts, batch = model.experts(), global_batch_samples(model.run)
    free: dict[str, Sequence[Any]] = {
        # Each rank of `ep` has whole experts; a model without any has ep=1, or what is fixed and then refused.
        "ep": [1] if experts is None else list_divisors(experts.count),
        "expert_tp": [parts for parts in list_divisors(model.expert_slices().count) if parts <= limits.expert_tp],
        "ep_chunks": [chunks for chunks in (1, 2, 4, 8, 16) if chunks == 1 or (experts and chunks <= limits.ep_chunks)],
        "context": CONTEXTS,
        "schedule": SCHEDULES,
        "stages_per_rank": range(1, int(min(limits.stages_per_rank, model.run.model.n_layers)) + 1),
        "microbatch": [size for size in list_divisors(batch) if size <= limits.microbatch],
        "zero": (0, 1, 2, 3),
        "reshard_after_forward": (False, True),
        "recompute": RECOMPUTES,
        "gather": GATHERS,
        **{name: (False, True) if getattr(limits, name) else (getattr(model.run.layout, name),) for name in OFFLOADS},
    }
    return {name: [fixed[name]] if name in fixed else values for name, values in free.items()}


def drop_equivalent(layouts: LayoutTable) -> LayoutTable:
    """Return one of those layouts that run the same way.

    A pipeline adds gradients up whole and keeps what it gathers: the lowest ZeRO level there is stands for the others, but
    for 0, and for 3 where parameters are freed or streamed.
    """
    t = layouts
    alike = (t.pp > 1) & (t.zero > 0) & ~t.reshard_after_forward & (t.streamed == 1) & (t.sharding_ranks > 1)
    return t.take(~alike | (t.zero == t.zero[alike].min(initial=3)))


def run_with_layout(run: Run, layout: ResolvedLayout) -> Run:
    """Return `run` with a planned layout; `layout.resolve.resolve_layout` makes the same layout of it again."""
    chosen = {name: getattr(layout, name) for name in CHOSEN}
    if layout.pp == 1:
        # The schedule has no effect then, and a number of stages would not go with all of them.
        chosen["stages_per_rank"] = "auto"
    return run.model_copy(update={"layout": run.layout.model_copy(update=chosen)})


def write_planned_run(run: Run, layout: ResolvedLayout, note: str) -> str:
    """Return the run file as text, under a comment."""
    comment = "".join(f"# {line}\n" for line in note.splitlines())
    return comment + dump_run(run_with_layout(run, layout))


def write_overrides(run: Run, layout: ResolvedLayout) -> list[str]:
    """Return the overrides of a command that turn the run file into `run_with_layout`: the chosen fields of the layout."""
    fields = run_with_layout(run, layout).layout.model_dump(mode="json", include=set(CHOSEN))
    return [f"{name}={str(fields[name]).lower()}" for name in CHOSEN]


def write_section(run: Run, layout: ResolvedLayout) -> str:
    """Return the chosen fields of the layout as YAML, to be put into a run file."""
    fields = run_with_layout(run, layout).layout.model_dump(mode="json", include=set(CHOSEN))
    return yaml.safe_dump({"layout": {name: fields[name] for name in CHOSEN}}, sort_keys=False)
