"""Whether a device has room for a run's micro-batch, by the memory model: what `layout.microbatch: auto` asks."""

from __future__ import annotations

from phalanx.config.schema import Run
from phalanx.layout.resolve import MemoryFits
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.memory.model import Kernels, memory
from phalanx.planner.memory.probability import BESIDE, communicators, fits
from phalanx.planner.trace.family import is_planned

LEAST_P = 0.9
"""Probability of fitting below which a micro-batch is taken to be too large; plans leave layouts out at the same."""


def memory_fits(run: Run, capacity: float, *, rocm: bool) -> MemoryFits | None:
    """Return the question whether a layout of `run` probably fits accelerators of `capacity` bytes.

    None for families that the memory model does not cover: what their batches take depends on the samples. rocm: whether the
    devices are AMD's.
    """
    if not is_planned(run.model):
        return None
    kernels = Kernels.on_accelerators(run, rocm=rocm)
    # Buffers between peers are counted wherever they may be used: whether ranks reach each other is not known here.
    copies = run.layout.peer_copies is not False

    def probably_fits(layout: ResolvedLayout) -> bool:
        candidate = layout.table
        found = memory(run, candidate, kernels, peer_copies=copies)
        beside = BESIDE["rocm" if rocm else "cuda"]
        p_fits = fits(found.allocated, communicators(candidate), capacity, beside, found.peer_buffers)
        return bool(p_fits[0] >= LEAST_P)

    return probably_fits
