"""What a layout certainly needs, from counts alone: a bound below the memory model, without tracing anything.

It leaves out most of the layouts that cannot fit before the model is traced for their micro-batches.
"""

from __future__ import annotations

import numpy as np

from phalanx.config.schema import LanguageRun
from phalanx.cost.bubble import in_flight
from phalanx.cost.candidates import SCHEDULES, Candidates
from phalanx.models.language.sizes import parameter_count
from phalanx.plan.models import Floats

_MASTER, _MOMENTS = 4, 8
_WIDTH = {"fp64": 8, "fp32": 4}
"""Bytes of an activation, where it is not 2."""


def least_bytes(run: LanguageRun, candidates: Candidates) -> Floats:
    """Bytes below which no rank of a candidate stays that has a mean share of the model, [candidates].

    Master weights, moments and gradients as they are shared out; or, in place of gradients, the inputs of all blocks of the
    first pipeline rank for the micro-batches in flight, which every kind of recompute keeps.
    """
    model, length = run.model, run.data.sequence_length
    held = parameter_count(model) / (candidates.pp * candidates.tp)
    shards = candidates.shards
    states = held / shards * (_MASTER + _MOMENTS)
    gradients = held * _MASTER / np.where(candidates.zero > 0, shards, 1)
    blocks = np.maximum(1, model.n_layers // candidates.n_stages)
    positions = candidates.microbatch * (length // candidates.cp // candidates.tp)
    width = _WIDTH.get(run.layout.precision, 2)
    inputs = blocks * _in_flight(candidates) * positions * model.d_model * width
    return np.asarray(states + np.maximum(gradients, inputs))


def _in_flight(candidates: Candidates) -> Floats:
    found = np.ones(len(candidates))
    for number, name in enumerate(SCHEDULES):
        some = np.flatnonzero((candidates.schedule == number) & (candidates.pp > 1))
        if len(some):
            pp, per_rank = candidates.pp[some], candidates.stages_per_rank[some]
            found[some] = in_flight(name, pp, per_rank, candidates.accumulation[some])
    return found
