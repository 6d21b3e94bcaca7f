"""Faults in ranks of a real run, from inside: a callback that the run file names, offered as a package offers one.

Which rank, in which step and how is said in the callback's options. A fault happens once: a marker file keeps it from
happening again after a restart, unless it is to.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from phalanx.chaos.inject import break_process
from phalanx.layout.layout_model import Stage
from phalanx.layout.place import as_place
from phalanx.training.callbacks import Callback, TrainingContext
from phalanx.training.metrics import StepMetrics

CHANGES = {"open", "os.mkdir", "os.rename"}
"""What happens to files as a checkpoint is written."""
ELSEWHERE = {"save", "slow save", "restore", "flip", "lost"}
"""Kinds that do not happen once before a step."""


class FaultCallback(Callback):
    """Does `kind` to rank `rank` (-1: a random one) before step `step`; see `happen`.

    marker: file that says that it has happened; empty for a fault that happens each time. seconds: of a slow rank, in every
    step from `step` on, or of each rename in a slow checkpoint. samples: what memory is enough for. passes: of a stage, that
    find memory all the same. seed: chooses the rank where it is -1, and the place in a checkpoint. place: of the machine,
    whose rank it is in place of `rank`, whatever that is called.
    """

    def __init__(
        self,
        kind: str,
        marker: str = "",
        rank: int = 1,
        step: int = 7,
        seconds: float = 0.0,
        seed: int = 0,
        samples: int = 0,
        place: int = -1,
        passes: int = 0,
    ) -> None:
        self.passes = passes
        self.place = place
        self.now, self.samples = 0, samples
        self.kind, self.marker, self.rank, self.step, self.seconds = kind, marker, rank, step, seconds
        self.random = random.Random(seed)
        self.started = False
        if kind == "restore" and os.environ["RANK"] == str(rank) and self.may_happen():
            self.die_in_restore()

    def on_start(self, context: TrainingContext) -> None:
        """Choose what was left to chance; all ranks choose alike."""
        self.started = True
        if self.rank < 0:
            self.rank = self.random.randrange(context.world_size)
        self.mine = context.rank == self.rank if self.place < 0 else os.environ["LOCAL_RANK"] == str(self.place)
        self.parameters = context.parameters
        if self.kind == "full" and self.mine:
            register_module_forward_pre_hook(self.refuse_memory)
        if self.kind == "slow save" and self.mine:
            self.slow_checkpoints(context.run_dir / "checkpoints")
        if self.kind == "save" and self.mine and self.may_happen():
            self.die_in_checkpoint(context.run_dir / "checkpoints", self.random.randrange(12))

    def may_happen(self) -> bool:
        """Whether it has not happened yet."""
        return not self.marker or not Path(self.marker).exists()

    def mark(self) -> None:
        if self.marker:
            Path(self.marker).write_text(f"{time.time()}")

    def die_in_checkpoint(self, folder: Path, change: int) -> None:
        """Kill this process before so many more changes to the folder of checkpoints."""
        left = [change]

        def before_change(event: str, arguments: tuple[Any, ...]) -> None:
            if event in CHANGES and str(folder) in str(arguments[0]):
                if left[0] == 0:
                    self.mark()
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

        sys.addaudithook(before_change)

    def die_in_restore(self) -> None:
        """Kill this process as it opens tensors of a checkpoint to begin from."""

        def before_open(event: str, arguments: tuple[Any, ...]) -> None:
            # Later they are opened to be written, and to be read back.
            if event == "open" and not self.started and str(arguments[0]).endswith(".safetensors"):
                self.mark()
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(before_open)

    def slow_checkpoints(self, folder: Path) -> None:
        """Have each rename in the folder of checkpoints take `seconds`."""

        def before_rename(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "os.rename" and str(folder) in str(arguments[0]):
                time.sleep(self.seconds)

        sys.addaudithook(before_rename)

    def on_step_begin(self, step: int) -> None:
        """Have the fault happen, if it is time."""
        self.now = step
        if self.kind == "full":
            return
        if self.kind == "slow" and self.mine and step >= self.step:
            time.sleep(self.seconds)
        elif self.kind == "lost" and self.mine and step >= self.step:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind not in ELSEWHERE and self.mine and step == self.step and self.may_happen():
            self.mark()
            self.happen()

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Flip a bit after the update of a step, if it is time."""
        if self.kind == "flip" and self.mine and metrics.step == self.step and self.may_happen():
            self.mark()
            self.flip_bit()

    def refuse_memory(self, module: torch.nn.Module, inputs: tuple[object, ...]) -> None:
        """Run out of memory in a forward pass of `step` or later, as a device does, with more than `samples` samples."""
        # Not what a planner traces.
        tensors = [x for x in inputs if isinstance(x, torch.Tensor) and x.dim() > 1 and x.device.type != "meta"]
        if self.now >= self.step and module.training and tensors and len(tensors[0]) > self.samples:
            self.passes -= isinstance(module, Stage)
            if self.passes >= 0:
                return
            raise torch.OutOfMemoryError(f"out of memory. Tried to allocate {len(tensors[0])} samples")

    def flip_bit(self) -> None:
        """Change one bit of one parameter in this rank's memory, low in its mantissa."""
        parts = [as_place(parameter.detach()).local for parameter in self.parameters.values()]
        bits = self.random.choice([part for part in parts if part.numel()]).view(-1).view(torch.int32)
        bits[self.random.randrange(len(bits))] ^= 1 << self.random.randrange(8)

    def spoil_activation(self) -> None:
        """Have the next module of this rank that gives activations give one that is no number."""

        def spoil(module: torch.nn.Module, inputs: object, output: object) -> torch.Tensor | None:
            if not isinstance(output, torch.Tensor) or output.dim() < 3 or not output.is_floating_point():
                return None
            hook.remove()
            wrong = output.clone()
            wrong[0, 0, 0] = torch.nan
            return wrong

        hook = register_module_forward_hook(spoil)

    def happen(self) -> None:
        """Do it."""
        match self.kind:
            case "mark":
                pass
            case "raise":
                raise ValueError("made to fail")
            case "memory":
                torch.empty(1 << 50)
            case "activation":
                self.spoil_activation()
            case "spin":
                break_process("hang")
            case other:
                break_process(other)


def offer_callback(folder: Path) -> Path:
    """Write the description of a package that offers tests' callbacks; processes with `folder` on their path find it."""
    described = folder / "fault_injection-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: fault-injection\nVersion: 1.0\n")
    offered = "fault = fault_injection:FaultCallback\npoison = poisoned_batches:Poison\nflips = bit_flips:BitFlips\n"
    (described / "entry_points.txt").write_text(f"[phalanx.callbacks]\n{offered}")
    return folder


def fault_words(callback: str = "fault", **options: Any) -> str:
    """Return the override that puts a callback of tests into a run."""
    chosen = ", ".join(f"{name}: {value}" for name, value in options.items())
    return f"training.callbacks=[{{name: {callback}, options: {{{chosen}}}}}]"
