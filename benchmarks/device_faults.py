"""Faults that only a device can have, and what times safeguards, as a callback of runs of `faults_on_devices`."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import torch

from phalanx.launch.heartbeat import Heartbeat, Phase
from phalanx.torch_compat.common import keep_device_busy
from phalanx.training.callbacks import Callback, TrainingContext
from phalanx.training.metrics import StepMetrics
from phalanx.training.safeguards.wrong_numbers import WrongNumbers
from phalanx.training.step import TrainStep

MEMORY_EVENTS = 10
"""Times that a run is made to run out of memory."""


class DeviceFault(Callback):
    """Does `kind` on rank `rank` before step `step`, once; marker: file that says when it happened.

    assert: an index out of bounds in a kernel. sleep: a kernel of a minute. slow: a kernel of twice a step's time before
    each step from `step` on. spike: gradients of the step times 10,000. fill: take the memory that the next step needs,
    before each step from `step` on. cost: time hashes and heartbeats, and write the seconds to `marker` at the end.
    """

    def __init__(self, kind: str, marker: str, step: int, rank: int = 1) -> None:
        self.kind, self.marker, self.step, self.rank = kind, Path(marker), step, rank

    def on_start(self, context: TrainingContext) -> None:
        """Put what measures or disturbs in place."""
        self.context = context
        self.mine = context.rank == self.rank
        self.now, self.allocated, self.fastest_s = 0, 0, math.inf
        self.ballast: list[torch.Tensor] = []
        self.seconds: dict[str, list[float]] = {"hash": [], "heartbeat": [], "step": []}
        if self.kind == "spike":
            self._disturb_gradients()
        if self.kind == "cost":
            self._time_safeguards()

    def needs_finished(self, step: int) -> bool:
        """Return true where memory is looked at between steps."""
        return self.kind == "fill"

    def on_step_begin(self, step: int) -> None:
        """Have the fault happen, if it is time."""
        self.now = step
        if not self.mine or step < self.step:
            return
        if self.kind == "fill":
            self._fill_device()
        elif self.kind == "slow":
            self._mark()
            self._slow_down()
        elif self.kind in ("assert", "sleep") and step == self.step and not self.marker.exists():
            self._mark()
            if self.kind == "sleep":
                # In clock cycles: about a minute.
                torch.cuda._sleep(100_000_000_000)
            else:
                table = torch.zeros(4, device=self.context.device)
                table[torch.full((4,), 1000, device=self.context.device)] += 1

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Keep the seconds of a step."""
        self.seconds["step"].append(metrics.step_seconds)
        if not self.marker.exists():
            self.fastest_s = min(self.fastest_s, metrics.step_seconds)

    def on_end(self, error: BaseException | None) -> None:
        """Write what was timed."""
        if self.kind == "cost" and self.mine:
            self.marker.write_text(json.dumps(self.seconds))

    def _mark(self) -> None:
        if not self.marker.exists():
            self.marker.write_text(f"{time.time()}")

    def _fill_device(self) -> None:
        """Leave three fifths of the memory that the step before took on top of what is held between steps."""
        events = self.context.run_dir / "events.jsonl"
        if events.exists() and events.read_text().count('"less_memory"') >= MEMORY_EVENTS:
            self.ballast.clear()
            return
        device = self.context.device
        took = torch.cuda.max_memory_allocated(device) - self.allocated
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        spare = free - int(0.6 * took)
        if self.allocated and spare > 0:
            self.ballast.append(torch.empty(spare, dtype=torch.uint8, device=device))
            print(f"{free / 2**30:.2f} GiB free, {(free - spare) / 2**30:.2f} left", file=sys.stderr, flush=True)
        torch.cuda.reset_peak_memory_stats(device)
        self.allocated = torch.cuda.memory_allocated(device)

    def _slow_down(self) -> None:
        # Longer than the step: the device of a small model has nothing to do most of the time.
        keep_device_busy(self.context.device, max(0.1, 2.0 * self.fastest_s))

    def _disturb_gradients(self) -> None:
        update = TrainStep.update_parameters

        def disturbed(step: TrainStep, loss: torch.Tensor) -> torch.Tensor:
            if self.now == self.step and not self.marker.exists():
                self._mark()
                for parameter in step.applied.parameters.values():
                    if parameter.grad is not None:
                        parameter.grad.mul_(1e4)
            return update(step, loss)

        TrainStep.update_parameters = disturbed  # type: ignore[method-assign, assignment]

    def _time_safeguards(self) -> None:
        compare, enter = WrongNumbers.compare_replicas, Heartbeat.enter

        def timed_compare(wrong: WrongNumbers, step: int) -> None:
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            began = time.perf_counter()
            compare(wrong, step)
            self.seconds["hash"].append(time.perf_counter() - began)

        def timed_enter(beat: Heartbeat, phase: Phase, step: int | None = None) -> None:
            began = time.perf_counter()
            enter(beat, phase, step)
            self.seconds["heartbeat"].append(time.perf_counter() - began)

        WrongNumbers.compare_replicas = timed_compare  # type: ignore[method-assign, assignment]
        Heartbeat.enter = timed_enter  # type: ignore[method-assign, assignment]
