"""Tuning's loop: starts parts of configurations on devices as ASHA and the packing rule say, and learns what they cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_high
from typing import Any

from phalanx.files import write_atomically
from phalanx.study.hyperparameters.candidates import Candidate, CandidateQueue
from phalanx.study.hyperparameters.configurations import SESSIONS, group_configurations, run_dir
from phalanx.study.hyperparameters.jobs import TuningJob
from phalanx.study.hyperparameters.packing import (
    PACKED,
    Device,
    Move,
    Packing,
    Ready,
    Running,
    decide_actions,
)
from phalanx.study.loop import ORDERLY_STOP_S, StudyLoop
from phalanx.study.processes.process import Worker
from phalanx.study.processes.slots import DeviceSlot
from phalanx.study.samplers import Proposal
from phalanx.study.store import StudyStore, save_outcome
from phalanx.study.trial import INTERRUPTED, OK, Outcome, Trial

_FIRST_START_S = 10.0
"""Seconds from starting a process to its first step, before any is known."""
_CONTEXT = 0.6e9
"""Bytes of an accelerator that a process takes beside its tensors: context, libraries, the allocator's gaps."""
_DRAWN_PER_SLOT = 4
"""Configurations at hand for each slot where a sampler learns: more would be drawn with less known."""


@dataclass(frozen=True)
class Settings:
    """What a tuner needs to know beside what it tries."""

    folder: Path
    metric: str
    slots: int
    """Trials that may share a device."""
    time_limit_s: float
    study_time_s: float | None = None
    memory_bytes: float | None = None
    """Bytes of a device for all trials on it; None takes what the device has."""
    packing: Packing = PACKED
    sampler: str = "random"


class Tuner(StudyLoop[TuningJob]):
    """One process that tunes; others may share the study."""

    stop_message = "trials wrote checkpoints, the same command goes on from there"

    def __init__(
        self,
        store: StudyStore,
        queue: CandidateQueue,
        places: Sequence[DeviceSlot],
        settings: Settings,
        tell: Callable[[Trial, int], None] = lambda part, number: None,
    ) -> None:
        """tell: called with each part when it begins and when it has ended, and with its configuration's number."""
        limit_s = settings.time_limit_s + ORDERLY_STOP_S
        super().__init__(store, settings.sampler, most=queue.trials, limit_s=limit_s)
        self.queue, self.settings, self.tell = queue, settings, tell
        self.places = {place.name: place for place in places}
        slots = settings.slots if settings.packing.share else 1
        self.devices = [Device(place.name, slots, settings.memory_bytes or place.memory) for place in places]
        self.accelerator = places[0].accelerator
        self.starts: list[float] = []
        """Seconds that processes took to their first step."""
        self._session = Session(settings, [place.name for place in places])
        if settings.study_time_s is not None:
            self.ends = time.time() + settings.study_time_s
            self.time_is_up = f"the {settings.study_time_s:g} s of tune.study_time_s are over"
        # What earlier sessions and other processes measured is known from the start.
        for part in store.trials():
            self._learn_cost(part)

    def run(self) -> str:
        """Run trials until none is left to begin, or time is up; return why. Raises Interrupted when asked to stop."""
        try:
            return super().run()
        finally:
            self._session.save(ended=True)

    def still_alive(self) -> None:
        """Write down that this process still has its devices."""
        self._session.save()

    def begin_trials(self) -> str:
        """Start and move what the packing rule says, until nothing more can begin."""
        # Each round decides on the state that the round before left.
        again = True
        while again:
            packing = replace(self.settings.packing, start_s=self.start_s)
            candidates = self.queue.candidates(self.store, self._lookahead(), backfill=packing.fill)
            by_key = {one.key: one for one in candidates}
            refused = [one for one in candidates if one.run is None]
            for one in refused:
                part = self._claim_part(one, {"rung": one.rung, "steps": self.queue.rungs[one.rung]})
                if part is not None:
                    self.record(part, Outcome("refused", words=one.refusal, more={"rung": one.rung}))
            ready = [*self._waiting(), *self.queue.ready(candidates)]
            # What is refused, or turns out to be another process's, makes room for others.
            again = bool(refused)
            for action in decide_actions(self.devices, self._running(), ready, packing):
                place = self.places[action.device]
                if isinstance(action, Move):
                    self._job(action.key).move_to(place)
                elif action.key in by_key:
                    again = not self._begin(by_key[action.key], place) or again
                else:
                    self._job(action.key).start(place)
        return "every trial has ended, and none is promoted further"

    def count_before(self, trial: Trial) -> int:
        """Return how many configurations that are not interrupted began before this one."""
        return sum(one.counted and one.number < trial.number for one in group_configurations(self.store.trials()))

    def report_progress(self, trial: Trial) -> None:
        """Tell whoever watches of a part that has begun, or ended."""
        configurations = group_configurations(self.store.trials())
        number = next(one.number for one in configurations if any(part.number == trial.number for part in one.parts))
        self.tell(trial, number)

    def collect_ended(self) -> bool:
        """Note which jobs share a device, and record those that have ended. Returns whether devices have become free."""
        busy = [job for job in self.jobs if job.process is not None]
        for job in busy:
            job.note_sharing(sum(other.place is job.place for other in busy))
        ended = super().collect_ended()
        return ended or any(job.process is None for job in busy)

    def learn(self, job: TuningJob, outcome: Outcome) -> None:
        """Learn what a job cost, and leave its outcome for whoever finds the trial without its study's process."""
        if outcome.cause == OK and outcome.more.get("step_s") is not None:
            self.starts.append(outcome.more["start_s"])
        self._learn_cost(replace(job.trial, outcome=outcome))
        if outcome.cause not in (OK, INTERRUPTED):
            job.remove_checkpoints()
        if outcome.value is not None:
            self.store.report(job.trial, job.until, outcome.value)
        if job.folder.exists():
            save_outcome(job.folder, outcome)

    @property
    def start_s(self) -> float:
        """Expected seconds from starting a process to its first step."""
        return median_high(self.starts) if self.starts else _FIRST_START_S

    def _lookahead(self) -> int:
        if not self.settings.packing.long_first:
            return 1
        if self.settings.sampler == "random":
            return self.queue.trials
        return _DRAWN_PER_SLOT * sum(device.slots for device in self.devices)

    def _job(self, key: str) -> TuningJob:
        return next(job for job in self.jobs if job.trial.key == key)

    def _waiting(self) -> list[Ready]:
        """Return the jobs that wait for a device of their own."""
        waiting = [job for job in self.jobs if job.process is None]
        seconds = [job.seconds_left(1, self.start_s) for job in waiting]
        return [
            Ready(job.trial.key, left, job.expected_bytes, alone=True)
            for job, left in zip(waiting, seconds, strict=True)
        ]

    def _running(self) -> list[Running]:
        found = []
        for job in (job for job in self.jobs if job.process is not None):
            assert job.place is not None
            left = job.seconds_left(sum(one.place is job.place for one in self.jobs), self.start_s)
            # A process that has not got far has nothing that is worth a checkpoint.
            far = time.time() - job.began > 2 * self.start_s
            movable = far and not job.asked and job.moving_to is None
            device = (job.moving_to or job.place).name
            found.append(Running(job.trial.key, device, left, job.expected_bytes, job.alone, movable, job.backfill))
        return found

    def _begin(self, candidate: Candidate, place: DeviceSlot) -> bool:
        """Claim a part and start it. Returns whether this process got it."""
        assert candidate.run is not None and candidate.size is not None
        rungs, costs = self.queue.rungs, self.queue.costs
        until = rungs[candidate.rung]
        first = rungs[candidate.rung - 1] if candidate.rung else 0
        step_s = costs.step_seconds(candidate.size, candidate.values)
        memory = costs.memory(candidate.size, candidate.values)
        note = {
            "rung": candidate.rung,
            "steps": until,
            "expected_s": (until - first) * step_s,
            "expected_bytes": memory,
            "device": place.name,
        }
        part = self._claim_part(candidate, note)
        if part is None:
            return False
        number = part.number if candidate.number is None else candidate.number
        job = TuningJob(
            trial=part,
            number=number,
            rung=candidate.rung,
            run=candidate.run,
            size=candidate.size,
            run_dir=run_dir(self.settings.folder, number),
            folder=self.store.folder / str(part.number),
            first=first,
            until=until,
            expected_step_s=step_s,
            expected_bytes=memory,
            metric=self.settings.metric,
            limit_s=self.settings.time_limit_s,
            # A limit of host memory says nothing of an accelerator's.
            memory_bytes=None if place.accelerator else self.settings.memory_bytes,
            backfill=candidate.backfill,
        )
        self.jobs.append(job)
        job.start(place)
        self.tell(part, number)
        return True

    def _claim_part(self, candidate: Candidate, note: dict[str, Any]) -> Trial | None:
        """Claim a part of a configuration; None where another process has it."""
        proposal = Proposal(candidate.values, note)
        part = self.claim(candidate.key, proposal, self.queue.space.ranges, counts=candidate.number is None)
        self.queue.mark_begun(candidate)
        return part

    def _learn_cost(self, part: Trial) -> None:
        """Take in what a finished part, of this process or another, has to say of costs."""
        if part.outcome is None or not part.good or part.outcome.more.get("step_s") is None:
            return
        size = self.queue.size_of(dict(part.values))
        if size is None:
            return
        more, memory = part.outcome.more, part.outcome.memory_bytes
        if memory is not None and self.accelerator:
            # What an accelerator counts leaves out what each process needs there beside tensors.
            memory += _CONTEXT
        self.queue.costs.learn(size, part.values, more["step_s"], memory, more["sharing"])


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
        """Write the session down as of now."""
        content = {**self._content, "end": time.time(), "ended": ended}
        with suppress(OSError):
            # A full disk must not end trials that do not need it now.
            write_atomically(self._file, json.dumps(content))
