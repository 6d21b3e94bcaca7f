"""The folder of a trial: the run file its processes are given, the reports they leave behind, and why they failed.

FOLDER/run.yaml      the run file that the ranks train: without what people read, and cut short where it is only measured
FOLDER/part.json     the run directory and the last step, where they train a part of a longer run
FOLDER/log           what the processes wrote to stdout and stderr
FOLDER/rank-N.json   what rank N measured, or why it failed
FOLDER/run           the run directory, where part.json names no other
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.config.load import dump_run, parse_run
from phalanx.config.schema import Run
from phalanx.files import write_atomically
from phalanx.hardware.host import KILLED_FOR_MEMORY
from phalanx.study.processes.process import Ended
from phalanx.study.trial import INTERRUPTED, Outcome

RUN_FILE, PART_FILE, LOG, TRAINED = "run.yaml", "part.json", "log", "run"
MEMORY_LIMIT = "PHALANX_TRIAL_MEMORY"
"""Environment variable: bytes of host memory that a rank may allocate."""
CORES = "PHALANX_TRIAL_CORES"
"""Environment variable: numbers of the CPU cores that a rank may use, separated by commas."""
FIRST_DEVICE = "PHALANX_TRIAL_FIRST_DEVICE"
"""Environment variable: number on its node of the device that the first rank of each node takes, in a step that sees all."""

_CAUSES = ("refused", "out_of_memory", "hang", "non_finite", "crash")
"""Causes that a rank, or its launcher, reports, those that explain the failures of other ranks first."""
_EXPLAIN_KILLS = ("refused", "out_of_memory", "hang", "non_finite")
"""Those of them that do not follow from the end of another rank: what a rank says else may be that it lost one."""
_FIRST_OF_SRUN = re.compile(r"^srun: error: .*\btasks? [\d,-]+: (Killed|Out Of Memory|Exited)\b", re.MULTILINE)
"""What srun says of the first rank that failed; it then kills the others."""
_SHOWN_LINES = 12
_KILLED = (-9, 137)
_KILLED_BY_SLURM = ("oom_kill", "oom-kill", "oom killed")
"""Words that Slurm writes into the log of a step whose process the kernel killed because memory ran out."""

_QUIET = (
    *("evaluation.every=null", "evaluation.prompt=null", "training.tensorboard=false", "training.wandb=null"),
    *("training.mlflow=null", "training.run_dir=null", "training.on_nonfinite=stop", "training.profile=null"),
    *("training.memory_snapshot=null", "data.verify=false", "evaluation.tasks=null"),
)
"""Overrides of every trial and measurement."""
_MEASURED = (
    *("checkpoint.every=null", "checkpoint.last=false", "evaluation.samples=8", "training.resume=never"),
    # A schedule is a function of the number of steps; its warm-up alone may be longer than the measured run.
    *("optimizer.schedule=constant", "optimizer.warmup_steps=0", "layout.batch_warmup=[]"),
    "data.length_warmup=[]",
    "training.noise_scale_every=null",
    # What runs out of memory is to say so, and not to be measured in smaller micro-batches.
    "restart.max=0",
)
_RESUMABLE = (
    *("training.resume=auto", "checkpoint.last=true", "checkpoint.keep_last=1", "checkpoint.keep_every=null"),
)
_RATE_SHARE = 0.01
"""Learning rate of measured steps, as a share of the run file's."""


def short_run(run: Run, steps: int, overrides: Sequence[str] = ()) -> Run:
    """Return `run` cut to `steps` steps to be measured, at a small constant learning rate.

    overrides: further `section.field=value` overrides. Raises ConfigError where one is wrong.
    """
    # Without a warm-up the whole rate throws a new model about, and rounding grows from step to step until the losses of
    # equivalent layouts have nothing in common.
    rate = f"optimizer.lr={run.optimizer.lr * _RATE_SHARE!r}"
    words = [*_applicable_overrides(run, [*_QUIET, *_MEASURED]), rate, f"training.steps={steps}", *overrides]
    return parse_run(dump_run(run), "the run file", words)


def tuned_overrides(run: Run) -> list[str]:
    """Return the overrides of every trial of tuning, which keeps metrics, one checkpoint, and an evaluation at each rung."""
    return _applicable_overrides(run, [*_QUIET, *_RESUMABLE])


def _applicable_overrides(run: Run, overrides: Iterable[str]) -> list[str]:
    """Return the `section.field=value` overrides whose field runs of this family have."""
    paths = ((override, override.partition("=")[0].split(".")) for override in overrides)
    return [override for override, (section, field) in paths if hasattr(getattr(run, section), field)]


@dataclass(frozen=True)
class Part:
    """A part of a run, trained from its newest checkpoint up to a step."""

    run_dir: str
    until: int
    """Optimizer step to stop after."""

    def write(self, folder: Path) -> None:
        """Write the part into a trial's folder, for its ranks to read."""
        write_atomically(folder / PART_FILE, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Part | None:
        """Read what `write` wrote; None where a trial trains a whole run."""
        file = folder / PART_FILE
        return cls(**json.loads(file.read_text())) if file.exists() else None


def read_rank_reports(folder: Path, ranks: int) -> list[dict[str, Any] | None]:
    """Read what each rank left in a trial's folder; None for ranks that left nothing."""
    files = [folder / f"rank-{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def read_log_tail(folder: Path) -> str:
    """Return the last lines of a trial's log; nothing where it never began."""
    file = folder / LOG
    return "\n".join(file.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]) if file.exists() else ""


def explain_failure(reports: Sequence[dict[str, Any]], ended: Ended, log: str) -> Outcome:
    """Return the outcome of a trial whose processes failed: the cause that explains the failures of all ranks.

    reports: what the ranks left that left something. ended: how the command ended. log: the end of the trial's log.
    """
    if ended.cause is not None:
        said = f"{ended.words}; {log}" if log else ended.words
        return Outcome(ended.cause, seconds=ended.seconds, words=said[:1000])
    if ended.timed_out:
        return Outcome("hang", seconds=ended.seconds, words=f"after {ended.seconds:.0f} s: {log}")
    # A rank that ran out of memory makes the others crash in the next collective: causes are sorted by what explains what.
    failed = sorted((one for one in reports if one["cause"] in _CAUSES), key=lambda one: _CAUSES.index(one["cause"]))
    first = _FIRST_OF_SRUN.search(log)
    # A rank may end before it can report, as where a package is missing.
    by_itself = first is not None and first[1] == "Exited"
    explained = by_itself or (failed and failed[0]["cause"] in _EXPLAIN_KILLS)
    if ended.code in _KILLED and not explained:
        # A killed rank leaves no report, and what the other ranks report, such as a closed connection, follows from it.
        if ended.memory_ran_out or any(said in log.lower() for said in _KILLED_BY_SLURM):
            words = f"a process was {KILLED_FOR_MEMORY} (signal 9)"
            return Outcome("out_of_memory", seconds=ended.seconds, words=words)
        return Outcome(INTERRUPTED, seconds=ended.seconds, words="a process was killed from outside (signal 9)")
    if failed:
        return Outcome(failed[0]["cause"], seconds=ended.seconds, words=str(failed[0]["words"])[-1000:])
    stopped = next((one for one in reports if one["cause"] == INTERRUPTED), None)
    if stopped is not None:
        return Outcome(INTERRUPTED, seconds=ended.seconds, words=str(stopped["words"]))
    return Outcome("crash", seconds=ended.seconds, words=f"exit code {ended.code}: {log}")
