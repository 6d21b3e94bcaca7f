"""How much memory a layout takes: the worst rank's peak for a million layouts, and rank by rank and cause by cause for one.

Sizes come from tracing the real model (`parts`). What a rank holds at the moments that may be its peak is read off the table
that its schedule runs, as counts of blocks, micro-batches and buffers (`one_stage`, `pipelined`); what one of each takes is
`weights`. The peak is the most of any one moment, not the sum of the most of every cause.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from phalanx.layout.spec import SCHEDULES, Ints, LayoutTable, Recompute, ResolvedLayout
from phalanx.optimizers import find_optimizer, kept_values, updates_whole_matrices
from phalanx.planner.distinct_rows import distinct_rows
from phalanx.planner.memory.host_state import host_bytes, moved_share
from phalanx.planner.memory.one_stage import OneStage, one_stage_candidates
from phalanx.planner.memory.parts import ModelBytes, model_bytes
from phalanx.planner.memory.peer_buffers import peer_buffer_bytes, sequence_buffer_bytes
from phalanx.planner.memory.pipelined import candidates_of_each_rank, cut_to_rounds, pipeline_candidates
from phalanx.planner.memory.ranks import RankParts, parts_at
from phalanx.planner.memory.replay import PeakCandidates, Pipeline
from phalanx.planner.memory.state import Allocations, Exchanges, MemoryState
from phalanx.planner.memory.weights import buffers_beside, causes_of, heaviest, together, weights
from phalanx.planner.memory.whole_update import round_bytes
from phalanx.planner.trace.traced_model import Kernel, TracedModel

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Kernels:
    """How the parts of a model run, as far as that decides what they keep."""

    attention: Kernel
    compiled: bool

    @classmethod
    def on_accelerators(cls, model: TracedModel, *, rocm: bool = False) -> Kernels:
        """Return the kernels of the model on accelerators. Layouts that cannot be compiled are known by themselves."""
        return cls(model.likely_kernel(rocm=rocm), model.run.training.compile in (True, "auto"))


@dataclass(frozen=True)
class MemoryEstimates:
    """The worst pipeline rank of each candidate; arrays with one entry for each."""

    allocated: FloatArray
    """Most bytes that live tensors take at a time: what `max_memory_allocated` counts."""
    rank: Ints
    """The pipeline rank."""
    moment: list[str]
    """What the rank does then."""
    peer_buffers: FloatArray
    """Bytes beside them that shards exchange through; 0 where collectives do that."""
    host: FloatArray
    """Bytes of state that a rank keeps in host memory."""

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
    causes: Allocations
    """Bytes by what they are held for, see CAUSES; padding of shards apart, as `padding`."""
    peer_buffers: float
    """Bytes beside them that shards exchange through."""


def memory(
    model: TracedModel,
    candidates: LayoutTable,
    kernels: Kernels,
    *,
    parts: ModelBytes | None = None,
    peer_copies: bool = False,
) -> MemoryEstimates:
    """Return the peak memory of the worst rank of each candidate.

    parts: the candidates' parts, where they are known already. peer_copies: whether shards exchange by peer copies.
    """
    parts = parts or _parts(model, candidates, kernels, peer_copies)
    allocated, peer_buffers = np.zeros((2, len(candidates)))
    rank, moment = np.zeros(len(candidates), np.int64), [""] * len(candidates)
    pipelined = candidates.pp > 1
    # A rank with all of the model and one of a pipeline are counted in different ways.
    for group in (~pipelined, pipelined):
        places = np.flatnonzero(group)
        if not len(places):
            continue
        some = candidates.take(places)
        state = _memory_state(model, some, parts.take(places), kernels, peer_copies)
        allocated[places], rank[places], moments = _worst_ranks(model, some, state)
        for place, name in zip(places.tolist(), moments, strict=True):
            moment[place] = name
        if peer_copies:
            held = _parts_at(model, some, rank[places])
            peer_buffers[places] = peer_buffer_bytes(state, held) + sequence_buffer_bytes(model, some)
    return MemoryEstimates(allocated, rank, moment, peer_buffers, host_bytes(model, candidates, parts))


def _worst_ranks(model: TracedModel, candidates: LayoutTable, state: MemoryState) -> tuple[FloatArray, Ints, list[str]]:
    """Return bytes, rank and moment of the worst rank of candidates, of which all are pipelines or none."""
    exchanges = Exchanges(state)
    counted = cut_to_rounds(candidates.schedule, candidates.pp, candidates.accumulation)
    one = together(weights(exchanges, candidates.accumulation - counted))
    beside = buffers_beside(exchanges)
    columns = _columns(candidates, exchanges, counted)
    # Layouts with equal counts differ only in what one of each takes: counted once, weighed together.
    _, alike = distinct_rows(columns)
    order = np.argsort(alike, kind="stable")
    allocated, rank = np.zeros(len(candidates)), np.zeros(len(candidates), np.int64)
    moment = [""] * len(candidates)
    for places in np.split(order, np.flatnonzero(np.diff(alike[order])) + 1):
        found = _peak_candidates(model, [int(column[places[0]]) for column in columns])
        held, row = heaviest(found, one[:, places], beside[:, places])
        allocated[places] = held + state.samples[places]
        rank[places] = found.rank[row]
        for place, at in zip(places.tolist(), row.tolist(), strict=True):
            moment[place] = found.moment[at]
    return allocated, rank, moment


def _columns(candidates: LayoutTable, exchanges: Exchanges, counted: Ints) -> list[Ints]:
    """Return the columns that decide the counts of a layout, [candidates] each. counted: micro-batches of the table."""
    alone = candidates.pp == 1
    of_one = (alone & exchanges.several, alone & exchanges.whole, exchanges.dropped, alone & (candidates.zero == 3))
    flags = (*of_one, candidates.offload_activations)
    return [
        np.where(alone, 0, candidates.schedule),
        candidates.pp,
        candidates.stages_per_rank,
        # Without a pipeline the flags say all that the number of micro-batches decides.
        np.where(alone, 1, counted),
        *(flag.astype(np.int64) for flag in flags),
    ]


def _peak_candidates(model: TracedModel, column: list[int], *, rank: int | None = None) -> PeakCandidates:
    """Return the moments that may be the peak. column: a row of `_columns`. rank: a pipeline rank; all where None."""
    schedule, pp, stages_per_rank, microbatches, several, whole, dropped, zero_3, offloads = column
    layout = model.run.layout
    if pp == 1:
        tied = bool(model.tied())
        flags = {
            "several": bool(several),
            "whole": bool(whole),
            "dropped": bool(dropped),
            "gathered_again": bool(zero_3),
            "offloads": bool(offloads),
        }
        return one_stage_candidates(
            OneStage(
                model.config.n_layers,
                layout.gather_blocks,
                layout.gathers_ahead,
                tied=tied,
                leading=model.config.leading_layers,
                **flags,
            )
        )
    shape = (SCHEDULES[schedule], pp, stages_per_rank, microbatches, model.config.n_layers)
    pipeline = Pipeline(
        *shape,
        model.block_costs(),
        layout.gather_blocks,
        layout.gathers_ahead,
        model.config.leading_layers,
        offloads=bool(offloads),
    )
    if rank is None:
        return pipeline_candidates(pipeline)[dropped]
    return candidates_of_each_rank(pipeline, bool(dropped))[rank]


def rank_memory(
    model: TracedModel, layout: ResolvedLayout, recompute: Recompute, kernels: Kernels, *, peer_copies: bool = False
) -> list[RankMemory]:
    """Return the peak of every pipeline rank of one layout, cause by cause."""
    one = replace(layout, recompute=recompute).table
    parts = _parts(model, one, kernels, peer_copies)
    padded = _memory_state(model, one, parts, kernels, peer_copies)
    # As if shards were even, so that what padding adds is told apart.
    exact = _memory_state(model, one, parts.unpadded(), kernels, peer_copies)
    exchanges = Exchanges(padded)
    counted = cut_to_rounds(one.schedule, one.pp, one.accumulation)
    later = one.accumulation - counted
    weight, by_cause = together(weights(exchanges, later)), weights(Exchanges(exact), later)
    column = [int(each[0]) for each in _columns(one, exchanges, counted)]
    found = []
    for rank in range(layout.pp):
        held = _peak_candidates(model, column, rank=rank)
        allocated, row = heaviest(held, weight, np.zeros_like(weight))
        peak = float(allocated[0] + padded.samples[0])
        causes = causes_of(held.counts[row[0]], by_cause, {"samples": padded.samples})
        bytes_of = {cause: float(np.broadcast_to(amount, 1)[0]) for cause, amount in causes.items()}
        bytes_of["padding"] = peak - sum(bytes_of.values())
        on_rank = _parts_at(model, one, np.asarray([rank]))
        buffers = float(np.broadcast_to(peer_buffer_bytes(padded, on_rank), 1)[0])
        buffers += peer_copies * float(sequence_buffer_bytes(model, one)[0])
        found.append(RankMemory(rank, peak, held.moment[row[0]], bytes_of, buffers))
    return found


def _parts_at(model: TracedModel, candidates: LayoutTable, ranks: Ints) -> RankParts:
    """Return what one pipeline rank of each candidate holds. ranks: which."""
    return parts_at(candidates, ranks, model.config.n_layers, model.block_costs(), model.config.leading_layers)


def _parts(model: TracedModel, candidates: LayoutTable, kernels: Kernels, peer_copies: bool) -> ModelBytes:
    return model_bytes(
        model, candidates, attention=kernels.attention, compiled=kernels.compiled, peer_copies=peer_copies
    )


def _kept_values(model: TracedModel, candidates: LayoutTable, parts: ModelBytes) -> dict[str, FloatArray]:
    """Return the values that are kept on the device for each parameter, as fields of `MemoryState`, [layouts] each."""
    offloaded = np.where(candidates.offload_optimizer, find_optimizer(model.run.optimizer).state_values, 0.0)
    return {
        "optimizer_values": kept_values(model.run) - offloaded,
        "matrix_values": kept_values(model.run, matrix=True) - offloaded,
        "moved_values": offloaded * moved_share(model, candidates, parts),
    }


def _memory_state(
    model: TracedModel, candidates: LayoutTable, parts: ModelBytes, kernels: Kernels, peer_copies: bool
) -> MemoryState:
    precision = model.precision
    piped = candidates.pp > 1
    whole_updates = updates_whole_matrices(model.run.optimizer)
    return MemoryState(
        sizes=parts,
        width=precision.compute_dtype.itemsize,
        master=precision.main_dtype.itemsize,
        quantised_width=precision.gathered_weight_bytes,
        copies=precision.copies_parameters and precision.products is None,
        **_kept_values(model, candidates, parts),
        sharded=candidates.data_ranks * candidates.cp > 1,
        piped=piped,
        zero=candidates.zero,
        reshard=candidates.reshard_after_forward,
        replicated=candidates.dp_replicate > 1,
        lone_experts=candidates.lone_experts,
        # Passes of one micro-batch follow one another as micro-batches do.
        accumulation=candidates.accumulation * model.passes.trained,
        tied=bool(model.tied()),
        samples=candidates.microbatch * (candidates.accumulation * model.sample_bytes() + model.bytes_between_passes()),
        round_bytes=round_bytes(model, candidates) if whole_updates else np.zeros(len(candidates)),
        peer_copies=peer_copies,
        gather_blocks=model.run.layout.gather_blocks,
        gathers_ahead=model.run.layout.gathers_ahead,
        sends_last=kernels.attention == "cpu",
    )
