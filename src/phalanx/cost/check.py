"""Predictions against measured runs: the error of each, and how good they are in groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.cluster.collectives import default_constants
from phalanx.cost.operation_time import Floats
from phalanx.cost.part_time import part_times
from phalanx.cost.profile import NamedProfile, Profile, default_profile, load_profile, shipped_profiles
from phalanx.cost.published import PublishedRun
from phalanx.cost.published_steps import Group, grouped, refused
from phalanx.cost.step_time import StepTimes, closed_form


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
    measured_memory_gb: float | None = None
    memory_error: float | None = None


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


def check(runs: Sequence[PublishedRun], *, calibrated: bool = True) -> list[CheckedRun]:
    """Every run with its prediction, in the order given. calibrated: by fitted profiles, where there are such."""
    predicted: dict[str, float] = {}
    for group in grouped(runs):
        rates = predict(group, profile_of(group, calibrated=calibrated).profile)
        predicted |= {run.row_id: float(rate) for run, rate in zip(group.runs, rates, strict=True)}
    return [_checked(run, predicted.get(run.row_id)) for run in runs]


def _checked(run: PublishedRun, rate: float | None) -> CheckedRun:
    memory = None if run.memory is None else run.memory.gib
    if rate is None or run.rate is None:
        return CheckedRun(run.row_id, run.group, False, refused(run), measured_memory_gb=memory)
    measured = run.rate.tokens_per_s
    return CheckedRun(run.row_id, run.group, True, "", rate, measured, rate / measured - 1, measured_memory_gb=memory)


def profile_of(group: Group, *, calibrated: bool = True) -> NamedProfile:
    """The fitted profile of a group's system if there is one, else the default of its device."""
    if calibrated and group.system.profile in shipped_profiles():
        return load_profile(group.system.profile)
    return default_profile(group.system.machine.node.device)


def step_times_of(group: Group, profile: Profile) -> StepTimes:
    """The steps of a group by a profile."""
    machine = group.system.machine
    constants = default_constants(machine)
    times = part_times(group.steps.parts, machine, constants, profile)
    return closed_form(group.steps, times, profile, constants, group.software)


def predict(group: Group, profile: Profile) -> Floats:
    """Tokens a second and device of each run of a group."""
    layouts = group.steps.layouts
    lengths = np.array([run.sequence_length for run in group.runs], np.float64)
    return np.asarray(layouts.global_batch * lengths / step_times_of(group, profile).total / layouts.world_size)


def summarise_check(rows: Sequence[CheckedRun], runs: Sequence[PublishedRun]) -> list[CheckedGroup]:
    """One line for each group with predictions, in order of first appearance, and one for `all`."""
    used = [(row, run) for row, run in zip(rows, runs, strict=True) if row.used]
    names = dict.fromkeys(row.group for row, _ in used)
    groups = {name: [(row, run) for row, run in used if row.group == name] for name in names}
    return [_summary(name, pairs) for name, pairs in ({**groups, "all": used} if used else {}).items()]


def _summary(name: str, pairs: Sequence[tuple[CheckedRun, PublishedRun]]) -> CheckedGroup:
    errors = np.abs([row.error for row, _ in pairs if row.error is not None])
    rates = np.array([(row.predicted_tokens_per_s, row.measured_tokens_per_s) for row, _ in pairs], np.float64)
    return CheckedGroup(
        group=name,
        rows=len(pairs),
        median=float(np.median(errors)),
        p95=float(np.quantile(errors, 0.95)),
        rank_correlation=None if len(pairs) < 3 else _rank_correlation(rates),
        top3_regret=_regret(pairs),
    )


def _rank_correlation(rates: Floats) -> float | None:
    ranks = [np.unique(column, return_inverse=True)[1] for column in rates.T]
    if not all(np.ptp(rank) for rank in ranks):
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


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
