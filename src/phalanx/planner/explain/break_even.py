"""FSDP or Hybrid-STOP: below how many positions a device the latter receives fewer bytes, counted on the model that runs.

For one global batch, FSDP over N = T F devices receives parameters and gradients of whole blocks; with T of them
tensor-parallel each receives those of a T-th, and the activations that the T exchange instead. Both grow with other things,
so they are equal at one number of positions. For a block of 12 d^2 parameters in bfloat16, gradients sent as they were
computed and nothing recomputed that is 4.5 d / T positions a device and micro-batch, whatever F; 6 d / T where gradients are
sent in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.config.schema import Run
from phalanx.families.registry import bind
from phalanx.hardware.machine import Machine
from phalanx.layout.spec import LayoutTable, Recompute, ResolvedLayout
from phalanx.planner.time.timing import our_framework
from phalanx.planner.trace.family import likely_kernel, planned_model, setting_of
from phalanx.planner.trace.parts import PartCosts, part_costs
from phalanx.precision import PRECISIONS


@dataclass(frozen=True)
class BreakEven:
    """Where the bytes of one tensor-parallel degree and of FSDP over as many devices are equal."""

    tp: int
    positions: float
    """A device and micro-batch: below, Hybrid-STOP receives fewer bytes."""
    samples: float
    """The same as samples of a micro-batch of the `tp` devices together."""
    times_width: float
    """`positions` * tp / width of the model: 4.5 for the textbook block."""


def break_evens(run: Run, legal: LayoutTable, recompute: Recompute, machine: Machine) -> tuple[BreakEven, ...]:
    """For each tensor-parallel degree above 1 among `legal`. recompute: repeats exchanges of activations."""
    devices = int(legal.world_size[0])
    copies = our_framework(run, machine).copy_engines
    degrees = np.unique(legal.tp[(legal.tp > 1) & (legal.cp == 1)]).tolist()
    return tuple(break_even(run, tp, devices // tp, recompute, peer_copies=copies) for tp in degrees)


def break_even(run: Run, tp: int, shards: int, recompute: Recompute, *, peer_copies: bool) -> BreakEven:
    """Of `tp` x `shards` devices against FSDP over all of them. peer_copies: whether gradients are sent as computed."""
    model, positions = planned_model(run), bind(run).positions().count
    dtype = PRECISIONS[run.layout.precision].compute_dtype
    each = 2 * dtype.itemsize + (dtype.itemsize if peer_copies else max(4, dtype.itemsize))
    whole, part = (_trace_block(run, degree, recompute) for degree in (1, tp))
    saved = each * (whole.parameter_count * (1 - 1 / (tp * shards)) - part.parameter_count * (1 - 1 / shards))
    exchanged = sum(collective.bytes for collective in part.costs.collectives()) * (tp - 1) / tp / positions
    tokens = saved / exchanged
    return BreakEven(tp, tokens / tp, tokens / positions, tokens / model.d_model)


def _trace_block(run: Run, tp: int, recompute: Recompute) -> PartCosts:
    """Of one sample, uncompiled: what is communicated is the same, and tracing is quick."""
    chosen = run.model_copy(update={"layout": run.layout.model_copy(update={"recompute": recompute})})
    layout = ResolvedLayout(global_batch=1, tp=tp)
    kernel = likely_kernel(run, rocm=False)
    return part_costs("block", setting_of(chosen, layout, attention=kernel, compiled=False), 1)
