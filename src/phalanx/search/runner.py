"""Runs trials of layouts for real: the run file of a point, its processes, and what they found, read back as an outcome.

A trial is a short training run with the real step on the real data. Its folder holds everything it leaves behind.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from phalanx.cluster.launch import srun_command
from phalanx.cluster.machine import Machine
from phalanx.config.check import global_batch_samples
from phalanx.config.load import dump_run, parse_run
from phalanx.config.schema import Run
from phalanx.config.search import Search
from phalanx.errors import ConfigError, PhalanxError
from phalanx.files import write_atomically
from phalanx.layout.precision import PRECISIONS
from phalanx.search.measure import MEMORY_LIMIT, RUN_FILE, TRAINED
from phalanx.search.process import Ended, guarded, run_limited
from phalanx.search.space import Space
from phalanx.search.storage import save_outcome
from phalanx.search.trials import INTERRUPTED, OK, Outcome, Trial
from phalanx.verify.bound import Bound

_MODULE = [sys.executable, "-m", "phalanx.search"]
_QUIET = (
    *("checkpoint.every=null", "checkpoint.last=false", "evaluation.every=null", "evaluation.samples=8"),
    *("evaluation.prompt=null", "training.tensorboard=false", "training.wandb=null", "training.mlflow=null"),
    *("training.resume=never", "data.verify=false", "training.profile=null", "training.memory_snapshot=null"),
    *("training.on_nonfinite=stop", "training.run_dir=null"),
)
"""What a trial leaves out of a run."""
_SHOWN_LINES = 12
_LOSS_SHARE = 0.01
"""Relative difference of losses beyond which no number format is an excuse."""
_KILLED = (-9, 137)
_FIRST_PORT, _PORTS = 10_000, 20_000
"""Below the ports that Linux hands out by itself, as for whole jobs."""


class Runner(Protocol):
    """Measures points."""

    def measure(self, space: Space, point: int, trial: Trial, folder: Path, before: Sequence[Trial]) -> Outcome:
        """Run a trial to its end. before: the study's trials so far."""


class Launcher(Protocol):
    """Where a trial's ranks are started."""

    def command(self, folder: Path, limit_s: float) -> list[str]:
        """What starts them all, and ends when they have."""

    def env(self, trial: Trial) -> Mapping[str, str]:
        """Variables they need beside those of this process."""


@dataclass(frozen=True)
class LocalLauncher:
    """Ranks on this machine, one for each of its devices that are asked for."""

    devices: int

    def command(self, folder: Path, limit_s: float) -> list[str]:
        """The launcher of `phalanx train --nproc`; a single rank needs none."""
        if self.devices == 1:
            return [*_MODULE, "rank", str(folder)]
        return [*_MODULE, "launch", str(folder), str(self.devices)]

    def env(self, trial: Trial) -> Mapping[str, str]:
        """None."""
        return {}


@dataclass(frozen=True)
class SlurmLauncher:
    """Ranks on whole nodes of the allocation that this process runs in."""

    machine: Machine
    nodes: int

    def command(self, folder: Path, limit_s: float) -> list[str]:
        """One step of the allocation; Slurm ends it a minute after the limit even if this process cannot."""
        # srun hands the wish to quit on to its ranks.
        return guarded(srun_command(self.machine, self.nodes, [*_MODULE, "rank", str(folder)], int(limit_s) + 60))

    def env(self, trial: Trial) -> Mapping[str, str]:
        """Where the ranks meet, and what the machine's description sets for jobs."""
        count = "one" if self.nodes == 1 else "several"
        set_by_machine = {
            one.name: os.path.expandvars(one.value)
            for one in self.machine.environment
            if one.nodes == "any" or (one.nodes == "one") == (count == "one")
        }
        job, node_list = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_NODELIST")
        if job is None or node_list is None:
            raise ConfigError(
                "--where slurm needs an allocation (SLURM_JOB_ID is not set); start it under salloc or sbatch"
            )
        asked = ["scontrol", "show", "hostnames", node_list]
        try:
            hosts = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.CalledProcessError) as error:
            raise PhalanxError(f"scontrol does not name the hosts of this allocation: {error}") from error
        # Trials that follow each other closely, or run side by side, do not meet at the same door.
        port = _FIRST_PORT + (int(job) * 31 + trial.number) % _PORTS
        return {**set_by_machine, "MASTER_ADDR": hosts[0], "MASTER_PORT": str(port)}


@dataclass(frozen=True)
class ProcessRunner:
    """Measures points by training a few steps."""

    run: Run
    search: Search
    devices: int
    launcher: Launcher
    words: tuple[str, ...] = ()
    """Overrides that every trial has."""
    keep: bool = False
    """Whether run directories of trials stay; logs stay in any case."""
    _more_env: Mapping[str, str] = field(default_factory=dict)

    def measure(self, space: Space, point: int, trial: Trial, folder: Path, before: Sequence[Trial]) -> Outcome:
        """Train a few steps and compare losses with those of the first good trial."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            run = self._run_of(space.words(point))
        except ConfigError as error:
            return Outcome("refused", words=str(error))
        write_atomically(folder / RUN_FILE, dump_run(run))
        env = {**self.launcher.env(trial), **self._more_env, **space.env(point)}
        if self.search.memory_gib is not None:
            env[MEMORY_LIMIT] = str(round(self.search.memory_gib * 2**30))
        limit = self.search.time_limit_s
        ended = run_limited(self.launcher.command(folder, limit), env, folder / "log", limit)
        outcome = self._outcome(folder, ended, run, before)
        save_outcome(folder, outcome)
        if not self.keep:
            shutil.rmtree(folder / TRAINED, ignore_errors=True)
        return outcome

    def _run_of(self, words: list[str]) -> Run:
        steps = (f"training.steps={self.search.steps}",)
        # A schedule of the learning rate is a function of the number of steps: a constant one is the same in all trials.
        rate = ("optimizer.schedule=constant", "optimizer.warmup_steps=0")
        quiet = [word for word in _QUIET if _has(self.run, word)]
        return parse_run(dump_run(self.run), "the run file", [*quiet, *steps, *rate, *self.words, *words])

    def _outcome(self, folder: Path, ended: Ended, run: Run, before: Sequence[Trial]) -> Outcome:
        said = _tail(folder / "log")
        if ended.timed_out:
            return Outcome("hang", seconds=ended.seconds, words=f"after {ended.seconds:.0f} s: {said}")
        ranks = [_read(folder / f"rank-{rank}.json") for rank in range(self.devices)]
        if ended.code or any(found is None for found in ranks):
            return _failure([found for found in ranks if found], ended, said)
        rows = [json.loads(line) for line in (folder / TRAINED / "metrics.jsonl").read_text().splitlines()]
        losses = tuple(float(row["loss"]) for row in rows)
        peaks = [found["memory_bytes"] for found in ranks if found and found["memory_bytes"] is not None]
        outcome = Outcome(
            OK,
            value=statistics.median(row["step_seconds"] for row in rows[self.search.skip :]),
            losses=losses,
            memory_bytes=max(peaks, default=None),
            seconds=ended.seconds,
            more={"step_s": [row["step_seconds"] for row in rows]},
        )
        return judge_losses(outcome, before, loss_bound(run))


def loss_bound(run: Run) -> float:
    """Relative difference that the loss of a first step may have between layouts: rounding, and at most _LOSS_SHARE."""
    targets = global_batch_samples(run) * int(getattr(run.data, "sequence_length", 1))
    layers = int(getattr(run.model, "n_layers", 1))
    return min(Bound(PRECISIONS[run.layout.precision], layers, targets).loss, _LOSS_SHARE)


def judge_losses(outcome: Outcome, before: Sequence[Trial], bound: float) -> Outcome:
    """`outcome`, or a failure where its losses are not finite, or not those of the first good trial.

    bound: see `loss_bound`. Each update adds rounding of its own, so step k may differ k times as much.
    """
    if not all(math.isfinite(loss) for loss in outcome.losses):
        return _not_ok(outcome, "non_finite", f"losses: {_list(outcome.losses)}")
    first = next((trial for trial in before if trial.good and trial.outcome and trial.outcome.losses), None)
    if first is None or first.outcome is None:
        return outcome
    pairs = zip(outcome.losses, first.outcome.losses, strict=False)
    for step, (here, there) in enumerate(pairs, start=1):
        allowed = bound * step
        if abs(here - there) > allowed * abs(there):
            words = (
                f"step {step}: loss {here:.7g}, but {there:.7g} in trial {first.number}; a difference of "
                f"{abs(here / there - 1):.2g} where {allowed:.2g} is rounding: phalanx verify tells which is right"
            )
            return _not_ok(outcome, "wrong_loss", words)
    return outcome


def _not_ok(outcome: Outcome, cause: str, words: str) -> Outcome:
    return Outcome(cause, None, outcome.losses, outcome.memory_bytes, outcome.seconds, words, outcome.more)


def _failure(found: list[dict[str, Any]], ended: Ended, said: str) -> Outcome:
    """Of ranks that failed: the cause that explains the others' failures, if one does."""
    order = ("refused", "out_of_memory", "non_finite", "crash")
    causes = sorted((one for one in found if one["cause"] in order), key=lambda one: order.index(one["cause"]))
    if ended.code in _KILLED and not (causes and causes[0]["cause"] == "out_of_memory"):
        # Nobody here did that: an operator, or a host without memory. What the other ranks say follows from it.
        return Outcome(INTERRUPTED, seconds=ended.seconds, words="a process was killed (signal 9)")
    if causes:
        return Outcome(causes[0]["cause"], seconds=ended.seconds, words=str(causes[0]["words"])[-1000:])
    return Outcome("crash", seconds=ended.seconds, words=f"exit code {ended.code}: {said}")


def _has(run: Run, word: str) -> bool:
    """Whether runs of this kind have the field that an override names."""
    section, field = word.partition("=")[0].split(".")
    return hasattr(getattr(run, section), field)


def _read(file: Path) -> dict[str, Any] | None:
    found: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    return found


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)
