"""Trials as jobs of a Slurm cluster, which the study submits itself: one array a time, one job a trial.

STUDY/arrays/N.sbatch      script of an array
STUDY/arrays/N.folders     folder of each of its jobs, a line a job
STUDY/arrays/JOB_TASK.log  what a job wrote outside its trial's folder
FOLDER/job.json            the job of the trial in that folder
FOLDER/ended               exit code and seconds of its ranks, written by the job

Jobs write into their trials' folders alone; the study's journal is written by the process that submits. That process may end
and another one take its jobs over: all that is known of them stands in these files and in the queue.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.errors import PhalanxError
from phalanx.files import write_atomically
from phalanx.hardware.machine import Machine
from phalanx.launch.job_script import ARRAY_END, Job, JobArray, array_script
from phalanx.printable import write_stderr
from phalanx.study.processes.process import Ended
from phalanx.study.processes.slots import MODULE
from phalanx.study.trial import INTERRUPTED

ARRAYS = "arrays"
_JOB_FILE = "job.json"
_LONGEST_ARRAY = 1000
"""Jobs of an array; Slurm's own limit (MaxArraySize) is 1001 where nobody changed it."""
_LOOK_S = 1.0
"""Seconds between looks for what jobs left in their folders."""
_HURRY_S = 2.0
"""Seconds between questions to the queue while a job that failed, or was told to stop, waits for its answer."""
_LOST_ANSWERS = 3
"""Answers in a row without a job after which it counts as lost: a job may stand in no list for a moment."""
_TAIL = 2000
"""Characters that are kept of a job's log."""

_WAITS = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
_UNDER_WAY = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})
_LOST = frozenset({"NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED"})
"""States of jobs that ended for what is not their trials' fault."""
_CAUSES = {"TIMEOUT": "hang", "DEADLINE": "hang", "OUT_OF_MEMORY": "out_of_memory", "CANCELLED": "cancelled"}
"""Cause of a trial's failure by the state of its job, where the state names one."""


@dataclass(eq=False)
class ArrayTask:
    """The job of one trial."""

    arrays: JobArrays
    folder: Path
    job: str = ""
    """Its name in the queue, such as 123_4; empty until it is submitted."""
    state: str = ""
    """State by Slurm's last answer."""
    missing: int = 0
    """Answers in a row in which it did not stand."""
    asked: bool = False
    told: bool = False
    """Whether Slurm was told that it is to stop."""
    ended: Ended | None = None

    def poll(self) -> Ended | None:
        """Return how its ranks ended; None while the job waits or runs."""
        self.arrays.look()
        return self.ended

    def ask_to_stop(self) -> None:
        """Ask the ranks to write a checkpoint and stop; a job that still waits is cancelled."""
        self.asked = True

    def kill(self) -> None:
        """Cancel the job; do nothing where it has ended."""
        if self.ended is None:
            self.arrays.cancel([self])
            self.ended = Ended(1, False, 0.0, words="killed")


@dataclass
class JobArrays:
    """Submits trials and follows their jobs.

    Everything that begins between two looks is one array.
    """

    machine: Machine
    job: Job
    """Nodes, time and account of each trial."""
    study: Path
    """Folder of the study."""
    poll_s: float = 15.0
    """Seconds between questions to the queue."""
    command: tuple[str, ...] = (*MODULE, "rank")
    """Command of each rank, to which the trial's folder is added."""
    tasks: list[ArrayTask] = field(default_factory=list)
    """Jobs that have not ended."""
    _looked: float = 0.0
    _asked: float = 0.0
    _submitted: bool = False
    """Whether Slurm has taken an array of this process."""
    _complained: bool = False

    @property
    def name(self) -> str:
        """Name of all jobs of the study."""
        # The same for every process that goes on with it, and another one for every other study.
        return f"phalanx-tune-{hashlib.sha256(str(self.study.resolve()).encode()).hexdigest()[:12]}"

    @property
    def folder(self) -> Path:
        """Folder of scripts and logs."""
        return self.study.resolve() / ARRAYS

    def add(self, folder: Path) -> ArrayTask:
        """Return the job of the trial in `folder`, which is submitted at the next look."""
        for name in (_JOB_FILE, ARRAY_END):
            (folder / name).unlink(missing_ok=True)
        task = ArrayTask(self, folder)
        self.tasks.append(task)
        self._looked = 0.0
        return task

    def find(self, folder: Path) -> ArrayTask | None:
        """Return the job that an earlier process submitted for the trial in `folder`; None where it did not get so far."""
        file = folder / _JOB_FILE
        if not file.exists():
            return None
        task = ArrayTask(self, folder, json.loads(file.read_text())["job"])
        self.tasks.append(task)
        return task

    def cancel_strangers(self) -> None:
        """Cancel jobs of this study that belong to no task: their process ended before it wrote down whose they are."""
        known = {task.job for task in self.tasks}
        strangers = [
            job for job, state in self._ask_queue().items() if job not in known and state in _WAITS | _UNDER_WAY
        ]
        if strangers:
            _run(["scancel", *strangers])

    def look(self) -> None:
        """Submit what is to be submitted, pass on requests to stop, and note which jobs have ended. Seldom does anything."""
        now = time.monotonic()
        if now - self._looked < min(_LOOK_S, self.poll_s):
            return
        self._looked = now
        self._submit()
        self._tell_to_stop()
        hurries = False
        for task in (task for task in self.tasks if task.job):
            code = _read_end(task.folder)
            # The ranks' exit code says all where it is 0, or they stopped because the study told them to.
            if code is not None and (code[0] == 0 or task.asked):
                task.ended = Ended(code[0], False, code[1])
            hurries = hurries or (task.ended is None and (code is not None or task.asked))
        if now - self._asked > (min(_HURRY_S, self.poll_s) if hurries else self.poll_s):
            self._asked = now
            self._follow()
        self.tasks = [task for task in self.tasks if task.ended is None]

    def cancel(self, tasks: Sequence[ArrayTask]) -> None:
        """Cancel the jobs of these tasks."""
        self.tasks = [task for task in self.tasks if task not in tasks]
        if jobs := [task.job for task in tasks if task.job]:
            _run(["scancel", *jobs])

    def _submit(self) -> None:
        """Submit the tasks that are not yet, as one array. Raises PhalanxError where the first array is refused."""
        waiting = [task for task in self.tasks if not task.job and not task.asked][:_LONGEST_ARRAY]
        if not waiting:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(file.stem) for file in self.folder.glob("*.sbatch")), default=0)
        script, folders = self.folder / f"{number}.sbatch", self.folder / f"{number}.folders"
        write_atomically(folders, "".join(f"{task.folder}\n" for task in waiting))
        array = JobArray(self.name, self.command, folders, len(waiting), self.folder)
        write_atomically(script, array_script(self.machine, self.job, array))
        done = _run(["sbatch", "--parsable", str(script)])
        # A cluster's name may follow after a semicolon.
        job = done.stdout.strip().splitlines()[-1].partition(";")[0] if done.stdout.strip() else ""
        if done.returncode or not job:
            said = done.stderr.strip() or f"exit code {done.returncode}"
            script.unlink()
            folders.unlink()
            if not self._submitted:
                raise PhalanxError(f"sbatch refused {len(waiting)} trials: {said}")
            # The queue is full, or Slurm does not answer: neither ends a study.
            self._complain(f"sbatch refused {len(waiting)} trials, which wait: {said}")
            self._looked = time.monotonic() + self.poll_s
            return
        self._submitted, self._complained = True, False
        for index, task in enumerate(waiting):
            task.job = f"{job}_{index}"
            write_atomically(task.folder / _JOB_FILE, json.dumps({"job": task.job}))
        write_stderr(f"job array {job}: {len(waiting)} trials of {self.job.nodes} nodes")

    def _tell_to_stop(self) -> None:
        asked = [task for task in self.tasks if task.asked and not task.told]
        for task in asked:
            task.told = True
            if not task.job:
                task.ended = Ended(1, False, 0.0)
        if jobs := [task.job for task in asked if task.job]:
            _run(["scancel", "--state=PENDING", *jobs])
            # Signals reach the ranks and not the script, which waits for them.
            _run(["scancel", "--state=RUNNING", "--signal=TERM", *jobs])

    def _follow(self) -> None:
        """Ask Slurm for the states of all jobs and note which have ended."""
        try:
            states = self._ask_queue()
            missing = [task.job for task in self.tasks if task.job and task.job not in states]
            states |= self._ask_accounting(missing)
        except PhalanxError as error:
            # Nothing is concluded from silence.
            self._complain(str(error))
            return
        self._complained = False
        for task in (task for task in self.tasks if task.job and task.ended is None):
            task.state = states.get(task.job, "")
            # A file that a job wrote on another node may be seen late.
            unclear = task.state in ("", "COMPLETED") and _read_end(task.folder) is None
            task.missing = task.missing + 1 if unclear else 0
            task.ended = self._judge(task)

    def _judge(self, task: ArrayTask) -> Ended | None:
        """Return how a job ended by its state and by what it left; None while it waits or runs."""
        end, state = _read_end(task.folder), task.state
        code, seconds = end or (1, 0.0)
        said = f"job {task.job}: {state}"
        if state in _WAITS | _UNDER_WAY:
            return None
        if state in _LOST:
            return Ended(code, False, seconds, cause=INTERRUPTED, words=said)
        if state in _CAUSES:
            return Ended(code, False, seconds, cause=_CAUSES[state], words=said)
        if end is not None:
            return Ended(code, False, seconds)
        if task.missing:
            if task.missing < _LOST_ANSWERS:
                return None
            known = said if state else f"job {task.job}: Slurm knows nothing of it any more"
            return Ended(code, False, seconds, cause=INTERRUPTED, words=known)
        # It failed before its ranks began: its own log says why.
        log = self.folder / f"{task.job}.log"
        words = log.read_text(errors="replace")[-_TAIL:] if log.exists() else ""
        return Ended(code, False, seconds, cause="crash", words=f"{said}: {words}")

    def _ask_queue(self) -> dict[str, str]:
        """Return the state of each job of this study that the queue knows, those that ended a while ago included."""
        asked = ["squeue", "--noheader", "--array", "--states=all", f"--name={self.name}", "--format=%i|%T"]
        return _read_states(_require(asked))

    def _ask_accounting(self, jobs: Sequence[str]) -> dict[str, str]:
        """Return the states of jobs that the queue has forgotten; nothing where the cluster keeps no accounts."""
        if not jobs or shutil.which("sacct") is None:
            return {}
        asked = [
            "sacct",
            "--noheader",
            "--parsable2",
            "--allocations",
            f"--jobs={','.join(jobs)}",
            "--format=JobID,State",
        ]
        done = _run(asked)
        return {} if done.returncode else _read_states(done.stdout)

    def _complain(self, text: str) -> None:
        # Once, until it works again.
        if not self._complained:
            write_stderr(f"warning: {text}")
        self._complained = True


@dataclass(frozen=True)
class JobSlot:
    """A place in the queue: one trial at a time is submitted for it."""

    arrays: JobArrays
    index: int
    ranks: int
    memory: float = math.inf
    accelerator: bool = True

    @property
    def name(self) -> str:
        """Number of the place."""
        return f"job {self.index}"

    def start(self, folder: Path, number: int, env: Mapping[str, str], limit_s: float) -> ArrayTask:
        """Submit the trial in `folder`. Its time is that of the job, its environment that of the cluster's description."""
        return self.arrays.add(folder)


def _read_end(folder: Path) -> tuple[int, float] | None:
    """Return (exit code, seconds) of the ranks of the trial in `folder`; None while they have not ended."""
    try:
        code, seconds = (folder / ARRAY_END).read_text().split()
    except FileNotFoundError:
        return None
    return int(code), float(seconds)


def _read_states(text: str) -> dict[str, str]:
    """Return states by job; of `CANCELLED by 1000` the first word."""
    rows = [line.strip().split("|") for line in text.splitlines() if "|" in line]
    return {job: state.split()[0] for job, state in rows if state.strip()}


def _require(command: Sequence[str]) -> str:
    done = _run(command)
    if done.returncode:
        raise PhalanxError(f"{command[0]} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        # Slurm's commands wait for its controller, sometimes for minutes.
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120.0)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))
