"""A study in simulated time: the scheduler that runs real trials, on trials that only have durations and scores.

Trials that share a device slow each other down; starting one takes time in which it does not compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.study.hyperparameters.asha import Standing, backfill_order, promotable_trials
from phalanx.study.hyperparameters.packing import (
    Device,
    DeviceUse,
    Move,
    Packing,
    Ready,
    Running,
    Span,
    Window,
    decide_actions,
    device_use,
    idle_share,
)

_EPSILON = 1e-9


@dataclass(frozen=True)
class SimulatedTrial:
    """A trial that exists as numbers."""

    step_s: float
    """Seconds of a step on a device of its own."""
    memory: float
    score: float
    """At every rung."""
    expected_s: float
    """What the scheduler believes of `step_s`."""


@dataclass
class _Job:
    trial: int
    rung: int
    device: str
    start_left: float
    work_left: float
    begin: float | None = None
    backfill: bool = False


@dataclass(frozen=True)
class Simulated:
    """What a simulated study came to."""

    seconds: float
    uses: list[DeviceUse]
    spans: list[Span]
    reached: list[int]
    """Trials that ran to each rung."""

    @property
    def idle(self) -> float:
        """Idle share of all devices."""
        return idle_share(self.uses)


class Simulation:
    """One study. slowdown: with k trials on a device each takes k ** slowdown times as long."""

    def __init__(
        self,
        trials: Sequence[SimulatedTrial],
        devices: Sequence[Device],
        packing: Packing,
        *,
        rungs: Sequence[int],
        eta: int = 3,
        slowdown: float = 1.0,
        lookahead: int | None = None,
    ) -> None:
        """rungs: steps at each. lookahead: trials that are known before they begin; None for all."""
        self.trials, self.devices, self.packing = trials, devices, packing
        self.rungs, self.eta, self.slowdown = rungs, eta, slowdown
        self.lookahead = len(trials) if lookahead is None else lookahead
        self.standings: list[Standing] = []
        self.jobs: list[_Job] = []
        self.spans: list[Span] = []
        self.drawn: list[int] = []
        self.now = 0.0

    def run(self) -> Simulated:
        """Until nothing is left to do."""
        left = list(range(len(self.trials)))
        while True:
            while left and len(self.drawn) < self.lookahead:
                self.drawn.append(left.pop(0))
            self._act()
            if not self.jobs:
                break
            self._advance()
        window = Window(tuple(device.name for device in self.devices), 0.0, self.now)
        reached = [sum(rung in one.scores for one in self.standings) for rung in range(len(self.rungs))]
        return Simulated(self.now, device_use([window], self.spans), self.spans, reached)

    def _act(self) -> None:
        ready = self._ready()
        fills = {one.key for one in ready if one.backfill}
        actions = decide_actions(self.devices, self._running(), ready, self.packing)
        for action in actions:
            if isinstance(action, Move):
                job = next(job for job in self.jobs if str(job.trial) == action.key)
                self._close(job)
                job.device, job.start_left = action.device, self.packing.start_s
                continue
            trial = int(action.key)
            if trial in self.drawn:
                self.drawn.remove(trial)
                self.standings.append(Standing(trial))
                rung, done = 0, 0
            else:
                standing = next(one for one in self.standings if one.number == trial)
                standing.begun += 1
                rung, done = standing.begun, self.rungs[standing.begun - 1]
            work = (self.rungs[rung] - done) * self.trials[trial].step_s
            self.jobs.append(_Job(trial, rung, action.device, self.packing.start_s, work, None, action.key in fills))

    def _ready(self) -> list[Ready]:
        found = [Ready(str(one), self._expected(one, 0), self.trials[one].memory) for one in self.drawn]
        regular = promotable_trials(self.standings, self.eta, len(self.rungs))
        for one in backfill_order(self.standings, len(self.rungs)):
            seconds = self._expected(one.number, one.begun + 1)
            found.append(Ready(str(one.number), seconds, self.trials[one.number].memory, backfill=one not in regular))
        return found

    def _expected(self, trial: int, rung: int) -> float:
        done = self.rungs[rung - 1] if rung else 0
        return (self.rungs[rung] - done) * self.trials[trial].expected_s

    def _running(self) -> list[Running]:
        found = []
        for job in self.jobs:
            believed = self.trials[job.trial].expected_s / self.trials[job.trial].step_s
            left = job.start_left + job.work_left * believed / self._rate(job.device)
            found.append(
                Running(str(job.trial), job.device, left, self.trials[job.trial].memory, backfill=job.backfill)
            )
        return found

    def _rate(self, device: str) -> float:
        count = sum(job.device == device and job.start_left <= _EPSILON for job in self.jobs)
        return float(max(count, 1) ** -self.slowdown)

    def _advance(self) -> None:
        rates = {device.name: self._rate(device.name) for device in self.devices}
        step = min(
            job.start_left if job.start_left > _EPSILON else job.work_left / rates[job.device] for job in self.jobs
        )
        self.now += step
        for job in list(self.jobs):
            if job.start_left > _EPSILON:
                job.start_left -= step
                if job.start_left <= _EPSILON:
                    job.begin = self.now
                continue
            job.work_left -= step * rates[job.device]
            if job.work_left <= _EPSILON * max(self.now, 1.0):
                self._close(job)
                self.jobs.remove(job)
                standing = next(one for one in self.standings if one.number == job.trial)
                standing.scores[job.rung] = self.trials[job.trial].score

    def _close(self, job: _Job) -> None:
        if job.begin is not None:
            self.spans.append(Span(job.device, job.begin, self.now, str(job.trial)))
        job.begin = None
