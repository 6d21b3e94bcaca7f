"""Predictions against measured runs: the error of each, and how good they are in groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from phalanx.config.families import find_family
from phalanx.config.schema import Run
from phalanx.families.registry import bind
from phalanx.hardware.device_facts import known_devices
from phalanx.planner.measured.measured_groups import MeasuredGroup, grouped, refused
from phalanx.planner.measured.runs import MeasuredRun
from phalanx.planner.memory.model import Kernels, rank_memory
from phalanx.planner.memory.probability import BESIDE, communicators, fits
from phalanx.planner.time.operation_time import Floats
from phalanx.planner.trace.traced_model import TracedModel


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
    """Live tensors on the worst rank, in units of 2^30 bytes, as device memories are counted."""
    measured_memory_gb: float | None = None
    """Memory as the source measured it, which may be more than live tensors."""
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
    """Median of the absolute errors of times, as a share."""
    p95: float
    rank_correlation: float | None
    """Spearman's, of predicted and measured rates; None for fewer than three rows, or where all are alike."""
    top3_regret: float | None
    """What the best of the three layouts that are predicted best loses against the best layout, the mean over all models
    that ran in at least four layouts on equally many devices; None where there is none."""
    memory_rows: int
    """With measured memory, and a prediction of it."""
    memory_median: float | None
    """Median of the absolute errors of memory, as a share; None where no row states its memory."""
    memory_p95: float | None
    said_to_fit: int
    """Rows, run or out of memory, that are predicted to fit with a probability of at least LIKELY."""
    false_fits: float | None
    """The share of those that ran out of memory; None where there are none."""


LIKELY = 0.9
"""Probability from which on the planner takes a layout to fit, by default."""
_GIB = 2**30


def check(runs: Sequence[MeasuredRun], *, calibrated: bool = True) -> list[CheckedRun]:
    """Predict every run, in the order given. calibrated: by fitted profiles, where there are such.

    Memory is predicted for runs whose memory was measured, and for those that had too little.
    """
    return compare(runs, grouped(runs), refused, peak_bytes, calibrated=calibrated)


R = TypeVar("R", bound=MeasuredRun)


def compare(
    runs: Sequence[R],
    groups: Sequence[MeasuredGroup],
    refuse: Callable[[R], str],
    peak: Callable[[R], float | None],
    *,
    calibrated: bool,
) -> list[CheckedRun]:
    """Compare `runs` with what their `groups` and `peak` say of them.

    refuse: says why the time of a run cannot be predicted. peak: predicts the bytes of live tensors on the worst rank.
    """
    # Runs of a machine and format are predicted together, by the profile that is fitted to these.
    predicted: dict[str, float] = {}
    for group in groups:
        rates = group.rates(group.profile(calibrated=calibrated))
        predicted |= {run.row_id: float(rate) for run, rate in zip(group.runs, rates, strict=True)}
    checked = []
    for run in runs:
        row = CheckedRun(run.row_id, run.group, False, refuse(run), status=run.status)
        rate = predicted.get(run.row_id)
        if rate is not None and run.rate is not None:
            measured = run.rate.tokens_per_s
            row = replace(
                row,
                used=True,
                reason="",
                predicted_tokens_per_s=rate,
                measured_tokens_per_s=measured,
                error=rate / measured - 1,
            )
        # A prediction of memory traces the model, which takes long: not where nothing was measured.
        wanted = run.used and (run.memory is not None or run.status == "oom")
        checked.append(replace(row, **_memory(run, peak(run) if wanted else None)))
    return checked


def _memory(run: MeasuredRun, peak: float | None) -> dict[str, Any]:
    """Return the measured and predicted memory of a run, as fields of its row. peak: predicted bytes, None where unknown."""
    known: dict[str, Any] = {} if run.memory is None else {"measured_memory_gb": run.memory.gib}
    if peak is None:
        return known
    known["predicted_memory_gb"] = peak / _GIB
    if run.memory is not None:
        known["memory_error"] = peak / _GIB / run.memory.gib - 1
    room = next((facts.memory_bytes for _, facts in known_devices() if facts.name == run.device), None)
    if room is not None and run.layout is not None and run.device is not None:
        groups = communicators(run.layout.table)
        beside = BESIDE["rocm" if run.device.startswith("MI") else "cuda"]
        known["p_fits"] = float(fits(np.array([peak]), groups, room, beside)[0])
    return known


def peak_bytes(run: MeasuredRun) -> float | None:
    """Predict the bytes of live tensors on the worst rank of a run; None where too little is known of it."""
    described = run_of(run)
    if run.layout is None or described is None:
        return None
    ranks = rank_memory(
        bind(described, TracedModel), run.layout, described.layout.recompute, Kernels("flash", compiled=True)
    )
    return max(rank.allocated for rank in ranks)


def run_of(run: MeasuredRun) -> Run | None:
    """Return the contents of a run file for a measured run, None where its model, length or layout is not known."""
    if run.layout is None or run.model is None or run.sequence_length is None:
        return None
    # The family's own kind of run, found by name: this room knows none of them.
    return find_family(run.model.family).run.model_validate(
        {
            "model": run.model,
            "data": {"sources": [{"path": "measured"}], "sequence_length": run.sequence_length},
            "layout": {
                "global_batch": run.layout.global_batch,
                "recompute": run.recompute or "none",
                "precision": run.precision or "bf16",
            },
            "optimizer": {"lr": 1e-4},
            "training": {"steps": 1},
        }
    )


def summarise_check(rows: Sequence[CheckedRun], runs: Sequence[MeasuredRun]) -> list[CheckedGroup]:
    """Return a line for each group with predicted times, in order of first appearance, and one for `all`."""
    pairs = list(zip(rows, runs, strict=True))
    names = dict.fromkeys(row.group for row in rows if row.used)
    groups = {name: [(row, run) for row, run in pairs if row.group == name] for name in names}
    return [_summary(name, some) for name, some in ({**groups, "all": pairs} if names else {}).items()]


def _summary(name: str, every: Sequence[tuple[CheckedRun, MeasuredRun]]) -> CheckedGroup:
    pairs = [(row, run) for row, run in every if row.used]
    memory = np.abs([row.memory_error for row, _ in every if row.memory_error is not None])
    fitting = [row for row, _ in every if row.p_fits is not None and row.p_fits >= LIKELY]
    errors = np.abs([row.error for row, _ in pairs if row.error is not None])
    rates = np.array([(row.predicted_tokens_per_s, row.measured_tokens_per_s) for row, _ in pairs], np.float64)
    # Spearman's; of fewer than three rows, or where all of a column are equal, it says nothing.
    ranked = len(pairs) >= 3 and bool(np.all(np.ptp(rates, axis=0)))
    correlation = float(np.corrcoef(_ranks(rates[:, 0]), _ranks(rates[:, 1]))[0, 1]) if ranked else None
    return CheckedGroup(
        group=name,
        rows=len(pairs),
        median=float(np.median(errors)),
        p95=float(np.quantile(errors, 0.95)),
        rank_correlation=correlation,
        top3_regret=_regret(pairs),
        memory_rows=len(memory),
        memory_median=float(np.median(memory)) if len(memory) else None,
        memory_p95=float(np.quantile(memory, 0.95)) if len(memory) else None,
        said_to_fit=len(fitting),
        false_fits=sum(row.status == "oom" for row in fitting) / len(fitting) if fitting else None,
    )


def _ranks(values: Floats) -> Floats:
    """Return the rank of each value; equal ones have the mean of their ranks."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[which])


def _regret(pairs: Sequence[tuple[CheckedRun, MeasuredRun]]) -> float | None:
    choices: dict[object, list[CheckedRun]] = {}
    for row, run in pairs:
        if run.layout is not None:
            batch = run.layout.global_batch * (run.sequence_length or 0)
            # Layouts compete where they trained the same model on as many devices by as many tokens a step.
            choices.setdefault((run.model, run.sequence_length, run.devices, batch, run.system), []).append(row)
    regrets = []
    for rows in choices.values():
        # Of three layouts any choice of three is the best.
        if len(rows) >= 4:
            best = sorted(rows, key=lambda row: -(row.predicted_tokens_per_s or 0.0))[:3]
            fastest = max(row.measured_tokens_per_s or 0.0 for row in rows)
            regrets.append(1 - max(row.measured_tokens_per_s or 0.0 for row in best) / fastest)
    return float(np.mean(regrets)) if regrets else None
