"""Parts of configurations, each trained from one rung to the next by a process: its files, its end, and what came of it."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.config.load import dump_run
from phalanx.config.schema import Run
from phalanx.files import read_last_record, write_atomically
from phalanx.study.hyperparameters.metric import evaluation_at, read_events, read_figure, read_metrics, step_problem
from phalanx.study.hyperparameters.packing import Span
from phalanx.study.processes.process import Ended, TrialProcess
from phalanx.study.processes.slots import DeviceSlot
from phalanx.study.processes.trial_files import (
    MEMORY_LIMIT,
    RUN_FILE,
    Part,
    explain_failure,
    read_log_tail,
    read_rank_reports,
)
from phalanx.study.trial import ASKED, INTERRUPTED, OK, Outcome, Trial

_BEGINS = ("start", "resume")
"""Events with which a process begins to train."""


@dataclass
class TuningJob:
    """A part of a configuration's training that this process has claimed."""

    trial: Trial
    """The part, in the store."""
    number: int
    """Number of the configuration."""
    rung: int
    run: Run
    run_dir: Path
    folder: Path
    """Files of the process."""
    first: int
    """Optimizer steps that were trained before."""
    until: int
    """Optimizer step at the rung."""
    expected_step_s: float
    """Seconds of a step on a device of its own, as expected before the start."""
    expected_bytes: float
    metric: str
    limit_s: float
    memory_bytes: float | None = None
    """Bytes of host memory that the process may take; None sets no limit."""
    backfill: bool = False
    """Whether it fills an idle device."""
    alone: bool = False
    """Whether it must have a device to itself."""
    slot: DeviceSlot | None = None
    moving_to: DeviceSlot | None = None
    process: TrialProcess | None = None
    """None while the job waits for a device of its own."""
    began: float = 0.0
    """Start of its process, in seconds since the epoch."""
    most_sharing: int = 1
    """Trials that its device had at once, at most, while it ran there."""
    spans: list[Span] = field(default_factory=list)
    asked: bool = False
    """Whether the process was asked to stop."""
    _sharing_sum: int = 0
    _looks: int = 0

    def start(self, slot: DeviceSlot) -> None:
        """Start the process on a device."""
        # The report of the process before the move, or before the retry, must not be taken for this one's.
        for report in self.folder.glob("rank-*.json"):
            report.unlink()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / RUN_FILE, dump_run(self.run))
        Part(str(self.run_dir.resolve()), self.until).write(self.folder)
        env = {} if self.memory_bytes is None else {MEMORY_LIMIT: str(round(self.memory_bytes))}
        self.slot, self.moving_to, self.began, self.asked = slot, None, time.time(), False
        self.most_sharing, self._sharing_sum, self._looks = 1, 0, 0
        self.process = slot.start(self.folder.resolve(), self.trial.number, env, self.limit_s)

    def follow(self, slot: DeviceSlot, process: TrialProcess) -> None:
        """Take over the process that an earlier tuner started."""
        self.slot, self.process, self.began = slot, process, (self.folder / RUN_FILE).stat().st_mtime

    def move_to(self, slot: DeviceSlot) -> None:
        """Ask the process to stop with a checkpoint; `poll` then resumes it on another device."""
        self.ask_to_stop()
        self.moving_to = slot

    def poll(self) -> Outcome | None:
        """Return what came of the job; None while its process runs, moves, or waits for a device of its own.

        Raises ConfigError where the evaluation has no such figure as the metric.
        """
        if self.process is None:
            return Outcome(INTERRUPTED, words="asked to stop", more={ASKED: True}) if self.asked else None
        ended = self.process.poll()
        if ended is None:
            return None
        self.process = None
        # When the process that has just ended computed.
        assert self.slot is not None
        report = read_rank_reports(self.folder, 1)[0]
        stopped = report is not None and report["cause"] == INTERRUPTED
        span = training_span(self.run_dir, self.began, report["ended"] if report else time.time())
        if span is not None:
            self.spans.append(Span(self.slot.name, *span, label=str(self.number)))
        outcome = self._read_outcome(ended)
        # It has written a checkpoint and goes on elsewhere, with the same claim in the store.
        if outcome.cause == INTERRUPTED and self.moving_to is not None:
            self.start(self.moving_to)
            return None
        if outcome.cause == "out_of_memory" and self.most_sharing > 1 and not self.alone:
            # Its neighbours may be at fault: it has another chance on a device of its own.
            self.alone, self.expected_bytes = True, 2.0 * self.expected_bytes
            return None
        # What stopped in good order, such as before the end of its job's time, just goes on where it got further.
        if outcome.cause == INTERRUPTED and (self.asked or (stopped and self._count_steps())):
            return replace(outcome, more={**outcome.more, ASKED: True})
        return outcome

    def ask_to_stop(self) -> None:
        """Ask the process to stop with a checkpoint."""
        self.moving_to, self.asked = None, True
        if self.process is not None:
            self.process.ask_to_stop()

    def kill(self) -> None:
        """End the process now; do nothing where there is none."""
        if self.process is not None:
            self.process.kill()

    @property
    def mean_sharing(self) -> float:
        """Trials that its device had, in the mean over its process's life."""
        return self._sharing_sum / self._looks if self._looks else 1.0

    def note_sharing(self, count: int) -> None:
        """Note how many trials its device has now."""
        self._sharing_sum, self._looks = self._sharing_sum + count, self._looks + 1
        self.most_sharing = max(self.most_sharing, count)

    def seconds_left(self, count: int, start_s: float) -> float:
        """Return the expected seconds until it ends with `count` trials on its device, by its own steps once there are some.

        start_s: expected seconds from starting a process to its first step.
        """
        log = self.run_dir / "metrics.jsonl"
        # Asked several times a second: only the end of the log is read.
        row = read_last_record(log, step_problem) if log.exists() else None
        if row is not None and row["step"] > self.first:
            return float((self.until - row["step"]) * row["step_seconds"])
        waited = time.time() - self.began
        return max(0.0, start_s - waited) + (self.until - self.first) * self.expected_step_s * count

    def measured_step_s(self) -> float | None:
        """Return seconds of a step, with its share of evaluation and checkpoint; None unless it computed in one stretch."""
        if len(self.spans) != 1:
            return None
        done = self._count_steps()
        return (self.spans[0].end - self.spans[0].begin) / done if done else None

    def remove_checkpoints(self) -> None:
        """Remove the checkpoints of a failed trial, which nothing resumes."""
        shutil.rmtree(self.run_dir / "checkpoints", ignore_errors=True)

    def _count_steps(self) -> int:
        """Return the steps that the last process trained: not those of an earlier process of this part."""
        begun = max((event["step"] for event in read_events(self.run_dir) if event["kind"] in _BEGINS), default=0)
        return sum(row["step"] > max(self.first, begun) for row in read_metrics(self.run_dir))

    def _read_outcome(self, ended: Ended) -> Outcome:
        """Return the score of a part that has ended, or why it has none. ended: how its processes ended."""
        assert self.slot is not None
        reports = read_rank_reports(self.folder, self.slot.ranks)
        left = [report for report in reports if report is not None]
        more = {
            "spans": [[span.device, span.begin, span.end] for span in self.spans],
            "rung": self.rung,
            "steps": self.until,
            "sharing": self.mean_sharing,
            "early": self.backfill,
            "step_s": self.measured_step_s(),
            "start_s": max(0.0, self.spans[-1].begin - self.began) if self.spans else None,
        }
        if ended.cause is not None or ended.timed_out or ended.code or len(left) < len(reports):
            found = explain_failure(left, ended, read_log_tail(self.folder))
            if self.asked and not ended.timed_out:
                # Before it trains a process knows of no good order: the signal just ends it.
                return Outcome(INTERRUPTED, seconds=ended.seconds, words="asked to stop", more=more)
            return replace(found, more=more)
        # On a CPU the resident memory stands in for that of tensors. The rank that needs most decides whether trials fit.
        memory = max(
            report["host_bytes"] if report["memory_bytes"] is None else report["memory_bytes"] for report in left
        )
        outcome = Outcome(OK, memory_bytes=memory, seconds=ended.seconds, more=more)
        evaluation = evaluation_at(self.run_dir, self.until)
        if evaluation is None:
            said = f"there was no evaluation after step {self.until}; the data need a split to validate on"
            return outcome.as_failure("refused", said)
        value = read_figure(evaluation, self.metric)
        if not math.isfinite(value):
            return outcome.as_failure("non_finite", f"{self.metric}={value}")
        return replace(outcome, value=value)


def training_span(run_dir: Path, began: float, ended: float) -> tuple[float, float] | None:
    """Return (begin, end) of the training loop of a run's last process; None where it did not get there.

    began, ended: of the process, in seconds since the epoch.
    """
    log = read_events(run_dir)
    starts = [place for place, event in enumerate(log) if event["kind"] in _BEGINS]
    if not starts:
        return None
    since = log[starts[-1] :]
    seconds = next((event["seconds"] for event in since if event["kind"] == "end"), None)
    if seconds is None:
        seconds = sum(row["step_seconds"] for row in read_metrics(run_dir) if row["step"] > since[0]["step"])
    begin = ended - seconds
    # What an earlier process left behind would seem to have begun before this one.
    return (begin, ended) if seconds > 0 and begin >= began - 1.0 else None
