"""The charts of a training run: which quantities are drawn, and the figures the page reads out under the pointer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from phalanx.formatting import format_count, format_duration, format_number
from phalanx.report.drawing import Scale
from phalanx.report.interactive_chart import AXES, Chart, Marks, Positions, Series, reduce_points
from phalanx.report.run_log import FloatArray, RunLog
from phalanx.report.task_scores import accuracy_by_task

MOST_DOTS = 60
"""Evaluations that are drawn with a dot each."""
MOST_TASKS = 3
"""In-context tasks that have curves of their own."""
SHORT_CURVE = 10
"""Points of a curve of which no average is worth drawing."""


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
    charts = [
        _chart_loss(log, positions),
        _chart_skill(log, positions),
        _chart_tasks(log, positions),
        _chart_learning_rate(log, positions),
        _chart_gradient_norm(log, positions),
        _chart_critical_batch(log, positions),
        _chart_throughput(log, positions),
        _chart_power(log, positions),
        _chart_memory(log, positions),
        _chart_step_time(log, positions),
        _chart_imbalance(log, positions),
        _chart_experts(log, positions),
    ]
    drawn = [chart for chart in charts if chart is not None]
    marks = Marks(*(_locate_events(log, positions, kind) for kind in ("resume", "checkpoint")))
    return RunCharts(drawn, positions, {axis: _choose_domain(axis, drawn) for axis in AXES}, marks)


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
    columns = {
        f"{chart.key}.{series.key}": _format_at(series, at.step, chart.key)
        for chart in run.charts
        for series in chart.series
        if series.label
    }
    columns["step"] = [f"{step:,.0f}" for step in at.step]
    columns["tokens"] = [format_count(tokens) for tokens in at.tokens]
    columns["time"] = [format_duration(seconds) for seconds in at.time]
    domains = {axis: (scale.low, scale.high) for axis, scale in run.domains.items()}
    return Readout(domains, {axis: at.on(axis).round(3).tolist() for axis in AXES}, columns)


def format_value(chart: str, value: float) -> str:
    """Write a value of the chart with this key."""
    return format_count(value) if chart == "throughput" else format_number(value)


def _format_at(series: Series, steps: FloatArray, chart: str) -> list[str]:
    """Return the series' value at each step as text: its newest value so far, "–" before its first."""
    index = np.searchsorted(series.positions.step, steps, side="right") - 1
    return [format_value(chart, series.values[i]) if i >= 0 else "–" for i in index.tolist()]


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


def _chart_learning_rate(log: RunLog, positions: Positions) -> Chart:
    series = _make_series("lr", "learning rate", 1, positions, log.columns["lr"])
    return Chart("lr", "Learning rate", "", "As applied at each step.", (series,), from_zero=True)


def _chart_gradient_norm(log: RunLog, positions: Positions) -> Chart:
    norm = log.columns["grad_norm"]
    series = _with_average("norm", "gradient norm", 1, positions, norm)
    explanation = f"Euclidean norm over all parameters, before clipping.{_explain_average(series)}"
    spans = _find_nonfinite(norm, positions)
    return Chart("grad-norm", "Gradient norm", "", explanation, series, nonfinite=spans, from_zero=True)


def _chart_critical_batch(log: RunLog, positions: Positions) -> Chart | None:
    """Chart the batch beyond which samples are wasted, where the run estimates it."""
    series = _recorded_series([("samples", "critical batch", 1, log.column("critical_batch"))], positions)
    explanation = (
        "Estimated from gradient norms at two batch sizes (McCandlish et al. 2018). A batch of this size takes twice the "
        "samples, and twice the steps, that the least of either would."
    )
    return _make_chart(series, "critical-batch", "Critical batch", "samples", explanation)


def _chart_throughput(log: RunLog, positions: Positions) -> Chart | None:
    # a rate that was not recorded is derived from tokens and seconds
    columns = [("tokens", "throughput", 1, log.tokens_per_second)]
    series = _recorded_series(columns, positions, averaged=("tokens",))
    explanation = f"Of each step, over all devices.{_explain_average(series)}"
    return _make_chart(series, "throughput", "Throughput", f"{log.unit}/s", explanation, scales=("linear",))


def _chart_power(log: RunLog, positions: Positions) -> Chart | None:
    """Chart the mean power of all devices in each step, where they count their energy."""
    watts = log.column("step_joules") / log.columns["step_seconds"]
    series = _recorded_series([("watts", "power", 1, watts)], positions, averaged=("watts",))
    explanation = f"Mean of each step, all devices, by their own counters of energy.{_explain_average(series)}"
    return _make_chart(series, "power", "Power", "W", explanation, scales=("linear",))


def _chart_memory(log: RunLog, positions: Positions) -> Chart | None:
    columns = [
        ("peak", "peak", 2, log.column("memory_peak_gib")),
        ("now", "after the step", 1, log.column("memory_now_gib")),
    ]
    explanation = "Device memory held by tensors: its peak so far and what is left after each step."
    return _make_chart(_recorded_series(columns, positions), "memory", "Memory", "GiB", explanation, scales=("linear",))


def _chart_step_time(log: RunLog, positions: Positions) -> Chart | None:
    columns = [
        ("step", "whole step", 1, log.columns["step_seconds"]),
        ("data", "data wait", 2, log.column("data_wait_seconds")),
        ("checkpoint", "checkpoint stall", 3, log.column("checkpoint_stall_seconds")),
        ("ranks", "ranks' wait", 4, log.column("rank_wait_seconds")),
    ]
    # a stall once in many steps has no average worth drawing
    series = _recorded_series(columns, positions, averaged=("step", "data", "ranks"))
    explanation = f"The whole of each step, and the parts of it spent waiting.{_explain_average(series)}"
    return _make_chart(series, "step-time", "Step time", "s", explanation)


def _chart_imbalance(log: RunLog, positions: Positions) -> Chart | None:
    """Chart how uneven the shares of ranks are, where they are."""
    columns = [
        ("measured", "measured", 1, log.column("imbalance")),
        ("expected", "by the costs shared out by", 2, log.column("imbalance_expected")),
    ]
    series = _recorded_series(columns, positions, averaged=("measured",))
    explanation = f"The slowest rank over the mean of all: 1 is perfect.{_explain_average(series)}"
    return _make_chart(series, "ranks", "Imbalance of ranks", "", explanation)


def _chart_experts(log: RunLog, positions: Positions) -> Chart | None:
    """Chart how uneven the use of experts is, where there are some."""
    columns = [("violation", "worst layer", 1, log.column("expert_violation"))]
    series = _recorded_series(columns, positions, averaged=("violation",))
    explanation = f"Largest load of an expert over the mean of its layer, less 1.{_explain_average(series)}"
    return _make_chart(series, "experts", "Maximal violation of the balance of experts", "", explanation)


def _make_chart(
    series: tuple[Series, ...],
    key: str,
    title: str,
    unit: str,
    explanation: str,
    scales: tuple[str, ...] = ("linear", "log"),
) -> Chart | None:
    return Chart(key, title, unit, explanation, series, scales=scales, from_zero=True) if series else None


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


def _recorded_series(
    columns: list[tuple[str, str, int, FloatArray]], positions: Positions, averaged: tuple[str, ...] = ()
) -> tuple[Series, ...]:
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


def _locate_events(log: RunLog, positions: Positions, kind: str) -> Positions:
    steps = {event.step for event in log.of_kind(kind) if event.step <= log.steps[-1]}
    return positions.at_steps(np.asarray(sorted(steps), dtype=np.float64))


def _positive_or_zero(values: FloatArray) -> FloatArray:
    return np.where(np.isfinite(values) & (values > 0), values, 0.0)


def _choose_domain(axis: str, charts: list[Chart]) -> Scale:
    series = [series.positions for chart in charts for series in chart.series]
    ends = np.concatenate([positions.on(axis)[[0, -1]] for positions in series])
    from_start = min(positions.step[0] for positions in series) <= 1
    # a run that was recorded from its first step shows how far it is from nothing; a part of one fills the width
    low, high = 0.0 if from_start else float(ends.min()), float(ends.max())
    return Scale(low, high) if high > low else Scale(low - 0.5, low + 0.5)
