"""Callbacks: what a run does beside training, at fixed moments of it, on every rank.

A run file names them in `training.callbacks`. A callback is a subclass of `Callback`, given to `CALLBACKS.register` or
offered by an installed package:

    [project.entry-points."phalanx.callbacks"]
    gradient_histogram = "my_package.histogram:GradientHistogram"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from phalanx.config.schema import CallbackChoice, Run, StepWindow, Training
from phalanx.errors import PhalanxError
from phalanx.extensions import Registry, make_extension
from phalanx.printable import write_stderr
from phalanx.torch_compat import common as compat
from phalanx.training.metrics import StepMetrics
from phalanx.training.stopping import write_traceback

T = TypeVar("T")


@dataclass(frozen=True)
class TrainingContext:
    """What a callback may look at of the run that it belongs to."""

    run: Run
    run_dir: Path
    rank: int
    world_size: int
    device: torch.device
    parameters: Mapping[str, nn.Parameter]
    """Main parameters of this rank by their names in the whole model; DTensors where they are sharded."""
    optimizer: torch.optim.Optimizer
    first_step: int
    """The first step that this process trains, from 1."""
    last_step: int


class Callback:
    """What a run does beside training: a subclass overrides the moments it cares about.

    The constructor only keeps its options: `phalanx config check` calls it too, to see whether it takes those given.
    Every rank makes its own instance, with the options of the run file as arguments by name, and calls every method at the
    same points, so that a callback may communicate between ranks. What only one rank should do, such as writing a file, is
    for the callback to restrict to `context.rank == 0`. An exception ends the run, and the message names the callback.
    """

    def on_start(self, context: TrainingContext) -> None:
        """Called once, before the first step, with the model built and a checkpoint loaded."""

    def on_step_begin(self, step: int) -> None:
        """Called before optimizer step `step` is launched."""

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Called with the metrics of each step; the device may have begun the next one, unless `needs_finished` says no."""

    def needs_finished(self, step: int) -> bool:
        """Return whether `step` has to be finished, and reported to `on_step_end`, before the next one is launched.

        For a callback that reads parameters or times the device. False by default: short steps then run asynchronously. All
        ranks must give the same answer.
        """
        return False

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Called when the state of `step` is safe from later steps; a checkpoint in the background may still be written."""

    def on_end(self, error: BaseException | None) -> None:
        """Called once when training ends: after the last step and checkpoint, or with the exception that ends it."""


CALLBACKS: Registry[type[Callback]] = Registry(
    "phalanx.callbacks",
    built_in={"chaos": "phalanx.chaos.inject:ChaosCallback"},
    accepts=lambda item: isinstance(item, type) and issubclass(item, Callback),
    expected="a subclass of phalanx.training.callbacks.Callback",
)
"""Every callback that `training.callbacks` may name."""


def build_callbacks(choices: Sequence[CallbackChoice]) -> dict[str, Callback]:
    """Return the callbacks that a run file asks for, by names for messages.

    Raises ConfigError for a name that stands for none and for options that a callback does not take.
    """
    built: dict[str, Callback] = {}
    for number, choice in enumerate(choices):
        field = f"training.callbacks.{number}"
        kind = CALLBACKS.get(choice.name, f"{field}.name")
        # The same callback may be asked for twice, with other options.
        name = f"{choice.name} ({field})" if choice.name in built else choice.name
        refusal = f"{field}.options={choice.options}: callback {choice.name} cannot be made with them"
        built[name] = make_extension(partial(kind, **choice.options), refusal)
    return built


class CallbackList:
    """Calls callbacks in order, and says which one failed."""

    def __init__(self, callbacks: Mapping[str, Callback], run_dir: Path, rank: int) -> None:
        self._callbacks = dict(callbacks)
        self._run_dir = run_dir
        self._rank = rank

    def call_each(self, moment: str, call: Callable[[Callback], T]) -> list[T]:
        """Return what `call` returns for each callback. moment: the method that it calls, for messages.

        Raises PhalanxError naming the callback that failed.
        """
        results: list[T] = []
        for name, callback in self._callbacks.items():
            try:
                results.append(call(callback))
            except PhalanxError as error:
                raise PhalanxError(f"callback {name}: {error}") from error
            # A foreign callback may raise anything, and the user has to hear whose it is.
            except Exception as error:
                log = write_traceback(self._run_dir, self._rank)
                raise PhalanxError(
                    f"callback {name} failed in {moment}: {type(error).__name__}: {error}\ntraceback: {log}"
                ) from error
        return results

    def end_each(self, error: BaseException | None) -> None:
        """End every callback. A failure here is raised, unless training has failed already: then it is printed."""
        try:
            self.call_each("on_end", lambda callback: callback.on_end(error))
        except PhalanxError as failure:
            if error is None:
                raise
            write_stderr(f"warning: {failure}")


class WindowRecorder(Callback):
    """Records a window of steps on every rank, and writes the record to the run directory."""

    kind: str
    """Folder of the run directory that the record goes to."""
    suffix: str

    def __init__(self, window: StepWindow, note: Callable[[str], None]) -> None:
        self.window = window
        self.note = note
        """Prints a line, on the first rank."""

    def start_recording(self) -> None:
        """Begin to record."""
        raise NotImplementedError

    def write_record(self, path: Path) -> None:
        """Stop recording and write what was recorded."""
        raise NotImplementedError

    def on_start(self, context: TrainingContext) -> None:
        """Note where the record goes."""
        self.device = context.device
        self.path = (
            context.run_dir
            / self.kind
            / f"steps-{self.window.first}-{self.window.last}-rank-{context.rank}.{self.suffix}"
        )
        # A run may begin inside the window, or end before it.
        self.recording = False

    def needs_finished(self, step: int) -> bool:
        """Return whether `step` borders on the window or lies in it, so that the record is of these steps alone."""
        return self.window.first - 1 <= step <= self.window.last

    def on_step_begin(self, step: int) -> None:
        """Begin to record at the window's first step."""
        if step == self.window.first:
            self.start_recording()
            self.recording = True

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Write the record after the window's last step."""
        # A run that resumes inside the window has nothing to write.
        if self.recording and metrics.step == self.window.last:
            self.recording = False
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.write_record(self.path)
            self.note(f"wrote {self.path}")


class ProfilerTrace(WindowRecorder):
    """Writes a Chrome trace of the profiler (`training.profile`)."""

    kind, suffix = "profile", "json"

    def start_recording(self) -> None:
        """Start the profiler, for the host and for this rank's device."""
        activities = [ProfilerActivity.CPU]
        if self.device.type != "cpu":
            # ROCm's activity goes by the name of CUDA too.
            activities.append(ProfilerActivity.XPU if self.device.type == "xpu" else ProfilerActivity.CUDA)
        # Shapes tell apart matmuls of the same kernel; stacks would slow the steps that are measured.
        self._profiler = profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def write_record(self, path: Path) -> None:
        """Stop the profiler and write its trace."""
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(path))


class MemoryHistory(WindowRecorder):
    """Writes the allocator's history, in the format of PyTorch's memory viewer (`training.memory_snapshot`)."""

    kind, suffix = "memory", "pickle"

    def start_recording(self) -> None:
        """Have the allocator record every allocation."""
        compat.record_memory_history(self.device)

    def write_record(self, path: Path) -> None:
        """Write what the allocator recorded."""
        compat.dump_memory_history(self.device, path)


def build_recorders(training: Training, device: torch.device, note: Callable[[str], None]) -> dict[str, Callback]:
    """Return the built-in callbacks that the run file asks for, by names for messages. note: prints a line."""
    found: dict[str, Callback] = {}
    if training.profile is not None:
        found["training.profile"] = ProfilerTrace(training.profile, note)
    # Only accelerators have an allocator that keeps a history.
    if training.memory_snapshot is not None and device.type != "cpu":
        found["training.memory_snapshot"] = MemoryHistory(training.memory_snapshot, note)
    return found
