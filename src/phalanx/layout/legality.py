"""The rules that say whether a layout is legal for a run, each a pure function that gives reasons in one sentence.

Nothing is allocated and no device is asked. A reason names the fields, their numbers and changes of other fields that may
mend it; `layout.resolve` keeps those that do, or adds the nearest legal degrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.config.schema import Run
from phalanx.families.family import BoundModel
from phalanx.families.registry import bind
from phalanx.layout.data_parallel import task_heads
from phalanx.layout.spec import DEGREES, SINGLE_STAGE, ResolvedLayout
from phalanx.precision import PRECISIONS

Fix = dict[str, int | str | bool]
"""Fields of the run file, as `section.field`, with other values."""

_MOST_TRIED = 4096
"""Samples of the largest micro-batch that a reason proposes."""


@dataclass(frozen=True)
class Reason:
    """Why a layout is not legal."""

    text: str
    fixes: tuple[Fix, ...] = ()
    """Changes of which each may mend this, where it does not take other degrees."""


def reasons(run: Run, layout: ResolvedLayout, world_size: int, devices_per_node: int | None = None) -> list[Reason]:
    """Every reason why `layout` cannot be used for `run` on `world_size` ranks; empty for a legal one."""
    model = bind(run)
    found = list(_world(layout, world_size))
    found += _axes(model, layout)
    # The other rules would only repeat what wrong degrees lead to.
    if found:
        return found
    rules = (_zero, _gather, _branch_groups, _tensor, _sequence, _context, _stages, _zero_bubble, _batch, _microbatches)
    found = [reason for rule in rules for reason in rule(model, layout)]
    return found + list(_node(run, layout, run.cluster.devices_per_node or devices_per_node))


def _world(layout: ResolvedLayout, world_size: int) -> Iterator[Reason]:
    if layout.world_size != world_size:
        stated = [name for name in DEGREES if getattr(layout, name) != 1] or ["dp_shard"]
        product = " x ".join(f"layout.{name}={getattr(layout, name)}" for name in stated)
        yield Reason(f"{product} = {layout.world_size} ranks, but {world_size} were started")


def _axes(model: BoundModel, layout: ResolvedLayout) -> Iterator[Reason]:
    legal = model.axes
    for name in DEGREES:
        if getattr(layout, name) > 1 and name not in legal:
            yield Reason(
                f"layout.{name}={getattr(layout, name)}: models of family {model.run.model.family} are spread over "
                f"{', '.join(degree for degree in DEGREES if degree in legal)} alone"
            )


def _zero(_model: BoundModel, layout: ResolvedLayout) -> Iterator[Reason]:
    if layout.zero == 0 and layout.dp_shard > 1:
        yield Reason(
            f"layout.zero=0 keeps everything on every rank, so layout.dp_shard={layout.dp_shard} has nothing to share out",
            ({"layout.dp_replicate": layout.dp_replicate * layout.dp_shard, "layout.dp_shard": 1},),
        )
    if layout.reshard_after_forward and layout.zero < 3:
        yield Reason(
            f"layout.reshard_after_forward=true frees gathered parameters, which layout.zero={layout.zero} never shares out",
            ({"layout.reshard_after_forward": "auto"}, {"layout.zero": 3}),
        )


def _gather(model: BoundModel, layout: ResolvedLayout) -> Iterator[Reason]:
    if layout.gather != "stream":
        return
    whole: Fix = {"layout.gather": "layer"}
    if not model.streams_weights:
        yield Reason(
            f"layout.gather=stream: models of family {model.run.model.family} have no matrix chains to stream", (whole,)
        )
    if layout.zero != 3:
        yield Reason(
            f"layout.gather=stream keeps no gathered parameters between passes, which layout.zero={layout.zero} does",
            ({"layout.zero": 3}, whole),
        )
    if model.run.layout.recompute == "selective":
        yield Reason(
            "layout.gather=stream computes hidden features again anyway, and layout.recompute=selective would keep them",
            ({"layout.recompute": "none"}, {"layout.recompute": "full"}, whole),
        )
    if layout.cp > 1 and layout.context == "all_to_all":
        yield Reason(
            f"layout.gather=stream has some heads at a time, and layout.context=all_to_all shares all out over "
            f"layout.cp={layout.cp}",
            ({"layout.context": "ring"}, whole),
        )
    if layout.splits_backward:
        yield Reason(
            f"layout.gather=stream gives gradients of inputs and of weights together, layout.schedule={layout.schedule} "
            "asks for them apart",
            ({"layout.schedule": "interleaved_1f1b"}, whole),
        )
    if PRECISIONS[model.run.layout.precision].scales_loss:
        yield Reason(
            "layout.gather=stream leaves some gradients plain and some sharded, which the loss scaling of "
            f"layout.precision={model.run.layout.precision} cannot undo together",
            ({"layout.precision": "bf16"}, whole),
        )
    if model.run.training.compile is True:
        yield Reason(
            "layout.gather=stream sends messages inside blocks, which training.compile=true cannot compile",
            ({"training.compile": "auto"}, whole),
        )


def _branch_groups(model: BoundModel, layout: ResolvedLayout) -> Iterator[Reason]:
    for text in task_heads.refusals(model.run, layout):
        yield Reason(text, ({"layout.branch_groups": "off"},))


def _tensor(model: BoundModel, layout: ResolvedLayout) -> Iterator[Reason]:
    for split in model.split_counts():
        if split.count % layout.tp:
            parts = f"{split.count} parts"
            if split.together > 1:
                parts = f"{split.count * split.together}, in {parts} of {split.together} that stay together"
            yield Reason(f"layout.tp={layout.tp} does not divide {split.field} ({parts})")
    rows = model.split_rows()
    if rows is not None and -(-rows.count // layout.tp) * (layout.tp - 1) >= rows.count:
        yield Reason(f"layout.tp={layout.tp} leaves some ranks without a row of {rows.field}={rows.count}")


def _sequence(model: BoundModel, layout: ResolvedLayout) -> Iterator[Reason]:
    if layout.cuts_structures:
        return
    positions = model.positions()
    stated = f"{positions.field}={positions.count}"
    ring = layout.cp > 1 and layout.context == "ring"
    unit = 2 * layout.cp if ring else layout.cp
    if positions.count % unit:
        parts = "2 x layout.cp (an early and a late part for each rank)" if ring else "layout.cp"
        yield Reason(f"{stated} is not a multiple of {parts} = {unit}")
    elif positions.count // layout.cp % layout.tp:
        yield Reason(
            f"{stated} over layout.cp={layout.cp} ranks leaves {positions.count // layout.cp} positions, "
            f"which layout.tp={layout.tp} does not divide"
        )


def _context(model: BoundModel, layout: ResolvedLayout) -> Iterator[Reason]:
    if layout.cp > 1 and layout.cuts_structures and model.run.layout.context != "auto":
        yield Reason(
            f"layout.context={model.run.layout.context} joins positions of samples, but over layout.cp={layout.cp} ranks "
            f"models of family {model.run.model.family} share out the atoms of structures",
            ({"layout.context": "auto"},),
        )
    if layout.cp == 1 or layout.context != "all_to_all":
        return
    heads = model.context_heads()
    if heads.count % layout.tp == 0 and heads.count // layout.tp % layout.cp:
        yield Reason(
            f"layout.context=all_to_all gives each rank whole heads, but layout.cp={layout.cp} does not divide "
            f"{heads.field}={heads.count} over layout.tp={layout.tp}",
            ({"layout.context": "ring"},),
        )


def _stages(model: BoundModel, layout: ResolvedLayout) -> Iterator[Reason]:
    if layout.pp == 1:
        return
    per_rank = layout.stages_per_rank
    stated = f"layout.stages_per_rank={per_rank}"
    if layout.schedule in SINGLE_STAGE and per_rank != 1:
        yield Reason(
            f"layout.schedule={layout.schedule} has one stage on each rank, not {stated}",
            ({"layout.stages_per_rank": 1},),
        )
    if layout.schedule == "zbv" and per_rank != 2:
        yield Reason(f"layout.schedule=zbv has two stages on each rank, not {stated}", ({"layout.stages_per_rank": 2},))
    if layout.schedule.startswith("interleaved") and per_rank < 2:
        yield Reason(
            f"layout.schedule={layout.schedule} needs at least two stages on each rank, not {stated}",
            ({"layout.stages_per_rank": 2}, {"layout.schedule": "1f1b"}),
        )
    if layout.n_stages > model.run.model.n_layers:
        yield Reason(
            f"layout.pp={layout.pp} x {stated} = {layout.n_stages} stages, "
            f"more than the model.n_layers={model.run.model.n_layers} layers they would hold"
        )


def _zero_bubble(model: BoundModel, layout: ResolvedLayout) -> Iterator[Reason]:
    if not layout.splits_backward:
        return
    name = f"layout.schedule={layout.schedule}"
    if layout.reshard_after_forward and layout.shards * layout.dp_replicate > 1:
        yield Reason(
            f"{name} with layout.reshard_after_forward=true gives wrong gradients: parameters gathered for the gradients "
            f"of inputs are freed before those of weights are computed",
            ({"layout.reshard_after_forward": "auto"},),
        )
    recompute = model.run.layout.recompute
    if recompute != "none":
        yield Reason(
            f"{name} reads activations twice, which recomputed ones (layout.recompute={recompute}) cannot be",
            ({"layout.recompute": "none"}, {"layout.schedule": "interleaved_1f1b"}),
        )
    if model.run.training.compile is True:
        yield Reason(
            f"{name} splits the backward pass of a stage, which compiled blocks do not allow",
            ({"training.compile": "auto"}, {"layout.schedule": "interleaved_1f1b"}),
        )
    if layout.schedule == "zbv" and model.tied():
        yield Reason(
            f"{name} has the first and the last stage on one rank, where a tied head would be sharded twice",
            ({"layout.schedule": "interleaved_zero_bubble"}, {"layout.schedule": "interleaved_1f1b"}),
        )


def divides_batch(layout: ResolvedLayout) -> bool:
    """Return whether the global batch is a whole number of micro-batches on each data-parallel rank."""
    return layout.global_batch % (layout.data_ranks * layout.microbatch) == 0


def suits_schedule(layout: ResolvedLayout) -> bool:
    """Return whether the pipeline's schedule can run as many micro-batches as a rank computes."""
    return not (_too_few(layout) or _uneven_rounds(layout))


def _batch(model: BoundModel, layout: ResolvedLayout) -> Iterator[Reason]:
    if divides_batch(layout):
        return
    ranks, unit = layout.data_ranks, layout.data_ranks * layout.microbatch
    stated = f"layout.global_batch={layout.global_batch} samples is not a multiple of"
    if model.run.layout.microbatch == "auto":
        text = f"{stated} {ranks} data-parallel ranks"
    else:
        text = f"{stated} layout.microbatch={layout.microbatch} x {ranks} data-parallel ranks = {unit}"
    batches = (*_nearest_batches(layout, unit), *_nearest_batches(layout, unit * layout.pp))
    yield Reason(text, (*_smaller_microbatch(layout), *batches))


def _smaller_microbatch(layout: ResolvedLayout) -> Iterator[Fix]:
    """Yield the largest micro-batch below the stated one that divides the batch and suits the schedule, if there is one."""
    if layout.global_batch % layout.data_ranks:
        return
    samples = layout.samples_per_rank
    sizes = range(min(layout.microbatch - 1, samples, _MOST_TRIED), 0, -1)
    smaller = (replace(layout, microbatch=size) for size in sizes if samples % size == 0)
    found = next((each for each in smaller if suits_schedule(each)), None)
    if found is not None:
        yield {"layout.microbatch": found.microbatch}


def _nearest_batches(layout: ResolvedLayout, unit: int) -> list[Fix]:
    lower = layout.global_batch // unit * unit
    return [{"layout.global_batch": batch} for batch in (lower, lower + unit) if batch]


def _too_few(layout: ResolvedLayout) -> bool:
    return layout.pp > 1 and layout.schedule == "1f1b" and layout.accumulation < layout.n_stages


def _uneven_rounds(layout: ResolvedLayout) -> bool:
    interleaved = layout.pp > 1 and layout.schedule.startswith("interleaved")
    return interleaved and layout.accumulation % _rounds(layout) != 0


def _rounds(layout: ResolvedLayout) -> int:
    return max(1, layout.accumulation // layout.pp)


def _microbatches(_model: BoundModel, layout: ResolvedLayout) -> Iterator[Reason]:
    if not divides_batch(layout):
        return
    count = layout.accumulation
    stated = f"the {count} micro-batches a rank computes (layout.global_batch over data ranks and layout.microbatch)"
    smaller = tuple(_smaller_microbatch(layout))
    batches = _nearest_batches(layout, layout.data_ranks * layout.microbatch * layout.pp)
    if _too_few(layout):
        yield Reason(
            f"{stated} are fewer than the {layout.n_stages} stages of layout.schedule=1f1b",
            (*smaller, {"layout.schedule": "gpipe"}, *batches),
        )
    if _uneven_rounds(layout):
        yield Reason(
            f"{stated} do not divide into {_rounds(layout)} equal rounds of layout.schedule={layout.schedule}",
            (*smaller, *batches),
        )


def _node(run: Run, layout: ResolvedLayout, devices_per_node: int | None) -> Iterator[Reason]:
    if layout.tp == 1 or devices_per_node is None or run.layout.tp_across_nodes:
        return
    if layout.tp > devices_per_node or devices_per_node % layout.tp:
        yield Reason(
            f"layout.tp={layout.tp} groups do not fit into nodes of {devices_per_node} devices",
            ({"layout.tp_across_nodes": True},),
        )
