"""The charts of a training run: which quantities are drawn, and the figures the page reads out under the pointer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from phalanx.formatting import format_count, format_duration, format_number
from phalanx.report.drawing import Scale
from phalanx.report.interactive_chart import AXES, Chart, Marks, Positions, Series, reduce_points
from phalanx.report.page_sections import accuracy_by_task
from phalanx.report.run_log import FloatArray, RunLog

MOST_DOTS = 60
"""Evaluations that are drawn with a dot each."""
MOST_TASKS = 3
"""In-context tasks that have curves of their own."""
SHORT_CURVE = 10
"""Points of a curve of which no average is worth drawing."""

CRITICAL_BATCH = (
    "Estimated from gradient norms at two batch sizes (McCandlish et al. 2018). A batch of this size takes twice the "
    "samples, and twice the steps, that the least of either would."
)
THROUGHPUT = "Of each step, over all devices."
POWER = "Mean of each step, all devices, by their own counters of energy."
MEMORY = "Device memory held by tensors: its peak so far and what is left after each step."
STEP_TIME = "The whole of each step, and the parts of it spent waiting."
IMBALANCE = "The slowest rank over the mean of all: 1 is perfect."
VIOLATION = "Largest load of an expert over the mean of its layer, less 1."
"""Explanations that stand below the charts."""

Recorded = tuple[str, str, int, FloatArray]
"""Key, label, colour and values of a column."""


@dataclass(frozen=True)
class RunCharts:
    """The charts of one run with everything they share."""

    charts: list[Chart]
    positions: Positions
    """Positions of every record of the log."""
    domains: dict[str, Scale]
    marks: Marks


def chart_run(log: RunLog) -> RunCharts:
    """Return the charts of a run, those of which the log tells something."""
    # Positions must never decrease, whatever a damaged log holds: searches and interpolation rely on it.
    seconds = np.cumsum(_positive_or_zero(log.columns["step_seconds"]))
    tokens = np.maximum.accumulate(_positive_or_zero(log.columns["tokens"]))
    positions = Positions(log.steps.astype(np.float64), tokens, seconds)
    evaluated = [_chart_skill(log, positions), _chart_tasks(log, positions)]
    drawn = [
        _chart_loss(log, positions),
        *(chart for chart in evaluated if chart is not None),
        *_chart_columns(log, positions),
    ]
    resumed, saved = ({event.step for event in log.of_kind(kind)} for kind in ("resume", "checkpoint"))
    # Events behind the last record have no place on the charts.
    marks = Marks(
        *(
            positions.at_steps(np.asarray(sorted(step for step in steps if step <= log.steps[-1]), dtype=np.float64))
            for steps in (resumed, saved)
        )
    )
    drawn_at = [series.positions for chart in drawn for series in chart.series]
    from_start = min(at.step[0] for at in drawn_at) <= 1
    domains: dict[str, Scale] = {}
    for axis in AXES:
        ends = np.concatenate([at.on(axis)[[0, -1]] for at in drawn_at])
        # a run that was recorded from its first step shows how far it is from nothing; a part of one fills the width
        low, high = 0.0 if from_start else float(ends.min()), float(ends.max())
        domains[axis] = Scale(low, high) if high > low else Scale(low - 0.5, low + 0.5)
    return RunCharts(drawn, positions, domains, marks)


def choose_half_life(records: int) -> int:
    """Return the steps after which a point's weight in the smoothed loss has halved, for a curve of this many records."""
    return max(1, round(records / 100))


def smooth_values(values: FloatArray, longest_half_life: int) -> FloatArray:
    """Return the exponential moving average of the finite values, shape kept, without bias towards a starting value.

    The half-life is a twentieth of the steps so far, up to the given one: a fixed one would trail far behind the steep
    start of a loss curve. A value that is not finite has no weight and stays a gap (NaN) in the result.
    """
    total = weight = 0.0
    result = np.full(len(values), np.nan)
    for i, value in enumerate(values.tolist()):
        if math.isfinite(value):
            # the weight of a value halves within the half-life; dividing by the sum of weights removes the bias to zero
            keep = 0.5 ** (1 / min(longest_half_life, (i + 1) / 20))
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
            result[i] = total / weight
    return result


@dataclass(frozen=True)
class Readout:
    """Figures that the page's script reads out under the pointer, for each record that any curve draws."""

    domains: dict[str, tuple[float, float]]
    """Low and high end of each horizontal axis."""
    positions: dict[str, list[float]]
    """Where the records lie on each horizontal axis."""
    columns: dict[str, list[str]]
    """Every figure as it is to be shown: "step", "tokens", "time", and "chart.series" for each curve."""

    @property
    def last(self) -> dict[str, str]:
        """Return the figures of the last record, shown while nothing points at a chart."""
        return {name: texts[-1] for name, texts in self.columns.items()}


def read_out(run: RunCharts) -> Readout:
    """Return the figures to read out."""
    drawn = [series.positions.step[series.kept] for chart in run.charts for series in chart.series]
    records = np.searchsorted(run.positions.step, np.concatenate(drawn))
    last = len(run.positions.step) - 1
    # an evaluation may lie after the last record; the last record is the one shown at rest
    at = run.positions.take(np.unique(np.minimum(np.append(records, last), last)))
    columns: dict[str, list[str]] = {}
    for chart in run.charts:
        for series in chart.series:
            if series.label:
                # the newest value so far at each step, and none before the first
                newest = np.searchsorted(series.positions.step, at.step, side="right") - 1
                columns[f"{chart.key}.{series.key}"] = [
                    format_value(chart.key, series.values[i]) if i >= 0 else "–" for i in newest.tolist()
                ]
    columns["step"] = [f"{step:,.0f}" for step in at.step]
    columns["tokens"] = [format_count(tokens) for tokens in at.tokens]
    columns["time"] = [format_duration(seconds) for seconds in at.time]
    domains = {axis: (scale.low, scale.high) for axis, scale in run.domains.items()}
    return Readout(domains, {axis: at.on(axis).round(3).tolist() for axis in AXES}, columns)


def format_value(chart: str, value: float) -> str:
    """Write a value of the chart with this key."""
    return format_count(value) if chart == "throughput" else format_number(value)


def _chart_loss(log: RunLog, positions: Positions) -> Chart:
    loss = log.columns["loss"]
    series = list(_with_average("train", "train", 1, positions, loss, average_label="train, smoothed"))
    explanation = "Mean per target; of text, nats per token."
    if len(series) > 1:
        explanation += f" Smoothed: moving average with a half-life of up to {choose_half_life(len(loss)):,} steps."
    # a step evaluated twice keeps its later evaluation
    held_out = {event.step: event.number("loss") for event in log.of_kind("evaluation")}
    if held_out:
        steps = np.asarray(sorted(held_out), dtype=np.float64)
        values = np.asarray([held_out[int(step)] for step in steps])
        look = "dotted" if len(steps) <= MOST_DOTS else "line"
        series.append(_make_series("validation", "validation", 2, positions.at_steps(steps), values, look))
    spans = _find_nonfinite(loss, positions)
    return Chart("loss", "Loss", "", explanation, tuple(series), nonfinite=spans, wide=True)


def _chart_skill(log: RunLog, positions: Positions) -> Chart | None:
    """Chart the error that forecasts save at the shortest, the middle and the longest lead time of each evaluation."""
    found = {event.step: event.fields.get("skill_by_lead_hours") for event in log.of_kind("evaluation")}
    skills = {step: by_lead for step, by_lead in sorted(found.items()) if isinstance(by_lead, dict)}
    leads = sorted({lead for by_lead in skills.values() for lead in by_lead if lead.isdecimal()}, key=int)
    if not leads:
        return None
    at = positions.at_steps(np.asarray(list(skills), dtype=np.float64))
    series = []
    for colour, lead in enumerate(dict.fromkeys((leads[0], leads[len(leads) // 2], leads[-1])), 1):
        values = [by_lead.get(lead) for by_lead in skills.values()]
        numbers = np.asarray([v if isinstance(v, int | float) else math.nan for v in values], dtype=np.float64)
        series.append(_make_series(f"skill-{lead}", f"{lead} h", colour, at, numbers, "dotted"))
    explanation = (
        "1 − RMSE / (the smaller RMSE of persistence and climatology) of held-out forecasts, mean over variables; "
        "negative where these are better."
    )
    return Chart("skill", "Forecast skill", "", explanation, tuple(series), scales=("linear",))


def _chart_tasks(log: RunLog, positions: Positions) -> Chart | None:
    """Chart the accuracy on in-context tasks: their mean, and each of the first ones."""
    evaluated = accuracy_by_task(log)
    if not evaluated:
        return None
    at = positions.at_steps(np.asarray(list(evaluated), dtype=np.float64))
    means = np.asarray([float(np.mean(list(tasks.values()))) for tasks in evaluated.values()])
    series = [_make_series("mean", "mean of all", 1, at, means, "dotted")]
    names = list(dict.fromkeys(name for tasks in evaluated.values() for name in tasks))
    for number, name in enumerate(names[:MOST_TASKS]):
        values = np.asarray([tasks.get(name, math.nan) for tasks in evaluated.values()])
        series.append(_make_series(f"task-{number}", name, number + 2, at, values, "dotted"))
    others = len(names) - MOST_TASKS
    explanation = "Share of questions answered right." + (
        f" {others:,} more tasks stand in the table." if others > 0 else ""
    )
    return Chart("tasks", "In-context accuracy", "", explanation, tuple(series), scales=("linear",), from_zero=True)


def _chart_columns(log: RunLog, positions: Positions) -> Iterator[Chart]:
    """Yield a chart for each quantity that steps record, those of which the log tells nothing left out."""
    lr = _make_series("lr", "learning rate", 1, positions, log.columns["lr"])
    yield Chart("lr", "Learning rate", "", "As applied at each step.", (lr,), from_zero=True)
    norm = log.columns["grad_norm"]
    series = _with_average("norm", "gradient norm", 1, positions, norm)
    explanation = f"Euclidean norm over all parameters, before clipping.{_explain_average(series)}"
    spans = _find_nonfinite(norm, positions)
    yield Chart("grad-norm", "Gradient norm", "", explanation, series, nonfinite=spans, from_zero=True)

    watts = log.column("step_joules") / log.columns["step_seconds"]
    memory = [
        ("peak", "peak", 2, log.column("memory_peak_gib")),
        ("now", "after the step", 1, log.column("memory_now_gib")),
    ]
    seconds = [
        ("step", "whole step", 1, log.columns["step_seconds"]),
        ("data", "data wait", 2, log.column("data_wait_seconds")),
        ("checkpoint", "checkpoint stall", 3, log.column("checkpoint_stall_seconds")),
        ("ranks", "ranks' wait", 4, log.column("rank_wait_seconds")),
    ]
    imbalance = [
        ("measured", "measured", 1, log.column("imbalance")),
        ("expected", "by the costs shared out by", 2, log.column("imbalance_expected")),
    ]
    critical = [("samples", "critical batch", 1, log.column("critical_batch"))]
    # a rate that was not recorded is derived from tokens and seconds
    rate = [("tokens", "throughput", 1, log.tokens_per_second)]
    violation = [("violation", "worst layer", 1, log.column("expert_violation"))]
    both, linear = ("linear", "log"), ("linear",)
    # key, title, unit, explanation; columns, and which of them are so noisy that an average is drawn over them
    charts: tuple[tuple[str, str, str, str, list[Recorded], tuple[str, ...], tuple[str, ...]], ...] = (
        ("critical-batch", "Critical batch", "samples", CRITICAL_BATCH, critical, (), both),
        ("throughput", "Throughput", f"{log.unit}/s", THROUGHPUT, rate, ("tokens",), linear),
        ("power", "Power", "W", POWER, [("watts", "power", 1, watts)], ("watts",), linear),
        ("memory", "Memory", "GiB", MEMORY, memory, (), linear),
        # a stall once in many steps has no average worth drawing
        ("step-time", "Step time", "s", STEP_TIME, seconds, ("step", "data", "ranks"), both),
        ("ranks", "Imbalance of ranks", "", IMBALANCE, imbalance, ("measured",), both),
        ("experts", "Maximal violation of the balance of experts", "", VIOLATION, violation, ("violation",), both),
    )
    for key, title, unit, explanation, columns, averaged, scales in charts:
        if series := _recorded_series(columns, positions, averaged):
            words = explanation + _explain_average(series)
            yield Chart(key, title, unit, words, series, scales=scales, from_zero=True)


def _explain_average(series: tuple[Series, ...]) -> str:
    return " The strong line is the moving average." if any(not one.label for one in series) else ""


def _make_series(
    key: str, label: str, colour: int, positions: Positions, values: FloatArray, look: str = "line"
) -> Series:
    return Series(key, label, colour, positions, values, reduce_points(values), look)


def _with_average(
    key: str, label: str, colour: int, positions: Positions, values: FloatArray, average_label: str = ""
) -> tuple[Series, ...]:
    """Return a noisy curve, pale, and its moving average over it; of a very short curve only the curve."""
    if len(values) <= SHORT_CURVE:
        return (_make_series(key, label, colour, positions, values),)
    raw = _make_series(key, label, colour, positions, values, "faint")
    average = smooth_values(values, choose_half_life(len(values)))
    return raw, Series(f"{key}-average", average_label, colour, positions, average, raw.kept)


def _recorded_series(columns: list[Recorded], positions: Positions, averaged: tuple[str, ...]) -> tuple[Series, ...]:
    """Return series of the columns that hold values, over the records that hold them: a value not recorded is no gap."""
    series: list[Series] = []
    for key, label, colour, values in columns:
        rows = np.flatnonzero(np.isfinite(values))
        if rows.size:
            column = (key, label, colour, positions.take(rows), values[rows])
            series += _with_average(*column) if key in averaged else (_make_series(*column),)
    return tuple(series)


def _find_nonfinite(values: FloatArray, positions: Positions) -> tuple[Positions, Positions] | None:
    bad = np.concatenate([[False], ~np.isfinite(values), [False]])
    edges = np.flatnonzero(np.diff(bad.astype(np.int8)))
    if not edges.size:
        return None
    return positions.take(edges[::2]), positions.take(edges[1::2] - 1)


def _positive_or_zero(values: FloatArray) -> FloatArray:
    return np.where(np.isfinite(values) & (values > 0), values, 0.0)
