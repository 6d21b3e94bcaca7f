"""What the optimizer steps of many layouts consist of: parts, how ranks share them out, and where their groups lie.

Everything that does not depend on how fast a device or its links are: `step_time` adds that, again and again where
constants are fitted. Arrays have one entry for each layout; layouts of several models may stand together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np

from phalanx.cluster.machine import Machine
from phalanx.cluster.topology import Placement, join, place
from phalanx.config.model import LanguageModel
from phalanx.cost.candidates import CONTEXTS, RECOMPUTES, SCHEDULES, Candidates
from phalanx.cost.language import PartName, Setting
from phalanx.cost.operation_time import Floats, Ints
from phalanx.cost.part_time import Parts, parts_of
from phalanx.cost.parts import part_costs
from phalanx.cost.software import Software
from phalanx.cost.stage_layers import split
from phalanx.models.language.declare import relative_block_costs


@dataclass(frozen=True)
class RankLayers:
    """Blocks of the ranks of a pipeline. Arrays of [layouts]."""

    first: Floats
    """Of the rank that holds the embedding."""
    last: Floats
    """Of the rank that holds the head; 0 where that is the first."""
    other: Floats
    """Of the rank with most blocks among the others; 0 where there is none."""
    mean: Floats
    """Mean over all ranks."""


@dataclass(frozen=True)
class Steps:
    """Steps of many layouts."""

    layouts: Candidates
    parts: Parts
    embedding: Ints
    """Positions in `parts`, as those of block and head."""
    block: Ints
    head: Ints
    layers: RankLayers
    joined: Floats
    """1 where the first pipeline rank holds the head too, else 0."""
    block_parameters: Floats
    """Elements on one rank before data parallelism shares them out."""
    embedding_parameters: Floats
    head_parameters: Floats
    hidden_bytes: Floats
    """Activations of one micro-batch between two stages, on one rank."""
    shards: Placement
    """The ranks that share out one copy of the parameters."""
    replicas: Placement
    """The ranks that hold the same part of them."""
    pipeline: Placement

    def __len__(self) -> int:
        return len(self.layouts)

    @classmethod
    def joined_up(cls, several: Sequence[Steps]) -> Steps:
        """The steps of several lists, one after the other."""
        starts = np.cumsum([0, *(steps.parts.count for steps in several)])
        moved = [
            replace(steps, embedding=steps.embedding + start, block=steps.block + start, head=steps.head + start)
            for steps, start in zip(several, starts, strict=False)
        ]
        values: dict[str, object] = {"parts": Parts.joined([steps.parts for steps in several])}
        for field in fields(cls):
            columns = [getattr(steps, field.name) for steps in moved]
            if isinstance(columns[0], Candidates | RankLayers):
                kind = type(columns[0])
                values[field.name] = kind(
                    **{
                        inner.name: np.concatenate([getattr(column, inner.name) for column in columns])
                        for inner in fields(kind)
                    }
                )
            elif isinstance(columns[0], Placement):
                values[field.name] = join(columns)
            elif field.name != "parts":
                values[field.name] = np.concatenate(columns)
        return cls(**values)  # type: ignore[arg-type]


def steps_of(
    setting: Setting,
    layouts: Candidates,
    machine: Machine,
    software: Software,
    chunk_tokens: Mapping[int, int] | None = None,
) -> Steps:
    """The steps of `layouts` of one model.

    setting: the model and how it is computed; degrees, context exchange and recompute are those of each layout.
    chunk_tokens: tokens whose logits are held at once, by tensor-parallel degree; else those of `setting`. Raises
    ConfigError where a group needs links or a network that the description of the machine does not have.
    """
    plain = replace(setting, compile=setting.compile and software.compiled)
    if not software.chunked_loss:
        plain = replace(plain, chunk_tokens=_WHOLE)
    keys = np.stack(
        [layouts.tp, layouts.cp, layouts.context * (layouts.cp > 1), layouts.recompute, layouts.microbatch], axis=1
    )
    distinct, which = _distinct(keys)
    wanted: list[tuple[PartName, Setting, int]] = []
    sizes: list[tuple[int, int, int, int]] = []
    for tp, cp, context, recompute, microbatch in distinct.tolist():
        one = replace(plain, tp=tp, cp=cp, context=CONTEXTS[context], recompute=RECOMPUTES[recompute])
        if chunk_tokens is not None:
            one = replace(one, chunk_tokens=chunk_tokens[tp])
        wanted += [("embedding", one, microbatch), ("block", one, microbatch), ("head", one, microbatch)]
        embedding, block, head = (
            part_costs(name, replace(one, recompute="none"), microbatch) for name, *_ in wanted[-3:]
        )
        shared = head.largest_parameter.count if one.model.tied_head else 0
        sizes.append((embedding.parameter_count, block.parameter_count, head.parameter_count, shared))
    counts = np.asarray(sizes, np.float64)[which]
    alone = layouts.pp == 1
    layers, joined = rank_layers(plain, layouts, software)
    samples, positions = layouts.microbatch, setting.length // layouts.cp
    split = layouts.tp if software.sequence_parallel else 1
    width = setting.model.d_model * (4 if setting.precision == "fp32" else 2)
    shards = layouts.shards
    world = layouts.world_size
    return Steps(
        layouts=layouts,
        parts=parts_of(wanted, software),
        embedding=3 * which,
        block=3 * which + 1,
        head=3 * which + 2,
        layers=layers,
        joined=joined,
        block_parameters=counts[:, 1],
        embedding_parameters=counts[:, 0],
        head_parameters=counts[:, 2] - np.where(alone, counts[:, 3], 0.0),
        hidden_bytes=samples * positions * width / split,
        shards=_placed(machine, shards, layouts.tp),
        replicas=_placed(machine, layouts.data_ranks * layouts.cp // shards, layouts.tp * shards),
        pipeline=_placed(machine, layouts.pp, world // layouts.pp),
    )


_WHOLE = 2**40
"""Tokens of a chunk that holds all of them."""


def rank_layers(setting: Setting, layouts: Candidates, software: Software) -> tuple[RankLayers, Floats]:
    """(blocks of the ranks, 1 where the first rank holds the head too) of each layout."""
    schedule = np.where(layouts.pp > 1, layouts.schedule, 0)
    distinct, which = _distinct(np.stack([layouts.pp, layouts.stages_per_rank, schedule], axis=1))
    extra = (0.0, 0.0) if software.even_stages else relative_block_costs(setting.model, setting.length)
    blocks = setting.model.n_layers
    table = np.asarray(
        [_layers_of(blocks, extra, pp, each, SCHEDULES[name] == "zbv") for pp, each, name in distinct.tolist()]
    )
    first, last, other, joined = table[which].T
    return RankLayers(first, last, other, setting.model.n_layers / layouts.pp), joined


@cache
def _layers_of(
    n_layers: int, extra: tuple[float, float], pp: int, per_rank: int, there_and_back: bool
) -> tuple[float, float, float, float]:
    stages = split(n_layers, pp * per_rank, *extra)
    ranks = np.zeros(pp)
    for stage, blocks in enumerate(stages):
        turn, rank = divmod(stage, pp)
        ranks[pp - 1 - rank if there_and_back and turn else rank] += blocks
    if pp == 1 or (there_and_back and per_rank == 2):
        return ranks[0], 0.0, ranks[1:].max(initial=0.0), 1.0
    return ranks[0], ranks[-1], ranks[1:-1].max(initial=0.0), 0.0


def stage_layers(model: LanguageModel, length: int, n_stages: int, *, even: bool) -> tuple[int, ...]:
    """Blocks of each pipeline stage. even: as many in each, whatever the embedding and the head cost."""
    return split(model.n_layers, n_stages, *(0.0, 0.0) if even else relative_block_costs(model, length))


def _distinct(keys: Ints) -> tuple[Ints, Ints]:
    """(distinct rows, which of them each row is); quick for a million rows of small numbers."""
    code = np.zeros(len(keys), np.int64)
    for column in keys.T:
        code = code * (int(column.max(initial=0)) + 1) + column
    highest = int(code.max(initial=0))
    if highest > _TABLE:
        _, first, which = np.unique(code, return_index=True, return_inverse=True)
        return keys[first], which
    place = np.full(highest + 1, -1, np.int64)
    place[code] = np.arange(len(code))
    used = np.flatnonzero(place >= 0)
    found = keys[place[used]]
    place[used] = np.arange(len(used))
    return found, place[code]


_TABLE = 10_000_000
"""Numbers up to which a table over all of them is quicker than sorting."""


def _placed(machine: Machine, size: Ints, stride: Ints) -> Placement:
    """`place`, computed once for each distinct pair."""
    stride = np.where(size > 1, stride, 1)
    distinct, which = _distinct(np.stack([size, stride], axis=1))
    found = place(machine, distinct[:, 0], distinct[:, 1])
    return Placement(**{field.name: getattr(found, field.name)[which] for field in fields(found)})
