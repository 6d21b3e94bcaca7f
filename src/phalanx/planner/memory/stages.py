"""What the pipeline ranks of a layout hold: layers, embedding, head, and how many micro-batches of each are in flight.

Closed forms of the tables in `planner.schedule.table`, stage by stage. Of all ranks only those are kept that may be
the worst: where another rank holds at least as much of everything, a rank cannot be.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

import numpy as np
import numpy.typing as npt

from phalanx.layout.pipeline.stage_assignment import from_other_ranks, stages_of_rank
from phalanx.layout.spec import SCHEDULES, LayoutTable, ResolvedLayout
from phalanx.planner.layouts.stage_layers import split
from phalanx.planner.memory.parts import distinct

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Holdings:
    """What pipeline ranks hold; arrays, one entry for each rank or candidate."""

    rank: FloatArray
    layers: FloatArray
    stage_layers: FloatArray
    """Of its largest stage."""
    embedding: FloatArray
    """1 for a rank with the embedding."""
    head: FloatArray
    blocks_kept: FloatArray
    """Blocks whose activations are held at the same time at most, each micro-batch counted."""
    embeddings_kept: FloatArray
    heads_kept: FloatArray
    stages_kept: FloatArray
    """Stages and micro-batches in flight."""
    received: FloatArray
    """Those among them that began with received activations."""
    handed_on: FloatArray
    """Those among them whose result went to another rank."""
    gets: FloatArray
    """Stages that receive activations from another rank."""
    gives: FloatArray
    """Stages that receive gradients from another rank."""
    waits_at_end: FloatArray
    """1 where the step waits at its end for what it sends to other stages: with several stages a rank."""
    waiting: FloatArray
    """Blocks whose gradients of weights are still to come after those of their input, each micro-batch counted."""
    split: FloatArray
    """1 where gradients of inputs and of weights come apart: a backward pass then frees nothing on its way."""
    again: FloatArray
    """1 where as much is held again after every stage of the rank has computed gradients."""

    def take(self, which: npt.ArrayLike) -> Holdings:
        """Those at these positions."""
        return Holdings(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


def holdings(candidates: LayoutTable, n_layers: int, costs: tuple[float, float]) -> list[Holdings]:
    """For each candidate the ranks that may hold most: the n-th of them in the n-th of the lists, the last one repeated.

    costs: what the embedding and the head cost beside one block, see `layout.pipeline.stage_assignment.split_layers`.
    """
    counted = _as_many_as_matter(candidates)
    first, inverse = distinct([candidates.pp, candidates.schedule, candidates.stages_per_rank, counted])
    columns = [candidates.schedule, candidates.pp, candidates.stages_per_rank, counted]
    keys = np.stack(columns, axis=1)[first].tolist()
    found = [_worst(SCHEDULES[name], *sizes, n_layers, costs) for name, *sizes in keys]
    most = max(map(len, found))
    # By rank, field and candidate.
    table = np.stack([ranks[np.minimum(np.arange(most), len(ranks) - 1)] for ranks in found], axis=2)
    return [Holdings(*place[:, inverse]) for place in table]


def _as_many_as_matter(candidates: LayoutTable) -> npt.NDArray[np.int64]:
    """Micro-batches, cut down to a number beyond which nothing more is in flight."""
    pp, count = candidates.pp, candidates.accumulation
    gpipe = candidates.schedule == SCHEDULES.index("gpipe")
    even = count % pp == 0
    enough = 4 * pp
    return np.where(
        pp == 1,
        np.minimum(count, 2),
        np.where(gpipe | ~even & (candidates.stages_per_rank > 1), count, np.minimum(count, enough)),
    )


@cache
def rank_holdings(
    schedule: str, pp: int, stages_per_rank: int, microbatches: int, n_layers: int, costs: tuple[float, float]
) -> Holdings:
    """What every pipeline rank holds, arrays of [ranks]."""
    layout = ResolvedLayout(global_batch=1, pp=pp, schedule=schedule, stages_per_rank=stages_per_rank)
    layers = np.asarray(split(n_layers, layout.n_stages, *costs), np.float64)
    stage = np.asarray([stages_of_rank(layout, rank) for rank in range(pp)])
    flight, waiting = stage_flight(schedule, pp, stages_per_rank, microbatches)
    first, last = stage == 0, stage == layout.n_stages - 1
    gets, gives = (np.asarray([from_other_ranks(layout, rank, way) for rank in range(pp)]) for way in (-1, 1))
    held = layers[stage]
    return Holdings(
        rank=np.arange(pp, dtype=np.float64),
        layers=held.sum(1),
        stage_layers=held.max(1),
        embedding=first.any(1).astype(np.float64),
        head=last.any(1).astype(np.float64),
        blocks_kept=(flight * held).sum(1),
        embeddings_kept=(flight * first).sum(1),
        heads_kept=(flight * last).sum(1),
        stages_kept=flight.sum(1),
        received=(flight * gets).sum(1),
        handed_on=(flight * gives).sum(1),
        gets=gets.sum(1).astype(np.float64),
        gives=gives.sum(1).astype(np.float64),
        waits_at_end=np.full(pp, float(stages_per_rank > 1)),
        waiting=waiting * held.mean(1),
        split=np.full(pp, float(layout.splits_backward)),
        again=(flight.sum(1) < microbatches * stages_per_rank).astype(np.float64),
    )


def stage_flight(schedule: str, pp: int, stages_per_rank: int, microbatches: int) -> tuple[FloatArray, FloatArray]:
    """What is in flight when a rank holds most: micro-batches of each of its stages, [ranks, stages_per_rank], and how many
    of all of them wait for the gradients of weights alone, [ranks]."""
    rank = np.arange(pp, dtype=np.float64)
    turn = np.arange(stages_per_rank, dtype=np.float64)
    count = float(microbatches)
    waiting = np.zeros(pp)
    if pp == 1:
        return np.ones((1, 1)), waiting
    if schedule == "gpipe":
        return np.full((pp, 1), count), waiting
    if schedule == "1f1b":
        return np.minimum(count, pp - rank)[:, None], waiting
    if schedule == "zbv":
        flight = np.minimum(count, np.stack([2 * pp - 1 - rank, rank + 1], 1))
        # The later ranks of a full pipeline hold more when fewer are in flight and most of those wait.
        late = (2 * pp - 1 <= count) & (rank >= pp / 2)
        return np.where(late[:, None], flight * ((pp + rank) / (2 * pp))[:, None], flight), np.where(late, 2 * rank, 0)
    together = float(microbatches // max(1, microbatches // pp))
    if schedule == "interleaved_zero_bubble":
        flight = np.minimum(count, np.where(turn == stages_per_rank - 1, pp, together))
        return np.broadcast_to(flight, (pp, stages_per_rank)), np.minimum(count, rank)
    # Forward passes ahead of the first backward pass, dealt out to the stages in rounds.
    ahead = np.minimum((stages_per_rank - 1) * together + 2 * (pp - 1 - rank) + 1, count * stages_per_rank)[:, None]
    cycles, rest = np.divmod(ahead, stages_per_rank * together)
    return np.asarray(cycles * together + np.clip(rest - turn * together, 0, together)), waiting


def holdings_at(
    candidates: LayoutTable, ranks: npt.NDArray[np.int64], n_layers: int, costs: tuple[float, float]
) -> Holdings:
    """What one rank of each candidate holds; ranks: which. See `holdings`."""
    columns = [candidates.schedule, candidates.pp, candidates.stages_per_rank, _as_many_as_matter(candidates), ranks]
    first, inverse = distinct(columns)
    rows = []
    for name, pp, stages_per_rank, count, rank in np.stack(columns, axis=1)[first].tolist():
        every = rank_holdings(SCHEDULES[name], pp, stages_per_rank, count, n_layers, costs)
        rows.append([getattr(every, field.name)[rank] for field in fields(Holdings)])
    return Holdings(*np.asarray(rows)[inverse].T)


@cache
def ranks_that_differ(pp: int, stages_per_rank: int, n_layers: int, costs: tuple[float, float]) -> list[int]:
    """Of an interleaved schedule the ranks whose stages have other layers, or another end of the model, than those of all
    ranks before: a rank that is like one before it has fewer micro-batches in flight."""
    stage = np.arange(pp * stages_per_rank).reshape(stages_per_rank, pp)
    layers = np.asarray(split(n_layers, pp * stages_per_rank, *costs))[stage]
    ends = np.stack([stage == 0, stage == stage.max()]).any(axis=1)
    _, first = np.unique(np.concatenate([layers, ends]), axis=1, return_index=True)
    return [int(rank) for rank in np.sort(first)]


@cache
def _worst(
    schedule: str, pp: int, stages_per_rank: int, microbatches: int, n_layers: int, costs: tuple[float, float]
) -> FloatArray:
    """The fields of `rank_holdings` for those ranks that may be the worst, [ranks, fields]."""
    ranks = rank_holdings(schedule, pp, stages_per_rank, microbatches, n_layers, costs)
    every = np.stack([getattr(ranks, field.name) for field in fields(Holdings)], 1)
    assert fields(Holdings)[0].name == "rank"
    columns = every[:, 1:]
    # What holds at least as much of everything comes before, in this order.
    order = np.argsort(-columns.sum(axis=1), kind="stable")
    columns = columns[order]
    as_much = (columns[:, None] >= columns[None]).all(axis=2)
    return np.asarray(every[np.sort(order[~np.triu(as_much, 1).any(axis=0)])])
