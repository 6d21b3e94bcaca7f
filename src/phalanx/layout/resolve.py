"""From a run file and a number of ranks to a legal layout, or to an error with the nearest legal ones; and all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from phalanx.config.check import global_batch_samples
from phalanx.config.families import check_parameter_count
from phalanx.config.schema import Layout, Run
from phalanx.errors import ConfigError
from phalanx.families.family import BoundModel
from phalanx.layout.data_parallel.task_heads import branch_sizes
from phalanx.layout.legality import is_legal, reasons_against
from phalanx.layout.legality.pipeline_rules import divides_batch, halves_batch, suits_schedule, suits_warmup
from phalanx.layout.legality.rule import Fix, Reason, Requirements
from phalanx.layout.spec import (
    CONTEXTS,
    DATA_AXES,
    DEGREES,
    SHARDING_AXES,
    SINGLE_STAGE,
    ZERO_BUBBLE,
    Ints,
    LayoutTable,
    ResolvedLayout,
)

Degrees = dict[str, int]

MemoryFits = Callable[[ResolvedLayout], bool]
"""Whether the devices have room for a layout with its micro-batch; `planner.rank.cost_models` makes one."""

MOST_SAMPLES = 64
"""Samples of a micro-batch that `auto` takes at most: a larger one is hardly faster and holds more."""
FILLING = 4
"""Micro-batches for each pipeline rank that `auto` leaves at least, where the batch has as many: pipeline ranks then wait
for at most about a fifth of a step."""
_SUGGESTED = 2
_EXPERIMENT = ("layout.global_batch", "layout.precision")
"""Fields of the layout that change what is trained. Hints touch them last."""


def resolve_layout(
    model: BoundModel, world_size: int, devices_per_node: int | None = None, fits: MemoryFits | None = None
) -> ResolvedLayout:
    """Return the layout that the run file of `model` asks for on `world_size` ranks, with `auto` filled in.

    devices_per_node: what the launcher says; the run file's own word comes first. fits: asked for the micro-batch where that
    is auto; None where the devices' memory is not known, or does not bound it. Raises ConfigError, with the numbers and the
    nearest legal choice, where the layout is not legal.
    """
    # First of all: sizes that nobody can train would overflow what follows.
    check_parameter_count(model.run.model)
    try:
        layout = with_degrees(model, _fill_degrees(model.run.layout, world_size), fits)
        layout = replace(layout, ep_node=int(ranks_of_node(model, layout.table, devices_per_node)[0]))
    except _Indivisible as error:
        raise ConfigError(f"{error}\n{_suggest_instead(model, world_size, devices_per_node)}") from None
    found = reasons_against(model, layout, world_size, devices_per_node)
    if found:
        raise ConfigError(_explain_illegal(model, layout, world_size, devices_per_node, found))
    return layout


def stated_ranks(run: Run) -> int:
    """Return the ranks that the stated degrees multiply to; `auto` counts as 1."""
    degrees = [getattr(run.layout, name) for name in DEGREES]
    return math.prod(degree for degree in degrees if degree != "auto")


def can_run(model: BoundModel, world_size: int, devices_per_node: int | None = None) -> bool:
    """Return whether the run file of `model` has a legal layout on `world_size` ranks as it stands."""
    try:
        layout = with_degrees(model, _fill_degrees(model.run.layout, world_size))
    except _Indivisible:
        return False
    layout = replace(layout, ep_node=int(ranks_of_node(model, layout.table, devices_per_node)[0]))
    return not reasons_against(model, layout, world_size, devices_per_node)


def with_degrees(model: BoundModel, degrees: Degrees, fits: MemoryFits | None = None) -> ResolvedLayout:
    """Return the layout with these degrees, all else as the run file says; legal or not. fits: as for `resolve_layout`."""
    chosen = model.run.layout
    cp, pp = degrees["cp"], degrees["pp"]
    per_rank = chosen.stages_per_rank
    if per_rank == "auto":
        per_rank = 1 if chosen.schedule in SINGLE_STAGE else 2
    context = chosen.context
    if context == "auto":
        # A ring computes biases and masks slowly, block by block.
        exchangeable = model.context_heads().count % (degrees["tp"] * cp) == 0
        context = "all_to_all" if exchangeable and model.needs_bias() else "ring"
    reshard = chosen.reshard_after_forward
    if reshard == "auto":
        # Pipeline stages would gather their parameters again for every micro-batch.
        reshard = chosen.zero == 3 and pp == 1
    layout = ResolvedLayout(
        global_batch=global_batch_samples(model.run),
        microbatch=1 if chosen.microbatch == "auto" else chosen.microbatch,
        **degrees,
        ep=chosen.ep,
        expert_tp=chosen.expert_tp,
        ep_chunks=chosen.ep_chunks,
        zero=chosen.zero,
        schedule=chosen.schedule,
        stages_per_rank=per_rank if pp > 1 else 1,
        context=context if cp > 1 and not model.cuts_structures else "ring",
        cuts_structures=model.cuts_structures,
        reshard_after_forward=reshard,
        # One rank that shares with nobody has nothing to stream.
        gather=chosen.gather if math.prod(degrees[name] for name in SHARDING_AXES) > 1 else "layer",
        branch_groups=branch_sizes(model, math.prod(degrees[name] for name in DATA_AXES)),
        recompute=chosen.recompute,
        offload_optimizer=chosen.offload_optimizer,
        offload_activations=chosen.offload_activations,
    )
    if chosen.microbatch != "auto":
        return layout
    sized = layout.table.vary("microbatch", range(1, MOST_SAMPLES + 1))
    possible = sized.take(divides_batch(sized) & suits_schedule(sized))
    possible = possible.take(suits_warmup(model.run, possible))
    if model.run.training.noise_scale_every is not None:
        possible = possible.take(halves_batch(possible))
    if not len(possible):
        return layout
    if layout.pp > 1:
        # Many small micro-batches fill a pipeline better than few large ones, which are faster each.
        filling = possible.take(possible.accumulation >= FILLING * possible.pp)
        possible = filling if len(filling) else possible.take([0])
    largest_first = [possible.row(index) for index in reversed(range(len(possible)))]
    if fits is None:
        return largest_first[0]
    return next((each for each in largest_first if fits(each)), largest_first[-1])


SMALL_MESSAGE = 2**22
"""Bytes of a message of rows below which an exchange in two stages is taken to be faster. Each message that a rank sends to
another node costs a step of the network's, and what two stages spare of these they pay for by sending all bytes once more
within the node. By the planner's model both are equal near 10 MiB on Frontier, and near 1 MiB if steps cost their latency
alone (benchmarks/expert_exchange.py); no machine of several nodes has been measured."""


def ranks_of_node(model: BoundModel, layouts: LayoutTable, devices_per_node: int | None) -> Ints:
    """Return `ep_node` of each layout, as the run file of `model` says it, [layouts]; 1 where there is nothing to exchange.

    devices_per_node: as for `resolve_layout`.
    """
    stated, over = model.run.layout.ep_node, layouts.experts_over
    if stated != "auto":
        return np.where((layouts.ep > 1) & (over > stated), stated, 1)
    devices = model.run.cluster.devices_per_node or devices_per_node
    if devices is None:
        return np.ones_like(over)
    positions = layouts.microbatch * (model.positions().count // (layouts.cp * layouts.tp))
    message = positions * model.dispatched_bytes() * layouts.expert_tp // over
    several = (layouts.ep > 1) & (over > devices) & (over % devices == 0)
    return np.where(several & (message < SMALL_MESSAGE), devices, 1)


def one_rank_microbatch(model: BoundModel) -> int:
    """Return the samples that are computed at a time on one rank, whatever its degrees are."""
    return with_degrees(model, dict.fromkeys(DEGREES, 1)).microbatch


def legal_layouts(model: BoundModel, world_size: int, devices_per_node: int | None = None) -> list[ResolvedLayout]:
    """Return every legal choice of degrees for `world_size` ranks, all else as the run file says."""
    layouts = _every_split(model, world_size)
    legal = is_legal(Requirements.of_model(model, world_size, devices_per_node), LayoutTable.from_rows(layouts))
    return list(itertools.compress(layouts, legal))


def fallback_layouts(model: BoundModel, wanted: ResolvedLayout, on_node: int | None = None) -> dict[int, list[str]]:
    """Return the nearest legal layout for each smaller number of ranks that has any, as changes of the run file.

    The global batch stays: a layout of fewer ranks computes the same steps. Degrees change first, then the micro-batch and
    how experts are spread, which change no result either. on_node: ranks of each of several nodes, which are left out as
    wholes; None where all ranks are on one.
    """
    found: dict[int, list[str]] = {}
    smaller = [wanted.microbatch] if model.run.layout.microbatch == "auto" else list_divisors(wanted.microbatch)[::-1]
    spreads: list[Fix] = [{}]
    spreads += [{"layout.ep": ep, "layout.expert_tp": 1} for ep in reversed(list_divisors(wanted.ep))]
    fixes = [
        spread | ({} if samples == wanted.microbatch else {"layout.microbatch": samples})
        for spread, samples in itertools.product(spreads, smaller)
    ]
    step = on_node or 1
    for ranks in range(wanted.world_size - step, 0, -step):
        legal = [
            (_degree_distance(layout, wanted)[0], order, layout)
            for order, fix in enumerate(fixes)
            for layout in legal_layouts(_change_fields(model, fix), ranks, on_node or ranks)
        ]
        if legal:
            _, order, nearest = min(legal, key=lambda choice: (*choice[:2], _degree_distance(choice[2], wanted)))
            degrees = [f"layout.{name}={getattr(nearest, name)}" for name in DEGREES]
            found[ranks] = [*degrees, *(f"{name}={value}" for name, value in fixes[order].items())]
    return found


def every_layout(model: BoundModel, world_size: int) -> list[ResolvedLayout]:
    """Return `legal_layouts` with every schedule, ZeRO level, resharding and kind of context parallelism as well."""
    variants = [variant for layout in _every_split(model, world_size) for variant in _vary_choices(layout)]
    legal = is_legal(Requirements.of_model(model, world_size), LayoutTable.from_rows(variants))
    return list(itertools.compress(variants, legal))


def _every_split(model: BoundModel, world_size: int) -> list[ResolvedLayout]:
    splits = all_factorisations(world_size, len(DEGREES))
    return [with_degrees(model, dict(zip(DEGREES, degrees, strict=True))) for degrees in splits]


def _vary_choices(layout: ResolvedLayout) -> Iterator[ResolvedLayout]:
    schedules = [(layout.schedule, 1)]
    if layout.pp > 1:
        schedules = [("gpipe", 1), ("1f1b", 1), *((n, 2) for n in ("interleaved_1f1b", *ZERO_BUBBLE))]
    # Where ranks share nothing, all levels are the same program; ZeRO 0 is another one wherever gradients are reduced.
    levels: list[tuple[int, bool]] = [(3, False)]
    if layout.dp_shard * layout.cp > 1:
        levels = [(1, False), (2, False), (3, False), (3, True)]
    if layout.dp_shard == 1 and layout.cp * layout.dp_replicate > 1:
        levels.append((0, False))
    contexts = CONTEXTS if layout.cp > 1 and not layout.cuts_structures else ("ring",)
    ranks = int(layout.table.expert_ranks[0])
    # An expert is sharded where ranks are left that have one each.
    spreads = [(ep, slices) for ep in list_divisors(ranks) for slices in list_divisors(ranks // ep if ep > 1 else 1)]
    for (schedule, per_rank), (zero, reshard), context, (ep, slices) in itertools.product(
        schedules, levels, contexts, spreads
    ):
        yield replace(
            layout,
            schedule=schedule,
            stages_per_rank=per_rank,
            zero=zero,
            reshard_after_forward=reshard,
            context=context,
            ep=ep,
            expert_tp=slices,
        )


def all_factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write `number` as an ordered product of `parts` whole numbers."""
    if parts == 1:
        yield (number,)
        return
    for divisor in list_divisors(number):
        for rest in all_factorisations(number // divisor, parts - 1):
            yield (divisor, *rest)


def list_divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    # Each divisor below the root has its counterpart above it.
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


class _Indivisible(ConfigError):
    """The stated degrees leave no whole number of ranks for the one that is auto."""


def _fill_degrees(layout: Layout, world_size: int) -> Degrees:
    """Return the degrees as numbers. Raises ConfigError where two are auto, or the others leave no whole number for it."""
    stated = {name: getattr(layout, name) for name in DEGREES}
    automatic = [name for name, value in stated.items() if value == "auto"]
    # dp_shard is auto by default: whoever says auto of another degree means that one.
    if len(automatic) > 1 and "dp_shard" in automatic:
        automatic.remove("dp_shard")
        stated["dp_shard"] = 1
    if len(automatic) > 1:
        names = " and ".join(f"layout.{name}" for name in automatic)
        raise ConfigError(f"{names} are both auto, but only one degree can take what the others leave; give the rest")
    if not automatic:
        return stated
    product = math.prod(value for value in stated.values() if value != "auto")
    if world_size % product:
        others = {name: value for name, value in stated.items() if value not in ("auto", 1)}
        text = " x ".join(f"layout.{name}={value}" for name, value in others.items())
        total = f" = {product}" if len(others) > 1 else ""
        raise _Indivisible(f"{text}{total} does not divide the world size {world_size}")
    return {**stated, automatic[0]: world_size // product}


def _suggest_instead(model: BoundModel, world_size: int, devices_per_node: int | None) -> str:
    """Return, in words, what is legal where the stated degrees do not divide the world size: one changed, else others."""
    stated = {name: getattr(model.run.layout, name) for name in DEGREES}
    given = {name: value for name, value in stated.items() if value not in ("auto", 1)}
    # One degree changed, the nearest first: as much as possible of what was asked for stays.
    changes = sorted((abs(d - value), d, name) for name, value in given.items() for d in list_divisors(world_size))
    more = _more_ranks(model, world_size, devices_per_node)
    for _, degree, name in changes:
        if can_run(_change_fields(model, {f"layout.{name}": degree}), world_size, devices_per_node):
            return f"{more}nearest legal: {name}={degree}"
    wanted = with_degrees(model, {name: 1 if value == "auto" else value for name, value in stated.items()})
    nearest = _nearest_degrees(model, wanted, world_size, devices_per_node)
    return f"{more}nearest legal: {_join_choices(nearest)}" if nearest else f"{more}{_none_legal(world_size)}"


def _more_ranks(model: BoundModel, world_size: int, devices_per_node: int | None) -> str:
    """Return the line that says how many ranks the stated degrees need, for who has started one alone; else nothing."""
    needed = stated_ranks(model.run)
    if world_size > 1 or needed == 1 or not can_run(model, needed, devices_per_node):
        return ""
    return f"start {needed} ranks: --nproc {needed}, or with torchrun or srun\n"


def _explain_illegal(
    model: BoundModel, layout: ResolvedLayout, world_size: int, devices_per_node: int | None, found: list[Reason]
) -> str:
    """Return the reasons, and what would be legal: other fields with these degrees, else other degrees, else both."""
    lines = "\n".join(reason.text for reason in found)
    # Every choice of one fix for each reason that has any, where these agree; those that change least come first.
    fixes: list[Fix] = []
    for chosen in itertools.product(*(reason.fixes for reason in found if reason.fixes)):
        joined = {name: value for part in chosen for name, value in part.items()}
        if joined and joined not in fixes and all(part.items() <= joined.items() for part in chosen):
            fixes.append(joined)
    fixes.sort(key=len)
    same = [fix for fix in fixes if not any(name in _EXPERIMENT for name in fix)]
    # Other fields first, so that the degrees that were asked for stay.
    mending = [fix for fix in same if can_run(_change_fields(model, fix), world_size, devices_per_node)]
    more = _more_ranks(model, world_size, devices_per_node) if layout.world_size != world_size else ""
    if mending:
        return f"{lines}\n{more}nearest legal: {_join_choices([_write_fix(fix) for fix in mending[:_SUGGESTED]])}"
    for fix in ({}, *same):
        beside = {name: value for name, value in fix.items() if name.removeprefix("layout.") not in DEGREES}
        nearest = _nearest_degrees(_change_fields(model, beside), layout, world_size, devices_per_node)
        if nearest:
            return (
                f"{lines}\n{more}nearest legal: {_join_choices([_write_fix(beside) + degrees for degrees in nearest])}"
            )
    return f"{lines}\n{more}{_other_experiment(model, fixes, layout, world_size, devices_per_node)}"


def _other_experiment(
    model: BoundModel, fixes: list[Fix], layout: ResolvedLayout, world_size: int, devices_per_node: int | None
) -> str:
    """Return what is legal with another global batch or precision, which train another run, or that nothing is."""
    changing = [fix for fix in fixes if any(name in _EXPERIMENT for name in fix)]
    mending = [_write_fix(fix) for fix in changing if can_run(_change_fields(model, fix), world_size, devices_per_node)]
    if not mending:
        for fix in changing:
            beside = {name: value for name, value in fix.items() if name.removeprefix("layout.") not in DEGREES}
            nearest = _nearest_degrees(_change_fields(model, beside), layout, world_size, devices_per_node)
            mending += [_write_fix(beside) + degrees for degrees in nearest]
    if not mending:
        return _none_legal(world_size)
    return f"nearest legal, but another experiment: {_join_choices(mending[:_SUGGESTED])}"


def _none_legal(world_size: int) -> str:
    return f"no choice of degrees is legal for {world_size} ranks with the other fields as they are"


def _change_fields(model: BoundModel, fix: Fix) -> BoundModel:
    run = model.run
    for name, value in fix.items():
        section, field = name.split(".")
        run = run.model_copy(update={section: getattr(run, section).model_copy(update={field: value})})
    return model.rebind(run)


def _write_fix(fix: Fix) -> list[str]:
    words = {name: "null" if value is None else str(value).lower() for name, value in fix.items()}
    return [f"{name.removeprefix('layout.')}={word}" for name, word in words.items()]


def _join_choices(choices: list[list[str]]) -> str:
    """Return each choice as the user would write it; of one field alone, its name once."""
    names = {tuple(word.partition("=")[0] for word in choice) for choice in choices}
    if len(names) == 1 and len(choices[0]) == 1:
        return " or ".join([choices[0][0], *(choice[0].partition("=")[2] for choice in choices[1:])])
    return ", or ".join(" ".join(choice) for choice in choices)


def _nearest_degrees(
    model: BoundModel, wanted: ResolvedLayout, world_size: int, devices_per_node: int | None
) -> list[list[str]]:
    """Return, in words, the degrees of the legal layouts that differ least from `wanted`."""
    legal = legal_layouts(model, world_size, devices_per_node)
    nearest = sorted(legal, key=lambda layout: _degree_distance(layout, wanted))[:_SUGGESTED]
    return [_write_degrees(layout, wanted) for layout in nearest]


def _degree_distance(layout: ResolvedLayout, wanted: ResolvedLayout) -> tuple[float, ...]:
    """Return how far the degrees of a layout are from those of another, with the degrees themselves to break ties."""
    # Data-parallel degrees are the first to give way: they change no model code and follow from the rest.
    weights = {"dp_replicate": 0.2, "dp_shard": 0.1}
    ratios = [
        weights.get(name, 1.0) * abs(math.log2(getattr(layout, name) / getattr(wanted, name))) for name in DEGREES
    ]
    return (sum(ratios), *(getattr(layout, name) for name in DEGREES))


def _write_degrees(layout: ResolvedLayout, wanted: ResolvedLayout) -> list[str]:
    """Return the degrees that matter, in words: those that are not 1, or were not wanted to be."""
    values = {name: getattr(layout, name) for name in DEGREES}
    return [f"{n}={v}" for n, v in values.items() if v != 1 or getattr(wanted, n) != 1]
