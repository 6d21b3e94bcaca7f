"""A part of a trial, from one rung to the next, as a process: its files, its start and end, and what came of it."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.config.load import dump_run
from phalanx.config.schema import Run
from phalanx.files import write_atomically
from phalanx.json_lines import read_last_record
from phalanx.study.hyperparameters.cost import Size
from phalanx.study.hyperparameters.metric import evaluation_at, events, figure, metrics, step_problem
from phalanx.study.hyperparameters.slots import Place
from phalanx.study.hyperparameters.timeline import Span
from phalanx.study.trials.causes import failure, log_tail, rank_reports
from phalanx.study.trials.process import Ended, Limited
from phalanx.study.trials.quiet import QUIET, applicable
from phalanx.study.trials.rank import MEMORY_LIMIT, RUN_FILE, Part
from phalanx.study.trials.trial import INTERRUPTED, OK, Outcome, Trial

_TRIED = (
    *QUIET,
    *("training.resume=auto", "checkpoint.last=true", "checkpoint.keep_last=1", "checkpoint.keep_every=null"),
)
"""What a trial does otherwise than a run: its folder holds metrics, one checkpoint, and an evaluation at each rung."""


def quiet_words(run: Run) -> list[str]:
    """Overrides that every trial has, those of them that runs of this family know."""
    return applicable(run, _TRIED)


@dataclass
class Job:
    """A part of a trial that this tuner has claimed."""

    trial: Trial
    """In the study."""
    number: int
    """Of the configuration."""
    rung: int
    run: Run
    size: Size
    run_dir: Path
    folder: Path
    first: int
    """Steps that were done before."""
    until: int
    expected_step_s: float
    """Seconds of a step on a device of its own, as it was believed to be."""
    expected_bytes: float
    metric: str
    limit_s: float
    early: bool = False
    """Whether it fills an idle device."""
    alone: bool = False
    """Whether it must have a device to itself."""
    place: Place | None = None
    """None while it waits for a device."""
    moving_to: Place | None = None
    began: float = 0.0
    """When its process started, seconds since the epoch."""
    most: int = 1
    """Trials that its device had at once, at most, while it ran there."""
    _seen: int = 0
    _looks: int = 0
    spans: list[Span] = field(default_factory=list)
    asked: bool = False
    """Whether it was told to stop."""
    process: Limited | None = None

    @property
    def key(self) -> str:
        """Its name among all that is ready or runs."""
        return self.trial.key

    def start(self, place: Place, memory_bytes: float | None) -> None:
        """Start its process on a device. memory_bytes: of the host that it may take at most; None is no limit."""
        for report in self.folder.glob("rank-*.json"):
            report.unlink()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / RUN_FILE, dump_run(self.run))
        Part(str(self.run_dir.resolve()), self.until).write(self.folder)
        env = dict(place.env())
        if memory_bytes is not None:
            env[MEMORY_LIMIT] = str(round(memory_bytes))
        self.place, self.moving_to, self.began, self.asked = place, None, time.time(), False
        self.most, self._seen, self._looks = 1, 0, 0
        command = place.command(self.folder.resolve(), self.limit_s)
        self.process = Limited(command, env, self.folder / "log", self.limit_s)

    def stop(self) -> None:
        """Ask it to stop with a checkpoint."""
        assert self.process is not None
        self.process.ask()
        self.asked = True

    def poll(self) -> Ended | None:
        """How its process ended; None while it runs."""
        assert self.process is not None
        return self.process.poll()

    @property
    def sharing(self) -> float:
        """How many trials its device had, in the mean."""
        return self._seen / self._looks if self._looks else 1.0

    def look(self, count: int) -> None:
        """Note how many trials its device has now."""
        self._seen, self._looks, self.most = self._seen + count, self._looks + 1, max(self.most, count)

    def seconds_left(self, count: int, start_s: float) -> float:
        """Expected time until it ends with `count` trials on its device, by its own steps once there are some."""
        row = _last_row(self.run_dir)
        if row is not None and row["step"] > self.first:
            return float((self.until - row["step"]) * row["step_seconds"])
        waited = time.time() - self.began
        return max(0.0, start_s - waited) + (self.until - self.first) * self.expected_step_s * count

    def close(self) -> None:
        """Note when it computed, once its process has ended."""
        report = (rank_reports(self.folder, 1) or [None])[0]
        assert self.place is not None
        span = computing(self.run_dir, self.began, report["ended"] if report else time.time())
        if span is not None:
            self.spans.append(Span(self.place.name, *span, label=str(self.number)))

    def outcome(self, ended: Ended) -> Outcome:
        """What came of it. Raises ConfigError where the evaluation has no such figure as the metric."""
        report = rank_reports(self.folder, 1)[0]
        more = {
            "spans": [[span.device, span.begin, span.end] for span in self.spans],
            "rung": self.rung,
            "steps": self.until,
            "sharing": self.sharing,
            "early": self.early,
            "step_s": self.measured_step_s(),
            "start_s": max(0.0, self.spans[-1].begin - self.began) if self.spans else None,
        }
        if ended.timed_out or ended.code or report is None:
            found = failure([report] if report else [], ended, log_tail(self.folder / "log"))
            if self.asked and not ended.timed_out:
                # Before it trains a process knows of no good order: the wish to stop just ends it.
                return Outcome(INTERRUPTED, seconds=ended.seconds, words="asked to stop", more=more)
            return Outcome(found.cause, seconds=ended.seconds, words=found.words, more=more)
        memory = report["memory_bytes"] if report["memory_bytes"] is not None else report["host_bytes"]
        evaluation = evaluation_at(self.run_dir, self.until)
        if evaluation is None:
            words = f"there was no evaluation after step {self.until}; the data need a split to validate on"
            return Outcome("refused", None, (), memory, ended.seconds, words, more)
        value = figure(evaluation, self.metric)
        if not math.isfinite(value):
            return Outcome("non_finite", None, (), memory, ended.seconds, f"{self.metric}={value}", more)
        return Outcome(OK, value, (), memory, ended.seconds, "", more)

    def measured_step_s(self) -> float | None:
        """Seconds of a step, evaluation and checkpoint included; None where it computed in several stretches or none."""
        if len(self.spans) != 1:
            return None
        # What an earlier process of this part trained was not in this span.
        begun = max((event["step"] for event in events(self.run_dir) if event["kind"] in _BEGINS), default=0)
        done = [row for row in metrics(self.run_dir) if row["step"] > max(self.first, begun)]
        return (self.spans[0].end - self.spans[0].begin) / len(done) if done else None

    def clean(self) -> None:
        """Remove what a failed trial would not be asked about any more."""
        shutil.rmtree(self.run_dir / "checkpoints", ignore_errors=True)


_BEGINS = ("start", "resume")
"""Events with which a process begins to train."""


def computing(run_dir: Path, began: float, ended: float) -> tuple[float, float] | None:
    """When the last process of a run that began at `began` was in its training loop; None where it did not get there."""
    log = events(run_dir)
    starts = [place for place, event in enumerate(log) if event["kind"] in _BEGINS]
    if not starts:
        return None
    since = log[starts[-1] :]
    seconds = next((event["seconds"] for event in since if event["kind"] == "end"), None)
    if seconds is None:
        seconds = sum(row["step_seconds"] for row in metrics(run_dir) if row["step"] > since[0]["step"])
    begin = ended - seconds
    # What an earlier process left behind would seem to have begun before this one.
    return (begin, ended) if seconds > 0 and begin >= began - 1.0 else None


def _last_row(run_dir: Path) -> dict[str, float] | None:
    file = run_dir / "metrics.jsonl"
    return read_last_record(file, step_problem) if file.exists() else None
