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
from phalanx.layout.spec import CONTEXTS, RECOMPUTES, SCHEDULES, Bools, LayoutTable, Recompute, ResolvedLayout
from phalanx.layout.stage_assignment import count_leading, stage_layer_counts, stages_of_rank
from phalanx.nn.precision import PRECISIONS
from phalanx.planner.distinct_rows import distinct_rows
from phalanx.planner.time.framework import FrameworkProfile
from phalanx.planner.time.operation_time import Floats, Ints
from phalanx.planner.time.part_time import Parts, at, parts_of
from phalanx.planner.trace.part_costs import PartCosts, part_costs
from phalanx.planner.trace.traced_model import PartName, PartParameter, Setting, part_tracer


@dataclass(frozen=True)
class RankParts:
    """Parts of the model on ranks of its pipeline.

    Arrays of [layouts, ranks]: ranks that have no more of any part than another one are left out, and layouts with fewer
    ranks than others have ranks without parts.
    """

    blocks: Floats
    """Blocks, leading ones apart."""
    leading: Floats
    """Leading blocks of the model."""
    embedding: Floats
    """1 on the rank of the embedding, else 0."""
    head: Floats

    @property
    def most_layers(self) -> Floats:
        """Blocks of both kinds on the fullest rank, [layouts]."""
        return np.asarray((self.blocks + self.leading).max(axis=1))


@dataclass(frozen=True)
class Tensors:
    """Parameters as tensors, which are gathered and reduced one by one. Arrays of [layouts]."""

    block: Floats
    leading: Floats
    """Those of a leading block; of a block where there is none."""
    embedding: Floats
    head: Floats


@dataclass(frozen=True)
class TrainedParameters:
    """What is trained on one rank before data parallelism shards it: this alone has gradients and is updated. In elements,
    arrays of [layouts]."""

    block: Floats
    leading: Floats
    """Those of a leading block; of a block where there is none."""
    embedding: Floats
    head: Floats
    experts: Floats
    """Those of a block's experts."""


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
    def of(cls, blocks: Sequence[PartCosts], recompute: Sequence[Recompute], random_drops: bool) -> Streams:
        """Return what of each of `blocks` is streamed. random_drops: whether dropout follows the last chain."""
        rows = []
        for block, choice in zip(blocks, recompute, strict=True):
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
                    first / max(sum(sent), 1) * (choice == "full"),
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
    n_layers: Ints
    """Blocks of the model."""
    leading_layers: Ints
    """Leading blocks of the model: dense ones of a mixture of experts."""
    end_costs: Floats
    """Costs of the embedding and of the head, in blocks, by which stages are split, [layouts, 2]."""
    ranks: RankParts
    unit: Ints
    """Blocks whose parameters are gathered, and gradients reduced, together."""
    block_parameters: Floats
    """Elements on one rank before data parallelism shards them."""
    embedding_parameters: Floats
    leading_parameters: Floats
    """Elements of a leading block; those of a block where there is none."""
    quantised_parameters: Floats
    """Those of a block's elements that are weights multiplied in 8 bits."""
    leading_quantised: Floats
    """Those of a leading block's elements that are."""
    expert_parameters: Floats
    """Elements of a block's experts, which expert parallelism shards."""
    head_parameters: Floats
    trained: TrainedParameters
    tensors: Tensors
    trained_tensors: Tensors
    """Those whose gradients are reduced."""
    streams: Streams
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
    trained_passes: Ints
    """Passes of a micro-batch forward and backward, where no pipeline is."""
    forecasts: Ints
    """Its passes that go forward alone."""

    @property
    def passes(self) -> Ints:
        """Passes of a step forward and backward, [layouts]."""
        return np.asarray(self.layouts.accumulation * self.trained_passes)

    @property
    def forecast_passes(self) -> Ints:
        """Passes of a step that go forward alone, [layouts]."""
        return np.asarray(self.layouts.accumulation * self.forecasts)

    def __len__(self) -> int:
        return len(self.layouts)

    def sum_parts(self, column: Floats) -> Floats:
        """Return the sum of `column`, a quantity of each part, over the parts of every rank, [layouts, ranks]."""
        return self._sum_over_ranks(column[self.block], column[self.leading], column[self.embedding], column[self.head])

    def sum_trained(self) -> Floats:
        """Return the elements trained on every rank before data parallelism shards them, [layouts, ranks]."""
        own = self.trained
        return self._sum_over_ranks(own.block, own.leading, own.embedding, own.head)

    def sum_trained_tensors(self) -> Floats:
        """Return the parameters trained on every rank, as tensors, [layouts, ranks]."""
        own = self.trained_tensors
        return self._sum_over_ranks(own.block, own.leading, own.embedding, own.head)

    def sum_quantised(self) -> Floats:
        """Return the elements of weights that are multiplied in 8 bits likewise, [layouts, ranks]."""
        nothing = np.zeros_like(self.quantised_parameters)
        return self._sum_over_ranks(self.quantised_parameters, self.leading_quantised, nothing, nothing)

    def _sum_over_ranks(self, block: Floats, leading: Floats, embedding: Floats, head: Floats) -> Floats:
        """Return the sum over the parts of every rank, [layouts, ranks]. block: of one block, [layouts], as the others."""
        ranks = self.ranks
        counts = ((ranks.blocks, block), (ranks.leading, leading), (ranks.embedding, embedding), (ranks.head, head))
        return np.asarray(sum(count * each[:, None] for count, each in counts))

    @classmethod
    def joined_up(cls, several: Sequence[Steps]) -> Steps:
        """Return the steps of several lists, one after the other."""
        starts = np.cumsum([0, *(steps.parts.count for steps in several)])
        # Numbers of parts begin anew in each list.
        moved = [
            replace(
                steps,
                embedding=steps.embedding + start,
                block=steps.block + start,
                leading=steps.leading + start,
                head=steps.head + start,
            )
            for steps, start in zip(several, starts, strict=False)
        ]
        values: dict[str, object] = {"parts": Parts.joined([steps.parts for steps in several])}
        for field in fields(cls):
            columns = [getattr(steps, field.name) for steps in moved]
            if isinstance(columns[0], RankParts):
                values[field.name] = _join_rank_parts(columns)
            elif isinstance(columns[0], LayoutTable | Streams | Tensors | TrainedParameters):
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
    settings, which = _distinct_settings(plain, layouts, chunk_tokens)
    kinds, tracer = _part_names(setting), part_tracer(setting)
    traced = [_setting_parts(one, microbatch, framework) for one, microbatch in settings]
    one_stage = layouts.pp == 1
    sizes, trained = (
        _part_sizes(traced, bool(tracer.tied()), trained=only).take(which).with_ends_together(one_stage)
        for only in (False, True)
    )
    blocks, recompute = [of_setting[1] for of_setting in traced], [one.recompute for one, _ in settings]
    ranks = list_rank_parts(plain, layouts, framework)
    unit = np.minimum(gather_blocks, np.ceil(ranks.most_layers / layouts.stages_per_rank).astype(np.int64))
    width = setting.model.d_model * PRECISIONS[setting.precision].compute_dtype.itemsize * setting.model.rows_per_sample
    return Steps(
        layouts=layouts,
        parts=parts_of([(name, one, size) for one, size in settings for name in kinds], framework),
        embedding=len(kinds) * which,
        block=len(kinds) * which + 1,
        leading=len(kinds) * which + (3 if plain.model.leading_layers else 1),
        head=len(kinds) * which + 2,
        n_layers=np.full(len(layouts), plain.model.n_layers),
        leading_layers=np.full(len(layouts), plain.model.leading_layers),
        end_costs=np.tile(framework.end_costs(plain), (len(layouts), 1)),
        ranks=ranks,
        unit=unit,
        block_parameters=sizes.block,
        embedding_parameters=sizes.embedding,
        leading_parameters=sizes.leading,
        quantised_parameters=sizes.quantised,
        leading_quantised=sizes.leading_quantised,
        expert_parameters=sizes.experts,
        head_parameters=sizes.head,
        trained=TrainedParameters(trained.block, trained.leading, trained.embedding, trained.head, trained.experts),
        tensors=sizes.tensors,
        trained_tensors=trained.tensors,
        streams=Streams.of(blocks, recompute, tracer.random_drops()).take(which),
        hidden_bytes=layouts.microbatch * (setting.length // layouts.cp) * width / layouts.tp,
        trained_passes=np.full(len(layouts), setting.passes.trained),
        forecasts=np.full(len(layouts), setting.passes.forecasts),
        **_place_groups(machine, layouts),
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
        layouts.expert_tp,
        layouts.ep_chunks,
        layouts.ep_node,
        layouts.lone_experts.astype(np.int64),
    ]


def _distinct_settings(
    plain: Setting, layouts: LayoutTable, chunk_tokens: Mapping[int, int] | None
) -> tuple[list[tuple[Setting, int]], Ints]:
    """Return the settings and micro-batches in which layouts compute, each once, and which of these each layout has.

    Many layouts compute the parts of the model alike: they are traced once.
    """
    keys = _setting_keys(layouts)
    first, which = distinct_rows(keys)
    distinct = np.stack([key[first] for key in keys], axis=1)
    return [_setting_at(plain, key, chunk_tokens) for key in distinct.tolist()], which


def _setting_at(plain: Setting, key: Sequence[int], chunk_tokens: Mapping[int, int] | None) -> tuple[Setting, int]:
    """Return `plain` in layouts with these `_setting_keys`, and the samples of a micro-batch."""
    tp, cp, context, recompute, microbatch, streamed, apart, ep, slices, chunks, node, lone = key
    one = replace(plain, tp=tp, cp=cp, context=CONTEXTS[context], recompute=RECOMPUTES[recompute], streamed=streamed)
    # Chunks are computed one after the other from Python: such blocks are not compiled.
    if streamed > 1:
        one = replace(one, compile=False)
    if apart:
        one = one.apart()
    if ep > 1:
        casts = bool(lone) and PRECISIONS[one.precision].copies_parameters
        one = replace(one, ep=ep, expert_tp=slices, ep_chunks=chunks, ep_node=node, casts_experts=casts)
    return one if chunk_tokens is None else replace(one, chunk_tokens=chunk_tokens[tp]), microbatch


def _place_groups(machine: Machine, layouts: LayoutTable) -> dict[str, Placement]:
    """Return where the groups of ranks lie, as fields of `Steps`. Raises ConfigError as `steps_of`."""
    experts = layouts.ep > 1
    sizes_and_strides = {
        "shards": (layouts.shards, layouts.tp),
        "replicas": (layouts.replicas, layouts.tp * layouts.shards),
        "expert_shards": (np.where(experts, layouts.expert_shards, 1), layouts.experts_over),
        "expert_replicas": (
            np.where(experts, layouts.expert_replicas, 1),
            layouts.experts_over * layouts.expert_shards,
        ),
        "pipeline": (layouts.pp, layouts.world_size // layouts.pp),
    }
    placed: dict[str, Placement] = {}
    for name, (size, stride) in sizes_and_strides.items():
        # A group of one rank lies the same whatever its stride.
        used_stride = np.where(size > 1, stride, 1)
        first, which = distinct_rows([size, used_stride])
        placed[name] = at(place_groups(machine, size[first], used_stride[first]), which)
    return placed


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
    quantised: Floats
    """Elements of a block's weights that are multiplied in 8 bits."""
    leading_quantised: Floats
    """The same of a leading block; of a block where there is none."""
    tensors: Tensors

    def take(self, which: Ints) -> _PartSizes:
        """Return those at these positions."""
        arrays = {name: column[which] for name, column in vars(self).items() if name != "tensors"}
        return _PartSizes(**arrays, tensors=at(self.tensors, which))

    def with_ends_together(self, together: Bools) -> _PartSizes:
        """Return the same with the table that embedding and head share counted once, where one rank holds both."""
        return replace(self, head=self.head - np.where(together, self.shared, 0.0))


def _setting_parts(setting: Setting, microbatch: int, framework: FrameworkProfile) -> list[PartCosts]:
    """Return the parts of a model in a setting, as `_part_names` lists them; their parameters are asked for."""
    # Parameters are the same with any recompute: ask a trace that is made anyway.
    traced = replace(setting, recompute="none") if setting.streamed > 1 else framework.traced_setting(setting)
    return [part_costs(name, traced, microbatch) for name in _part_names(setting)]


def _part_sizes(settings: Sequence[Sequence[PartCosts]], tied: bool, *, trained: bool) -> _PartSizes:
    """Return the sizes of the parts in each setting. tied: whether the head's table is the embedding's. trained: whether
    only what is trained counts."""
    rows: list[tuple[int, ...]] = []
    for embedding, block, head, *leading in settings:

        def counted(part: PartCosts) -> list[PartParameter]:
            # Gradients of streamed matrices go around with their chunks, whatever is trained.
            return [one for one in part.parameters if one.streamed or not (trained and one.frozen)]

        before = leading[0] if leading else block
        counts = [sum(one.count for one in counted(part)) for part in (embedding, block, head, before)]
        table = head.largest_parameter
        shared = table.count if tied and table in counted(head) else 0
        experts = sum(one.count for one in counted(block) if one.expert)
        quantised = [sum(one.count for one in counted(part) if one.quantised) for part in (block, before)]
        # Streamed matrices travel in chunks of their own.
        tensors = [sum(not one.streamed for one in counted(part)) for part in (block, before, embedding, head)]
        rows.append((*counts, shared, experts, *quantised, *tensors))
    start, middle, end, front, both, of_experts, narrow, first_narrow, *each = np.asarray(rows, np.float64).T
    return _PartSizes(start, middle, end, front, both, of_experts, narrow, first_narrow, Tensors(*each))


def list_rank_parts(setting: Setting, layouts: LayoutTable, framework: FrameworkProfile) -> RankParts:
    """Return the parts of the model on the ranks of each layout's pipeline."""
    schedule = np.where(layouts.pp > 1, layouts.schedule, 0)
    keys = [layouts.pp, layouts.stages_per_rank, schedule]
    rows, which = distinct_rows(keys)
    model, ends = setting.model, framework.end_costs(setting)
    distinct = zip(*(key[rows].tolist() for key in keys), strict=True)
    found = [
        _largest_ranks(model.n_layers, model.leading_layers, ends, pp, each, SCHEDULES[name])
        for pp, each, name in distinct
    ]
    table = np.zeros((len(found), max(map(len, found), default=0), len(fields(RankParts))))
    for row, ranks in zip(table, found, strict=True):
        row[: len(ranks)] = ranks
    return RankParts(*np.moveaxis(table[which], 2, 0))


@cache
def _largest_ranks(
    n_layers: int, leading_layers: int, ends: tuple[float, float], pp: int, stages_per_rank: int, schedule: str
) -> list[tuple[float, float, float, float]]:
    """Return blocks, leading blocks, embedding and head of the ranks that no other one equals or surpasses in all of them.

    The first rank comes first, then the last one, then others in their order.
    """
    layout = ResolvedLayout(global_batch=1, pp=pp, schedule=schedule, stages_per_rank=stages_per_rank)
    layers = stage_layer_counts(n_layers, layout.n_stages, *ends)
    leading = count_leading(layers, leading_layers)
    held = []
    for rank in dict.fromkeys((0, pp - 1, *range(pp))):
        stages = stages_of_rank(layout, rank)
        first = sum(leading[stage] for stage in stages)
        blocks = sum(layers[stage] for stage in stages) - first
        held.append((float(blocks), float(first), float(0 in stages), float(layout.n_stages - 1 in stages)))
    distinct = list(dict.fromkeys(held))
    return [
        one
        for one in distinct
        if not any(all(a <= b for a, b in zip(one, other, strict=True)) for other in distinct if other != one)
    ]


def _join_rank_parts(several: Sequence[RankParts]) -> RankParts:
    """Return the ranks of several lists of layouts, one after the other."""
    # Layouts with fewer ranks than others get ranks without parts.
    most = max(parts.blocks.shape[1] for parts in several)

    def join(name: str) -> Floats:
        columns = [getattr(parts, name) for parts in several]
        return np.concatenate([np.pad(column, ((0, 0), (0, most - column.shape[1]))) for column in columns])

    return RankParts(**{field.name: join(field.name) for field in fields(RankParts)})
