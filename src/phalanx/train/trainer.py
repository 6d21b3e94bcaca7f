"""The training loop: decides when to log, evaluate, save and stop. `train.start` builds what it joins."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from phalanx import __version__
from phalanx.cluster.device import HostCopy, Moment
from phalanx.config.load import dump_run
from phalanx.config.schema import Run
from phalanx.errors import CheckpointError, Interrupted, PhalanxError
from phalanx.layout.apply import Applied
from phalanx.layout.attention import AttentionChoice
from phalanx.layout.mesh import Ranks
from phalanx.layout.spec import ResolvedLayout
from phalanx.train.checkpoint import CheckpointStore, placed_tensors, rng_state
from phalanx.train.checkpoint.rank_group import RankGroup
from phalanx.train.inputs import Inputs
from phalanx.train.interrupt import StopRequest
from phalanx.train.logs import Sink, format_duration
from phalanx.train.metrics import RankTimes, StepMeter, StepMetrics
from phalanx.train.optimizer import set_learning_rate
from phalanx.train.profile import Probes
from phalanx.train.run_ahead import RunAhead
from phalanx.train.run_dir import RunDirectory
from phalanx.train.schedule import learning_rate
from phalanx.train.step import StepResult, TrainStep


@dataclass
class Parts:
    """Everything a training loop joins, built for one run on this rank."""

    run: Run
    layout: ResolvedLayout
    ranks: Ranks
    device: torch.device
    attention: AttentionChoice
    applied: Applied
    step: TrainStep
    inputs: Inputs
    store: CheckpointStore
    directory: RunDirectory
    meter: StepMeter
    sinks: list[Sink]


@dataclass(frozen=True)
class _Running:
    """A step that the device may still compute."""

    step: int
    lr: float
    found: HostCopy
    """Loss and gradient norm, and what ranks agree on beside."""
    began: Moment
    data_wait: float
    """Seconds."""
    stall: float
    """Seconds of a checkpoint before."""


class Trainer:
    """Trains from `first_step` (the last step already done) to step `until`, by default the run's last one."""

    def __init__(self, parts: Parts, first_step: int, until: int | None = None) -> None:
        self.parts = parts
        self.run = parts.run
        self.until = parts.run.training.steps if until is None else min(until, parts.run.training.steps)
        self.step = first_step
        self.saved_step = first_step if first_step else -1
        self.stall = 0.0
        self.run_ahead = RunAhead(parts.device, allowed=parts.device.type != "cpu")
        self.running: deque[_Running] = deque()
        self.last: _Running | None = None
        """The step whose figures were read last, as long as the one behind it was launched before."""
        self.seconds = math.inf
        """Of the last step that was read; before that no step is known to be short."""
        self.unlogged: tuple[StepMetrics, Callable[[], RankTimes]] | None = None
        self.probes = Probes(parts.run.training, parts.directory.path, parts.device, parts.ranks.rank)
        self.train_step = parts.step
        self.told_of_peak = False

    def train(self) -> None:
        """Run the remaining steps; always leaves a checkpoint of the last step done, unless a step failed.

        Raises Interrupted after a first SIGINT or SIGTERM, and PhalanxError on a non-finite step under
        `training.on_nonfinite=stop`.
        """
        if self.step >= self.until:
            self._note(f"already trained to step {self.step}; raise training.steps to go on")
            return
        start = time.perf_counter()
        with StopRequest() as stop, self.parts.attention.active():
            for step in range(self.step + 1, self.until + 1):
                self.running.append(self._launch(step, stop.signal_number))
                while len(self.running) > self._steps_ahead(step):
                    self._finish(self.running.popleft())
                signal_number = stop.agreed(self.parts.device) if not self.running else self.run_ahead.signal_number
                if signal_number:
                    self._finish_all()
                    self._stop(signal_number)
                if not self.running and step < self.until:
                    self._keep_and_evaluate(step)
            self._evaluate(self.step)
            if self.run.checkpoint.last:
                self._save(final=True)
        self._event("end", seconds=time.perf_counter() - start)
        self._note(f"trained to step {self.step} in {format_duration(time.perf_counter() - start)}")

    def _steps_ahead(self, step: int) -> int:
        """How many steps up to `step`, just launched, may be left for the device to finish."""
        checkpoint, evaluation = self.run.checkpoint.every, self.run.evaluation.every
        looked_at = step == self.until or _due(step, checkpoint) or _due(step, evaluation) or self.probes.look_at(step)
        return int(self.run_ahead.ahead and not looked_at)

    def _launch(self, step: int, signal_number: int) -> _Running:
        rate = learning_rate(self.run.optimizer, step, self.run.training.steps)
        set_learning_rate(self.train_step.optimizer, rate)
        self.probes.before(step)
        began, asked = Moment(self.parts.device), time.perf_counter()
        batch = self.parts.inputs.stream.next()
        wait = time.perf_counter() - asked
        found = self.run_ahead.told(self.train_step.enqueue(step, batch), signal_number, self.seconds)
        stall, self.stall = self.stall, 0.0
        return _Running(step, rate, found, began, wait, stall)

    def _finish_all(self) -> None:
        while self.running:
            self._finish(self.running.popleft())

    def _finish(self, running: _Running) -> None:
        """Wait for a step and do what follows from it."""
        result = StepResult.of(self.run_ahead.read(running.found))
        # The device goes from step to step, whenever the host comes to read; one launched behind nothing begins at once.
        before = running.began if self.last is None else self.last.found.made
        self.seconds = running.found.made.seconds_since(before) + running.stall
        self.last = running if self.running else None
        for path in self.probes.after(running.step):
            self._note(f"wrote {path}")
        peak = self.parts.meter.peaks.measured
        metrics = self.parts.meter.measure(
            step=running.step,
            result=result,
            lr=running.lr,
            seconds=self.seconds,
            data_wait=running.data_wait,
            checkpoint_stall=running.stall,
        )
        self._tell_raised_peak(peak)
        self.parts.inputs.verification.raise_if_failed()
        self._log_complete()
        self._check_finite(metrics)
        self.step = running.step
        times = self.parts.inputs.after(running.step)
        if times is None:
            self._log(metrics)
        else:
            self.unlogged = (metrics, times)
        if not self.running:
            # The line is on disk before a checkpoint of the same step can be: a resumed run then has no gap.
            self._log_complete()

    def _tell_raised_peak(self, before: float | None) -> None:
        """Say once that the peak measured at the start was too low, where a step has raised it above `before`."""
        raised = self.parts.meter.peaks.measured
        if before is not None and raised is not None and raised > before and not self.told_of_peak:
            self.told_of_peak = True
            self._note(
                f"the matmul rate measured at the start, {before:.3g} TFLOP/s, was too low (was the machine busy?): a step "
                f"reached {raised:.3g}; MFU of measured now counts from the fastest step"
            )

    def _log_complete(self) -> None:
        """Log the step whose times on other ranks were still on their way."""
        if self.unlogged is not None:
            metrics, times = self.unlogged
            self.unlogged = None
            self._log(replace(metrics, ranks=times()))

    def _keep_and_evaluate(self, step: int) -> None:
        if _due(step, self.run.checkpoint.every):
            self.stall = self._save()
        if _due(step, self.run.evaluation.every):
            self._evaluate(step)

    def _check_finite(self, metrics: StepMetrics) -> None:
        if metrics.updated or self.run.training.on_nonfinite == "skip":
            return
        # Gradients that overflow now and then are how a dynamic loss scale is found; no scale mends a loss.
        if self.train_step.scaler is not None and math.isfinite(metrics.loss):
            return
        self._log(metrics)
        raise PhalanxError(
            f"step {metrics.step}: loss={metrics.loss} gradient norm={metrics.grad_norm} is not finite; stopped before "
            f"the update. Resume with a lower optimizer.lr, or with training.on_nonfinite=skip"
        )

    def _save(self, *, final: bool = False) -> float:
        """Checkpoint the present step; returns the seconds training stood still for it."""
        if self.saved_step == self.step:
            self.parts.store.wait()
            return 0.0
        start = time.perf_counter()
        try:
            RankGroup.default().on_first(self._sync_metrics)
            handle = self.parts.store.save(
                self.step,
                placed_tensors(self.parts.applied.parameters, self.parts.applied.splits, self.train_step.optimizer),
                self._state(),
                asynchronous=self.run.checkpoint.asynchronous and not final,
            )
        except CheckpointError as error:
            # Hours of training are worth more than one checkpoint: only the last one must succeed.
            if final:
                raise
            self._note(f"warning: {error}")
            self._event("warning", text=str(error))
            return time.perf_counter() - start
        self.saved_step = self.step
        stall = time.perf_counter() - start
        self._event("checkpoint", path=str(handle.path), stall_seconds=round(stall, 4))
        if final:
            self._note(f"checkpoint {handle.path}")
        return stall

    def _sync_metrics(self) -> None:
        """Have the metrics so far on disk. Raises CheckpointError: no checkpoint may be newer than they are."""
        log = self.parts.directory.metrics
        try:
            log.sync()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint of step {self.step} was not saved: {log.path} cannot be written ({error.strerror})"
            ) from error

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "data_fingerprint": self.parts.inputs.stream.fingerprint,
            "scaler": None if self.train_step.scaler is None else self.train_step.scaler.state_dict(),
            "rng": rng_state(),
            "run": dump_run(self.run),
            **self.parts.inputs.saved,
            **self.parts.inputs.state(),
            "phalanx": __version__,
            "torch": str(torch.__version__),
        }

    def _evaluate(self, step: int) -> None:
        for finding in self.parts.inputs.evaluator.evaluate(self.train_step.executor):
            self._event(finding.kind, **finding.fields)
            self._note(f"step {step}  {finding.words}" if finding.kind == "evaluation" else finding.words)

    def _stop(self, signal_number: int) -> None:
        self._save(final=True)
        raise Interrupted(
            f"stopped by signal {signal_number} after step {self.step}, checkpoint written; "
            f"the same command goes on from there",
            signal_number,
        )

    def _log(self, metrics: StepMetrics) -> None:
        if not self.parts.ranks.first:
            return
        log = self.parts.directory.metrics
        before = log.failure
        log.append(metrics.as_dict())
        if log.failure is not None and before is None:
            reason = log.failure.strerror
            self._note(f"warning: {log.path} cannot be written ({reason}); its lines wait in memory, training goes on")
        for sink in self.parts.sinks:
            sink.step(metrics)

    def _event(self, kind: str, **fields: Any) -> None:
        if self.parts.ranks.first:
            self.parts.directory.event(kind, self.step, **fields)

    def _note(self, text: str) -> None:
        for sink in self.parts.sinks:
            sink.note(text)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
