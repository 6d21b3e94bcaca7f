"""How much memory a layout takes: the worst rank's peak for a million layouts, and rank by rank and cause by cause for one.

Sizes come from tracing the real model (`memory_parts`), micro-batches in flight from the schedule (`memory_stages`), and
what is held at the same time from how a step runs (`memory_moments`). The peak is the most of any one moment, not the sum of
the most of every cause.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.config.schema import Run
from phalanx.cost.candidates import Candidates, Ints
from phalanx.cost.family import Kernel, cost_family, likely_kernel
from phalanx.cost.memory_moments import MOMENTS, moments
from phalanx.cost.memory_parts import ModelBytes, model_bytes
from phalanx.cost.memory_situation import Held, Situation
from phalanx.cost.memory_stages import Holdings, holdings, rank_holdings
from phalanx.cost.peer_buffers import peer_buffer_bytes
from phalanx.layout.precision import PRECISIONS
from phalanx.layout.recompute import Recompute
from phalanx.layout.spec import ResolvedLayout
from phalanx.models.families import family_of

FloatArray = npt.NDArray[np.float64]

_CHUNK = 16384
"""Candidates judged at a time: their arrays stay in the processor's cache."""


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
    candidates: Candidates,
    kernels: Kernels,
    *,
    parts: ModelBytes | None = None,
    peer_copies: bool = False,
) -> MemoryEstimates:
    """Peak memory of the worst rank of each candidate.

    parts: the candidates' parts, where they are known already. peer_copies: whether shards exchange by peer copies.
    """
    parts = parts or _parts(run, candidates, kernels, peer_copies)
    costs = family_of(run).block_costs(run)
    ranks = holdings(candidates, run.model.n_layers, costs)
    count = len(candidates)
    nothing = np.zeros(count)
    result = MemoryEstimates(nothing, nothing.astype(np.int64), nothing.astype(np.int64), nothing.copy())
    groups = [np.flatnonzero(candidates.pp == 1), np.flatnonzero(candidates.pp > 1)]
    for group in groups:
        for start in range(0, len(group), _CHUNK):
            chunk = group[start : start + _CHUNK]
            _judge(
                run,
                candidates.take(chunk),
                parts.take(chunk),
                [r.take(chunk) for r in ranks],
                chunk,
                result,
                kernels,
                peer_copies,
            )
    return result


def _judge(
    run: Run,
    candidates: Candidates,
    parts: ModelBytes,
    ranks: list[Holdings],
    where: Ints,
    result: MemoryEstimates,
    kernels: Kernels,
    peer_copies: bool,
) -> None:
    allocated, rank, moment, buffers = (
        getattr(result, name)[where] for name in ("allocated", "rank", "moment", "peer_buffers")
    )
    for place, holds in enumerate(ranks):
        # The last one is repeated where a layout has fewer that matter.
        if place and (holds.rank == ranks[place - 1].rank).all():
            continue
        situation = _situation(run, candidates, parts, holds, kernels, peer_copies)
        own = peer_buffer_bytes(situation)
        for name, held in moments(situation):
            total = sum(held.values())
            more = total + own > allocated + buffers
            np.copyto(allocated, total, where=more)
            np.copyto(buffers, own, where=more)
            np.copyto(rank, holds.rank.astype(np.int64), where=more)
            np.copyto(moment, MOMENTS.index(name), where=more)
    result.allocated[where], result.peer_buffers[where] = allocated, buffers
    result.rank[where], result.moment[where] = rank, moment


def rank_memory(
    run: Run, layout: ResolvedLayout, recompute: Recompute, kernels: Kernels, *, peer_copies: bool = False
) -> list[RankMemory]:
    """The peak of every pipeline rank of one layout, cause by cause."""
    one = Candidates.of([layout], [recompute])
    parts = _parts(run, one, kernels, peer_copies)
    costs = family_of(run).block_costs(run)
    ranks = rank_holdings(
        layout.schedule, layout.pp, layout.stages_per_rank, layout.accumulation, run.model.n_layers, costs
    )
    every = np.zeros(layout.pp, np.int64)
    many, parts = one.take(every), parts.take(every)
    situation = _situation(run, many, parts, ranks, kernels, peer_copies)
    held, buffers = dict(moments(situation)), np.broadcast_to(peer_buffer_bytes(situation), layout.pp)
    exact = dict(moments(_situation(run, many, parts.unpadded(), ranks, kernels, peer_copies)))
    totals = {name: np.broadcast_to(sum(causes.values()), layout.pp) for name, causes in held.items()}
    names = list(totals)
    worst = np.argmax(np.stack(list(totals.values())), axis=0)
    found = []
    for rank in range(layout.pp):
        name = names[int(worst[rank])]
        causes = {cause: float(np.broadcast_to(amount, layout.pp)[rank]) for cause, amount in exact[name].items()}
        allocated = float(totals[name][rank])
        causes["padding"] = allocated - sum(causes.values())
        found.append(RankMemory(rank, allocated, name, causes, float(buffers[rank])))
    return found


def _parts(run: Run, candidates: Candidates, kernels: Kernels, peer_copies: bool) -> ModelBytes:
    return model_bytes(run, candidates, attention=kernels.attention, compiled=kernels.compiled, peer_copies=peer_copies)


def _situation(
    run: Run, candidates: Candidates, parts: ModelBytes, holds: Holdings, kernels: Kernels, peer_copies: bool
) -> Situation:
    dtype = PRECISIONS[run.layout.precision]
    piped = candidates.pp > 1
    return Situation(
        sizes=parts,
        holds=holds,
        width=dtype.itemsize,
        master=max(4, dtype.itemsize),
        sharded=candidates.data_ranks * candidates.cp > 1,
        piped=piped,
        zero=candidates.zero,
        reshard=candidates.reshard_after_forward,
        replicated=candidates.dp_replicate > 1,
        accumulation=candidates.accumulation,
        ranks=candidates.pp,
        tied=bool(family_of(run).tied(run)),
        samples=candidates.accumulation * candidates.microbatch * cost_family(run.model).sample_bytes(run),
        peer_copies=peer_copies,
        gather_blocks=run.layout.gather_blocks,
        gathers_ahead=run.layout.gathers_ahead,
        sends_last=kernels.attention == "cpu",
    )
