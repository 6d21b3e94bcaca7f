"""The loop of every study: trials begin, end, and are recorded, until none is left to begin or somebody asks to stop.

The loop keeps nothing in memory that a kill would lose: all that is known of trials is in the store. A search of layouts
(`study.layouts.layout_search`) and tuning (`study.hyperparameters.tuner`) differ in which trials they begin, and where.
"""

from __future__ import annotations

import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Generic, Protocol, TypeVar

from phalanx.errors import Interrupted
from phalanx.launch.parent import ONE_WISH_S
from phalanx.study.processes.process import Worker
from phalanx.study.samplers import Proposal, optuna_distribution
from phalanx.study.space import Range
from phalanx.study.store import StudyStore
from phalanx.study.trial import ASKED, INTERRUPTED, Outcome, Trial

_TICK_S = 0.05
"""Seconds between looks at this process's own jobs."""
_LOOK_S = 2.0
"""Seconds between looks at what other processes that share the study did."""
ORDERLY_STOP_S = 300.0
"""Seconds that trials have to end, and to write a checkpoint where they keep any, once they were asked to stop."""


class Job(Protocol):
    """A trial that this process has begun."""

    trial: Trial

    def poll(self) -> Outcome | None:
        """Return what came of the trial; None until it has ended. Never waits long."""

    def ask_to_stop(self) -> None:
        """Ask the trial's processes to stop in good order."""

    def kill(self) -> None:
        """End the trial's processes now; do nothing where they have ended."""


@dataclass
class EndedJob:
    """A trial that needs no processes: it is refused, or simulated."""

    trial: Trial
    outcome: Outcome

    def poll(self) -> Outcome:
        """Return the outcome."""
        return self.outcome

    def ask_to_stop(self) -> None:
        """Do nothing: the trial has ended."""

    def kill(self) -> None:
        """Do nothing: the trial has ended."""


J = TypeVar("J", bound=Job)


class StudyLoop(ABC, Generic[J]):
    """One process that runs trials of a study; others may run trials of the same study."""

    stop_message = "the same command goes on from there"
    time_is_up = ""

    def __init__(self, store: StudyStore, sampler: str, *, most: int, limit_s: float) -> None:
        """sampler: its name, for the record. most: trials that the study has in all. limit_s: seconds
        that a trial may be under way: on another host it counts as running for so long."""
        self.store, self.sampler_name, self.most, self.limit_s = store, sampler, most, limit_s
        self.jobs: list[J] = []
        self.ends = math.inf
        """Time to stop all trials, in seconds since the epoch."""
        self.worker: Worker | None = None
        """Whose the trials are; None for this process, with which they end."""
        self.tick_s = _TICK_S
        self._signal = 0
        self._asked_at = 0.0

    @abstractmethod
    def begin_trials(self) -> str:
        """Begin what can begin now, as further `jobs`. Returns why nothing is left to begin, for where no job runs."""

    @abstractmethod
    def count_before(self, trial: Trial) -> int:
        """Return how many trials of the study that count towards `most` began before this one."""

    @abstractmethod
    def report_progress(self, trial: Trial) -> None:
        """Tell whoever watches of a trial that has begun, or ended."""

    def learn(self, job: J, outcome: Outcome) -> None:
        """Take in what came of a job before it is recorded."""

    def still_alive(self) -> None:
        """Do what is to be done every few seconds."""

    def run(self) -> str:
        """Run trials until none is left to begin, or time is up; return why. Raises Interrupted when asked to stop."""
        looked = 0.0
        with ExitStack() as cleanup:
            # A signal is only noted, so that it never falls into the middle of a line of the journal.
            for number in (signal.SIGINT, signal.SIGTERM):
                cleanup.callback(signal.signal, number, signal.signal(number, self._note_signal))
            # However the loop ends, no trial outlives it: nobody would record its outcome.
            cleanup.callback(lambda: [job.kill() for job in self.jobs])
            while True:
                # Ended trials first: what begins next may depend on them, and a stop must not lose their outcomes.
                ended = self.collect_ended()
                if self._signal or time.time() > self.ends:
                    self._stop_all()
                    if self._signal:
                        raise Interrupted(f"stopped by signal {self._signal}; {self.stop_message}", self._signal)
                    return self.time_is_up
                # After an end at once, for a device is free; else seldom, for each look reads the journal.
                if ended or time.time() - looked > _LOOK_S:
                    looked = time.time()
                    self.still_alive()
                    # Trials of processes that died make room, or are resumed.
                    self.store.recover()
                    reason = self.begin_trials()
                    if not self.jobs:
                        return reason
                time.sleep(self.tick_s)

    def claim(self, key: str, proposal: Proposal, ranges: Mapping[str, Range], *, counts: bool = True) -> Trial | None:
        """Return a trial that is now this process's to run; None where another process was first.

        ranges: what each value might have been, for Optuna's tools. counts: whether the trial counts towards `most`.
        """
        distributions = {name: optuna_distribution(given) for name, given in ranges.items()}
        # Optuna's tools show a study by its distributions; ours need the values alone.
        trial = self.store.claim(
            key,
            proposal.values,
            distributions,
            sampler=self.sampler_name,
            limit_s=self.limit_s,
            note=proposal.note,
            worker=self.worker,
        )
        # Processes that share a study may each have seen room for one more: the journal's order decides.
        if trial is not None and counts and self.count_before(trial) >= self.most:
            self.store.withdraw(trial)
            return None
        return trial

    def collect_ended(self) -> bool:
        """Record the outcomes of jobs that have ended. Returns whether any has."""
        before = len(self.jobs)
        for job in list(self.jobs):
            outcome = job.poll()
            if outcome is not None:
                self.jobs.remove(job)
                self.learn(job, outcome)
                self.record(job.trial, outcome)
        return len(self.jobs) < before

    def record(self, trial: Trial, outcome: Outcome) -> None:
        """Write an outcome into the store and tell whoever watches."""
        self.store.finish(trial, outcome)
        self.report_progress(next(one for one in self.store.trials() if one.number == trial.number))

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        # A signal often comes twice, to the process and to its group. Later ones mean that somebody will not wait.
        if self._signal and now - self._asked_at > ONE_WISH_S:
            raise KeyboardInterrupt
        self._signal, self._asked_at = number, now

    def _stop_all(self) -> None:
        """Ask all jobs to stop, wait until they have, and record those that have not as interrupted."""
        for job in self.jobs:
            job.ask_to_stop()
        deadline = time.monotonic() + ORDERLY_STOP_S
        while self.jobs and time.monotonic() < deadline:
            self.collect_ended()
            time.sleep(self.tick_s)
        # Those that do not stop are killed by `run`; as asked to stop they are no failed attempts.
        for job in self.jobs:
            self.store.finish(job.trial, Outcome(INTERRUPTED, words="the tuner was stopped", more={ASKED: True}))
