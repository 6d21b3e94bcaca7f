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

import torch
from torch import nn

from phalanx.config.schema import CallbackChoice, Run
from phalanx.errors import PhalanxError
from phalanx.extensions import Registry, make_extension
from phalanx.printable import write_stderr
from phalanx.training.metrics import StepMetrics
from phalanx.training.stopping import write_traceback


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

    def on_start(self, context: TrainingContext) -> None:
        """See `Callback.on_start`."""
        self._call_each("on_start", lambda callback: callback.on_start(context))

    def on_step_begin(self, step: int) -> None:
        """See `Callback.on_step_begin`."""
        self._call_each(f"on_step_begin of step {step}", lambda callback: callback.on_step_begin(step))

    def on_step_end(self, metrics: StepMetrics) -> None:
        """See `Callback.on_step_end`."""
        self._call_each(f"on_step_end of step {metrics.step}", lambda callback: callback.on_step_end(metrics))

    def needs_finished(self, step: int) -> bool:
        """Return whether any callback needs `step` finished before the next one is launched."""
        needed: list[bool] = []
        self._call_each("needs_finished", lambda callback: needed.append(callback.needs_finished(step)))
        return any(needed)

    def on_checkpoint(self, step: int, path: Path) -> None:
        """See `Callback.on_checkpoint`."""
        self._call_each(f"on_checkpoint of step {step}", lambda callback: callback.on_checkpoint(step, path))

    def on_end(self, error: BaseException | None) -> None:
        """End every callback. A failure here is raised, unless training has failed already: then it is printed."""
        try:
            self._call_each("on_end", lambda callback: callback.on_end(error))
        except PhalanxError as failure:
            if error is None:
                raise
            write_stderr(f"warning: {failure}")

    def _call_each(self, moment: str, call: Callable[[Callback], object]) -> None:
        for name, callback in self._callbacks.items():
            try:
                call(callback)
            except PhalanxError as error:
                raise PhalanxError(f"callback {name}: {error}") from error
            except Exception as error:
                log = write_traceback(self._run_dir, self._rank)
                raise PhalanxError(
                    f"callback {name} failed in {moment}: {type(error).__name__}: {error}\ntraceback: {log}"
                ) from error
