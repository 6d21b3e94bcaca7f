"""What the optimizer steps of many layouts consist of: parts, how they are divided among ranks, and where their groups lie.

Everything that does not depend on how fast a device or its links are: `step_time` adds that, again and again where
constants are fitted. Arrays have one entry for each layout; layouts of several models may stand together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np

from phalanx.hardware.machine import Machine
from phalanx.hardware.topology import Placement, join_placements, place_groups
from phalanx.layout.spec import CONTEXTS, RECOMPUTES, SCHEDULES, LayoutTable
from phalanx.layout.stage_assignment import stage_layer_counts
from phalanx.nn.precision import PRECISIONS
from phalanx.planner.distinct_rows import distinct_rows
from phalanx.planner.time.framework import FrameworkProfile
from phalanx.planner.time.operation_time import Floats, Ints
from phalanx.planner.time.part_time import Parts, at, parts_of
from phalanx.planner.trace.part_costs import PartCosts, part_costs
from phalanx.planner.trace.traced_model import PartName, Setting, part_tracer


@dataclass(frozen=True)
class RankLayers:
    """Blocks of the ranks of a pipeline. Arrays of [layouts]."""

    first: Floats
    """Blocks of the rank that holds the embedding."""
    last: Floats
    """Blocks of the rank that holds the head; 0 where that is the first."""
    other: Floats
    """Blocks of the fullest rank among the others; 0 where there is none."""
    mean: Floats
    """Mean over all ranks."""

    @property
    def most(self) -> Floats:
        """Blocks of the fullest rank."""
        return np.maximum(np.maximum(self.first, self.last), self.other)


@dataclass(frozen=True)
class Tensors:
    """Parameters as tensors, which are gathered and reduced one by one. Arrays of [layouts]."""

    block: Floats
    embedding: Floats
    head: Floats


@dataclass(frozen=True)
class Streams:
    """What of a block is streamed, and how. Arrays of [layouts]; 0 where blocks are gathered whole."""

    parameters: Floats
    """Elements on one rank before data parallelism shards them."""
    piece: Floats
    """Elements that stay on the rank that has most."""
    messages: Floats
    """Chunks that go around the ring in one pass."""
    sent: Floats
    """Elements of all of them."""
    own: Floats
    """Elements that arrive before the first product, where several ranks hold a chunk together."""
    again: Floats
    """Share of a pass that recompute repeats before the backward pass: what it needs to find the last chain's input."""
    busy: Floats
    """Share of a pass that has a message under way beside it."""

    @classmethod
    def of(cls, blocks: Sequence[PartCosts], recompute: Ints, random_drops: bool) -> Streams:
        """Return what of each of `blocks` is streamed. random_drops: whether dropout follows the last chain."""
        rows = []
        for block, choice in zip(blocks, recompute.tolist(), strict=True):
            chains = block.chains
            sent = [chain.sent for chain in chains]
            first = sum(sent) if random_drops else sum(sent[:-1])
            chunks = sum(chain.plan.chunks for chain in chains)
            messages = sum(chain.plan.chunks - 1 for chain in chains)
            rows.append(
                (
                    sum(parameter.count for parameter in block.parameters if parameter.streamed),
                    sum(chain.piece for chain in chains),
                    messages,
                    sum(sent),
                    sum(chain.own for chain in chains),
                    first / max(sum(sent), 1) * (RECOMPUTES[choice] == "full"),
                    messages / max(chunks, 1),
                )
            )
        return cls(*np.asarray(rows, np.float64).reshape(-1, len(fields(cls))).T)

    def take(self, which: Ints) -> Streams:
        """Return those at these positions."""
        return Streams(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


@dataclass(frozen=True)
class Steps:
    """Steps of many layouts."""

    layouts: LayoutTable
    parts: Parts
    embedding: Ints
    """Positions in `parts`, as those of block and head."""
    block: Ints
    leading: Ints
    """A leading block; the block where there is none."""
    head: Ints
    n_leading: Floats
    """Leading blocks of the first stage."""
    n_layers: Ints
    """Blocks of the model."""
    leading_layers: Ints
    """Leading blocks of the model: dense ones of a mixture of experts."""
    end_costs: Floats
    """Costs of the embedding and of the head, in blocks, by which stages are split, [layouts, 2]."""
    layers: RankLayers
    unit: Ints
    """Blocks whose parameters are gathered, and gradients reduced, together."""
    joined: Floats
    """1 where the first pipeline rank holds the head too, else 0."""
    block_parameters: Floats
    """Elements on one rank before data parallelism shards them."""
    embedding_parameters: Floats
    leading_parameters: Floats
    """Parameters that the leading blocks have more than as many others; less than 0 where these have more."""
    expert_parameters: Floats
    """Elements of a block's experts, which expert parallelism shards."""
    head_parameters: Floats
    tensors: Tensors
    streams: Streams
    alike: Ints
    """Layouts with the same number have the same parts of the model, as many gathered together, and shards and replicas
    that lie alike: their data-parallel ranks exchange the same."""
    hidden_bytes: Floats
    """Activations of one micro-batch between two stages, on one rank."""
    shards: Placement
    """The ranks over which one copy of the parameters is sharded."""
    replicas: Placement
    """The ranks that hold the same part of them."""
    expert_shards: Placement
    """The ranks over which one copy of a rank's experts is sharded."""
    expert_replicas: Placement
    """The ranks that hold the same part of them."""
    pipeline: Placement

    def __len__(self) -> int:
        return len(self.layouts)

    def of_start(self, column: Floats) -> Floats:
        """Return `column` of the embedding, plus what leading blocks have more of it than as many others, [layouts].

        column: a time, a size or a count of each part.
        """
        return column[self.embedding] + self.n_leading * (column[self.leading] - column[self.block])

    def take(self, which: Ints) -> Steps:
        """Return those at these positions."""
        values: dict[str, object] = {"parts": self.parts}
        for field in fields(self):
            column = getattr(self, field.name)
            if isinstance(column, LayoutTable | Streams):
                values[field.name] = column.take(which)
            elif isinstance(column, Placement | RankLayers | Tensors):
                values[field.name] = at(column, which)
            elif field.name != "parts":
                values[field.name] = column[which]
        return Steps(**values)  # type: ignore[arg-type]

    @classmethod
    def joined_up(cls, several: Sequence[Steps]) -> Steps:
        """Return the steps of several lists, one after the other."""
        starts = np.cumsum([0, *(steps.parts.count for steps in several)])
        kinds = np.cumsum([0, *(int(steps.alike.max(initial=-1)) + 1 for steps in several)])
        moved = [
            replace(
                steps,
                embedding=steps.embedding + start,
                block=steps.block + start,
                leading=steps.leading + start,
                head=steps.head + start,
                alike=steps.alike + kind,
            )
            for steps, start, kind in zip(several, starts, kinds, strict=False)
        ]
        values: dict[str, object] = {"parts": Parts.joined([steps.parts for steps in several])}
        for field in fields(cls):
            columns = [getattr(steps, field.name) for steps in moved]
            if isinstance(columns[0], LayoutTable | RankLayers | Streams | Tensors):
                kind = type(columns[0])
                values[field.name] = kind(
                    **{
                        inner.name: np.concatenate([getattr(column, inner.name) for column in columns])
                        for inner in fields(kind)
                    }
                )
            elif isinstance(columns[0], Placement):
                values[field.name] = join_placements(columns)
            elif field.name != "parts":
                values[field.name] = np.concatenate(columns)
        return cls(**values)  # type: ignore[arg-type]


def steps_of(
    setting: Setting,
    layouts: LayoutTable,
    machine: Machine,
    framework: FrameworkProfile,
    chunk_tokens: Mapping[int, int] | None = None,
    gather_blocks: int = 1,
) -> Steps:
    """Return the steps of `layouts` of one model.

    setting: the model and how it is computed; degrees, context exchange and recompute are those of each layout.
    chunk_tokens: tokens whose logits are held at once, by tensor-parallel degree; else those of `setting`. gather_blocks:
    blocks that are gathered together, where a stage has as many. Raises ConfigError where a group needs links or a network
    that the description of the machine does not have.
    """
    plain = replace(setting, compile=setting.compile and framework.compiled)
    # Many layouts compute the parts of the model alike: each distinct setting is traced once.
    keys = _setting_keys(layouts)
    first, which = distinct_rows(keys)
    distinct = np.stack([key[first] for key in keys], axis=1)
    settings = [_setting_at(plain, key, chunk_tokens) for key in distinct.tolist()]
    kinds = _part_names(setting)
    wanted = [(name, one, size) for one, size in settings for name in kinds]
    sizes, blocks = _part_sizes(settings, framework)
    sizes = sizes.take(which)
    one_stage = layouts.pp == 1
    ends = framework.end_costs(plain)
    layers, joined = rank_layers(plain, layouts, framework)
    unit = np.minimum(gather_blocks, np.ceil(layers.most / layouts.stages_per_rank).astype(np.int64))
    width = setting.model.d_model * PRECISIONS[setting.precision].compute_dtype.itemsize
    _, like_parts = distinct_rows([layouts.tp, layouts.cp, layouts.ep, layouts.streamed, one_stage])
    groups, like_groups = _place_groups(machine, layouts)
    first_stage = [stage_layer_counts(plain.model.n_layers, n, *ends)[0] for n in layouts.n_stages]
    n_leading = np.minimum(np.asarray(first_stage, np.float64), plain.model.leading_layers)
    return Steps(
        layouts=layouts,
        parts=parts_of(wanted, framework),
        embedding=len(kinds) * which,
        block=len(kinds) * which + 1,
        leading=len(kinds) * which + (3 if plain.model.leading_layers else 1),
        head=len(kinds) * which + 2,
        n_leading=n_leading,
        n_layers=np.full(len(layouts), plain.model.n_layers),
        leading_layers=np.full(len(layouts), plain.model.leading_layers),
        end_costs=np.tile(ends, (len(layouts), 1)),
        layers=layers,
        unit=unit,
        joined=joined,
        block_parameters=sizes.block,
        embedding_parameters=sizes.embedding,
        leading_parameters=n_leading * (sizes.leading - sizes.block),
        expert_parameters=sizes.experts,
        # One rank that holds both ends has the shared table once.
        head_parameters=sizes.head - np.where(one_stage, sizes.shared, 0.0),
        tensors=sizes.tensors,
        streams=Streams.of(blocks, distinct[:, 3], part_tracer(setting).random_drops()).take(which),
        alike=distinct_rows([like_parts, *like_groups, unit])[1],
        hidden_bytes=layouts.microbatch * (setting.length // layouts.cp) * width / layouts.tp,
        **groups,
    )


_PARTS: tuple[PartName, ...] = ("embedding", "block", "head")


def _part_names(setting: Setting) -> tuple[PartName, ...]:
    """Return the names of the parts of a model that differ."""
    return (*_PARTS, "leading") if setting.model.leading_layers else _PARTS


def _setting_keys(layouts: LayoutTable) -> list[Ints]:
    """Return the columns that decide how the parts of a model are computed."""
    context = layouts.context * (layouts.cp > 1)
    return [
        layouts.tp,
        layouts.cp,
        context,
        layouts.recompute,
        layouts.microbatch,
        layouts.streamed,
        layouts.splits_backward.astype(np.int64),
        layouts.ep,
        layouts.lone_experts.astype(np.int64),
    ]


def _setting_at(plain: Setting, key: Sequence[int], chunk_tokens: Mapping[int, int] | None) -> tuple[Setting, int]:
    """Return `plain` in layouts with these `_setting_keys`, and the samples of a micro-batch."""
    tp, cp, context, recompute, microbatch, streamed, apart, ep, lone = key
    one = replace(plain, tp=tp, cp=cp, context=CONTEXTS[context], recompute=RECOMPUTES[recompute], streamed=streamed)
    if streamed > 1:
        one = replace(one, compile=False)
    if apart:
        one = one.apart()
    if ep > 1:
        casts = bool(lone) and PRECISIONS[one.precision].copies_parameters
        one = replace(one, ep=ep, casts_experts=casts)
    return one if chunk_tokens is None else replace(one, chunk_tokens=chunk_tokens[tp]), microbatch


def _place_groups(machine: Machine, layouts: LayoutTable) -> tuple[dict[str, Placement], list[Ints]]:
    """Return where the groups of ranks lie, as fields of `Steps`, and columns that tell data-parallel groups apart.

    Layouts with equal numbers in such a column have groups of that kind that lie alike. Raises ConfigError as `steps_of`.
    """
    experts = layouts.ep > 1
    sizes_and_strides = {
        "shards": (layouts.shards, layouts.tp),
        "replicas": (layouts.replicas, layouts.tp * layouts.shards),
        "expert_shards": (np.where(experts, layouts.expert_shards, 1), layouts.ep),
        "expert_replicas": (np.where(experts, layouts.expert_replicas, 1), layouts.ep * layouts.expert_shards),
        "pipeline": (layouts.pp, layouts.world_size // layouts.pp),
    }
    placed: dict[str, Placement] = {}
    alike: list[Ints] = []
    for name, (size, stride) in sizes_and_strides.items():
        # A group of one rank lies the same whatever its stride.
        used_stride = np.where(size > 1, stride, 1)
        first, which = distinct_rows([size, used_stride])
        placed[name] = at(place_groups(machine, size[first], used_stride[first]), which)
        if name != "pipeline":
            alike.append(which)
    return placed, alike


@dataclass(frozen=True)
class _PartSizes:
    """Elements of the parts of a model on one rank before data parallelism shards them. Arrays of [settings]."""

    embedding: Floats
    block: Floats
    head: Floats
    leading: Floats
    """Elements of a leading block; those of a block where there is none."""
    shared: Floats
    """Elements of the table that embedding and head share; 0 where each has its own."""
    experts: Floats
    """Elements of a block's experts, which expert parallelism shards."""
    tensors: Tensors

    def take(self, which: Ints) -> _PartSizes:
        """Return those at these positions."""
        arrays = {name: column[which] for name, column in vars(self).items() if name != "tensors"}
        return _PartSizes(**arrays, tensors=at(self.tensors, which))


def _part_sizes(
    settings: Sequence[tuple[Setting, int]], framework: FrameworkProfile
) -> tuple[_PartSizes, list[PartCosts]]:
    """Return the sizes of the parts in each setting, and its blocks."""
    rows: list[tuple[int, ...]] = []
    blocks: list[PartCosts] = []
    for one, microbatch in settings:
        # Parameters are the same with any recompute: ask a trace that is made anyway.
        traced = replace(one, recompute="none") if one.streamed > 1 else framework.traced_setting(one)
        embedding, block, head, *leading = (part_costs(name, traced, microbatch) for name in _part_names(one))
        blocks.append(block)
        shared = head.largest_parameter.count if part_tracer(one).tied() else 0
        counts = [part.parameter_count for part in (embedding, block, head, leading[0] if leading else block)]
        experts = sum(parameter.count for parameter in block.parameters if parameter.expert)
        # Streamed matrices travel in chunks of their own.
        tensors = [sum(not parameter.streamed for parameter in part.parameters) for part in (block, embedding, head)]
        rows.append((*counts, shared, experts, *tensors))
    first, middle, last, before, tied, of_experts, *counted = np.asarray(rows, np.float64).T
    return _PartSizes(first, middle, last, before, tied, of_experts, Tensors(*counted)), blocks


def rank_layers(setting: Setting, layouts: LayoutTable, framework: FrameworkProfile) -> tuple[RankLayers, Floats]:
    """Return the blocks of the ranks of each layout, and 1 where its first rank holds the head too, else 0."""
    schedule = np.where(layouts.pp > 1, layouts.schedule, 0)
    keys = [layouts.pp, layouts.stages_per_rank, schedule]
    rows, which = distinct_rows(keys)
    extra = framework.end_costs(setting)
    blocks = setting.model.n_layers
    distinct = zip(*(key[rows].tolist() for key in keys), strict=True)
    table = np.asarray(
        [_count_rank_layers(blocks, extra, pp, each, SCHEDULES[name] == "zbv") for pp, each, name in distinct]
    )
    first, last, other, joined = table[which].T
    return RankLayers(first, last, other, setting.model.n_layers / layouts.pp), joined


@cache
def _count_rank_layers(
    n_layers: int, extra: tuple[float, float], pp: int, per_rank: int, there_and_back: bool
) -> tuple[float, float, float, float]:
    """Return the blocks of the first, the last and the fullest other rank, and 1 where the first holds the head too.

    there_and_back: stages are placed in a V: down the ranks, then back to the first.
    """
    stages = stage_layer_counts(n_layers, pp * per_rank, *extra)
    ranks = np.zeros(pp)
    for stage, blocks in enumerate(stages):
        turn, rank = divmod(stage, pp)
        ranks[pp - 1 - rank if there_and_back and turn else rank] += blocks
    if pp == 1 or (there_and_back and per_rank == 2):
        return ranks[0], 0.0, ranks[1:].max(initial=0.0), 1.0
    return ranks[0], ranks[-1], ranks[1:-1].max(initial=0.0), 0.0
