"""Rules about pipelines: stages, split backward passes, and as many micro-batches as their schedules can run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phalanx.config.check import batch_sizes
from phalanx.config.schema import Run
from phalanx.layout.legality.rule import Fix, Requirements, Rule
from phalanx.layout.spec import DATA_AXES, DEGREES, SINGLE_STAGE, Bools, Ints, LayoutTable, ResolvedLayout

_MOST_TRIED = 4096
"""Samples of the largest micro-batch that a fix proposes."""


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


def divides_batch(layouts: LayoutTable) -> Bools:
    """Return where the global batch is a whole number of micro-batches on each data-parallel rank."""
    return np.asarray(layouts.global_batch % (layouts.data_ranks * layouts.microbatch) == 0)


def suits_schedule(layouts: LayoutTable) -> Bools:
    """Return where the pipeline's schedule can run as many micro-batches as a rank computes."""
    return ~(_fewer_than_stages(layouts) | _leaves_uneven_rounds(layouts))


def halves_batch(layouts: LayoutTable) -> Bools:
    """Return where a step can run as two, of half of the micro-batches each, as estimates of gradient noise do."""
    half = replace(layouts, global_batch=layouts.global_batch // 2)
    return np.asarray((layouts.accumulation % 2 == 0) & suits_schedule(half))


def suits_warmup(run: Run, layouts: LayoutTable) -> Bools:
    """Return where the smaller global batches of a warm-up are whole numbers of micro-batches that suit the schedule too."""
    suited = np.ones(len(layouts), np.bool_)
    for samples in {samples for _, samples in batch_sizes(run).stages}:
        suited &= _suits_batch(layouts, samples)
    return suited


def _suits_batch(layouts: LayoutTable, samples: int) -> Bools:
    """Return where a global batch of `samples` is a whole number of micro-batches that suits the schedule."""
    smaller = replace(layouts, global_batch=np.full_like(layouts.global_batch, samples))
    return divides_batch(smaller) & suits_schedule(smaller)


def _explain_warmup(needs: Requirements, layout: ResolvedLayout) -> str:
    unit = layout.data_ranks * layout.microbatch
    number, samples = next(
        (number, samples)
        for number, (_, samples) in enumerate(batch_sizes(needs.run).stages)
        if not _suits_batch(layout.table, samples)[0]
    )
    below = samples // unit * unit
    nearest = " or ".join(str(batch) for batch in (below, below + unit) if batch)
    pipelined = "" if layout.pp == 1 else f" over layout.pp={layout.pp} with layout.schedule={layout.schedule}"
    ranks = f"layout.microbatch={layout.microbatch} x {layout.data_ranks} data-parallel ranks = {unit}"
    stated = f"layout.batch_warmup.{number}.global_batch of {samples} samples"
    return f"{stated} does not suit {ranks}{pipelined}; multiples of it: {nearest}"


def measures_noise(needs: Requirements) -> bool:
    """Return whether the run estimates the gradient noise scale."""
    return needs.run.training.noise_scale_every is not None


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


def _halved_microbatch(layout: ResolvedLayout) -> list[Fix]:
    """Return the largest micro-batch whose number can be halved, if any."""
    sized = layout.table.vary("microbatch", range(1, min(layout.samples_per_rank, _MOST_TRIED) + 1))
    sized = sized.take(divides_batch(sized))
    found = sized.microbatch[suits_schedule(sized) & halves_batch(sized)]
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
    Rule(
        reads=(*_BATCH_FIELDS, "pp", "schedule", "stages_per_rank"),
        broken=lambda needs, t: divides_batch(t) & suits_schedule(t) & ~suits_warmup(needs.run, t),
        message=_explain_warmup,
    ),
    Rule(
        reads=(*_BATCH_FIELDS, "pp", "schedule", "stages_per_rank"),
        broken=lambda needs, t: measures_noise(needs) & divides_batch(t) & suits_schedule(t) & ~halves_batch(t),
        message="training.noise_scale_every={needs.run.training.noise_scale_every} runs a step in two halves, which "
        + _COUNT
        + " do not give",
        fixes=lambda x: (*_halved_microbatch(x), {"training.noise_scale_every": None}),
    ),
    Rule(
        reads=("gather",),
        broken=lambda needs, t: measures_noise(needs) & t.has("gather", "stream"),
        message="training.noise_scale_every={needs.run.training.noise_scale_every} looks at gradients half way through a "
        "step, where those of layout.gather=stream are still on their way",
        fixes=({"layout.gather": "layer"}, {"training.noise_scale_every": None}),
    ),
)
