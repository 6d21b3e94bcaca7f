"""The training loop: steps, their observations, checkpoints and evaluations, and stopping in good order."""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.checkpoint import CheckpointStore, MemoryCopies, RankGroup, SaveHandle
from phalanx.checkpoint.folders import list_published
from phalanx.data.batch_stream import Batch
from phalanx.errors import CheckpointError, DataError, Interrupted, PhalanxError
from phalanx.hardware.device import HostCopy, Moment
from phalanx.hardware.reliability import CHECKPOINT_GB_S
from phalanx.launch.heartbeat import SILENT, Heartbeat
from phalanx.launch.wall_time import granted_grace, granted_seconds
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.mesh import Mesh, Ranks
from phalanx.layout.spec import ResolvedLayout
from phalanx.object_store import StoreUnavailable
from phalanx.optimizers import LearningRateSchedule, set_learning_rate
from phalanx.report.run_log import EVALUATED_EVENT, LESS_MEMORY_EVENT, SAVE_EVENT
from phalanx.training.callbacks import CallbackList, TrainingContext
from phalanx.training.checkpointing import Restored, collect_state, load_newest
from phalanx.training.inputs import Inputs, ScheduledEvaluator, TrainableModel
from phalanx.training.logs import RunLog, format_clock
from phalanx.training.metrics import RankTimes, StepMeter, StepMetrics
from phalanx.training.run_dir import RunDirectory, measured_save_seconds
from phalanx.training.safeguards.checkpoint_interval import CheckpointInterval
from phalanx.training.safeguards.dead_experts import DeadExperts
from phalanx.training.safeguards.divergence import Divergence, DivergenceGuard, all_finite
from phalanx.training.safeguards.memory_limit import less_memory, lighter_layout, note_out_of_memory
from phalanx.training.safeguards.memory_probe import MemoryProbe
from phalanx.training.safeguards.step_replay import StepReplay
from phalanx.training.safeguards.straggler_log import StragglerLog
from phalanx.training.safeguards.time_limit import GraceCheck, TimeLimit
from phalanx.training.safeguards.wrong_numbers import WrongNumbers
from phalanx.training.step import StepLimits, StepResult, TrainStep
from phalanx.training.stopping import DIRECTORY_GONE, TIME_IS_UP, StopRequest


@dataclass(frozen=True)
class Placement:
    """Where a run computes: its ranks, their layout and mesh, and the device of this one."""

    ranks: Ranks
    layout: ResolvedLayout
    mesh: Mesh
    device: torch.device
    stated: ResolvedLayout
    """The layout as the run file has it: `layout` may take less memory, where that ran out before."""

    @property
    def stage_words(self) -> str:
        """The place of this rank in a pipeline, for messages; empty without one."""
        pp = self.mesh.pp
        return "" if pp.size == 1 else f" (pipeline rank {pp.rank} of {pp.size})"


@dataclass(frozen=True)
class RunParts:
    """Everything a training loop joins, built for one run on this rank."""

    model: TrainableModel
    place: Placement
    attention: AttentionChoice
    step: TrainStep
    inputs: Inputs
    store: CheckpointStore
    directory: RunDirectory
    describe: Callable[[], None]
    """Writes to the run directory what this run is: run file, machine, data. For the first rank."""
    meter: StepMeter
    log: RunLog
    callbacks: CallbackList
    heartbeat: Heartbeat = SILENT
    copies: MemoryCopies | None = None
    """Of the state, in the memory of nodes, where the run makes some."""
    probe: MemoryProbe | None = None
    """Chooses the micro-batch before the first step, where that is to be done."""


class Trainer:
    """Trains from where a run begins to step `until`, by default the run's last one."""

    def __init__(self, parts: RunParts, restored: Restored, until: int | None = None) -> None:
        self.parts = parts
        self.run = run = parts.model.run
        self.heartbeat = parts.heartbeat
        self.stragglers = StragglerLog(parts.heartbeat, parts.log)
        self.until = run.training.steps if until is None else min(until, run.training.steps)
        self.step = first_step = restored.step
        """The last step whose observations were read."""
        self.schedule = LearningRateSchedule(run.optimizer, run.training.steps)
        scales_loss = parts.step.scaler is not None
        self.guard = DivergenceGuard(run, parts.store, parts.log, scales_loss=scales_loss, first_step=first_step)
        self.wrong = WrongNumbers(
            run, parts.step.applied, self.guard, parts.log, parts.directory.path, restored.safeguards
        )
        self.replay = (
            StepReplay(parts.step, parts.log, keeps_spikes=run.safeguards.on_spike == "warn")
            if run.safeguards.replay
            else None
        )
        self.dead_experts = DeadExperts(parts.log)
        # What was copied to memory alone is still to be saved.
        self.checkpointer = Checkpointer(parts, self.guard, self.wrong, 0 if restored.from_memory else first_step)
        self.interval = CheckpointInterval(run, parts.place.ranks, parts.log, first_step)
        self.checkpoint_waits = False
        """Whether a checkpoint is due, and waits for a step that shows that the weights are good."""
        self.remote = "://" in run.data.model_dump_json()
        """Whether data may come from a store that does not answer; the same on all ranks."""
        self.stop = StopRequest()
        expected_save_s = self._expect_save()
        self.time_limit = TimeLimit(granted_seconds(), expected_save_s)
        self.grace = GraceCheck(granted_grace())
        self._warn_of_grace(expected_save_s)
        self.lost: str | None = None
        """What was lost of the run directory's logs, on the first rank."""
        self.stall = 0.0
        """Seconds that training stood still for a checkpoint since the last launch."""
        # A step is done again with the weights that it began with: the one behind it must not have begun.
        asynchronous = parts.place.device.type != "cpu" and self.replay is None
        self.asynchronous = AsynchronousSteps(parts.place.device, allowed=asynchronous)
        self.launched: deque[LaunchedStep] = deque()
        self.last: LaunchedStep | None = None
        """The step that was read last, as long as the one behind it was launched before."""
        self.seconds = math.inf
        """Of the last step that was read; before that no step is known to be short."""
        self.unlogged: tuple[StepMetrics, Callable[[], RankTimes]] | None = None
        """A step whose times on other ranks are still on their way."""
        # Where there are other ranks, these wait for exchanges that a failed pass will not come to: all begin again.
        halves = run.restart.max > 0 and "halve" in run.safeguards.on_out_of_memory
        if parts.place.ranks.world_size == 1 and halves:
            parts.step.save_memory = self._halve_microbatch

    def train(self) -> None:
        """Run the remaining steps; always leave a checkpoint of the last step done, unless a step failed.

        Raises Interrupted after a first SIGINT or SIGTERM, and PhalanxError on a non-finite step under
        `training.on_nonfinite=stop`, after `training.max_skipped_steps` of them in a row, where the weights are not finite,
        and where a callback fails.
        """
        log = self.parts.log
        if self.step >= self.until:
            log.note(f"already trained to step {self.step}; raise training.steps to go on")
            return
        start = time.perf_counter()
        # In this order: a signal that comes while callbacks end is still a request, not the end of the process.
        with self.stop, self.parts.attention.active(self.parts.place.device), self._called_back():
            self._probe_memory()
            step = self.step
            while step < self.until:
                step += 1
                self.launched.append(self._launch(step))
                # A step that is launched already computes while the host reads the one before it.
                while len(self.launched) > self._steps_ahead(step):
                    self._finish(self.launched.popleft())
                if self._is_compared(step):
                    self.wrong.compare_replicas(step)
                if self._rewind_if_wanted():
                    step = self.step
                    continue
                self._watch_time()
                self._stop_if_asked()
                if not self.launched and step < self.until:
                    self._save_and_evaluate(step)
            self._evaluate(self._evaluators())
            # Asked on the first rank for all: another host's view of a shared file system may lag behind.
            if RankGroup.default().from_first(self.parts.directory.is_gone):
                self._end_without_directory()
            if self.run.checkpoint.last:
                self.checkpointer.save(self.step, final=True)
            self.checkpointer.forget_copies()
        if lost := RankGroup.default().from_first(lambda: self.lost):
            raise PhalanxError(f"trained to step {self.step}, but {lost}")
        seconds = time.perf_counter() - start
        log.event("end", self.step, seconds=seconds)
        log.note(f"trained to step {self.step} in {format_clock(seconds)}")

    @contextmanager
    def _called_back(self) -> Iterator[None]:
        """Tell the callbacks that training starts, and how it ends."""
        parts = self.parts
        context = TrainingContext(
            run=self.run,
            run_dir=parts.directory.path,
            rank=parts.place.ranks.rank,
            world_size=parts.place.ranks.world_size,
            device=parts.place.device,
            parameters=parts.step.applied.parameters,
            optimizer=parts.step.optimizer,
            first_step=self.step + 1,
            last_step=self.until,
        )
        parts.callbacks.call_each("on_start", lambda callback: callback.on_start(context))
        try:
            yield
        except BaseException as error:
            parts.callbacks.end_each(error)
            raise
        parts.callbacks.end_each(None)

    def _launch(self, step: int) -> LaunchedStep:
        """Start a step; on an accelerator this does not wait for it."""
        # A function of the step alone: nothing of the schedule is saved, and a changed run file is obeyed.
        rate = self.schedule.rate(step)
        set_learning_rate(self.parts.step.optimizer, rate)
        self.heartbeat.enter("data", step)
        self.parts.callbacks.call_each(f"on_step_begin of step {step}", lambda callback: callback.on_step_begin(step))
        # Before the batch is asked for: a step lasts from here, waiting for data included.
        began, asked = Moment(self.parts.place.device), time.perf_counter()
        batch = self._next_batch(step)
        wait = time.perf_counter() - asked
        limits = self.wrong.limits()
        # A spike that is to be done again leaves the weights alone, whatever is to become of it.
        self.parts.step.limits = limits if self.replay is not None else self.wrong.enforced(limits)
        found = self.parts.step.enqueue(step, batch)
        observations = self.asynchronous.share(found, self.stop.signal_number, self.seconds)
        stall, self.stall = self.stall, 0.0
        return LaunchedStep(step, rate, observations, began, wait, stall, limits, batch)

    def _probe_memory(self) -> None:
        """Choose the micro-batch by a step without an update, where the run leaves it open and has not found it yet."""
        if self.parts.probe is not None:
            self.parts.probe.run(self.parts.step, self.step + 1, self._next_batch(self.step + 1), self.parts.log)
            self.parts.inputs.stream.seek(self.step + self.wrong.skipped_batches)

    def _halve_microbatch(self, layout: ResolvedLayout) -> ResolvedLayout | None:
        """Return the layout in which a step that ran out of memory is done again; None where something else comes first, or
        micro-batches cannot shrink."""
        ways, place = self.run.safeguards.on_out_of_memory, self.parts.place
        smaller = lighter_layout(self.parts.model, layout, ways, place.ranks.ranks_per_node)
        # All else takes a start: the model is built anew for it.
        if smaller is None or smaller.microbatch == layout.microbatch:
            return None
        # A later start of the run begins with it.
        note_out_of_memory(self.parts.directory.path, layout, self.parts.place.stated, smaller)
        # Steps before it may still be computed.
        step = self.step + len(self.launched) + 1
        self.parts.log.event(LESS_MEMORY_EVENT, step, **less_memory(smaller, layout))
        self.parts.log.note(
            f"step {step} ran out of memory: it is done again with {smaller.microbatch} x {smaller.accumulation} samples in "
            f"place of {layout.microbatch} x {layout.accumulation}, which changes no gradient"
        )
        return smaller

    def _next_batch(self, step: int) -> Batch:
        """Return this rank's batch of `step`; by `safeguards.on_bad_data` pass over those that some rank cannot read.

        Raises DataError for what cannot be read, and StoreUnavailable, on all ranks, where a store fails any of them.
        """
        skips = self.run.safeguards.on_bad_data == "skip"
        while True:
            batch: Batch | None = None
            lost: StoreUnavailable | None = None
            bad: DataError | None = None
            try:
                batch = self.parts.inputs.stream.next()
            except StoreUnavailable as error:
                lost = error
            except DataError as error:
                if not skips:
                    raise
                bad = error
            failed = torch.tensor([lost is not None, bad is not None], dtype=torch.uint8)
            if self.remote or skips:
                # Only then: the exchange makes the hosts wait for each other, though not the devices.
                failed = RankGroup.default().any(failed)
            any_lost, any_bad = failed.tolist()
            if any_lost:
                self._end_without_store(lost)
            if batch is not None and not any_bad:
                return batch
            samples = torch.empty(0, dtype=torch.int64) if batch is None else batch.sample_indices
            self.wrong.pass_over(step, bad, samples)
            # A stream that failed reads no further by itself.
            self.parts.inputs.stream.seek(step - 1 + self.wrong.skipped_batches)

    def _end_without_store(self, lost: StoreUnavailable | None) -> NoReturn:
        """Keep the last step and end, on all ranks. lost: what this rank met. Raises StoreUnavailable."""
        while self.launched:
            self._finish(self.launched.popleft())
        if self.step:
            self.checkpointer.save(self.step, final=True)
        reason = lost or "the store of data did not answer another rank, which says more"
        kept = ", checkpoint written; the same command goes on from there" if self.step else ""
        raise StoreUnavailable(f"{reason}; training ends after step {self.step}{kept}")

    def _steps_ahead(self, step: int) -> int:
        """Return how many steps up to `step`, just launched, may be left for the device to finish."""
        looked_at = (
            step == self.until
            or self.interval.is_due(step)
            or _is_due(step, self.run.checkpoint.memory_every)
            or bool(self._due_evaluators(step))
            or _is_due(step, self.run.safeguards.compare_replicas)
            or any(self.parts.callbacks.call_each("needs_finished", lambda callback: callback.needs_finished(step)))
        )
        return int(self.asynchronous.ahead and not looked_at and not self.checkpoint_waits)

    def _is_compared(self, step: int) -> bool:
        """Return whether replicas are compared after `step`: when it is due, and before whatever is saved."""
        if not self.wrong.compares or self.launched:
            return False
        saved = self.interval.is_due(step) or self.checkpoint_waits or step == self.until
        saved |= _is_due(step, self.run.checkpoint.memory_every)
        return saved or _is_due(step, self.run.safeguards.compare_replicas)

    def _rewind_if_wanted(self) -> bool:
        """Return to the newest checkpoint where the last step asks for it; return whether the run did.

        Raises PhalanxError where there is none but the run cannot go on, and after too many rewinds.
        """
        parts, wanted = self.parts, self.wrong.wanted
        if wanted is None:
            return False
        parts.store.wait()
        newest = parts.store.newest()
        if newest is None:
            self.wrong.wanted = None
            if wanted.vital:
                raise PhalanxError(
                    f"step {wanted.step}: {wanted.reason}. There is no checkpoint to rewind to; set a smaller "
                    f"checkpoint.every"
                )
            parts.log.note("there is no checkpoint to rewind to: the update was left out")
            return False
        self.wrong.take_rewind(wanted, newest.step)
        with self.heartbeat.during("checkpoint"):
            restored = self._return_to_newest()
        self.wrong.rewound(wanted, restored.step, restored.safeguards.recent, parts.directory.redone_seconds)
        self.heartbeat.begin(restored.step)
        return True

    def _return_to_newest(self) -> Restored:
        """Load the newest checkpoint, and make data and logs continue from there."""
        parts = self.parts
        # What the device may still compute belongs to steps that never were.
        while self.launched:
            self.asynchronous.read(self.launched.popleft().observations)
        self.unlogged, self.last, self.checkpoint_waits = None, None, False
        restored = load_newest(parts.model, parts.store, parts.step, parts.inputs)
        assert restored is not None
        self.step = self.checkpointer.saved_step = restored.step
        self.interval.begin(restored.step)
        # They are of steps that never were.
        self.checkpointer.forget_copies()
        parts.step.applied.refresh()
        parts.inputs.stream.seek(restored.step + self.wrong.skipped_batches)
        RankGroup.default().on_first(lambda: parts.directory.rewind(restored.step))
        return restored

    def _finish(self, launched: LaunchedStep) -> None:
        """Wait for a step, and measure, check and log it."""
        self.heartbeat.enter("collective")
        figures = self.asynchronous.read(launched.observations)
        if self.replay is not None:
            figures = self.replay.resolve(launched.step, launched.batch, launched.limits, figures)
        result = StepResult.from_figures(figures, self.wrong.enforced(launched.limits))
        # The device goes from step to step, whenever the host comes to read; one launched behind nothing begins at once.
        before = launched.launched if self.last is None else self.last.observations.made
        self.seconds = launched.observations.made.seconds_since(before) + launched.stall
        self.last = launched if self.launched else None
        self.interval.note_step(self.seconds - launched.stall)
        metrics = self.parts.meter.measure(
            step=launched.step,
            result=result,
            lr=launched.lr,
            seconds=self.seconds,
            data_wait=launched.data_wait,
            checkpoint_stall=launched.stall,
        )
        # Data are verified in the background: an altered file ends the run at the first step read after it was found.
        self.parts.inputs.verification.raise_if_failed()
        self._log_unlogged()
        self.wrong.judge_step(metrics, launched.limits, launched.batch.sample_indices)
        divergence = self.guard.judge_step(metrics)
        if divergence is not None:
            self._log(metrics)
            self.checkpointer.forget_copies()
            self.guard.give_up(divergence, self.step)
        self.step = launched.step
        self.heartbeat.finish_step(self.step)
        self.dead_experts.watch(metrics.step, metrics.experts)
        times = self.parts.inputs.after(launched.step)
        if times is None:
            self._log(metrics)
        else:
            self.unlogged = (metrics, times)
        if not self.launched:
            # The line is on disk before a checkpoint of the same step can be: a resumed run then has no gap.
            self._log_unlogged()

    def _log_unlogged(self) -> None:
        """Log the step whose times on other ranks were still on their way."""
        if self.unlogged is not None:
            metrics, times = self.unlogged
            self.unlogged = None
            self._log(replace(metrics, ranks=times()))

    def _log(self, metrics: StepMetrics) -> None:
        metrics = self.stragglers.add_times(metrics)
        self.parts.log.log_step(metrics)
        self.parts.callbacks.call_each(
            f"on_step_end of step {metrics.step}", lambda callback: callback.on_step_end(metrics)
        )
        if self.parts.place.ranks.first:
            self._watch_directory()

    def _save_and_evaluate(self, step: int) -> None:
        self.checkpoint_waits |= self.interval.is_due(step)
        # Weights whose step was not finite give the same step again: saved, they would push out checkpoints of good ones.
        if self.checkpoint_waits and not self.guard.skipped:
            self.stall = self.checkpointer.save(self.step)
            self.checkpoint_waits = False
            self.interval.saved(self.step, self.stall, self.checkpointer.write_seconds)
        elif _is_due(step, self.run.checkpoint.memory_every) and not self.guard.skipped:
            self.stall = self.checkpointer.copy_to_memory(self.step)
        self._evaluate(self._due_evaluators(step))

    def _evaluators(self) -> list[ScheduledEvaluator]:
        inputs = self.parts.inputs
        return [ScheduledEvaluator(self.run.evaluation.every, inputs.evaluator), *inputs.others]

    def _due_evaluators(self, step: int) -> list[ScheduledEvaluator]:
        return [one for one in self._evaluators() if _is_due(step, one.every)]

    def _evaluate(self, evaluators: Sequence[ScheduledEvaluator]) -> None:
        began = time.perf_counter()
        for one in evaluators:
            with self.heartbeat.during("evaluate"):
                findings = one.evaluator.evaluate(self.parts.step.executor)
            for finding in findings:
                self.parts.log.log_finding(self.step, finding)
        if evaluators:
            taken = round(time.perf_counter() - began, 4)
            self.parts.log.event(EVALUATED_EVENT, self.step, evaluation_seconds=taken)

    def _expect_save(self) -> float:
        """Return the seconds that a checkpoint took or, where none was written, will by its size."""
        ranks, measured_s = self.parts.place.ranks, measured_save_seconds(self.parts.directory.path)
        if measured_s is not None:
            return measured_s
        state = sum(place.local.nbytes for place in self.parts.step.saved_tensors().values())
        return state * (ranks.ranks_per_node or ranks.world_size) / (CHECKPOINT_GB_S * 1e9)

    def _warn_of_grace(self, save_s: float) -> None:
        if warning := self.grace.warn(save_s):
            self.parts.log.note(warning)
            self.parts.log.event("warning", self.step, text=warning.removeprefix("warning: "))

    def _watch_time(self) -> None:
        """Ask all ranks to stop where the wall time leaves room for no further step; the first rank's clock decides."""
        self.checkpointer.log_duration()
        self._warn_of_grace(self.checkpointer.write_seconds)
        if not self.parts.place.ranks.first or self.step == self.until:
            return
        # A wish reaches the other ranks with the step that is launched next, and is read behind the one after that.
        passes = 1 + 2 * len(self.launched)
        if self.time_limit.is_near(self.checkpointer.write_seconds, passes) and not self.stop.signal_number:
            self.stop.signal_number = TIME_IS_UP

    def _stop_if_asked(self) -> None:
        """End the run in good order where any rank was asked to stop. Raises Interrupted, on all ranks."""
        if self.launched:
            # Asking the other ranks now would wait for the step that is under way: its observations bring their answer.
            signal_number = self.asynchronous.signal_number
        else:
            signal_number = self.stop.agree(self.parts.place.device)
        if not signal_number:
            return
        while self.launched:
            self._finish(self.launched.popleft())
        if signal_number == DIRECTORY_GONE:
            self._end_without_directory()
        self.checkpointer.save(self.step, final=True)
        by = f"by signal {signal_number}"
        if signal_number == TIME_IS_UP:
            # As a scheduler's own warning would end it: its job is to be queued again.
            by, signal_number = "before the end of the wall time", signal.SIGTERM
        raise Interrupted(
            f"stopped {by} after step {self.step}, checkpoint written; the same command goes on from there",
            signal_number,
        )

    def _end_without_directory(self) -> NoReturn:
        """Keep the present step, where the run directory can be made again, and end. Raises PhalanxError."""
        directory = self.parts.directory
        lost = f"run directory {directory.path} was removed, renamed or unmounted before the end of step {self.step}"
        if not RankGroup.default().from_first(directory.make_again):
            raise PhalanxError(f"{lost}; nothing more can be kept there, so training ends")
        RankGroup.default().on_first(self.parts.describe)
        # Whatever was saved of this step went with the directory.
        self.checkpointer.saved_step = -1
        self.parts.log.event("warning", self.step, text=lost)
        self.checkpointer.save(self.step, final=True)
        raise PhalanxError(
            f"{lost}, with its metrics and checkpoints. It was made again with the run file and a checkpoint of step "
            f"{self.step}; the same command resumes from there"
        )

    def _watch_directory(self) -> None:
        """Say at once when the run directory is gone, and ask all ranks to stop."""
        directory, log = self.parts.directory, self.parts.log
        if self.stop.signal_number != DIRECTORY_GONE and directory.is_gone():
            log.note(f"warning: run directory {directory.path} is gone: removed, renamed or unmounted; training stops")
            # As a signal would, so that all ranks stop behind the same step.
            self.stop.signal_number = DIRECTORY_GONE
            return
        for file in (directory.metrics, directory.events):
            if file.removed:
                file.removed = False
                self.lost = f"{file.path} was removed while training; its lines before step {self.step} are lost"
                log.note(f"warning: {self.lost}")
                log.event("warning", self.step, text=self.lost)
                # Whoever removed it may have removed the other files as well.
                self.parts.describe()


class Checkpointer:
    """Saves the state of a run, once a step."""

    def __init__(self, parts: RunParts, guard: DivergenceGuard, wrong: WrongNumbers, first_step: int) -> None:
        self._parts = parts
        self._guard = guard
        self._wrong = wrong
        self.saved_step = first_step if first_step else -1
        self._written: SaveHandle | None = None
        """The last save whose time was not logged yet: one in the background takes its time."""
        self.write_seconds = 0.0
        """Time that the last save took which is known to be on storage."""

    def save(self, step: int, *, final: bool = False) -> float:
        """Checkpoint the state after `step`; return the seconds training stood still for it.

        final: whether the run ends here. Only then a failure is raised: hours of training are worth more than a checkpoint.
        """
        with self._parts.heartbeat.during("checkpoint"):
            return self._save(step, final=final)

    def _save(self, step: int, *, final: bool) -> float:
        """Save the state after `step`; see `save`. final: the run ends with it, so that it must be on disk."""
        parts = self._parts
        # The last step may be due anyway: once is enough, but it has to be on disk before the run ends.
        if self.saved_step == step:
            parts.store.wait()
            if final:
                self.forget_copies()
            return 0.0
        start = time.perf_counter()
        self.log_duration()
        tensors = parts.step.saved_tensors()
        if not all_finite(tensors.values(), parts.place.device):
            found = f"step {step}: weights or optimizer state are not finite; they are not saved"
            self.forget_copies()
            self._guard.give_up(Divergence(found, "or with optimizer.grad_clip"), step)
        try:
            RankGroup.default().on_first(lambda: self._sync_metrics(step))
            state = collect_state(parts.model, step, parts.step, parts.inputs, self._wrong.state())
            asynchronous = parts.model.run.checkpoint.asynchronous and not final
            handle = parts.store.save(step, tensors, state, asynchronous=asynchronous)
        except CheckpointError as error:
            if final:
                raise
            parts.log.note(f"warning: {error}")
            parts.log.event("warning", step, text=str(error))
            return time.perf_counter() - start
        self.saved_step = step
        stall = time.perf_counter() - start
        # The save before may have been under way until this one could begin.
        self.log_duration()
        parts.log.event("checkpoint", step, path=str(handle.path), stall_seconds=round(stall, 4))
        self._written = handle
        if not asynchronous:
            self.log_duration()
        if final:
            parts.log.note(f"checkpoint {handle.path}")
            self.forget_copies()
        parts.callbacks.call_each(
            f"on_checkpoint of step {step}", lambda callback: callback.on_checkpoint(step, handle.path)
        )
        return stall

    def copy_to_memory(self, step: int) -> float:
        """Copy the state after `step` to the memory of nodes; return the seconds training stood still for it."""
        parts, start = self._parts, time.perf_counter()
        assert parts.copies is not None
        with parts.heartbeat.during("checkpoint"):
            tensors = parts.step.saved_tensors()
            if not all_finite(tensors.values(), parts.place.device):
                found = f"step {step}: weights or optimizer state are not finite; they are not copied"
                self.forget_copies()
                self._guard.give_up(Divergence(found, "or with optimizer.grad_clip"), step)
            try:
                stored = RankGroup.default().from_first(lambda: self._find_stored(step))
                state = collect_state(parts.model, step, parts.step, parts.inputs, self._wrong.state())
                parts.copies.save(step, tensors, state, stored=stored)
            except CheckpointError as error:
                parts.log.note(f"warning: {error}")
                parts.log.event("warning", step, text=str(error))
        return time.perf_counter() - start

    def forget_copies(self) -> None:
        """Drop the copies in memory, where there are some: nothing is to go on from them."""
        if self._parts.copies is not None:
            self._parts.copies.forget()

    def _find_stored(self, step: int) -> int:
        """Return the step of the newest checkpoint on storage, or 0, once the metrics up to `step` are on disk."""
        self._sync_metrics(step)
        return max((one.step for one in list_published(self._parts.store.root)), default=0)

    def log_duration(self) -> None:
        """Log how long the last save took, once it has ended well: a job's time limit must leave room for one."""
        handle = self._written
        if handle is not None and handle.done and handle.error is None:
            seconds = max(handle.stall_seconds, handle.write_seconds)
            self._parts.log.event(SAVE_EVENT, handle.step, seconds=round(seconds, 4))
            self.write_seconds = seconds
            self._written = None

    def _sync_metrics(self, step: int) -> None:
        """Have the metrics so far on disk. Raises CheckpointError: no checkpoint may be newer than they are."""
        log = self._parts.directory.metrics
        try:
            log.sync()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint of step {step} was not saved: {log.path} cannot be written ({error.strerror})"
            ) from error


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


SHORT_S = 2.0
"""Steps that take less than this, seconds, are asynchronous."""


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device may still compute."""

    step: int
    lr: float
    observations: HostCopy
    """Loss and gradient norm, and what ranks agree on beside."""
    launched: Moment
    data_wait: float
    """Seconds that the launch waited for the batch."""
    stall: float
    """Seconds of a checkpoint before."""
    limits: StepLimits
    """Limits of its loss and gradient norm, whether they were enforced or not."""
    batch: Batch
    """This rank's samples, in host memory."""


class AsynchronousSteps:
    """Whether the host launches the next step before it reads what the last one gave. The same on all ranks."""

    def __init__(self, device: torch.device, *, allowed: bool) -> None:
        """Begin with steps that are read at once. allowed: never true where the host computes the steps itself."""
        self.device = device
        self.allowed = allowed
        self.ahead = False
        """Whether steps are asynchronous, where nothing else makes the host wait for one."""
        self.signal_number = 0
        """Signal that some rank was sent by the time of the last step that was read, or 0."""

    def share(self, observations: Tensor, signal_number: int, seconds: float) -> HostCopy:
        """Return the copy to `read` of a step's observations, float64 [n], and what ranks agree on; wait for nothing.

        signal_number: what this rank was sent, or 0. seconds: of the last step that was read.
        """
        if not self.allowed:
            return HostCopy(observations)
        # The largest counts: a signal to any rank stops all, and the slowest rank's time says whether a step is short.
        agreed = torch.tensor([signal_number, seconds], dtype=torch.float64).to(self.device, non_blocking=True)
        if dist.is_initialized():
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return HostCopy(torch.cat((observations, agreed)))

    def read(self, shared: HostCopy) -> list[float]:
        """Return the step's own observations once the device has computed them, and take up what ranks agreed on."""
        values: list[float] = shared.read()
        if self.allowed:
            *values, signal_number, seconds = values
            self.signal_number = int(signal_number)
            self.ahead = seconds < SHORT_S
        return values
