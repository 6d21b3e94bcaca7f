"""Runs trials of layouts for real: the run file of a point, its processes, and what they found, read back as an outcome.

A trial is a short training run with the real step on the real data. Its folder holds everything it leaves behind.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from phalanx.config.check import global_batch_samples
from phalanx.config.load import dump_run
from phalanx.config.schema import Run
from phalanx.config.search import Search
from phalanx.errors import ConfigError
from phalanx.files import write_atomically
from phalanx.json_lines import read_json_lines
from phalanx.precision import PRECISIONS
from phalanx.report.run_log import metrics_problem
from phalanx.study.layouts.space import Space
from phalanx.study.trials.causes import failure, log_tail, rank_reports
from phalanx.study.trials.launchers import Launcher
from phalanx.study.trials.process import Ended, run_limited
from phalanx.study.trials.rank import MEMORY_LIMIT, RUN_FILE, TRAINED
from phalanx.study.trials.short_run import short_run
from phalanx.study.trials.storage import save_outcome
from phalanx.study.trials.trial import INTERRUPTED, OK, Outcome, Trial
from phalanx.verify.bound import Bound

_LOSS_SHARE, _NORM_SHARE = 0.01, 0.03
"""Relative differences of losses and of gradient norms beyond which no number format is an excuse."""
DEVICE = "device"
"""Name in `Outcome.more`: what the trial ran on, as machine descriptions call it."""
_NORMS = "gradient_norms"
"""Name in `Outcome.more`: of each step."""


class Runner(Protocol):
    """Measures points."""

    def measure(self, space: Space, point: int, trial: Trial, folder: Path, before: Sequence[Trial]) -> Outcome:
        """Run a trial to its end. before: the study's trials so far."""


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
        """Train a few steps and compare losses and gradient norms with those of the first good trial."""
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
        return short_run(self.run, self.search.steps, [*self.words, *words])

    def _outcome(self, folder: Path, ended: Ended, run: Run, before: Sequence[Trial]) -> Outcome:
        ranks = rank_reports(folder, self.devices)
        if ended.timed_out or ended.code or None in ranks:
            return failure([found for found in ranks if found], ended, log_tail(folder / "log"))
        log = read_json_lines(folder / TRAINED / "metrics.jsonl", metrics_problem)
        if log.damaged:
            # The disk's doing, not the layout's: the trial may be repeated.
            return Outcome(INTERRUPTED, seconds=ended.seconds, words=log.describe_damage())
        rows = log.records
        losses = tuple(float(row["loss"]) for row in rows)
        peaks = [found["memory_bytes"] for found in ranks if found and found["memory_bytes"] is not None]
        outcome = Outcome(
            OK,
            value=statistics.median(row["step_seconds"] for row in rows[self.search.skip :]),
            losses=losses,
            memory_bytes=max(peaks, default=None),
            seconds=ended.seconds,
            more={
                "step_s": [row["step_seconds"] for row in rows],
                _NORMS: [row["grad_norm"] for row in rows],
                "memory_retries": rows[-1]["memory_retries"],
                DEVICE: json.loads((folder / TRAINED / "machine.json").read_text())["device_kind"],
            },
        )
        return judge_losses(outcome, before, loss_bound(run))


def loss_bound(run: Run) -> float:
    """Relative difference that losses and gradient norms of a first step may have between layouts: rounding."""
    targets = global_batch_samples(run) * int(getattr(run.data, "sequence_length", 1))
    layers = int(getattr(run.model, "n_layers", 1))
    return Bound(PRECISIONS[run.layout.precision].compute_dtype, layers, targets).loss


def judge_losses(outcome: Outcome, before: Sequence[Trial], bound: float) -> Outcome:
    """`outcome`, or a failure: of losses that are not finite, or losses or gradient norms not those of the first good trial.

    bound: see `loss_bound`; at most _LOSS_SHARE and _NORM_SHARE count. Each update adds rounding of its own, so step k may
    differ k times as much.
    """
    if not all(math.isfinite(loss) for loss in outcome.losses):
        return _not_ok(outcome, "non_finite", f"losses: {_list(outcome.losses)}")
    first = next((trial for trial in before if trial.good and trial.outcome and trial.outcome.losses), None)
    if first is None or first.outcome is None:
        return outcome
    for what, here, there, share in (
        ("loss", outcome.losses, first.outcome.losses, _LOSS_SHARE),
        ("gradient norm", outcome.more.get(_NORMS, ()), first.outcome.more.get(_NORMS, ()), _NORM_SHARE),
    ):
        for step, (one, other) in enumerate(zip(here, there, strict=False), start=1):
            allowed = min(bound, share) * step
            if not abs(one - other) <= allowed * abs(other):
                words = (
                    f"step {step}: {what} {one:.7g}, but {other:.7g} in trial {first.number}; a difference of "
                    f"{abs(one / other - 1) if other else math.inf:.2g} where {allowed:.2g} is rounding: "
                    f"phalanx verify tells which is right"
                )
                return _not_ok(outcome, "wrong_loss", words)
    return outcome


def _not_ok(outcome: Outcome, cause: str, words: str) -> Outcome:
    return Outcome(cause, None, outcome.losses, outcome.memory_bytes, outcome.seconds, words, outcome.more)


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)
