"""The tuner: starts trials on devices, sees how they end, and again. Nothing is held in memory that a kill would lose."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from phalanx.errors import Interrupted
from phalanx.files import write_atomically
from phalanx.launch.parent import ONE_WISH_S
from phalanx.study.hyperparameters.job import Job
from phalanx.study.hyperparameters.packing import PACKED, Device, Move, Packing, Ready, Running, decide
from phalanx.study.hyperparameters.plan import Candidate, Planner
from phalanx.study.hyperparameters.slots import Place
from phalanx.study.hyperparameters.study import SESSIONS, configurations, run_dir
from phalanx.study.trials.optuna_sampler import distribution
from phalanx.study.trials.process import Ended, Worker
from phalanx.study.trials.storage import Study, save_outcome
from phalanx.study.trials.trial import ASKED, INTERRUPTED, OK, Outcome, Trial

_TICK_S = 0.05
_LOOK_S = 2.0
"""Seconds between looks at what other tuners did, and between signs of life in the session's file."""
_ORDERLY_S = 300.0
"""Seconds that trials have to write a checkpoint once they were asked to stop."""
_FIRST_START_S = 10.0
"""Seconds from starting a process to its first step, before any is known."""
_CONTEXT = 0.6e9
"""Bytes of an accelerator that a process takes beside its tensors: context, libraries, the allocator's gaps."""
_BEFORE_SAMPLES = 4
"""Times the devices' slots that are drawn ahead where an engine learns from what it proposed."""


@dataclass(frozen=True)
class Settings:
    """What a tuner needs to know beside what it tries."""

    folder: Path
    metric: str
    slots: int
    time_limit_s: float
    study_time_s: float | None = None
    memory_bytes: float | None = None
    """Of a device for all trials on it; None takes what the device has."""
    packing: Packing = PACKED
    engine: str = "random"


@dataclass
class Tuner:
    """One process that runs trials; others may share the study."""

    study: Study
    planner: Planner
    places: Sequence[Place]
    settings: Settings
    tell: Callable[[Trial, int], None] = lambda part, number: None
    """Called with each part of a trial when it begins and when it has ended, and the configuration's number."""
    jobs: list[Job] = field(default_factory=list)
    """Those with a process, and those that wait for a device of their own."""
    starts: list[float] = field(default_factory=list)
    """Seconds that processes took to their first step."""
    _signal: int = 0
    _asked_at: float = 0.0

    def __post_init__(self) -> None:
        memory = self.settings.memory_bytes
        slots = self.settings.slots if self.settings.packing.share else 1
        self.devices = [Device(place.name, slots, memory or place.memory) for place in self.places]
        self._place_of = {place.name: place for place in self.places}
        self._session = Session(self.settings, [device.name for device in self.devices])
        self._ends = math.inf if self.settings.study_time_s is None else time.time() + self.settings.study_time_s
        for part in self.study.trials():
            self._learn_again(part)

    def run(self) -> str:
        """Until nothing is left to do, or time is up; says which. Raises Interrupted when it is asked to stop."""
        previous = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._run()
        finally:
            for job in self.jobs:
                if job.process is not None:
                    job.process.end()
            self._session.save(ended=True)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run(self) -> str:
        looked = 0.0
        while True:
            changed = self._collect()
            if self._signal or time.time() > self._ends:
                self._stop_all()
                if self._signal:
                    raise Interrupted(
                        f"stopped by signal {self._signal}; trials wrote checkpoints, the same command goes on from there",
                        self._signal,
                    )
                return f"the {self.settings.study_time_s:g} s of tune.study_time_s are over"
            if changed or time.time() - looked > _LOOK_S:
                looked = time.time()
                self._session.save()
                self._dispatch()
                if not self.jobs:
                    return "every trial has ended, and none is promoted further"
            time.sleep(_TICK_S)

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal and now - self._asked_at > ONE_WISH_S:
            raise KeyboardInterrupt
        self._signal, self._asked_at = number, now

    def _dispatch(self) -> None:
        """Decide until nothing more can begin: what turns out to be another tuner's, or refused, makes room."""
        self.study.recover()
        while True:
            lookahead = self._lookahead()
            packing = replace(self.settings.packing, start_s=self.start_s)
            candidates = self.planner.candidates(self.study, lookahead, fill=packing.fill)
            by_key = {one.key: one for one in candidates}
            refused = [one for one in candidates if one.run is None]
            for one in refused:
                self._refuse(one)
            ready = [*self._waiting(), *self.planner.ready(candidates)]
            actions = decide(self.devices, self._running(), ready, packing)
            again = bool(refused)
            for action in actions:
                place = self._place_of[action.device]
                if isinstance(action, Move):
                    self._move(action.key, place)
                elif action.key in by_key:
                    # What is known of the next one depends on what became of this one.
                    again = self._begin(by_key[action.key], place) or again
                else:
                    self._start(next(job for job in self.jobs if job.key == action.key), place)
            if not again:
                return

    def _lookahead(self) -> int:
        if not self.settings.packing.long_first:
            return 1
        if self.settings.engine == "random":
            return self.planner.trials
        return _BEFORE_SAMPLES * sum(device.slots for device in self.devices)

    @property
    def start_s(self) -> float:
        """Expected seconds from starting a process to its first step."""
        return sorted(self.starts)[len(self.starts) // 2] if self.starts else _FIRST_START_S

    def _waiting(self) -> list[Ready]:
        waiting = [job for job in self.jobs if job.process is None]
        return [Ready(job.key, self._left(job, 1), job.expected_bytes, alone=True) for job in waiting]

    def _running(self) -> list[Running]:
        found = []
        for job in (job for job in self.jobs if job.process is not None):
            assert job.place is not None
            device = (job.moving_to or job.place).name
            left = self._left(job, sum(one.place is job.place for one in self.jobs))
            # A process that has not got far has nothing that is worth a checkpoint.
            movable = not job.asked and job.moving_to is None and time.time() - job.began > 2 * self.start_s
            found.append(Running(job.key, device, left, job.expected_bytes, job.alone, movable, job.early))
        return found

    def _left(self, job: Job, count: int) -> float:
        return job.seconds_left(count, self.start_s)

    def _begin(self, candidate: Candidate, place: Place) -> bool:
        """Claim a part of a trial and start it. Returns whether the claim was lost, so that there is room again."""
        assert candidate.run is not None and candidate.size is not None
        until = self.planner.rungs[candidate.rung]
        first = self.planner.rungs[candidate.rung - 1] if candidate.rung else 0
        step_s = self.planner.costs.step_seconds(candidate.size, candidate.values)
        memory = self.planner.costs.memory(candidate.size, candidate.values)
        note = {
            "rung": candidate.rung,
            "steps": until,
            "expected_s": (until - first) * step_s,
            "expected_bytes": memory,
            "device": place.name,
        }
        part = self._claim(candidate, note)
        self.planner.begun(candidate)
        if part is None:
            return True
        number = part.number if candidate.number is None else candidate.number
        job = Job(
            trial=part,
            number=number,
            rung=candidate.rung,
            run=candidate.run,
            size=candidate.size,
            run_dir=run_dir(self.settings.folder, number),
            folder=self.study.folder / str(part.number),
            first=first,
            until=until,
            expected_step_s=step_s,
            expected_bytes=memory,
            metric=self.settings.metric,
            limit_s=self.settings.time_limit_s,
            early=candidate.early,
        )
        self.jobs.append(job)
        self._start(job, place)
        self.tell(part, number)
        return False

    def _claim(self, candidate: Candidate, note: Mapping[str, Any]) -> Trial | None:
        ranges = {name: distribution(given) for name, given in self.planner.space.ranges.items()}
        part = self.study.claim(
            candidate.key,
            candidate.values,
            ranges,
            engine=self.settings.engine,
            limit_s=self.settings.time_limit_s + _ORDERLY_S,
            note=note,
        )
        if part is None or candidate.number is not None:
            return part
        # Tuners that share a study may each have taken the last place: the journal's order decides.
        before = [one for one in configurations(self.study.trials()) if one.counted and one.number < part.number]
        if len(before) >= self.planner.trials:
            self.study.withdraw(part)
            return None
        return part

    def _refuse(self, candidate: Candidate) -> None:
        part = self._claim(candidate, {"rung": candidate.rung, "steps": self.planner.rungs[candidate.rung]})
        self.planner.begun(candidate)
        if part is not None:
            number = part.number if candidate.number is None else candidate.number
            self.study.finish(part, Outcome("refused", words=candidate.refusal, more={"rung": candidate.rung}))
            self._told(part, number)

    def _start(self, job: Job, place: Place) -> None:
        limit = self.settings.memory_bytes if not place.accelerator else None
        job.start(place, limit)

    def _move(self, key: str, place: Place) -> None:
        job = next(job for job in self.jobs if job.key == key)
        job.moving_to = place
        job.stop()

    def _collect(self) -> bool:
        """Take in what has ended; whether anything has."""
        changed = False
        counts: dict[str, int] = {}
        for job in self.jobs:
            if job.process is not None and job.place is not None:
                counts[job.place.name] = counts.get(job.place.name, 0) + 1
        for job in [job for job in self.jobs if job.process is not None]:
            ended = job.poll()
            if ended is None:
                assert job.place is not None
                job.look(counts[job.place.name])
                continue
            changed = True
            self._ended(job, ended)
        return changed

    def _ended(self, job: Job, ended: Ended) -> None:
        job.close()
        job.process = None
        outcome = job.outcome(ended)
        if outcome.cause == INTERRUPTED and job.moving_to is not None:
            self._start(job, job.moving_to)
            return
        if outcome.cause == "out_of_memory" and job.most > 1 and not job.alone:
            # That may be its neighbours' fault: it has another chance on a device of its own.
            job.alone, job.expected_bytes = True, 2.0 * job.expected_bytes
            return
        self.jobs.remove(job)
        self._learn(job, outcome)
        if outcome.cause == INTERRUPTED and job.asked:
            outcome = replace(outcome, more={**outcome.more, ASKED: True})
        elif outcome.cause != OK and outcome.cause != INTERRUPTED:
            job.clean()
        if outcome.value is not None:
            self.study.report(job.trial, job.until, outcome.value)
        save_outcome(job.folder, outcome)
        self.study.finish(job.trial, outcome)
        self._told(job.trial, job.number)

    def _told(self, part: Trial, number: int) -> None:
        self.tell(next(one for one in self.study.trials() if one.number == part.number), number)

    def _learn(self, job: Job, outcome: Outcome) -> None:
        step_s = outcome.more.get("step_s")
        if outcome.cause != OK or step_s is None:
            return
        self.starts.append(outcome.more["start_s"])
        self.planner.costs.learn(job.size, job.trial.values, step_s, self._memory(outcome), job.sharing)

    def _learn_again(self, part: Trial) -> None:
        """What a part of an earlier session, or of another tuner, has to say of costs."""
        if part.outcome is None or not part.good or part.outcome.more.get("step_s") is None:
            return
        size = self.planner.size(dict(part.values))
        if size is not None:
            more, memory = part.outcome.more, self._memory(part.outcome)
            self.planner.costs.learn(size, part.values, more["step_s"], memory, more["sharing"])

    def _memory(self, outcome: Outcome) -> float | None:
        """Bytes that a trial took: what an accelerator counts leaves out what each process needs there."""
        if outcome.memory_bytes is None or not self.places[0].accelerator:
            return outcome.memory_bytes
        return outcome.memory_bytes + _CONTEXT

    def _stop_all(self) -> None:
        """Ask all trials to stop with a checkpoint, and wait until they have."""
        for job in self.jobs:
            job.moving_to = None
            if job.process is not None:
                job.stop()
        deadline = time.monotonic() + _ORDERLY_S
        while any(job.process is not None for job in self.jobs) and time.monotonic() < deadline:
            self._collect()
            time.sleep(_TICK_S)
        for job in self.jobs:
            self.study.finish(job.trial, Outcome(INTERRUPTED, words="the tuner was stopped", more={ASKED: True}))
        if not any(job.process is not None for job in self.jobs):
            self.jobs.clear()


class Session:
    """A file that says which devices a tuner has had, from when to when: what idle time is a share of."""

    def __init__(self, settings: Settings, devices: Sequence[str]) -> None:
        worker = Worker.this_process()
        self._file = settings.folder / SESSIONS / f"{worker.host}-{worker.pid}-{int(time.time())}.json"
        self._content: dict[str, Any] = {
            "devices": list(devices),
            "slots": settings.slots,
            "packing": settings.packing.share,
            "begin": time.time(),
        }

    def save(self, *, ended: bool = False) -> None:
        """Write it down as of now."""
        content = {**self._content, "end": time.time(), "ended": ended}
        with suppress(OSError):
            # A full disk must not end trials that do not need it now.
            write_atomically(self._file, json.dumps(content))
