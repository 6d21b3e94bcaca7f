"""Faults from inside a rank: the callback `chaos`, which `phalanx chaos` puts into a run.

Each fault of the schedule happens once: a marker file keeps it from happening again after a restart, and tells when it was.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from phalanx.chaos.faults import KINDS, PlannedFault
from phalanx.checkpoint.folders import list_published
from phalanx.layout.place import as_place
from phalanx.torch_compat.common import keep_device_busy
from phalanx.training.callbacks import Callback, TrainingContext
from phalanx.training.metrics import StepMetrics

CHANGES = {"open", "os.mkdir", "os.rename"}
"""What happens to files as a checkpoint is written (audit events)."""
MOST_CHANGES = 6
"""Changes to files after which a kill in a checkpoint comes at the latest."""
SAVE_S = 60.0
"""Most seconds to wait for a checkpoint that is being written."""
STEP_LOG = "steps.log"
"""File beside the schedule: when each step ended, by the first rank, and when the ranks began."""
START = "start"
"""Stands in it in place of a step where the ranks began."""
SLOW_SHARE, LEAST_SLOW_S = 2.0, 0.1
"""A slow rank waits in each step so many times what the fastest one took, and no less than so many seconds. A device that
its host keeps waiting would hide a shorter wait."""


class ChaosCallback(Callback):
    """Makes the faults of a schedule happen on the ranks that they are planned for.

    schedule: JSON file with a list of `PlannedFault`; markers and the log of steps go beside it.
    """

    def __init__(self, schedule: str) -> None:
        self.folder = Path(schedule).parent
        self.schedule = Path(schedule)

    def on_start(self, context: TrainingContext) -> None:
        """Read the schedule."""
        planned = [PlannedFault(**fields) for fields in json.loads(self.schedule.read_text())]
        self.context = context
        self.mine = [fault for fault in planned if fault.rank == context.rank]
        self.looked_at = {step for fault in planned for step in (fault.step - 1, fault.step)}
        self.fastest_s, self.slow_s, self.slow_until = math.inf, 0.0, 0
        self.note_step(START)

    def needs_finished(self, step: int) -> bool:
        """Return whether a fault comes before the next step: what it strikes is then that step on every device."""
        return step in self.looked_at

    def on_step_begin(self, step: int) -> None:
        """Make what is planned before `step` happen, unless it has."""
        for fault in self.mine:
            if fault.step == step and not fault.marker_file(self.folder).exists() and fault.kind != "bitflip":
                self.cause_fault(fault)
        if step < self.slow_until:
            self.wait_before_step()

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Flip a bit after the update of the step before that of a fault, and note when the step ended."""
        self.note_step(str(metrics.step))
        self.fastest_s = min(self.fastest_s, metrics.step_seconds)
        for fault in self.mine:
            if (
                fault.kind == "bitflip"
                and fault.step == metrics.step + 1
                and not fault.marker_file(self.folder).exists()
            ):
                self.note_fault(fault)
                self.flip_parameter(random.Random(fault.seed))

    def note_step(self, what: str) -> None:
        """Note on the first rank that a step ended, or that the ranks begin."""
        if self.context.rank == 0:
            with (self.folder / STEP_LOG).open("a") as log:
                log.write(f"{time.time()} {what}\n")

    def note_fault(self, fault: PlannedFault, **fields: Any) -> None:
        """Note that a fault happens now."""
        fault.marker_file(self.folder).write_text(json.dumps({"time": time.time(), **fields}))

    def cause_fault(self, fault: PlannedFault) -> None:
        """Make one fault happen in this process."""
        if fault.kind == "save":
            self.die_in_checkpoint(fault)
            return
        if fault.kind == "slow":
            # Of steps before it: those to come are as slow as it makes them, and the first one compiles.
            self.slow_s = max(LEAST_SLOW_S, SLOW_SHARE * self.fastest_s)
            self.slow_until = fault.step + KINDS["slow"].lasts
            self.note_fault(fault)
            return
        if fault.kind in ("oom", "error"):
            self.fail_forward(fault)
            return
        if fault.kind == "damage":
            damaged = self.flip_checkpoint(random.Random(fault.seed))
            # With one checkpoint alone the run would have nothing to fall back to.
            if damaged is None:
                return
            self.note_fault(fault, damaged=damaged)
        else:
            self.note_fault(fault)
        break_process("kill" if fault.kind == "damage" else fault.kind)

    def wait_before_step(self) -> None:
        """Have this rank's device come late to the step, or its host where it computes by itself."""
        if self.context.device.type == "cuda":
            keep_device_busy(self.context.device, self.slow_s)
        else:
            time.sleep(self.slow_s)

    def fail_forward(self, fault: PlannedFault) -> None:
        """Have the next forward pass raise what running out of memory, or a defect, raises."""

        def fail_once(_module: nn.Module, _inputs: object) -> None:
            # A compiler that comes after it, in this process, could not follow it.
            hook.remove()
            self.note_fault(fault)
            if fault.kind == "oom":
                raise torch.OutOfMemoryError("out of memory (injected)")
            raise RuntimeError("made to fail (injected)")

        # Only now: a hook that is there from the start could change what is compiled.
        hook = register_module_forward_pre_hook(fail_once)

    def die_in_checkpoint(self, fault: PlannedFault) -> None:
        """Kill this process at a random change to files of the next checkpoint that it takes part in."""
        folder = str(self.context.run_dir / "checkpoints")
        left = [random.Random(fault.seed).randrange(MOST_CHANGES)]

        def before_change(event: str, arguments: tuple[Any, ...]) -> None:
            if event in CHANGES and folder in str(arguments[0]):
                if left[0] == 0:
                    self.note_fault(fault)
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

        sys.addaudithook(before_change)

    def flip_checkpoint(self, chance: random.Random) -> int | None:
        """Flip a bit of the newest checkpoint and return its step; None, and nothing flipped, where it is the only one."""
        # A save in the background would make a newer one, which nobody has damaged.
        deadline = time.monotonic() + SAVE_S
        while any((self.context.run_dir / "checkpoints").glob("*.writing")) and time.monotonic() < deadline:
            time.sleep(0.05)
        published = list_published(self.context.run_dir / "checkpoints")
        if len(published) < 2:
            return None
        file = chance.choice(sorted(published[0].path.glob("*.safetensors")))
        with file.open("r+b") as data:
            place = chance.randrange(file.stat().st_size)
            data.seek(place)
            byte = data.read(1)[0] ^ 1 << chance.randrange(8)
            data.seek(place)
            data.write(bytes([byte]))
        return published[0].step

    def flip_parameter(self, chance: random.Random) -> None:
        """Change the lowest bits of one element of one parameter, in this rank's memory."""
        parts = [as_place(parameter.detach()).local for parameter in self.context.parameters.values()]
        part = chance.choice([part for part in parts if part.numel()]).view(-1).view(torch.uint8)
        part[chance.randrange(len(part) // 4) * 4] ^= 1 << chance.randrange(8)


def break_process(kind: str) -> None:
    """End this process, suspend it or keep it busy for ever, as faults of the kind do."""
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            while True:
                time.sleep(0.01)
        case "lock":
            # Tries some 2**64 ways to match, in C, and holds Python's lock all the while.
            re.match(r"(a+)+$", "a" * 64 + "b")
        case other:
            raise AssertionError(other)
