"""What lies in host memory: state between updates, how much of it is on a device at a time; activations between passes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from phalanx.layout.spec import SCHEDULES, LayoutTable
from phalanx.optimizers import find_optimizer
from phalanx.optimizers.offloaded_state import BUCKET_BYTES
from phalanx.planner.distinct_rows import distinct_rows
from phalanx.planner.memory.parts import ModelBytes
from phalanx.planner.memory.pipelined import cut_to_rounds
from phalanx.planner.memory.ranks import rank_parts
from phalanx.planner.memory.replay import COLUMN, Pipeline, Replay
from phalanx.planner.trace.traced_model import TracedModel

FloatArray = npt.NDArray[np.float64]

BUCKETS_HELD = 2
"""Buckets of parameters whose state is on the device at a time: one is updated or leaves, and the next arrives."""


def most_trained_bytes(model: TracedModel, candidates: LayoutTable, parts: ModelBytes) -> FloatArray:
    """Return the bytes of main parameters that the pipeline rank with most of them trains, [layouts]."""
    blocks = parts.block.plus(parts.experts)
    sizes = np.stack([part.trained_shard for part in (blocks, parts.leading, parts.embedding, parts.head)])
    config, found = model.config, np.zeros(len(candidates))
    first, inverse = distinct_rows([candidates.schedule, candidates.pp, candidates.stages_per_rank])
    for number, row in enumerate(first.tolist()):
        pipeline = (SCHEDULES[candidates.schedule[row]], int(candidates.pp[row]), int(candidates.stages_per_rank[row]))
        held = rank_parts(*pipeline, config.n_layers, model.block_costs(), config.leading_layers)
        counts = np.stack([held.layers - held.leading, held.leading, held.embedding, held.head], axis=1)
        alike = inverse == number
        found[alike] = (counts @ sizes[:, alike]).max(axis=0)
    return found * model.precision.main_dtype.itemsize


def moved_share(model: TracedModel, candidates: LayoutTable, parts: ModelBytes) -> FloatArray:
    """Return the share of a rank's offloaded state that is on its device at a time while it updates, [layouts]."""
    if not candidates.offload_optimizer.any():
        return np.zeros(len(candidates))
    whole = most_trained_bytes(model, candidates, parts)
    # The largest parameters are tables of embeddings, each a bucket of its own.
    width = model.precision.main_dtype.itemsize
    ends = width * np.maximum(parts.embedding.trained_shard, parts.head.trained_shard)
    held = BUCKET_BYTES * (BUCKETS_HELD - 1) + np.maximum(BUCKET_BYTES, ends)
    return np.asarray(np.minimum(1.0, held / np.maximum(whole, 1.0)))


def host_bytes(model: TracedModel, candidates: LayoutTable, parts: ModelBytes) -> FloatArray:
    """Return the most bytes of state and activations that one rank keeps in host memory, [layouts]."""
    state = find_optimizer(model.run.optimizer).state_values * most_trained_bytes(model, candidates, parts)
    return np.where(candidates.offload_optimizer, state, 0.0) + _activation_bytes(model, candidates, parts)


def _activation_bytes(model: TracedModel, candidates: LayoutTable, parts: ModelBytes) -> FloatArray:
    """Return the most bytes of activations that one rank keeps in host memory, [layouts]."""
    found = np.zeros(len(candidates))
    offloaded = np.flatnonzero(candidates.offload_activations)
    some = candidates.take(offloaded)
    piped = some.pp > 1
    counted = cut_to_rounds(some.schedule, some.pp, some.accumulation)
    # Of a rank with all of the model one micro-batch at a time has anything there.
    columns = [some.schedule * piped, some.pp, some.stages_per_rank, counted * piped]
    first, inverse = distinct_rows(columns)
    sizes = np.stack([parts.leaving, parts.leading_leaving, -parts.input_leaving])[:, offloaded]
    for number, (schedule, *shape) in enumerate(np.stack(columns, axis=1)[first].tolist()):
        alike = inverse == number
        away = _blocks_away(model, SCHEDULES[schedule], *shape)
        found[offloaded[alike]] = (away @ sizes[:, alike]).max(axis=0)
    return found


def _blocks_away(model: TracedModel, schedule: str, pp: int, stages_per_rank: int, microbatches: int) -> FloatArray:
    """Return what may be in host memory at a time: blocks, leading blocks, and inputs among theirs that stay, [cases, 3]."""
    layers, leading = model.config.n_layers, model.config.leading_layers
    if pp == 1:
        ahead = min(leading, layers - 1)
        return np.asarray([[layers - 1 - ahead, ahead, 0]], np.float64)
    pipeline = Pipeline(
        schedule, pp, stages_per_rank, microbatches, layers, model.block_costs(), 1, 1, leading, offloads=True
    )
    before = Replay(pipeline, np.arange(pp), np.zeros(pp, bool)).before
    names = (("blocks_kept", "blocks_present"), ("leading_kept", "leading_present"), ("received", "received_present"))
    away = [before[:, :, COLUMN[kept]] - before[:, :, COLUMN[present]] for kept, present in names]
    return np.unique(np.stack(away, axis=-1).reshape(-1, len(names)), axis=0).astype(np.float64)
