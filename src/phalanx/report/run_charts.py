"""The charts of a training run: which quantities are drawn, and the figures the page reads out under the pointer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phalanx.report.chart import AXES, Chart, Marks, Positions, Series, reduce_points
from phalanx.report.run_log import FloatArray, RunLog
from phalanx.report.scale import Scale
from phalanx.report.text import count, duration, number


@dataclass(frozen=True)
class RunCharts:
    """The charts of one run with everything they share."""

    charts: list[Chart]
    positions: Positions
    """Of every record of the log."""
    domains: dict[str, Scale]
    marks: Marks


def run_charts(log: RunLog) -> RunCharts:
    """The charts of a run: loss, learning rate, gradient norm, throughput, memory and step time."""
    seconds = np.nancumsum(log.columns["step_seconds"])
    tokens = np.maximum.accumulate(np.nan_to_num(log.columns["tokens"]))
    positions = Positions(log.steps.astype(np.float64), tokens, seconds)
    charts = [
        _loss(log, positions),
        _learning_rate(log, positions),
        _gradient_norm(log, positions),
        _throughput(log, positions),
        _memory(log, positions),
        _step_time(log, positions),
    ]
    drawn = [chart for chart in charts if chart is not None]
    marks = Marks(*(_event_positions(log, positions, kind) for kind in ("resume", "checkpoint")))
    return RunCharts(drawn, positions, {axis: _domain(axis, drawn) for axis in AXES}, marks)


def half_life(records: int) -> int:
    """Steps after which a point's weight in the smoothed loss has halved, for a curve of this many records."""
    return max(1, round(records / 100))


def smoothed(values: FloatArray, half_life_steps: int) -> FloatArray:
    """Exponential moving average of the finite values, shape kept, without bias towards a starting value.

    A value that is not finite has no weight and stays a gap (NaN) in the result.
    """
    keep = 0.5 ** (1 / half_life_steps)
    total = weight = 0.0
    result = np.full(len(values), np.nan)
    for i, value in enumerate(values.tolist()):
        if math.isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
            result[i] = total / weight
    return result


def readout(run: RunCharts) -> dict[str, object]:
    """What the page's script reads out under the pointer: for each point any curve draws, its positions as numbers and
    every figure as it is to be shown (one string a column, fields divided by "|")."""
    points = np.unique(np.concatenate([np.searchsorted(run.positions.step, _steps(s)) for c in run.charts for s in c.series]))
    points = points[points < len(run.positions.step)]
    at = run.positions.take(points)
    columns = {
        f"{chart.key}.{series.key}": "|".join(_shown_at(series, at.step, FORMATS[chart.key]))
        for chart in run.charts
        for series in chart.series
    }
    columns["step"] = "|".join(f"{step:,.0f}" for step in at.step)
    columns["tokens"] = "|".join(count(tokens) for tokens in at.tokens)
    columns["time"] = "|".join(duration(seconds) for seconds in at.time)
    domains = {axis: [scale.low, scale.high] for axis, scale in run.domains.items()}
    places = {"step": at.step.tolist(), "tokens": at.tokens.tolist(), "time": [round(t, 3) for t in at.time.tolist()]}
    return {"domains": domains, "positions": places, "columns": columns}


FORMATS: dict[str, Callable[[float], str]] = {
    "loss": number,
    "lr": number,
    "grad-norm": number,
    "throughput": count,
    "memory": number,
    "step-time": number,
}
"""How each chart's values are written."""


def _steps(series: Series) -> FloatArray:
    return series.positions.step[series.kept]


def _shown_at(series: Series, steps: FloatArray, show: Callable[[float], str]) -> list[str]:
    """The series' value at each step as text: its newest value so far, "–" before its first."""
    index = np.searchsorted(series.positions.step, steps, side="right") - 1
    return [show(series.values[i]) if i >= 0 else "–" for i in index.tolist()]


def _loss(log: RunLog, positions: Positions) -> Chart:
    loss = log.columns["loss"]
    series = [_series("train", "train", 1, positions, loss, look="faint")]
    if len(loss) > 10:
        smooth = smoothed(loss, half_life(len(loss)))
        series.append(_series("smoothed", "train, smoothed", 1, positions, smooth))
    # a run that lost steps to a kill may have evaluated one step twice: the later evaluation counts
    held_out = {event.step: event.number("loss") for event in log.of_kind("evaluation")}
    if held_out:
        steps = np.asarray(sorted(held_out), dtype=np.float64)
        values = np.asarray([held_out[int(step)] for step in steps])
        series.append(_series("validation", "validation", 2, positions.at_steps(steps), values, look="dotted"))
    explanation = f"Nats a token. Smoothed with a half-life of {half_life(len(loss)):,} steps."
    return Chart(
        "loss", "Loss", "", explanation, tuple(series), nonfinite=_nonfinite_spans(loss, positions), wide=True
    )


def _learning_rate(log: RunLog, positions: Positions) -> Chart:
    series = _series("lr", "learning rate", 1, positions, log.columns["lr"])
    return Chart("lr", "Learning rate", "", "As applied at each step.", (series,), from_zero=True)


def _gradient_norm(log: RunLog, positions: Positions) -> Chart:
    norm = log.columns["grad_norm"]
    series = _series("norm", "gradient norm", 1, positions, norm)
    explanation = "Euclidean norm over all parameters, before clipping."
    spans = _nonfinite_spans(norm, positions)
    return Chart("grad-norm", "Gradient norm", "", explanation, (series,), nonfinite=spans, from_zero=True)


def _throughput(log: RunLog, positions: Positions) -> Chart | None:
    series = _recorded([("tokens", "throughput", 1, log.tokens_per_second)], positions)
    explanation = "Tokens a second of each step, over all devices."
    return _chart_of(series, "throughput", "Throughput", "tokens/s", explanation, scales=("linear",))


def _memory(log: RunLog, positions: Positions) -> Chart | None:
    columns = [
        ("peak", "peak", 2, log.column("memory_peak_gib")),
        ("now", "after the step", 1, log.column("memory_now_gib")),
    ]
    explanation = "Device memory held by tensors: its peak so far and what is left after each step."
    return _chart_of(_recorded(columns, positions), "memory", "Memory", "GiB", explanation, scales=("linear",))


def _step_time(log: RunLog, positions: Positions) -> Chart | None:
    columns = [
        ("step", "whole step", 1, log.columns["step_seconds"]),
        ("data", "data wait", 2, log.column("data_wait_seconds")),
        ("checkpoint", "checkpoint stall", 3, log.column("checkpoint_stall_seconds")),
    ]
    explanation = "The whole of each step, and the parts of it spent waiting."
    return _chart_of(_recorded(columns, positions), "step-time", "Step time", "s", explanation)


def _chart_of(
    series: tuple[Series, ...],
    key: str,
    title: str,
    unit: str,
    explanation: str,
    scales: tuple[str, ...] = ("linear", "log"),
) -> Chart | None:
    return Chart(key, title, unit, explanation, series, scales=scales, from_zero=True) if series else None


def _series(
    key: str, label: str, colour: int, positions: Positions, values: FloatArray, look: str = "line"
) -> Series:
    return Series(key, label, colour, positions, values, reduce_points(values), look)


def _recorded(columns: list[tuple[str, str, int, FloatArray]], positions: Positions) -> tuple[Series, ...]:
    """Series of the columns that hold values, over the records that hold them: a value not recorded is no gap."""
    series = []
    for key, label, colour, values in columns:
        rows = np.flatnonzero(np.isfinite(values))
        if rows.size:
            series.append(_series(key, label, colour, positions.take(rows), values[rows]))
    return tuple(series)


def _nonfinite_spans(values: FloatArray, positions: Positions) -> tuple[Positions, Positions] | None:
    bad = np.concatenate([[False], ~np.isfinite(values), [False]])
    edges = np.flatnonzero(np.diff(bad.astype(np.int8)))
    if not edges.size:
        return None
    return positions.take(edges[::2]), positions.take(edges[1::2] - 1)


def _event_positions(log: RunLog, positions: Positions, kind: str) -> Positions:
    steps = {event.step for event in log.of_kind(kind) if event.step <= log.steps[-1]}
    return positions.at_steps(np.asarray(sorted(steps), dtype=np.float64))


def _domain(axis: str, charts: list[Chart]) -> Scale:
    ends = np.concatenate([series.positions.on(axis)[[0, -1]] for chart in charts for series in chart.series])
    low, high = float(ends.min()), float(ends.max())
    # one step has no extent of its own
    return Scale(low, high) if high > low else Scale(low - 0.5, high + 0.5)
