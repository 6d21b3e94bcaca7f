"""Predictions against measured runs: the error of each, and how good they are in groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phalanx.hardware.device import known_devices
from phalanx.planner.layouts.candidates import Candidates
from phalanx.planner.memory.probability import BESIDE, communicators, fits
from phalanx.planner.published.memory import published_peak
from phalanx.planner.published.runs import PublishedRun
from phalanx.planner.published.steps import Group, grouped, refused
from phalanx.planner.time.operation_time import Floats
from phalanx.planner.time.part_time import part_times
from phalanx.planner.time.profile import NamedProfile, default_profile, load_profile, shipped_profiles
from phalanx.planner.time.step_time import StepTimes, closed_form


@dataclass(frozen=True)
class CheckedRun:
    """One row of a table, with what the model says of it."""

    row_id: str
    group: str
    used: bool
    reason: str
    """Why it is not used; empty for one that is."""
    predicted_tokens_per_s: float | None = None
    """Tokens a second and device."""
    measured_tokens_per_s: float | None = None
    error: float | None = None
    """Predicted over measured, less 1."""
    predicted_memory_gb: float | None = None
    """Of live tensors on the worst rank, in units of 2^30 bytes, as device memories are counted."""
    measured_memory_gb: float | None = None
    """As the source measured it, which may be more than live tensors."""
    memory_error: float | None = None
    status: str = "ok"
    """oom: it did not fit."""
    p_fits: float | None = None
    """Predicted probability that it fits; None where memory is not predicted."""


@dataclass(frozen=True)
class CheckedGroup:
    """How good the predictions of one group are."""

    group: str
    rows: int
    """With a prediction."""
    median: float
    """Of the absolute errors, as the next."""
    p95: float
    rank_correlation: float | None
    """Spearman's, of predicted and measured rates; None for fewer than three rows, or where all are alike."""
    top3_regret: float | None
    """What the best of the three layouts that are predicted best loses against the best layout, the mean over all models
    that ran in at least four layouts on equally many devices; None where there is none."""
    memory_rows: int
    """With measured memory, and a prediction of it."""
    memory_median: float | None
    """Of the absolute errors of those, as the next; None without such rows."""
    memory_p95: float | None
    said_to_fit: int
    """Rows, run or out of memory, that are predicted to fit with a probability of at least LIKELY."""
    false_fits: float | None
    """The share of those that ran out of memory; None where there are none."""


LIKELY = 0.9
"""Probability from which on the planner takes a layout to fit, by default."""
_GIB = 2**30


def check(runs: Sequence[PublishedRun], *, calibrated: bool = True) -> list[CheckedRun]:
    """Every run with its prediction, in the order given. calibrated: by fitted profiles, where there are such.

    Memory is predicted for runs whose memory was measured, and for those that had too little.
    """
    predicted: dict[str, float] = {}
    for group in grouped(runs):
        rates = predict(group, profile_of(group, calibrated=calibrated))
        predicted |= {run.row_id: float(rate) for run, rate in zip(group.runs, rates, strict=True)}
    return [_checked(run, predicted.get(run.row_id)) for run in runs]


def _checked(run: PublishedRun, rate: float | None) -> CheckedRun:
    checked = CheckedRun(run.row_id, run.group, False, refused(run), status=run.status)
    if rate is not None and run.rate is not None:
        measured = run.rate.tokens_per_s
        checked = replace(
            checked,
            used=True,
            reason="",
            predicted_tokens_per_s=rate,
            measured_tokens_per_s=measured,
            error=rate / measured - 1,
        )
    return replace(checked, **_memory(run))


def _memory(run: PublishedRun) -> dict[str, Any]:
    """What is known of a run's memory, and what is predicted of it."""
    known: dict[str, Any] = {} if run.memory is None else {"measured_memory_gb": run.memory.gib}
    peak = published_peak(run) if run.used and (run.memory is not None or run.status == "oom") else None
    if peak is None:
        return known
    known["predicted_memory_gb"] = peak / _GIB
    if run.memory is not None:
        known["memory_error"] = peak / _GIB / run.memory.gib - 1
    room = next((facts.memory_bytes for _, facts in known_devices() if facts.name == run.device), None)
    if room is not None and run.layout is not None and run.device is not None:
        groups = communicators(Candidates.of([run.layout], [run.recompute or "none"]))
        beside = BESIDE["rocm" if run.device.startswith("MI") else "cuda"]
        known["p_fits"] = float(fits(np.array([peak]), groups, room, beside)[0])
    return known


def profile_of(group: Group, *, calibrated: bool = True) -> NamedProfile:
    """The fitted profile of a group's system if there is one, else the default of its device."""
    if calibrated and group.system.profile in shipped_profiles():
        return load_profile(group.system.profile)
    return default_profile(group.system.machine.node.device)


def step_times_of(group: Group, named: NamedProfile) -> StepTimes:
    """The steps of a group by a profile."""
    machine = group.system.machine
    constants = named.collectives_on(machine)
    times = part_times(group.steps.parts, machine, constants, named.profile)
    return closed_form(group.steps, times, named.profile, constants, group.software)


def predict(group: Group, profile: NamedProfile) -> Floats:
    """Tokens a second and device of each run of a group."""
    layouts = group.steps.layouts
    lengths = np.array([run.sequence_length for run in group.runs], np.float64)
    return np.asarray(layouts.global_batch * lengths / step_times_of(group, profile).total / layouts.world_size)


def summarise_check(rows: Sequence[CheckedRun], runs: Sequence[PublishedRun]) -> list[CheckedGroup]:
    """One line for each group with predicted times, in order of first appearance, and one for `all`."""
    pairs = list(zip(rows, runs, strict=True))
    names = dict.fromkeys(row.group for row in rows if row.used)
    groups = {name: [(row, run) for row, run in pairs if row.group == name] for name in names}
    return [_summary(name, some) for name, some in ({**groups, "all": pairs} if names else {}).items()]


def _summary(name: str, every: Sequence[tuple[CheckedRun, PublishedRun]]) -> CheckedGroup:
    pairs = [(row, run) for row, run in every if row.used]
    memory = np.abs([row.memory_error for row, _ in every if row.memory_error is not None])
    fitting = [row for row, _ in every if row.p_fits is not None and row.p_fits >= LIKELY]
    errors = np.abs([row.error for row, _ in pairs if row.error is not None])
    rates = np.array([(row.predicted_tokens_per_s, row.measured_tokens_per_s) for row, _ in pairs], np.float64)
    return CheckedGroup(
        group=name,
        rows=len(pairs),
        median=float(np.median(errors)),
        p95=float(np.quantile(errors, 0.95)),
        rank_correlation=None if len(pairs) < 3 else _rank_correlation(rates),
        top3_regret=_regret(pairs),
        memory_rows=len(memory),
        memory_median=float(np.median(memory)) if len(memory) else None,
        memory_p95=float(np.quantile(memory, 0.95)) if len(memory) else None,
        said_to_fit=len(fitting),
        false_fits=sum(row.status == "oom" for row in fitting) / len(fitting) if fitting else None,
    )


def _rank_correlation(rates: Floats) -> float | None:
    """Spearman's: of equal rates each has the mean of their ranks."""
    if not np.all(np.ptp(rates, axis=0)):
        return None
    return float(np.corrcoef(_ranks(rates[:, 0]), _ranks(rates[:, 1]))[0, 1])


def _ranks(values: Floats) -> Floats:
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[which])


def _regret(pairs: Sequence[tuple[CheckedRun, PublishedRun]]) -> float | None:
    choices: dict[object, list[CheckedRun]] = {}
    for row, run in pairs:
        if run.layout is not None:
            batch = run.layout.global_batch * (run.sequence_length or 0)
            choices.setdefault((run.model, run.sequence_length, run.devices, batch, run.system), []).append(row)
    regrets = []
    for rows in choices.values():
        if len(rows) >= 4:
            best = sorted(rows, key=lambda row: -(row.predicted_tokens_per_s or 0.0))[:3]
            fastest = max(row.measured_tokens_per_s or 0.0 for row in rows)
            regrets.append(1 - max(row.measured_tokens_per_s or 0.0 for row in best) / fastest)
    return float(np.mean(regrets)) if regrets else None
