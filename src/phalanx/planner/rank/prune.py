"""What a layout certainly needs, from counts alone: a bound below the memory model, without tracing anything.

It leaves out most of the layouts that cannot fit before the model is traced for their micro-batches.
"""

from __future__ import annotations

import numpy as np

from phalanx.config.schema import Run
from phalanx.families.registry import bind
from phalanx.optimizers import find_optimizer
from phalanx.planner.layouts.candidates import SCHEDULES, Candidates
from phalanx.planner.rank.models import Floats
from phalanx.planner.schedule.bubble import in_flight
from phalanx.planner.trace.family import planned_model
from phalanx.precision import PRECISIONS

_MASTER = 4


def least_bytes(run: Run, candidates: Candidates) -> Floats:
    """Bytes below which no rank of a candidate stays that has a mean share of the model, [candidates].

    Master weights, moments and gradients as they are shared out; or, in place of gradients, the inputs of all blocks of the
    first pipeline rank for the micro-batches in flight, which every kind of recompute keeps.
    """
    model, length = planned_model(run), bind(run).positions().count
    held = bind(run).parameter_count() / (candidates.pp * candidates.tp)
    shards = candidates.shards
    states = held / shards * _MASTER * (1 + find_optimizer(run.optimizer).state_values)
    gradients = held * _MASTER / np.where(candidates.zero > 0, shards, 1)
    blocks = np.maximum(1, model.n_layers // candidates.n_stages)
    positions = candidates.microbatch * (length // candidates.cp // candidates.tp)
    width = PRECISIONS[run.layout.precision].compute_dtype.itemsize
    inputs = blocks * _in_flight(candidates) * positions * model.d_model * width
    return np.asarray(states + np.maximum(gradients, inputs))


def gathered_bytes(run: Run, candidates: Candidates) -> Floats:
    """Bytes of a block that is gathered whole, [candidates]: what streaming saves at most in weights and their gradients.

    Two blocks' parameters, and one's gradients as they are computed and as they are sent; `tp` alone shares them out.
    """
    width = PRECISIONS[run.layout.precision].compute_dtype.itemsize
    block = bind(run).parameter_count() / planned_model(run).n_layers / candidates.tp
    return np.asarray(block * (3 * width + _MASTER))


def _in_flight(candidates: Candidates) -> Floats:
    found = np.ones(len(candidates))
    for number, name in enumerate(SCHEDULES):
        some = np.flatnonzero((candidates.schedule == number) & (candidates.pp > 1))
        if len(some):
            pp, per_rank = candidates.pp[some], candidates.stages_per_rank[some]
            found[some] = in_flight(name, pp, per_rank, candidates.accumulation[some])
    return found
