"""What a layout certainly needs, from counts alone: bounds below the memory model, without tracing anything.

They leave out most of the layouts that cannot fit before the model is traced for their micro-batches.
"""

from __future__ import annotations

import numpy as np

from phalanx.layout.spec import SCHEDULES, LayoutTable
from phalanx.optimizers import find_optimizer
from phalanx.planner.rank.cost_models import Floats
from phalanx.planner.schedule.bubble import in_flight
from phalanx.planner.trace.family import TracedModel, planned_model
from phalanx.precision import PRECISIONS

_MAIN_BYTES = 4
"""Bytes of a main parameter, and of a value of the optimizer's state or of a reduced gradient."""


def bound_memory(model: TracedModel, layouts: LayoutTable) -> Floats:
    """Return bytes below which no rank stays that has a mean share of the model, [layouts].

    Main parameters, optimizer state and gradients as they are sharded; or, in place of gradients, the inputs of all blocks
    of the first pipeline rank for the micro-batches in flight, which every kind of recompute keeps.
    """
    run, config = model.run, planned_model(model.run)
    held = model.parameter_count() / (layouts.pp * layouts.tp)
    states = held / layouts.shards * _MAIN_BYTES * (1 + find_optimizer(run.optimizer).state_values)
    gradients = held * _MAIN_BYTES / layouts.shards
    microbatches = np.ones(len(layouts))
    for number, name in enumerate(SCHEDULES):
        some = np.flatnonzero((layouts.schedule == number) & (layouts.pp > 1))
        if len(some):
            pp, per_rank = layouts.pp[some], layouts.stages_per_rank[some]
            microbatches[some] = in_flight(name, pp, per_rank, layouts.accumulation[some])
    # The mean stage: some rank has at least as many blocks.
    blocks = np.maximum(1, config.n_layers // layouts.n_stages)
    positions = layouts.microbatch * (model.positions().count // layouts.cp // layouts.tp)
    inputs = (
        blocks * microbatches * positions * config.d_model * PRECISIONS[run.layout.precision].compute_dtype.itemsize
    )
    return np.asarray(states + np.maximum(gradients, inputs))


def count_gathered_bytes(model: TracedModel, layouts: LayoutTable) -> Floats:
    """Return bytes of a block that is gathered whole, [layouts]: what streaming saves at most in weights and gradients.

    Two blocks' parameters, and one's gradients as they are computed and as they are sent; `tp` alone splits them.
    """
    width = PRECISIONS[model.run.layout.precision].compute_dtype.itemsize
    block = model.parameter_count() / model.run.model.n_layers / layouts.tp
    return np.asarray(block * (3 * width + _MAIN_BYTES))
