"""Tuning, from a run file to a study that has run: parts of configurations on devices as ASHA and the packing rule say."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_high
from typing import Any

from phalanx.config.load import dump_run, load_run
from phalanx.config.schema import Run
from phalanx.config.studies import Tune
from phalanx.errors import ConfigError, PhalanxError
from phalanx.families.registry import bind
from phalanx.files import write_atomically
from phalanx.hardware.machine import Machine
from phalanx.launch.job_script import Job, complete_job
from phalanx.layout.resolve import resolve_layout
from phalanx.locks import FolderLock
from phalanx.study.hyperparameters.asha import rung_steps
from phalanx.study.hyperparameters.candidates import Candidate, CandidateQueue, CostModel, Refusal, measure_size
from phalanx.study.hyperparameters.configuration import RUN, SESSIONS, group_configurations, open_store, run_dir
from phalanx.study.hyperparameters.hyperparameter_space import HyperparameterSpace, build_hyperparameter_space
from phalanx.study.hyperparameters.metric import check_metric
from phalanx.study.hyperparameters.packing import (
    PACKED,
    QUEUED,
    UNPACKED,
    Device,
    Move,
    Packing,
    Ready,
    Running,
    decide_actions,
)
from phalanx.study.hyperparameters.tuning_job import TuningJob
from phalanx.study.loop import ORDERLY_STOP_S, StudyLoop
from phalanx.study.processes.job_arrays import JobArrays, JobSlot
from phalanx.study.processes.process import Worker
from phalanx.study.processes.slots import DeviceSlot, automatic_sharing, find_devices, spread_over_nodes
from phalanx.study.processes.trial_files import tuned_overrides
from phalanx.study.samplers import Proposal, make_sampler
from phalanx.study.store import StudyError, StudyStore, save_outcome
from phalanx.study.trial import ASKED, INTERRUPTED, OK, Outcome, Trial
from phalanx.training.inputs import TrainableModel

_FIRST_START_S = 10.0
"""Seconds from starting a process to its first step, before any is known."""
_CONTEXT_BYTES = 0.6e9
"""Bytes of an accelerator that a process takes beside its tensors: context, libraries, the allocator's gaps."""
_QUEUED_TRIALS = 16
"""Trials that are in a cluster's queue at once where nobody says."""
_QUEUE_S = 90 * 86400.0
"""Seconds that a job may wait and run before other processes of the study take it for abandoned."""
_QUEUE_TICK_S = 1.0
"""Seconds between looks at jobs of a cluster."""
_DRAWN_PER_SLOT = 4
"""Configurations at hand for each slot where a sampler learns: more would be drawn with less known."""
_FREE_SECTIONS = {"tune", "search", "cluster", "checkpoint"}
"""Sections that may change while a study is resumed; what of `tune` may not, the store knows."""


def run_tuning(
    run: Run,
    folder: Path,
    *,
    where: str = "local",
    devices: int | None = None,
    machine: Machine | None = None,
    job: Job | None = None,
    packing: bool = True,
    tell: Callable[[Trial, int], None],
) -> str:
    """Run trials until the study has `tune.trials` and none of them is promoted further; return why it stopped.

    Resumes the study that an earlier call left.

    Args:
        run: the run file, with its `tune` section.
        folder: of the study.
        where: local, slurm or sbatch.
        devices: number of devices; None takes all, or for sbatch those of 16 trials.
        machine: description of the Slurm cluster.
        job: of sbatch: account, time and folder of each trial's job.
        packing: whether trials share devices, the long ones first.
        tell: see `Tuner`.

    Raises ConfigError for what does not go together, DataError where data are missing, Interrupted when asked to stop.
    """
    space, section = build_hyperparameter_space(run), run.tune
    ranks = section.nproc
    # A layout that is not one of so many ranks is refused before anything starts.
    model = bind(run, TrainableModel)
    on_nodes = None if where == "local" or machine is None else spread_over_nodes(ranks, machine.node.devices)
    ranks_per_node = ranks if on_nodes is None else on_nodes[1]
    resolve_layout(model, ranks, ranks_per_node)
    size = measure_size(bind(space.run_of({}, tuned_overrides(run))), ranks)
    arrays = describe_jobs(run, folder, machine, job) if where == "sbatch" else None
    if arrays is None:
        slots = find_devices(where, run.cluster.device, devices, machine, ranks)
    else:
        slots = list(find_places(arrays, devices, ranks))
    rungs = rung_steps(section.asha, run.training.steps)
    check_metric(section.metric, model.expected_evaluation())
    _require_same_run(run, folder)
    store = open_store(folder, describe_study(run, space, rungs))
    # The first process of the study writes it; later ones were compared with it above.
    if not (folder / RUN).exists():
        write_atomically(folder / RUN, dump_run(run))
    queue = CandidateQueue(
        space,
        make_sampler(section.engine, space, section.seed),
        CostModel(space.ranges, size, accelerator=slots[0].accelerator),
        rungs=rungs,
        eta=section.asha.eta if section.asha else 2,
        trials=section.trials,
        default_first=section.first == "default",
        ranks=ranks,
        ranks_per_node=ranks_per_node,
    )
    how = QUEUED if arrays is not None else PACKED if packing else UNPACKED
    return Tuner(store, queue, slots, Settings.of_section(section, folder, slots, how), tell, arrays).run()


def describe_jobs(run: Run, folder: Path, machine: Machine | None, job: Job | None) -> JobArrays:
    """Return what submits the trials of a study. Raises ConfigError where the machine has no such jobs."""
    if machine is None or job is None:
        raise ConfigError("--where sbatch needs --cluster NAME, which says how jobs are started there")
    if shutil.which("sbatch") is None:
        raise PhalanxError("--where sbatch needs sbatch, which is not on PATH; start the study on a login node")
    nodes, each = spread_over_nodes(run.tune.nproc, machine.node.devices)
    seconds = math.ceil(run.tune.time_limit_s) if job.seconds is None else job.seconds
    machine = machine.with_devices(each)
    return JobArrays(machine, complete_job(machine, replace(job, nodes=nodes, seconds=seconds)), folder)


def find_places(arrays: JobArrays, devices: int | None, ranks: int) -> list[JobSlot]:
    """Return a place in the queue for each trial that may be there at once. devices: of all of them."""
    count, rest = divmod(_QUEUED_TRIALS * ranks if devices is None else devices, ranks)
    if rest or not count:
        raise ConfigError(f"--devices {devices} is no multiple of the {ranks} devices of a trial (--nproc, tune.nproc)")
    return [JobSlot(arrays, index, ranks) for index in range(count)]


def load_study(folder: Path) -> tuple[Run, HyperparameterSpace]:
    """Return the run file that a study tunes, and its space. Raises ConfigError where there is none."""
    run = load_run(folder / RUN)
    return run, build_hyperparameter_space(run)


def describe_study(run: Run, space: HyperparameterSpace, rungs: tuple[int, ...]) -> dict[str, Any]:
    """Return what trials of one study have in common, beside the run file: others could not be compared with them."""
    section = run.tune
    return {
        "parameters": {name: given.model_dump(mode="json") for name, given in section.parameters.items()},
        "constraints": list(space.constraints),
        "metric": section.metric,
        "rungs": list(rungs),
        "eta": section.asha.eta if section.asha else None,
    }


def best_run_text(folder: Path, summary: dict[str, Any]) -> str:
    """Return a run file that trains the best configuration from the start, with all that trials leave out of a run.

    summary: of `summarise_study`. Raises ConfigError where no trial has a score.
    """
    best = summary["best"]
    if best is None:
        raise ConfigError("--write: no trial has a score, so there is no best configuration to write")
    note = (
        f"# Best of {len(summary['trials'])} trials: {summary['metric']} {best['score']:.6g} after {best['steps']} steps "
        f"(trial {best['number']}).\n"
    )
    return note + dump_run(load_study(folder)[1].run_of(best["values"]))


def _require_same_run(run: Run, folder: Path) -> None:
    """Refuse to resume with another run than the study began with. Raises ConfigError that names what differs."""
    if not (folder / RUN).exists():
        return
    before = load_run(folder / RUN)
    differs = [
        f"{name}.{field}"
        for name, section in before.model_dump(mode="json", exclude=_FREE_SECTIONS).items()
        for field, value in section.items()
        if getattr(run, name).model_dump(mode="json").get(field) != value
    ]
    if differs:
        raise ConfigError(
            f"{folder} holds a study of a run with another {', '.join(differs)}; put that back, or give another --out DIR"
        )


@dataclass(frozen=True)
class Settings:
    """Folder, limits and scheduling of a study."""

    folder: Path
    metric: str
    sharing: int
    """Trials that may share a device."""
    time_limit_s: float
    study_time_s: float | None = None
    memory_bytes: float | None = None
    """Bytes of a device for all trials on it; None takes what the device has."""
    packing: Packing = PACKED
    sampler: str = "random"

    @classmethod
    def of_section(cls, section: Tune, folder: Path, slots: Sequence[DeviceSlot], packing: Packing) -> Settings:
        """Return what the run file's `tune` section asks for on these slots."""
        return cls(
            folder=folder,
            metric=section.metric,
            sharing=automatic_sharing(slots) if section.slots == "auto" else section.slots,
            time_limit_s=section.time_limit_s,
            study_time_s=section.study_time_s,
            memory_bytes=None if section.memory_gib is None else section.memory_gib * 2**30,
            packing=packing,
            sampler=section.engine,
        )


class Tuner(StudyLoop[TuningJob]):
    """One process that tunes; others may share the study."""

    stop_message = "trials wrote checkpoints, the same command goes on from there"

    def __init__(
        self,
        store: StudyStore,
        queue: CandidateQueue,
        slots: Sequence[DeviceSlot],
        settings: Settings,
        tell: Callable[[Trial, int], None] = lambda part, number: None,
        arrays: JobArrays | None = None,
    ) -> None:
        """Run trials on `slots`.

        tell: called with each part when it begins and when it has ended, and with its configuration's number. arrays: what
        submits the trials, where they are jobs.
        """
        limit_s = _QUEUE_S if arrays is not None else settings.time_limit_s + ORDERLY_STOP_S
        super().__init__(store, settings.sampler, most=queue.trials, limit_s=limit_s)
        self.queue, self.settings, self.tell = queue, settings, tell
        self.slots = {slot.name: slot for slot in slots}
        sharing = settings.sharing if settings.packing.share else 1
        self.devices = [Device(slot.name, sharing, settings.memory_bytes or slot.memory) for slot in slots]
        self.accelerator = slots[0].accelerator
        self.arrays = arrays
        if arrays is not None:
            # Jobs outlive this process: whoever has the study's lock goes on with them.
            self.worker = Worker(arrays.name, 0, "")
            self.tick_s = min(_QUEUE_TICK_S, arrays.poll_s)
        self.starts: list[float] = []
        """Seconds that processes took to their first step."""
        self._session = Session(settings, list(self.slots))
        if settings.study_time_s is not None:
            self.ends = time.time() + settings.study_time_s
            self.time_is_up = f"the {settings.study_time_s:g} s of tune.study_time_s are over"
        # What earlier sessions and other processes measured is known from the start.
        for part in store.trials():
            self._learn_cost(part)

    def run(self) -> str:
        """Run trials until none is left to begin, or time is up; return why. Raises Interrupted when asked to stop."""
        with ExitStack() as held:
            held.callback(self._session.save, ended=True)
            if self.arrays is not None:
                held.enter_context(FolderLock(self.arrays.folder / ".lock", StudyError, "--out DIR"))
                self._take_over_jobs(self.arrays)
            return super().run()

    def still_alive(self) -> None:
        """Write down that this process still has its devices."""
        self._session.save()

    def begin_trials(self) -> str:
        """Start and move what the packing rule says, until nothing more can begin."""
        # Each round decides on the state that the round before left.
        again = True
        while again:
            packing = replace(self.settings.packing, start_s=self.start_s)
            found = self.queue.candidates(self.store, self._trials_ahead(packing), backfill=packing.fill)
            refused = [one for one in found if isinstance(one, Refusal)]
            for one in refused:
                part = self._claim_part(one, {"rung": one.rung, "steps": self.queue.rungs[one.rung]})
                if part is not None:
                    self.record(part, Outcome("refused", words=one.reason, more={"rung": one.rung}))
            candidates = {one.key: one for one in found if isinstance(one, Candidate)}
            ready = [
                # Jobs without a process wait for a device of their own.
                *(
                    Ready(job.trial.key, job.seconds_left(1, self.start_s), job.expected_bytes, alone=True)
                    for job in self.jobs
                    if job.process is None
                ),
                *(Ready(one.key, one.seconds, one.memory_bytes, one.backfill) for one in candidates.values()),
            ]
            # What is refused, or turns out to be another process's, makes room for others.
            again = bool(refused)
            for action in decide_actions(self.devices, self._running_jobs(), ready, packing):
                slot = self.slots[action.device]
                if action.key in candidates and not isinstance(action, Move):
                    again = not self._begin(candidates[action.key], slot) or again
                    continue
                job = next(job for job in self.jobs if job.trial.key == action.key)
                if isinstance(action, Move):
                    job.move_to(slot)
                else:
                    job.start(slot)
        return "every trial has ended, and none is promoted further"

    def _trials_ahead(self, packing: Packing) -> int:
        """Return how many trials are drawn before they can begin."""
        if not packing.long_first:
            # Without an order to choose, as many as can begin are enough.
            return max(1, sum(device.slots for device in self.devices) - len(self.jobs))
        if self.settings.sampler == "random":
            # Random draws learn nothing: all of them may be known at once, the longest first.
            return self.queue.trials
        return _DRAWN_PER_SLOT * sum(device.slots for device in self.devices)

    def _running_jobs(self) -> list[Running]:
        """Return the trials that have a process, as the packing rule sees them."""
        running = []
        for job in (job for job in self.jobs if job.process is not None):
            assert job.slot is not None
            left = job.seconds_left(sum(one.slot is job.slot for one in self.jobs), self.start_s)
            # A process that has not got far has nothing that is worth a checkpoint.
            far = time.time() - job.began > 2 * self.start_s
            movable = far and not job.asked and job.moving_to is None
            device = (job.moving_to or job.slot).name
            running.append(Running(job.trial.key, device, left, job.expected_bytes, job.alone, movable, job.backfill))
        return running

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
            job.note_sharing(sum(other.slot is job.slot for other in busy))
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

    def _begin(self, candidate: Candidate, slot: DeviceSlot) -> bool:
        """Claim a part and start it. Returns whether this process got it."""
        note = {
            "rung": candidate.rung,
            "steps": candidate.until,
            "expected_s": candidate.seconds,
            "expected_bytes": candidate.memory_bytes,
            "device": slot.name,
        }
        part = self._claim_part(candidate, note)
        if part is None:
            return False
        number = part.number if candidate.number is None else candidate.number
        job = self._make_job(part, number, candidate, slot)
        self.jobs.append(job)
        job.start(slot)
        self.tell(part, number)
        return True

    def _make_job(self, part: Trial, number: int, candidate: Candidate, slot: DeviceSlot) -> TuningJob:
        return TuningJob(
            trial=part,
            number=number,
            rung=candidate.rung,
            run=candidate.run,
            run_dir=run_dir(self.settings.folder, number),
            folder=self.store.folder / str(part.number),
            first=candidate.first,
            until=candidate.until,
            expected_step_s=candidate.step_s,
            expected_bytes=candidate.memory_bytes,
            metric=self.settings.metric,
            limit_s=self.settings.time_limit_s,
            # A limit of host memory says nothing of an accelerator's.
            memory_bytes=None if slot.accelerator else self.settings.memory_bytes,
            backfill=candidate.backfill,
        )

    def _take_over_jobs(self, arrays: JobArrays) -> None:
        """Go on with the jobs that an earlier process of this study submitted."""
        assert self.worker is not None
        numbers = {part.number: one.number for one in group_configurations(self.store.trials()) for part in one.parts}
        for place, part in enumerate(self.store.running_of(self.worker)):
            number, slot = numbers[part.number], list(self.slots.values())[place % len(self.slots)]
            candidate, task = self.queue.candidate_of(part, number), arrays.find(self.store.folder / str(part.number))
            if task is None or isinstance(candidate, Refusal):
                gone = Outcome(INTERRUPTED, words="the study ended before it was submitted", more={ASKED: True})
                self.record(part, gone)
                continue
            job = self._make_job(part, number, candidate, slot)
            job.follow(slot, task)
            self.jobs.append(job)
        arrays.cancel_strangers()

    def _claim_part(self, candidate: Candidate | Refusal, note: dict[str, Any]) -> Trial | None:
        """Claim a part of a configuration; None where another process has it."""
        proposal = Proposal(candidate.values, note)
        part = self.claim(candidate.key, proposal, self.queue.space.ranges, counts=candidate.number is None)
        self.queue.mark_begun(candidate)
        return part

    def _learn_cost(self, part: Trial) -> None:
        """Take in what a finished part, of this process or another, has to say of costs."""
        if part.outcome is None or not part.good or part.outcome.more.get("step_s") is None:
            return
        more, memory = part.outcome.more, part.outcome.memory_bytes
        if memory is not None and self.accelerator:
            # What an accelerator counts leaves out what each process needs there beside tensors.
            memory += _CONTEXT_BYTES
        self.queue.learn_cost(dict(part.values), more["step_s"], memory, more["sharing"])


class Session:
    """A file that says which devices a tuner has had, from when to when: what idle time is a share of."""

    def __init__(self, settings: Settings, devices: Sequence[str]) -> None:
        worker = Worker.this_process()
        self._file = settings.folder / SESSIONS / f"{worker.host}-{worker.pid}-{int(time.time())}.json"
        self._content: dict[str, Any] = {
            "devices": list(devices),
            "slots": settings.sharing,
            "packing": settings.packing.share,
            "begin": time.time(),
        }

    def save(self, *, ended: bool = False) -> None:
        """Write the session down as of now."""
        content = {**self._content, "end": time.time(), "ended": ended}
        with suppress(OSError):
            # A full disk must not end trials that do not need it now.
            write_atomically(self._file, json.dumps(content))
