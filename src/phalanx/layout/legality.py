"""The rules that say whether a layout is legal for a run: one list, for a single layout as for a million.

A rule is a predicate over a table of layouts, with the message and the fixes for a layout that breaks it. `reasons_against`
asks them of one layout, which is a table of one row; `is_legal` makes a mask of them for many. Nothing is allocated and no
device is asked. `layout.resolve` keeps those fixes that lead to a legal layout, or adds the nearest legal degrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

import numpy as np

from phalanx.config.schema import Run
from phalanx.families.family import BoundModel
from phalanx.layout.data_parallel import task_heads
from phalanx.layout.spec import DATA_AXES, DEGREES, SINGLE_STAGE, Bools, Ints, LayoutTable, ResolvedLayout
from phalanx.nn.precision import PRECISIONS
from phalanx.nn.splits import SplitCount

Fix = dict[str, int | str | bool]
"""Fields of the run file, as `section.field`, with other values."""

_MOST_TRIED = 4096
"""Samples of the largest micro-batch that a fix proposes."""


@dataclass(frozen=True)
class Requirements:
    """What a run on a number of ranks asks of its layout; its model is asked once for all layouts."""

    model: BoundModel
    run: Run
    world_size: int
    devices_per_node: int | None
    """None where nobody says it."""
    axes: frozenset[str]
    """Degrees that may be more than 1."""
    streams_weights: bool
    """Whether the model has projection pairs to stream."""
    split_counts: list[SplitCount]
    """What a tensor-parallel degree must divide."""
    split_rows: SplitCount | None
    """Rows of a table that tensor-parallel ranks may share unevenly."""
    positions: SplitCount
    """Positions of a sample."""
    context_heads: SplitCount
    """Heads that Ulysses (`context: all_to_all`) spreads over `tp` and `cp`."""
    tied: bool
    """Whether embedding and head share parameters."""

    @classmethod
    def of_model(cls, model: BoundModel, world_size: int, devices_per_node: int | None = None) -> Requirements:
        """Ask the model. devices_per_node: what the launcher says; the run file's own word comes first."""
        run = model.run
        return cls(
            model=model,
            run=run,
            world_size=world_size,
            devices_per_node=run.cluster.devices_per_node or devices_per_node,
            axes=model.axes,
            streams_weights=model.streams_weights,
            split_counts=model.split_counts(),
            split_rows=model.split_rows(),
            positions=model.positions(),
            context_heads=model.context_heads(),
            tied=bool(model.tied()),
        )


@dataclass(frozen=True)
class Reason:
    """Why one layout is not legal."""

    text: str
    """A sentence, or one on each line, that names the fields and their numbers."""
    fixes: tuple[Fix, ...] = ()
    """Changes of which each may mend the layout without other degrees."""


@dataclass(frozen=True)
class Rule:
    """One thing that makes layouts illegal."""

    reads: tuple[str, ...]
    """Fields of a layout that decide whether it breaks the rule."""
    broken: Callable[[Requirements, LayoutTable], Bools | bool]
    """Where layouts break the rule, [layouts]; or one answer for all of them."""
    message: str | Callable[[Requirements, ResolvedLayout], str]
    """A text in which `{x.FIELD}` is a field of the layout, `{needs.FIELD}` one of the requirements; or what writes it."""
    fixes: tuple[Fix, ...] | Callable[[ResolvedLayout], Iterable[Fix]] = ()
    """As for `Reason`, or what finds them."""

    def explain(self, needs: Requirements, layout: ResolvedLayout) -> Reason:
        """Return why `layout` breaks this rule."""
        if isinstance(self.message, str):
            text = self.message.format(x=layout, needs=needs)
        else:
            text = self.message(needs, layout)
        return Reason(text, tuple(self.fixes(layout)) if callable(self.fixes) else self.fixes)


def is_legal(needs: Requirements, layouts: LayoutTable, decided: Set[str] | None = None) -> Bools:
    """Return which layouts break no rule, [layouts].

    decided: fields that have their values already, while layouts are put together choice by choice; rules that read others
    have to wait. None: all have.
    """
    legal = np.ones(len(layouts), np.bool_)
    for rule in RULES:
        if decided is None or decided >= set(rule.reads):
            legal &= np.logical_not(rule.broken(needs, layouts))
    return legal


def reasons_against(
    model: BoundModel, layout: ResolvedLayout, world_size: int, devices_per_node: int | None = None
) -> list[Reason]:
    """Return every reason why `layout` cannot be used for `model` on `world_size` ranks; none for a legal one."""
    needs = Requirements.of_model(model, world_size, devices_per_node)
    broken = [rule for rule in RULES if np.any(rule.broken(needs, layout.table))]
    # The other rules would only repeat what wrong degrees lead to.
    broken = [rule for rule in broken if rule in DEGREE_RULES] or broken
    return [rule.explain(needs, layout) for rule in broken]


# --- degrees -----------------------------------------------------------------------------------------------------------


def _explain_product(needs: Requirements, layout: ResolvedLayout) -> str:
    stated = [name for name in DEGREES if getattr(layout, name) != 1] or ["dp_shard"]
    product = " x ".join(f"layout.{name}={getattr(layout, name)}" for name in stated)
    return f"{product} = {layout.world_size} ranks, but {needs.world_size} were started"


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

# --- what data-parallel ranks share, and how they gather it ------------------------------------------------------------

_GATHER_WHOLE: Fix = {"layout.gather": "layer"}

SHARDING_RULES = (
    Rule(
        reads=("zero", "dp_shard"),
        broken=lambda _, t: (t.zero == 0) & (t.dp_shard > 1),
        message="layout.zero=0 keeps everything on every rank, so layout.dp_shard={x.dp_shard} has nothing to share out",
        fixes=lambda x: ({"layout.dp_replicate": x.dp_replicate * x.dp_shard, "layout.dp_shard": 1},),
    ),
    # ZeRO 1 and 2 keep all parameters on every rank.
    Rule(
        reads=("zero", "reshard_after_forward"),
        broken=lambda _, t: t.reshard_after_forward & (t.zero < 3),
        message="layout.reshard_after_forward=true frees gathered parameters, which layout.zero={x.zero} never shares out",
        fixes=({"layout.reshard_after_forward": "auto"}, {"layout.zero": 3}),
    ),
    Rule(
        reads=("gather",),
        broken=lambda needs, t: t.has("gather", "stream") & (not needs.streams_weights),
        message="layout.gather=stream: models of family {needs.run.model.family} have no matrix chains to stream",
        fixes=(_GATHER_WHOLE,),
    ),
    Rule(
        reads=("gather", "zero"),
        broken=lambda _, t: t.has("gather", "stream") & (t.zero != 3),
        message="layout.gather=stream keeps no gathered parameters between passes, which layout.zero={x.zero} does",
        fixes=({"layout.zero": 3}, _GATHER_WHOLE),
    ),
    Rule(
        reads=("gather", "recompute"),
        broken=lambda _, t: t.has("gather", "stream") & t.has("recompute", "selective"),
        message="layout.gather=stream computes hidden features again anyway, "
        "and layout.recompute=selective would keep them",
        fixes=({"layout.recompute": "none"}, {"layout.recompute": "full"}, _GATHER_WHOLE),
    ),
    # Ulysses exchanges all heads at once, of which a streamed projection has computed some alone.
    Rule(
        reads=("gather", "cp", "context"),
        broken=lambda _, t: t.has("gather", "stream") & (t.cp > 1) & t.has("context", "all_to_all"),
        message="layout.gather=stream has some heads at a time, and layout.context=all_to_all shares all out over "
        "layout.cp={x.cp}",
        fixes=({"layout.context": "ring"}, _GATHER_WHOLE),
    ),
    Rule(
        reads=("gather", "pp", "schedule"),
        broken=lambda _, t: t.has("gather", "stream") & t.splits_backward,
        message="layout.gather=stream gives gradients of inputs and of weights together, layout.schedule={x.schedule} "
        "asks for them apart",
        fixes=({"layout.schedule": "interleaved_1f1b"}, _GATHER_WHOLE),
    ),
    Rule(
        reads=("gather",),
        broken=lambda needs, t: t.has("gather", "stream") & PRECISIONS[needs.run.layout.precision].scales_loss,
        message="layout.gather=stream leaves some gradients plain and some sharded, which the loss scaling of "
        "layout.precision={needs.run.layout.precision} cannot undo together",
        fixes=({"layout.precision": "bf16"}, _GATHER_WHOLE),
    ),
    Rule(
        reads=("gather",),
        broken=lambda needs, t: t.has("gather", "stream") & (needs.run.training.compile is True),
        message="layout.gather=stream sends messages inside blocks, which training.compile=true cannot compile",
        fixes=({"training.compile": "auto"}, _GATHER_WHOLE),
    ),
)

# --- task heads --------------------------------------------------------------------------------------------------------


def _refuses_branch_groups(needs: Requirements, layouts: LayoutTable) -> Bools | bool:
    # Few runs have groups of ranks for their heads, and those have few layouts: asking one by one is quick enough.
    if needs.run.layout.branch_groups == "off" and not any(layouts.branch_groups):
        return False
    rows = [layouts.row(index) for index in range(len(layouts))]
    return np.asarray([any(task_heads.refusals(needs.model, row)) for row in rows], np.bool_)


BRANCH_RULES = (
    # Which groups are possible depends on costs of data and on numbers of ranks: see `task_heads`.
    Rule(
        reads=(*DEGREES, "branch_groups"),
        broken=_refuses_branch_groups,
        message=lambda needs, x: "\n".join(task_heads.refusals(needs.model, x)),
        fixes=({"layout.branch_groups": "off"},),
    ),
)

# --- what tensor- and context-parallel ranks split ---------------------------------------------------------------------


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


SPLIT_RULES = (
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

# --- pipeline stages ---------------------------------------------------------------------------------------------------

_ONE_BACKWARD: Fix = {"layout.schedule": "interleaved_1f1b"}

STAGE_RULES = (
    Rule(
        reads=("pp", "schedule", "stages_per_rank"),
        broken=lambda _, t: (t.pp > 1) & t.has("schedule", *SINGLE_STAGE) & (t.stages_per_rank != 1),
        message="layout.schedule={x.schedule} has one stage on each rank, not layout.stages_per_rank={x.stages_per_rank}",
        fixes=({"layout.stages_per_rank": 1},),
    ),
    # Stages go down the ranks and up again, in the shape of a V.
    Rule(
        reads=("pp", "schedule", "stages_per_rank"),
        broken=lambda _, t: (t.pp > 1) & t.has("schedule", "zbv") & (t.stages_per_rank != 2),
        message="layout.schedule=zbv has two stages on each rank, not layout.stages_per_rank={x.stages_per_rank}",
        fixes=({"layout.stages_per_rank": 2},),
    ),
    Rule(
        reads=("pp", "schedule", "stages_per_rank"),
        broken=lambda _, t: t.interleaves & (t.stages_per_rank < 2),
        message="layout.schedule={x.schedule} needs at least two stages on each rank, "
        "not layout.stages_per_rank={x.stages_per_rank}",
        fixes=({"layout.stages_per_rank": 2}, {"layout.schedule": "1f1b"}),
    ),
    Rule(
        reads=("pp", "stages_per_rank"),
        broken=lambda needs, t: (t.pp > 1) & (t.n_stages > needs.run.model.n_layers),
        message="layout.pp={x.pp} x layout.stages_per_rank={x.stages_per_rank} = {x.n_stages} stages, "
        "more than the model.n_layers={needs.run.model.n_layers} layers they would hold",
    ),
    Rule(
        reads=(*DEGREES, "schedule", "zero", "reshard_after_forward"),
        broken=lambda _, t: t.splits_backward & t.reshard_after_forward & (t.shards * t.dp_replicate > 1),
        message="layout.schedule={x.schedule} with layout.reshard_after_forward=true gives wrong gradients: parameters "
        "gathered for the gradients of inputs are freed before those of weights are computed",
        fixes=({"layout.reshard_after_forward": "auto"},),
    ),
    Rule(
        reads=("pp", "schedule", "recompute"),
        broken=lambda _, t: t.splits_backward & ~t.has("recompute", "none"),
        message="layout.schedule={x.schedule} reads activations twice, which recomputed ones "
        "(layout.recompute={x.recompute}) cannot be",
        fixes=({"layout.recompute": "none"}, _ONE_BACKWARD),
    ),
    # A compiled block is one node of the backward pass: its two kinds of gradients come together.
    Rule(
        reads=("pp", "schedule"),
        broken=lambda needs, t: t.splits_backward & (needs.run.training.compile is True),
        message="layout.schedule={x.schedule} splits the backward pass of a stage, which compiled blocks do not allow",
        fixes=({"training.compile": "auto"}, _ONE_BACKWARD),
    ),
    # FSDP would wrap the shared parameter in both stages of the first rank.
    Rule(
        reads=("pp", "schedule"),
        broken=lambda needs, t: (t.pp > 1) & t.has("schedule", "zbv") & needs.tied,
        message="layout.schedule=zbv has the first and the last stage on one rank, "
        "where a tied head would be sharded twice",
        fixes=({"layout.schedule": "interleaved_zero_bubble"}, _ONE_BACKWARD),
    ),
)

# --- micro-batches -----------------------------------------------------------------------------------------------------


def divides_batch(layouts: LayoutTable) -> Bools:
    """Return where the global batch is a whole number of micro-batches on each data-parallel rank."""
    return np.asarray(layouts.global_batch % (layouts.data_ranks * layouts.microbatch) == 0)


def suits_schedule(layouts: LayoutTable) -> Bools:
    """Return where the pipeline's schedule can run as many micro-batches as a rank computes."""
    return ~(_fewer_than_stages(layouts) | _leaves_uneven_rounds(layouts))


def _fewer_than_stages(layouts: LayoutTable) -> Bools:
    return np.asarray((layouts.pp > 1) & layouts.has("schedule", "1f1b") & (layouts.accumulation < layouts.n_stages))


def _count_rounds(layouts: LayoutTable) -> Ints:
    return np.asarray(np.maximum(1, layouts.accumulation // layouts.pp))


def _leaves_uneven_rounds(layouts: LayoutTable) -> Bools:
    return np.asarray(layouts.interleaves & (layouts.accumulation % _count_rounds(layouts) != 0))


def _explain_batch(needs: Requirements, layout: ResolvedLayout) -> str:
    stated = f"layout.global_batch={layout.global_batch} samples is not a multiple of"
    if needs.run.layout.microbatch == "auto":
        return f"{stated} {layout.data_ranks} data-parallel ranks"
    unit = layout.data_ranks * layout.microbatch
    return f"{stated} layout.microbatch={layout.microbatch} x {layout.data_ranks} data-parallel ranks = {unit}"


def _smaller_microbatch(layout: ResolvedLayout) -> list[Fix]:
    """Return the largest micro-batch below the stated one that divides the batch and suits the schedule, if any."""
    largest = min(layout.microbatch - 1, layout.samples_per_rank, _MOST_TRIED)
    if largest < 1:
        return []
    smaller = layout.table.vary("microbatch", range(1, largest + 1))
    found = smaller.microbatch[divides_batch(smaller) & suits_schedule(smaller)]
    return [{"layout.microbatch": found[-1].item()}] if len(found) else []


def _nearest_batches(layout: ResolvedLayout, ranks: int) -> list[Fix]:
    """Return the multiples of a micro-batch on each of `ranks` next to the global batch, from below and from above."""
    unit = layout.microbatch * ranks
    lower = layout.global_batch // unit * unit
    return [{"layout.global_batch": batch} for batch in (lower, lower + unit) if batch]


_BATCH_FIELDS = ("global_batch", "microbatch", *DATA_AXES)
_COUNT = (
    "the {x.accumulation} micro-batches a rank computes (layout.global_batch over data ranks and layout.microbatch)"
)

BATCH_RULES = (
    Rule(
        reads=_BATCH_FIELDS,
        broken=lambda _, t: ~divides_batch(t),
        message=_explain_batch,
        fixes=lambda x: (
            *_smaller_microbatch(x),
            *_nearest_batches(x, x.data_ranks),
            *_nearest_batches(x, x.data_ranks * x.pp),
        ),
    ),
    # 1F1B fills its pipeline before the first backward pass, with one micro-batch for each stage.
    Rule(
        reads=(*_BATCH_FIELDS, "pp", "schedule", "stages_per_rank"),
        broken=lambda _, t: divides_batch(t) & _fewer_than_stages(t),
        message=_COUNT + " are fewer than the {x.n_stages} stages of layout.schedule=1f1b",
        fixes=lambda x: (
            *_smaller_microbatch(x),
            {"layout.schedule": "gpipe"},
            *_nearest_batches(x, x.data_ranks * x.pp),
        ),
    ),
    # Interleaved schedules give each stage of a rank equally many micro-batches before the next one has its turn.
    Rule(
        reads=(*_BATCH_FIELDS, "pp", "schedule"),
        broken=lambda _, t: divides_batch(t) & _leaves_uneven_rounds(t),
        message=lambda needs, x: (
            f"{_COUNT.format(x=x)} do not divide into {_count_rounds(x.table)[0]} equal rounds of "
            f"layout.schedule={x.schedule}"
        ),
        fixes=lambda x: (*_smaller_microbatch(x), *_nearest_batches(x, x.data_ranks * x.pp)),
    ),
)

# --- nodes -------------------------------------------------------------------------------------------------------------


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

RULES = (
    *DEGREE_RULES,
    *SHARDING_RULES,
    *BRANCH_RULES,
    *SPLIT_RULES,
    *STAGE_RULES,
    *BATCH_RULES,
    *NODE_RULES,
)
"""All rules, in the order in which messages follow each other."""
