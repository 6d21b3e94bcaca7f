"""The training loop: decides when to log, evaluate, save and stop. `train.start` builds what it joins."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from phalanx import __version__
from phalanx.checkpoint import CheckpointStore, RankGroup, placed_tensors, rng_state
from phalanx.config.load import dump_run
from phalanx.config.schema import Run
from phalanx.errors import CheckpointError, Interrupted, PhalanxError
from phalanx.hardware.device import HostCopy, Moment
from phalanx.layout.apply import ParallelModel
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.mesh import Ranks
from phalanx.layout.spec import ResolvedLayout
from phalanx.optimizers import LearningRateSchedule, set_learning_rate
from phalanx.train.inputs import Inputs
from phalanx.train.interrupt import DIRECTORY_GONE, StopRequest
from phalanx.train.logs import Sink, format_duration
from phalanx.train.metrics import RankTimes, StepMeter, StepMetrics
from phalanx.train.nonfinite import GradientSpikes, all_finite
from phalanx.train.profile import Probes
from phalanx.train.run_ahead import RunAhead
from phalanx.train.run_dir import RunDirectory
from phalanx.train.step import StepResult, TrainStep


@dataclass
class Parts:
    """Everything a training loop joins, built for one run on this rank."""

    run: Run
    layout: ResolvedLayout
    ranks: Ranks
    device: torch.device
    attention: AttentionChoice
    applied: ParallelModel
    step: TrainStep
    inputs: Inputs
    store: CheckpointStore
    directory: RunDirectory
    describe: Callable[[], None]
    """Writes to the run directory what says what this run is: run file, machine, data."""
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
        self.updated_step = first_step
        """The last step that changed the weights."""
        self.skipped = 0
        """Steps in a row, up to the last one, that left the weights alone."""
        self.checkpoint_waits = False
        """A checkpoint is due, and waits for a step that shows that the weights are good."""
        self.spikes = GradientSpikes()
        self.stop = StopRequest()
        self.lost: str | None = None
        """What was lost of the run directory's logs, on the first rank."""
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
        `training.on_nonfinite=stop`, after `training.max_skipped_steps` of them in a row, and where the weights are no
        numbers.
        """
        if self.step >= self.until:
            self._note(f"already trained to step {self.step}; raise training.steps to go on")
            return
        start = time.perf_counter()
        stop = self.stop
        with stop, self.parts.attention.active():
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
            if RankGroup.default().from_first(self.parts.directory.is_gone):
                self._end_without_directory()
            if self.run.checkpoint.last:
                self._save(final=True)
        if lost := RankGroup.default().from_first(lambda: self.lost):
            raise PhalanxError(f"trained to step {self.step}, but {lost}")
        self._event("end", seconds=time.perf_counter() - start)
        self._note(f"trained to step {self.step} in {format_duration(time.perf_counter() - start)}")

    def _steps_ahead(self, step: int) -> int:
        """How many steps up to `step`, just launched, may be left for the device to finish."""
        checkpoint, evaluation = self.run.checkpoint.every, self.run.evaluation.every
        looked_at = step == self.until or _due(step, checkpoint) or _due(step, evaluation) or self.probes.look_at(step)
        return int(self.run_ahead.ahead and not looked_at and not self.checkpoint_waits)

    def _launch(self, step: int, signal_number: int) -> _Running:
        rate = LearningRateSchedule(self.run.optimizer, self.run.training.steps).rate(step)
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
        result = StepResult.from_figures(self.run_ahead.read(running.found))
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
        self._note_spike(metrics)
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
        self.checkpoint_waits |= _due(step, self.run.checkpoint.every)
        if self.checkpoint_waits and not self.skipped:
            self.stall = self._save()
            self.checkpoint_waits = False
        if _due(step, self.run.evaluation.every):
            self._evaluate(step)

    def _check_finite(self, metrics: StepMetrics) -> None:
        """Count steps without an update, and end the run where they are too many or may not be at all."""
        if metrics.updated:
            self.updated_step, self.skipped = metrics.step, 0
            return
        self.skipped += 1
        # Gradients that overflow now and then are how a dynamic loss scale is found; no scale mends a loss.
        overflow = self.train_step.scaler is not None and math.isfinite(metrics.loss)
        most = self.run.training.max_skipped_steps
        found = f"step {metrics.step}: loss={metrics.loss} gradient norm={metrics.grad_norm} is not finite; "
        if self.run.training.on_nonfinite == "stop" and not overflow:
            self._log(metrics)
            self._give_up(f"{found}stopped before the update", "or with training.on_nonfinite=skip")
        if self.skipped >= most:
            self._log(metrics)
            self._give_up(
                f"{found}{self.skipped} steps in a row left the weights alone", f"training.max_skipped_steps={most}"
            )

    def _give_up(self, found: str, otherwise: str) -> NoReturn:
        """End a run whose weights give no finite step, and see to it that it resumes from weights that did.

        found: what was wrong with the step. otherwise: what else may be changed than the learning rate. Raises
        PhalanxError.
        """
        words = self._set_suspects_aside()
        text = f"{found}. {words}. Resume with a lower optimizer.lr, {otherwise}"
        self._event("warning", text=text)
        raise PhalanxError(text)

    def _set_suspects_aside(self) -> str:
        """Take checkpoints of the present weights out of the listing; returns in words where the run resumes.

        Whatever the learning rate, they would give the same step again. They stay where none before them is left.
        """
        store = self.parts.store
        kept = store.list()
        suspects = [one for one in kept if one.step >= self.updated_step]
        before = next((one for one in kept if one.step < self.updated_step), None)
        every = self.run.checkpoint.every
        if suspects and before is None and every is not None and suspects[-1].step > every:
            return (
                f"Only the checkpoint of step {suspects[-1].step} is left, with these very weights "
                f"(checkpoint.keep_last={self.run.checkpoint.keep_last}): begin anew with another --run-dir"
            )
        names = store.set_aside(suspects)
        aside = f"{', '.join(names)} holds these very weights and was set aside. " if names else ""
        return f"{aside}The run resumes from step {before.step if before else 0}"

    def _note_spike(self, metrics: StepMetrics) -> None:
        median = self.spikes.median_exceeded(metrics.grad_norm)
        if median is None:
            return
        self._event("gradient_spike", grad_norm=metrics.grad_norm, median=median)
        self._note(
            f"warning: step {metrics.step}: gradient norm {metrics.grad_norm:.3g} is {metrics.grad_norm / median:,.0f} "
            f"times the median of the steps before ({median:.3g})"
        )

    def _save(self, *, final: bool = False) -> float:
        """Checkpoint the present step; returns the seconds training stood still for it."""
        if self.saved_step == self.step:
            self.parts.store.wait()
            return 0.0
        start = time.perf_counter()
        applied = self.parts.applied
        tensors = placed_tensors(applied.parameters, applied.splits, self.train_step.optimizer)
        if not all_finite(tensors.values(), self.parts.device):
            self._give_up(
                f"step {self.step}: weights or optimizer state are not finite; they are not saved",
                "or with optimizer.grad_clip",
            )
        try:
            RankGroup.default().on_first(self._sync_metrics)
            handle = self.parts.store.save(
                self.step,
                tensors,
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
        if signal_number == DIRECTORY_GONE:
            self._end_without_directory()
        self._save(final=True)
        raise Interrupted(
            f"stopped by signal {signal_number} after step {self.step}, checkpoint written; "
            f"the same command goes on from there",
            signal_number,
        )

    def _end_without_directory(self) -> NoReturn:
        """Keep the present step, where the run directory can be made again, and end. Raises PhalanxError."""
        directory = self.parts.directory
        lost = f"run directory {directory.path} was removed, renamed or unmounted before the end of step {self.step}"
        if not RankGroup.default().from_first(directory.make_again):
            raise PhalanxError(f"{lost}; nothing more can be kept there, so training ends")
        RankGroup.default().on_first(self.parts.describe)
        self.saved_step = -1
        self._event("warning", text=lost)
        self._save(final=True)
        raise PhalanxError(
            f"{lost}, with its metrics and checkpoints. It was made again with the run file and a checkpoint of step "
            f"{self.step}; the same command resumes from there"
        )

    def _watch_directory(self) -> None:
        """Say at once when the run directory is gone, and ask all ranks to stop."""
        directory = self.parts.directory
        if self.stop.signal_number != DIRECTORY_GONE and directory.is_gone():
            self._note(
                f"warning: run directory {directory.path} is gone: removed, renamed or unmounted; training stops"
            )
            self.stop.signal_number = DIRECTORY_GONE
            return
        for log in (directory.metrics, directory.events):
            if log.removed:
                log.removed = False
                self.lost = f"{log.path} was removed while training; its lines before step {self.step} are lost"
                self._note(f"warning: {self.lost}")
                self._event("warning", text=self.lost)
                # Whoever removed it may have removed the other files as well.
                self.parts.describe()

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
        self._watch_directory()

    def _event(self, kind: str, **fields: Any) -> None:
        if self.parts.ranks.first:
            self.parts.directory.event(kind, self.step, **fields)

    def _note(self, text: str) -> None:
        for sink in self.parts.sinks:
            sink.note(text)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
