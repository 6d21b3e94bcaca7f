"""State that lies in host memory between updates: how much of it is on a device at a time, and what a host holds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from phalanx.layout.spec import SCHEDULES, LayoutTable
from phalanx.optimizers import find_optimizer
from phalanx.optimizers.offloaded_state import BUCKET_BYTES
from phalanx.planner.distinct_rows import distinct_rows
from phalanx.planner.memory.parts import ModelBytes
from phalanx.planner.memory.ranks import rank_parts
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
    """Return the most bytes of state that one rank keeps in host memory, [layouts]."""
    state = find_optimizer(model.run.optimizer).state_values * most_trained_bytes(model, candidates, parts)
    return np.where(candidates.offload_optimizer, state, 0.0)
