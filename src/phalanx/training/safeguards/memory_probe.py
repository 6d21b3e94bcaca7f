"""Finds the micro-batch of `layout.microbatch=auto`: the planner's, corrected by what one step took.

The step is the run's first, done once before training with its update left out: weights and optimizer state stay those that
training begins with. Later starts of the run in the same layout take what was found.
"""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field

from phalanx.checkpoint import RankGroup
from phalanx.data.batch_stream import Batch
from phalanx.families.family import BoundModel
from phalanx.files import write_atomically
from phalanx.hardware.device import peak_bytes, reset_peak_bytes
from phalanx.layout.mesh import Ranks
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.rank.cost_models import SeenMemory, memory_fits
from phalanx.torch_compat.common import is_rocm
from phalanx.training.logs import RunLog
from phalanx.training.safeguards.memory_limit import name_layout, read_record
from phalanx.training.step import StepLimits, TrainStep

PROBE_FILE = "microbatch.json"
"""File of a run directory: the micro-batch that was found, and where."""
_NO_UPDATE = StepLimits(grad_norm=-1.0)
_GIB = 2**30


class FoundMicrobatch(BaseModel):
    """What microbatch.json holds."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    layout: str
    """The layout in which it was found, in all but the micro-batch."""
    capacity: int
    """Bytes of a device's memory."""
    microbatch: Annotated[int, Field(ge=1, le=10**9)]


def recall_microbatch(run_dir: Path, layout: ResolvedLayout, capacity: int) -> ResolvedLayout | None:
    """Return `layout` with the micro-batch that an earlier start found, the same on all ranks; None where there was none.

    capacity: bytes of a device's memory. Raises PhalanxError for a microbatch.json that Phalanx cannot have written.
    """
    found = RankGroup.default().from_first(lambda: read_record(run_dir / PROBE_FILE, FoundMicrobatch))
    if found is None or (found.layout, found.capacity) != (name_layout(layout), capacity):
        return None
    return replace(layout, microbatch=found.microbatch)


class MemoryProbe:
    """Does one step, and has the steps behind it take the largest micro-batch that fits by what it took."""

    def __init__(self, model: BoundModel, ranks: Ranks, device: torch.device, capacity: int, run_dir: Path) -> None:
        """Prepare for steps of `model` on this rank. capacity: bytes of the device's memory."""
        self._model = model
        self._ranks = ranks
        self._device = device
        self._capacity = capacity
        self._run_dir = run_dir

    def run(self, step: TrainStep, number: int, batch: Batch, log: RunLog) -> None:
        """Do step `number` without its update, and choose. All ranks call it together.

        batch: this rank's samples of that step. Memory that runs out is met as in any step: a process alone does it again
        with less, several ranks begin again.
        """
        began, planned = time.perf_counter(), step.applied.layout
        scaler = None if step.scaler is None else deepcopy(step.scaler.state_dict())
        reset_peak_bytes(self._device)
        step.limits = _NO_UPDATE
        step.enqueue(number, batch).tolist()
        if step.scaler is not None and scaler is not None:
            step.scaler.load_state_dict(scaler)
        if step.applied.layout != planned:
            return
        peak = max(RankGroup.default().all_gather(peak_bytes(self._device)))
        size = RankGroup.default().from_first(lambda: self._choose(planned, peak))
        words = f"one step with {planned.microbatch} x {planned.accumulation} samples took {peak / _GIB:.2f} GiB"
        if size == planned.microbatch:
            log.note(f"layout.microbatch=auto: {words}: they stay")
        else:
            step.take_layout(replace(planned, microbatch=size))
            now = step.applied.layout
            log.note(f"layout.microbatch=auto: {words}: steps take {now.microbatch} x {now.accumulation}")
        # A part of the start, like the loading before it.
        seconds = round(time.perf_counter() - began, 3)
        sizes = {"planned": planned.microbatch, "microbatch": size}
        log.event("microbatch", number - 1, **sizes, peak_bytes=peak, start_seconds=seconds)

    def _choose(self, planned: ResolvedLayout, peak: int) -> int:
        """Return the largest micro-batch that fits, by the planner's estimate and what `planned` took, and keep it."""
        fits = memory_fits(self._model, self._capacity, rocm=is_rocm(), seen=SeenMemory(planned, peak))
        size = resolve_layout(self._model, self._ranks.world_size, self._ranks.ranks_per_node, fits).microbatch
        found = FoundMicrobatch(layout=name_layout(planned), capacity=self._capacity, microbatch=size)
        write_atomically(self._run_dir / PROBE_FILE, found.model_dump_json() + "\n")
        return size
