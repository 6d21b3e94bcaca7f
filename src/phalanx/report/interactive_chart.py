"""Charts of a quantity over a run whose axes the reader of the page chooses: one SVG path for each choice.

The drawing is stretched to the width of the page, so text stays outside the SVG. What the quantities are is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from phalanx.report.drawing import Scale, Tick, choose_position_ticks, choose_value_ticks, fit_scale
from phalanx.report.run_log import FloatArray, IntArray

AXES = ("step", "tokens", "time")
PLOT_WIDTH, PLOT_HEIGHT = 1000, 400
"""The SVG's own units; the page stretches them."""

MOST_POINTS_UNREDUCED = 1500
"""Points of the longest curve that is drawn with all of them."""
BUCKETS = 350
"""Parts of a longer curve, each drawn by its lowest and its highest point: less than three units wide."""
MOST_MARKS = 100
MOST_SPANS = 500


@dataclass(frozen=True)
class Positions:
    """Where points lie on each horizontal axis; all of one shape (points,) and never decreasing."""

    step: FloatArray
    tokens: FloatArray
    time: FloatArray
    """Training time: seconds of all steps so far."""

    def on(self, axis: str) -> FloatArray:
        """Return the positions on one of `AXES`."""
        positions: FloatArray = getattr(self, axis)
        return positions

    def at_steps(self, steps: FloatArray) -> Positions:
        """Return positions of the given steps, shape (points,), by interpolation; 0 tokens and seconds before the first."""
        tokens, time = (np.interp(steps, self.step, self.on(axis), left=0.0) for axis in ("tokens", "time"))
        return Positions(steps, tokens, time)

    def take(self, index: IntArray) -> Positions:
        """Return the points of the given indices."""
        return Positions(self.step[index], self.tokens[index], self.time[index])


@dataclass(frozen=True)
class Series:
    """One curve. A value that is not finite, and on a logarithmic scale one that is not positive, is a gap."""

    key: str
    label: str
    """Name in the legend and the read-out; empty for a curve that only accompanies another."""
    colour: int
    """Which of the page's curve colours, from 1."""
    positions: Positions
    values: FloatArray
    kept: IntArray
    """Indices of the points that are drawn, from `reduce_points`."""
    look: str = "line"
    """line, faint (a thin pale line) or dotted (a line with a dot at each point)."""


@dataclass(frozen=True)
class Marks:
    """Steps worth marking on every chart, with their positions."""

    resumes: Positions
    checkpoints: Positions


@dataclass(frozen=True)
class Chart:
    """One plot: its words, its curves, and the spans over which its quantity was not finite."""

    key: str
    title: str
    unit: str
    explanation: str
    series: tuple[Series, ...]
    nonfinite: tuple[Positions, Positions] | None = None
    """First and last positions of the spans of consecutive steps without a finite value."""
    scales: tuple[str, ...] = ("linear", "log")
    from_zero: bool = False
    wide: bool = False

    @property
    def starts_logarithmic(self) -> bool:
        """Whether a linear scale would press nearly all points into its lowest twentieth."""
        if "log" not in self.scales:
            return False
        first = self.series[0].values
        shown = first[np.isfinite(first) & (first > 0)]
        return bool(shown.size) and float(shown.max()) > 20 * float(np.median(shown))


@dataclass(frozen=True)
class Path:
    """One SVG path and the classes that style it and say for which axes it is shown."""

    classes: str
    d: str


@dataclass(frozen=True)
class AxisTicks:
    """The ticks of one choice of axis."""

    classes: str
    ticks: list[Tick]


@dataclass(frozen=True)
class ChartDrawing:
    """Everything the page needs to show a chart."""

    paths: list[Path]
    value_ticks: list[AxisTicks]
    position_ticks: list[AxisTicks]


def reduce_points(values: FloatArray) -> IntArray:
    """Return indices of at most 2 * `BUCKETS` + 2 points that keep the outline of a long curve.

    These are each bucket's lowest and highest finite value, and the first and last point. A short curve keeps all points.
    """
    n = len(values)
    if n <= MOST_POINTS_UNREDUCED:
        return np.arange(n)
    # Minimum and maximum of each bucket, in order: a mean would hide the spikes that one looks for.
    kept = {0, n - 1}
    for start, stop in pairwise(np.linspace(0, n, BUCKETS + 1).astype(np.int64).tolist()):
        bucket = values[start:stop]
        finite = np.flatnonzero(np.isfinite(bucket))
        if finite.size:
            shown = bucket[finite]
            kept.update((int(start + finite[shown.argmin()]), int(start + finite[shown.argmax()])))
    return np.asarray(sorted(kept), dtype=np.int64)


def draw_chart(chart: Chart, domains: dict[str, Scale], marks: Marks) -> ChartDrawing:
    """Draw a chart on every pair of horizontal axis and vertical scale it offers.

    Args:
        chart: what to draw.
        domains: the scale of each horizontal axis, the same for all charts of a page.
        marks: resumes and checkpoints.
    """
    # the kept points hold the extremes, so the scale fits all points
    values = np.concatenate([series.values[series.kept] for series in chart.series])
    scales = {name: fit_scale(values, logarithmic=name == "log", from_zero=chart.from_zero) for name in chart.scales}
    # Every choice of axes is drawn, and the style sheet shows one: the page works without a script.
    paths: list[Path] = []
    for axis in AXES:
        domain = domains[axis]
        checkpoints, resumes = (
            _thin_marks(domain.share(at.on(axis)) * PLOT_WIDTH) for at in (marks.checkpoints, marks.resumes)
        )
        paths.append(Path(f"checkpoints x-{axis}", "".join(f"M{x:.1f} {PLOT_HEIGHT}v-12" for x in checkpoints)))
        paths.append(Path(f"resumes x-{axis}", "".join(f"M{x:.1f} 0V{PLOT_HEIGHT}" for x in resumes)))
        if chart.nonfinite is not None:
            spans = _merge_spans(*(domain.share(end.on(axis)) * PLOT_WIDTH for end in chart.nonfinite))
            shape = "".join(f"M{a:.1f} 0H{b:.1f}V{PLOT_HEIGHT}H{a:.1f}Z" for a, b in spans)
            paths.append(Path(f"nonfinite x-{axis}", shape))
        for name, scale in scales.items():
            shown = _name_choice(axis, name, chart.scales)
            for series in chart.series:
                x = domain.share(series.positions.on(axis)) * PLOT_WIDTH
                y = (1 - scale.share(series.values)) * PLOT_HEIGHT
                style = f"colour-{series.colour} {shown}"
                line, lone = _draw_curve(x, y, series.kept)
                paths.append(Path(f"curve {series.look} {style}", line))
                paths.append(Path(f"lone dots {series.look} {style}", _draw_dots(x, y, lone)))
                if series.look == "dotted":
                    finite = series.kept[np.isfinite(y[series.kept])]
                    paths.append(Path(f"dots {style}", _draw_dots(x, y, finite)))
    return ChartDrawing(
        paths=[path for path in paths if path.d],
        value_ticks=[
            AxisTicks(_name_choice(None, name, chart.scales), choose_value_ticks(scales[name])) for name in scales
        ],
        position_ticks=[AxisTicks(f"x-{axis}", choose_position_ticks(domains[axis], axis)) for axis in AXES],
    )


def _name_choice(axis: str | None, scale: str, scales: tuple[str, ...]) -> str:
    """Return the classes of what is shown for one choice of axis and scale; the style sheet hides what is not chosen."""
    return " ".join([f"x-{axis}"] * (axis is not None) + [f"y-{scale}"] * (len(scales) > 1))


def _draw_curve(x: FloatArray, y: FloatArray, kept: IntArray) -> tuple[str, list[int]]:
    """Return the line through the kept points, in SVG units, broken at gaps; and the points that no line reaches."""
    # a gap between two kept points breaks the line even where the gap itself was not kept
    gaps_before = np.cumsum(~np.isfinite(y))
    pieces: list[str] = []
    lone: list[int] = []
    previous = None
    for i in kept[np.isfinite(y[kept])].tolist():
        joined = previous is not None and gaps_before[i] == gaps_before[previous]
        if joined:
            pieces.append(f"L{x[i]:.1f} {y[i]:.1f}")
            if lone and lone[-1] == previous:
                lone.pop()
        else:
            pieces.append(f"M{x[i]:.1f} {y[i]:.1f}")
            lone.append(i)
        previous = i
    return "".join(pieces), lone


def _draw_dots(x: FloatArray, y: FloatArray, index: Iterable[int]) -> str:
    # a line of no length shows its round caps: a dot that the stretched drawing does not flatten
    return "".join(f"M{x[i]:.1f} {y[i]:.1f}h0" for i in index)


def _thin_marks(positions: FloatArray) -> FloatArray:
    """Return the positions without those that would fall on the same hair's breadth."""
    cells = np.unique(np.round(positions * MOST_MARKS / PLOT_WIDTH), return_index=True)[1]
    return positions[np.sort(cells)]


def _merge_spans(first: FloatArray, last: FloatArray) -> Iterator[tuple[float, float]]:
    """Yield spans in order, joined where the eye could not tell them apart."""
    hair = PLOT_WIDTH / MOST_SPANS
    start = end = float("nan")
    for a, b in zip(first, last, strict=True):
        if a - end < hair:
            end = float(b)
            continue
        if np.isfinite(end):
            yield start, end
        start, end = float(a), float(b)
    if np.isfinite(end):
        yield start, end
