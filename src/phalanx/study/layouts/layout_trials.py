"""Trials of layouts: short training runs with the real step on the real data, in processes of their own.

A trial's folder holds everything that the trial leaves behind.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phalanx.config.check import global_batch_samples
from phalanx.config.load import dump_run
from phalanx.config.schema import Run
from phalanx.config.studies import Search
from phalanx.errors import ConfigError
from phalanx.files import read_json_lines, write_atomically
from phalanx.nn.precision import PRECISIONS
from phalanx.report.run_log import metrics_problem
from phalanx.study.layouts.layout_space import LayoutSpace
from phalanx.study.loop import EndedJob, Job
from phalanx.study.processes.process import Ended, LimitedProcess
from phalanx.study.processes.slots import Launcher
from phalanx.study.processes.trial_files import (
    LOG,
    MEMORY_LIMIT,
    RUN_FILE,
    TRAINED,
    explain_failure,
    read_log_tail,
    read_rank_reports,
    short_run,
)
from phalanx.study.store import save_outcome
from phalanx.study.trial import ASKED, DEVICE, INTERRUPTED, OK, Outcome, Trial
from phalanx.verification.error_bounds import ErrorBound

_LOSS_SHARE, _NORM_SHARE = 0.01, 0.03
"""Relative differences of losses and of gradient norms that no number format excuses."""
_NORMS = "gradient_norms"
"""Key of `Outcome.more`: gradient norm of each step."""


class Runner(Protocol):
    """Starts trials of points."""

    def start(self, space: LayoutSpace, trial: Trial, folder: Path, before: Sequence[Trial]) -> Job:
        """Start a trial. folder: its own. before: the study's trials so far."""


@dataclass(frozen=True)
class ProcessRunner:
    """Starts trials that train a few steps."""

    run: Run
    search: Search
    devices: int
    launcher: Launcher
    keep: bool = False
    """Whether run directories of trials stay; logs stay in any case."""

    def start(self, space: LayoutSpace, trial: Trial, folder: Path, before: Sequence[Trial]) -> Job:
        """Start the ranks of a trial; a point that the run file does not allow ends as refused at once."""
        point = space.find(trial.values)
        assert point is not None
        # A trial that was interrupted may have left files under the same number.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            run = short_run(self.run, self.search.steps, space.overrides(point))
        except ConfigError as error:
            return EndedJob(trial, Outcome("refused", words=str(error)))
        write_atomically(folder / RUN_FILE, dump_run(run))
        env = {**self.launcher.env(trial.number), **space.env(point)}
        if self.search.memory_gib is not None:
            env[MEMORY_LIMIT] = str(round(self.search.memory_gib * 2**30))
        limit_s = self.search.time_limit_s
        process = LimitedProcess(self.launcher.command(folder, limit_s), env, folder / LOG, limit_s)
        return LayoutJob(trial, self, run, folder, before, process)


@dataclass
class LayoutJob:
    """A trial of a layout whose ranks have been started."""

    trial: Trial
    runner: ProcessRunner
    run: Run
    folder: Path
    before: Sequence[Trial]
    process: LimitedProcess
    asked: bool = False

    def poll(self) -> Outcome | None:
        """Return what came of the trial, its losses judged by those of the first good trial; None while it runs."""
        ended = self.process.poll()
        if ended is None:
            return None
        if self.asked and not ended.timed_out:
            return Outcome(INTERRUPTED, seconds=ended.seconds, words="asked to stop", more={ASKED: True})
        outcome = self._read_outcome(ended)
        save_outcome(self.folder, outcome)
        # All that is read of it stands in the outcome.
        if not self.runner.keep:
            shutil.rmtree(self.folder / TRAINED, ignore_errors=True)
        return outcome

    def ask_to_stop(self) -> None:
        """End the trial: a few steps are not worth a checkpoint."""
        self.asked = True
        self.process.kill()

    def kill(self) -> None:
        """End the trial's processes now."""
        self.process.kill()

    def _read_outcome(self, ended: Ended) -> Outcome:
        """Return the median time of a step of a trial that has ended, or why it has none."""
        reports = read_rank_reports(self.folder, self.runner.devices)
        found = [one for one in reports if one is not None]
        if ended.timed_out or ended.code or len(found) < len(reports):
            return explain_failure(found, ended, read_log_tail(self.folder))
        log = read_json_lines(self.folder / TRAINED / "metrics.jsonl", metrics_problem)
        if log.damaged:
            # The disk's fault, not the layout's: the trial may be repeated.
            return Outcome(INTERRUPTED, seconds=ended.seconds, words=log.describe_damage())
        rows = log.records
        machine = json.loads((self.folder / TRAINED / "machine.json").read_text())
        outcome = Outcome(
            OK,
            # The median: a step beside which the data or another job stalled says nothing of the layout.
            value=statistics.median(row["step_seconds"] for row in rows[self.runner.search.skip :]),
            losses=tuple(float(row["loss"]) for row in rows),
            memory_bytes=max((one["memory_bytes"] for one in found if one["memory_bytes"] is not None), default=None),
            seconds=ended.seconds,
            more={
                "step_s": [row["step_seconds"] for row in rows],
                _NORMS: [row["grad_norm"] for row in rows],
                "memory_retries": rows[-1]["memory_retries"],
                DEVICE: machine["device_kind"],
            },
        )
        return judge_losses(outcome, self.before, loss_bound(self.run))


def loss_bound(run: Run) -> float:
    """Return the relative difference that rounding may make to losses and gradient norms of a first step."""
    targets = global_batch_samples(run) * int(getattr(run.data, "sequence_length", 1))
    layers = int(getattr(run.model, "n_layers", 1))
    return ErrorBound(PRECISIONS[run.layout.precision].compute_dtype, layers, targets).loss


def judge_losses(outcome: Outcome, before: Sequence[Trial], bound: float) -> Outcome:
    """Return `outcome`, or a failure where losses are not finite, or differ from those of the first good trial.

    Gradient norms are compared like losses. before: earlier trials. bound: see `loss_bound`; at most 1% of a loss and 3% of
    a gradient norm count. Each update adds rounding of its own, so step k may differ k times as much.
    """
    if not all(math.isfinite(loss) for loss in outcome.losses):
        said = f"losses: {', '.join(f'{loss:.6g}' for loss in outcome.losses)}"
        return outcome.as_failure("non_finite", said)
    # Which of two is right no search can tell: the first good one is taken for it, and the planner's best comes first.
    first = next((trial for trial in before if trial.good and trial.outcome and trial.outcome.losses), None)
    if first is None or first.outcome is None:
        return outcome
    for what, here, there, share in (
        ("loss", outcome.losses, first.outcome.losses, _LOSS_SHARE),
        ("gradient norm", outcome.more.get(_NORMS, ()), first.outcome.more.get(_NORMS, ()), _NORM_SHARE),
    ):
        for step, (one, other) in enumerate(zip(here, there, strict=False), start=1):
            # Written so that a NaN on either side is a difference.
            allowed = min(bound, share) * step
            if not abs(one - other) <= allowed * abs(other):
                said = (
                    f"step {step}: {what} {one:.7g}, but {other:.7g} in trial {first.number}; a difference of "
                    f"{abs(one / other - 1) if other else math.inf:.2g} where {allowed:.2g} is rounding: "
                    f"phalanx verify tells which is right"
                )
                return outcome.as_failure("wrong_loss", said)
    return outcome
