"""How much memory a layout takes: the worst rank's peak for a million layouts, and rank by rank and cause by cause for one.

Sizes come from tracing the real model (`memory_parts`), micro-batches in flight from the schedule (`memory_stages`), and
what is held at the same time from how a step runs: even ones have moments in closed form (`memory_moments`), of ranks whose
stages take turns the table is replayed (`memory_turns`). The peak is the most of any one moment, not the sum of
the most of every cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from phalanx.config.schema import Run
from phalanx.families.registry import bind
from phalanx.layout.spec import SCHEDULES, Ints, LayoutTable, Recompute, ResolvedLayout
from phalanx.optimizers import find_optimizer
from phalanx.planner.memory.interleaved import Pipeline, cut_to_rounds, turns, turns_of_each
from phalanx.planner.memory.parts import ModelBytes, distinct, model_bytes
from phalanx.planner.memory.peaks import MOMENTS, moments
from phalanx.planner.memory.peer_buffers import peer_buffer_bytes
from phalanx.planner.memory.stages import holdings, holdings_at, rank_holdings
from phalanx.planner.memory.state import Exchanges, Held, Rank, Situation
from phalanx.planner.memory.weights import beside, causes_of, heaviest, together, weights
from phalanx.planner.trace.family import Kernel, TracedModel, likely_kernel
from phalanx.precision import PRECISIONS

FloatArray = npt.NDArray[np.float64]

_CHUNK = 16384
"""Layouts judged at a time: their arrays stay in the processor's cache."""


@dataclass(frozen=True)
class Kernels:
    """How the parts of a model run, as far as that decides what they keep."""

    attention: Kernel
    compiled: bool

    @classmethod
    def on_accelerators(cls, run: Run, *, rocm: bool = False) -> Kernels:
        """As `run` runs on accelerators. Layouts that cannot be compiled are known by themselves."""
        return cls(likely_kernel(run, rocm=rocm), run.training.compile in (True, "auto"))


@dataclass(frozen=True)
class MemoryEstimates:
    """The worst pipeline rank of each candidate; arrays with one entry for each."""

    allocated: FloatArray
    """Most bytes that live tensors take at a time: what `max_memory_allocated` counts."""
    rank: Ints
    """The pipeline rank."""
    moment: Ints
    """Position in MOMENTS of the moment when it is."""
    peer_buffers: FloatArray
    """Bytes beside them that shards exchange through; 0 where collectives do that."""

    @property
    def held(self) -> FloatArray:
        """Both: what a run logs as its peak."""
        return np.asarray(self.allocated + self.peer_buffers)


@dataclass(frozen=True)
class RankMemory:
    """The peak of one pipeline rank of one layout."""

    rank: int
    allocated: float
    """Bytes; the sum of `causes`."""
    moment: str
    causes: Held
    """Bytes by what they are held for, see CAUSES; padding of shards apart, as `padding`."""
    peer_buffers: float
    """Bytes beside them that shards exchange through."""


def memory(
    run: Run,
    candidates: LayoutTable,
    kernels: Kernels,
    *,
    parts: ModelBytes | None = None,
    peer_copies: bool = False,
) -> MemoryEstimates:
    """Peak memory of the worst rank of each candidate.

    parts: the candidates' parts, where they are known already. peer_copies: whether shards exchange by peer copies.
    """
    parts = parts or _parts(run, candidates, kernels, peer_copies)
    nothing = np.zeros(len(candidates))
    result = MemoryEstimates(nothing, nothing.astype(np.int64), nothing.astype(np.int64), nothing.copy())
    piped, replayed = candidates.pp > 1, replays(candidates)
    for group in (~piped, piped & ~replayed, replayed):
        places = np.flatnonzero(group)
        for start in range(0, len(places), _CHUNK):
            chunk = places[start : start + _CHUNK]
            some = candidates.take(chunk)
            situation = _situation(run, some, parts.take(chunk), kernels, peer_copies)
            judge = _replayed if replayed[chunk[0]] else _of_moments
            found = judge(run, some, situation)
            for field in fields(found):
                getattr(result, field.name)[chunk] = getattr(found, field.name)
    return result


def replays(candidates: LayoutTable) -> npt.NDArray[np.bool_]:
    """Whose schedule tables are replayed: a rank's stages compute, gather and reduce in turn."""
    return np.asarray((candidates.pp > 1) & (candidates.schedule == SCHEDULES.index("interleaved_1f1b")))


def _of_moments(run: Run, candidates: LayoutTable, situation: Situation) -> MemoryEstimates:
    """By the moments of an even step, of the ranks that may be the worst."""
    nothing = np.zeros(len(candidates))
    allocated, rank, moment, buffers = nothing, nothing.astype(np.int64), nothing.astype(np.int64), nothing.copy()
    ranks = holdings(candidates, run.model.n_layers, bind(run).block_costs())
    for place, holds in enumerate(ranks):
        # The last one is repeated where a layout has fewer that matter.
        if place and (holds.rank == ranks[place - 1].rank).all():
            continue
        each = Rank(situation, holds)
        own = peer_buffer_bytes(each)
        for name, held in moments(each):
            total = sum(held.values())
            more = total + own > allocated + buffers
            np.copyto(allocated, total, where=more)
            np.copyto(buffers, own, where=more)
            np.copyto(rank, holds.rank.astype(np.int64), where=more)
            np.copyto(moment, MOMENTS.index(name), where=more)
    return MemoryEstimates(allocated, rank, moment, buffers)


def _replayed(run: Run, candidates: LayoutTable, situation: Situation) -> MemoryEstimates:
    """By the table of each schedule."""
    nothing = np.zeros(len(candidates))
    allocated, rank, moment, buffers = nothing, nothing.astype(np.int64), nothing.astype(np.int64), nothing.copy()
    exchanges = Exchanges(situation)
    counted = cut_to_rounds(candidates.pp, candidates.accumulation)
    one, besides = together(weights(exchanges, candidates.accumulation - counted)), beside(exchanges)
    columns = [candidates.pp, candidates.stages_per_rank, counted, exchanges.dropped.astype(np.int64)]
    _, alike = distinct(columns)
    order = np.argsort(alike, kind="stable")
    lots = np.split(order, np.flatnonzero(np.diff(alike[order])) + 1)
    keys = [[int(column[places[0]]) for column in columns] for places in lots]
    for places, key in zip(lots, keys, strict=True):
        each = turns(_pipeline(run, *key[:3]))[key[3]]
        held, row = heaviest(each, one[:, places], besides[:, places])
        allocated[places] = held + situation.samples[places]
        rank[places] = each.rank[row]
        moment[places] = [MOMENTS.index(each.moment[place]) for place in row.tolist()]
    if situation.peer_copies:
        costs = bind(run).block_costs()
        buffers = peer_buffer_bytes(Rank(situation, holdings_at(candidates, rank, run.model.n_layers, costs)))
    return MemoryEstimates(allocated, rank, moment, buffers)


def _pipeline(run: Run, pp: int, stages_per_rank: int, microbatches: int) -> Pipeline:
    layout = run.layout
    costs = bind(run).block_costs()
    return Pipeline(
        pp, stages_per_rank, microbatches, run.model.n_layers, costs, layout.gather_blocks, layout.gathers_ahead
    )


def rank_memory(
    run: Run, layout: ResolvedLayout, recompute: Recompute, kernels: Kernels, *, peer_copies: bool = False
) -> list[RankMemory]:
    """The peak of every pipeline rank of one layout, cause by cause."""
    one = replace(layout, recompute=recompute).table
    parts = _parts(run, one, kernels, peer_copies)
    costs = bind(run).block_costs()
    ranks = rank_holdings(
        layout.schedule, layout.pp, layout.stages_per_rank, layout.accumulation, run.model.n_layers, costs
    )
    every = np.zeros(layout.pp, np.int64)
    many, parts = one.take(every), parts.take(every)
    padded = _situation(run, many, parts, kernels, peer_copies)
    exact = _situation(run, many, parts.unpadded(), kernels, peer_copies)
    if replays(one)[0]:
        peaks = _replayed_peaks(run, layout, padded, exact)
    else:
        peaks = _peaks(Rank(padded, ranks), Rank(exact, ranks))
    buffers = np.broadcast_to(peer_buffer_bytes(Rank(padded, ranks)), layout.pp)
    found = []
    for rank, (allocated, moment, causes) in enumerate(peaks):
        causes["padding"] = allocated - sum(causes.values())
        found.append(RankMemory(rank, allocated, moment, causes, float(buffers[rank])))
    return found


Peak = tuple[float, str, Held]
"""Bytes, the moment, and bytes by cause, padding of shards left out."""


def _peaks(padded: Rank, exact: Rank) -> Iterator[Peak]:
    """Of every rank."""
    count = len(padded.layers)
    held, by_cause = dict(moments(padded)), dict(moments(exact))
    totals = {name: np.broadcast_to(sum(causes.values()), count) for name, causes in held.items()}
    names = list(totals)
    worst = np.argmax(np.stack(list(totals.values())), axis=0)
    for rank in range(count):
        name = names[int(worst[rank])]
        causes = {cause: float(np.broadcast_to(amount, count)[rank]) for cause, amount in by_cause[name].items()}
        yield float(totals[name][rank]), name, causes


def _replayed_peaks(run: Run, layout: ResolvedLayout, padded: Situation, exact: Situation) -> Iterator[Peak]:
    """Of every rank, by the table of the schedule."""
    counted = cut_to_rounds(np.asarray(layout.pp), np.asarray(layout.accumulation))
    later = layout.accumulation - counted
    exchanges = Exchanges(padded)
    one, by_cause = together(weights(exchanges, later)), weights(Exchanges(exact), later)
    freed = bool(exchanges.dropped[0])
    pipeline = _pipeline(run, layout.pp, layout.stages_per_rank, int(counted))
    for rank, each in enumerate(turns_of_each(pipeline, freed)):
        here = slice(rank, rank + 1)
        allocated, row = heaviest(each, one[:, here], np.zeros_like(one[:, here]))
        samples = {"samples": padded.samples}
        causes = causes_of(each.counts[row[0]], by_cause, samples)
        yield (
            float(allocated[0] + padded.samples[rank]),
            each.moment[row[0]],
            {cause: float(np.broadcast_to(amount, layout.pp)[rank]) for cause, amount in causes.items()},
        )


def _parts(run: Run, candidates: LayoutTable, kernels: Kernels, peer_copies: bool) -> ModelBytes:
    return model_bytes(run, candidates, attention=kernels.attention, compiled=kernels.compiled, peer_copies=peer_copies)


def _situation(run: Run, candidates: LayoutTable, parts: ModelBytes, kernels: Kernels, peer_copies: bool) -> Situation:
    precision = PRECISIONS[run.layout.precision]
    piped = candidates.pp > 1
    return Situation(
        sizes=parts,
        width=precision.compute_dtype.itemsize,
        master=precision.main_dtype.itemsize,
        optimizer_values=find_optimizer(run.optimizer).state_values,
        sharded=candidates.data_ranks * candidates.cp > 1,
        piped=piped,
        zero=candidates.zero,
        reshard=candidates.reshard_after_forward,
        replicated=candidates.dp_replicate > 1,
        accumulation=candidates.accumulation,
        ranks=candidates.pp,
        tied=bool(bind(run).tied()),
        samples=candidates.accumulation * candidates.microbatch * bind(run, TracedModel).sample_bytes(),
        peer_copies=peer_copies,
        gather_blocks=run.layout.gather_blocks,
        gathers_ahead=run.layout.gathers_ahead,
        sends_last=kernels.attention == "cpu",
    )
