"""Draws charts as SVG in a chart's own units; colours are classes of the style sheets.

From bottom to top: scales and their ticks, shapes, plots with two axes, rows of bars. What the quantities are is known to
the modules of the pages alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup, escape

from phalanx.formatting import format_duration, format_tick
from phalanx.report.run_log import FloatArray

WIDTH = 1000
"""Units of every drawing from left to right; the page stretches them."""

_DURATION_STEPS = [
    *(1, 2, 5, 10, 15, 20, 30),
    *(60 * minutes for minutes in (1, 2, 3, 5, 10, 15, 20, 30)),
    *(3600 * hours for hours in (1, 2, 3, 6, 12)),
    *(86400 * days for days in (1, 2, 5, 10, 20, 50)),
]
"""Seconds between ticks of an axis of time."""


@dataclass(frozen=True)
class Tick:
    """A labelled position on a scale."""

    share: float
    """0 at the low end of the scale, 1 at its high end."""
    value: float
    label: str


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic scale from `low` to `high`, with `low < high` (and `low > 0` when logarithmic)."""

    low: float
    high: float
    logarithmic: bool = False

    def share(self, values: FloatArray) -> FloatArray:
        """Return where values lie, shape kept: 0 at `low`, 1 at `high`; NaN where the scale has no place for a value."""
        if not self.logarithmic:
            return np.where(np.isfinite(values), (values - self.low) / (self.high - self.low), np.nan)
        logs = np.log(values, out=np.full(values.shape, np.nan), where=np.isfinite(values) & (values > 0))
        return (logs - math.log(self.low)) / (math.log(self.high) - math.log(self.low))

    def ticks(self, values: list[float], label: Callable[[float], str]) -> list[Tick]:
        """Return the given values that lie on this scale, as ticks."""
        shares = self.share(np.asarray(values, dtype=np.float64))
        placed = zip(values, shares, strict=True)
        # a tick at an end of the scale may lie beyond it by a rounding error
        return [Tick(float(share), value, label(value)) for value, share in placed if -1e-9 <= share <= 1 + 1e-9]


def fit_scale(values: FloatArray, *, logarithmic: bool = False, from_zero: bool = False) -> Scale:
    """Return a scale that shows every finite value (every positive one when logarithmic) with a little air around them."""
    shown = values[np.isfinite(values) & ((values > 0) | (not logarithmic))]
    low, high = (float(shown.min()), float(shown.max())) if shown.size else (1.0, 1.0)
    if logarithmic:
        # A scale of a single value must not be empty, nor one of extreme values leave the range of floats.
        air = max(math.exp(0.04 * (math.log(high) - math.log(low))), 1.05)
        limits = sys.float_info
        return Scale(max(low / air, limits.min), min(high * air, limits.max), logarithmic=True)
    # Equal values, and zeros, need some height as well.
    air = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    if from_zero and low >= 0:
        return Scale(0.0, high + air if high > 0 else 1.0)
    return Scale(low - air, high + air)


def choose_value_ticks(scale: Scale, label: Callable[[float], str] = format_tick) -> list[Tick]:
    """Return four to eight round values on a scale, as ticks."""
    if not scale.logarithmic:
        return scale.ticks(_round_values(scale, wanted=5), label)
    # As fine as gives four ticks: of many decades every second or third power of ten is enough.
    decades = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    stride = math.ceil(len(decades) / 7)
    powers = [10.0**decade for decade in decades if decade % stride == 0]
    if stride > 1:
        return scale.ticks(powers, label)
    for multiples in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = scale.ticks([multiple * power for power in powers for multiple in multiples], label)
        if len(ticks) >= 4:
            return ticks
    # less than a third of a decade is as good as linear
    return scale.ticks(_round_values(scale, wanted=5), label)


def choose_position_ticks(scale: Scale, axis: str) -> list[Tick]:
    """Return about five round positions on a horizontal scale of the axis "step", "tokens" or "time" (in seconds)."""
    span = scale.high - scale.low
    if axis == "time" and span >= 4:
        stride = next((step for step in _DURATION_STEPS if span / step <= 6), _DURATION_STEPS[-1])
        stride *= math.ceil(span / stride / 6)
        values = [float(stride * i) for i in range(math.ceil(scale.low / stride), math.floor(scale.high / stride) + 1)]
        return scale.ticks(values, format_duration)
    if axis == "time":
        return scale.ticks(_round_values(scale, wanted=4), format_duration)
    # half a step or half a token is nothing
    values = [value for value in _round_values(scale, wanted=5) if value == round(value)]
    return scale.ticks(values, format_tick)


def _round_values(scale: Scale, wanted: int) -> list[float]:
    """Return about `wanted` multiples of 1, 2, 2.5 or 5 times a power of ten that lie on a linear scale."""
    rough = (scale.high - scale.low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    stride = power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= 0.85 * rough)
    first, last = math.ceil(scale.low / stride - 1e-9), math.floor(scale.high / stride + 1e-9)
    # a stride such as 0.1 is not exact in binary; rounding keeps 0.30000000000000004 off the page
    return [float(f"{i * stride:.10g}") for i in range(first, last + 1)]


@dataclass(frozen=True)
class Drawing:
    """One SVG, and what it shows in words."""

    svg: Markup
    words: str
    legend: tuple[tuple[str, str], ...] = ()
    """Class and name of each colour."""


def draw_nothing(words: str) -> Drawing:
    """Return an empty drawing, which says in `words` why it is empty."""
    return finish_drawing([], 1, words)


def finish_drawing(
    parts: Sequence[Markup], height: float, words: str, legend: tuple[tuple[str, str], ...] = ()
) -> Drawing:
    """Put shapes into an SVG of `WIDTH` by `height` units."""
    # Markup.format escapes what it fills in: names on a page come from run files and logs of others.
    start = Markup('<svg viewBox="0 0 {} {:.0f}" role="img" class="drawing">').format(WIDTH, height)
    return Drawing(start + Markup("").join(parts) + Markup("</svg>"), words, legend)


def make_rectangle(x: float, y: float, wide: float, tall: float, style: str, title: str = "") -> Markup:
    """Return a rectangle. style: its class; title: what is said under the pointer."""
    shape = '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"'
    return Markup(shape).format(style, x, y, wide, tall) + _close_shape("rect", title)


def make_circle(x: float, y: float, radius: float, style: str, title: str = "") -> Markup:
    """Return a dot. style: its class; title: what is said under the pointer."""
    shape = '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{:g}"'
    return Markup(shape).format(style, x, y, radius) + _close_shape("circle", title)


def _close_shape(tag: str, title: str) -> Markup:
    return Markup("><title>{}</title></{}>").format(title, tag) if title else Markup("/>")


def make_line(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    """Return a straight line. style: its class."""
    shape = '<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>'
    return Markup(shape).format(style, x1, y1, x2, y2)


def make_polyline(corners: Sequence[tuple[float, float]], style: str) -> Markup:
    """Return a line through the corners. style: its class."""
    return Markup('<polyline class="{}" points="{}"/>').format(style, " ".join(f"{x:.1f},{y:.1f}" for x, y in corners))


def make_text(x: float, y: float, words: str, anchor: str = "start") -> Markup:
    """Return words whose start, middle or end is at x."""
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, escape(words))


@dataclass
class Plot:
    """A chart with a scale across and a scale up, to which curves and dots are added."""

    across: Scale
    up: Scale
    left: float = 80
    """Where the plot begins; labels of the scale that goes up are left of it."""
    top: float = 15
    tall: float = 260
    right: float = WIDTH - 20
    below: float = 24
    """Units from the plot down to the labels of the scale across."""
    parts: list[Markup] = field(default_factory=list)

    @property
    def bottom(self) -> float:
        """The height of the lower end."""
        return self.top + self.tall

    def place_across(self, values: Sequence[float]) -> list[float]:
        """Return where values of the scale across lie from left to right."""
        shares = self.across.share(np.asarray(values, np.float64))
        return [float(self.left + share * (self.right - self.left)) for share in shares]

    def place_up(self, values: Sequence[float]) -> list[float]:
        """Return where values of the scale up lie from top to bottom."""
        shares = self.up.share(np.asarray(values, np.float64))
        return [float(self.bottom - share * self.tall) for share in shares]

    def label_up(self, label: Callable[[float], str] = format_tick) -> None:
        """Add lines at round values of the scale up, and what they stand for."""
        for tick in choose_value_ticks(self.up, label):
            y = self.top + (1 - tick.share) * self.tall
            self.parts += [
                make_line(self.left, y, WIDTH - 10, y, "grid"),
                make_text(self.left - 8, y + 5, tick.label, "end"),
            ]

    def label_across(self, values: Sequence[float], label: Callable[[float], str], apart: float = 0.0) -> None:
        """Add labels below the plot. apart: units between two labels at least; those that are nearer are left out."""
        last = -math.inf
        for x, value in zip(self.place_across(values), values, strict=True):
            # labels that overlap cannot be read
            if x - last >= apart:
                self.parts.append(make_text(x, self.bottom + self.below, label(value), "middle"))
                last = x

    def add_line(self, xs: Sequence[float], ys: Sequence[float], style: str) -> None:
        """Add a line through points given as values of both scales."""
        self.parts.append(make_polyline(list(zip(self.place_across(xs), self.place_up(ys), strict=True)), style))

    def add_dot(self, x: float, y: float, style: str, title: str = "", radius: float = 5) -> None:
        """Add a dot at a point given as values of both scales. title: what is said under the pointer."""
        self.parts.append(make_circle(self.place_across([x])[0], self.place_up([y])[0], radius, style, title))

    def add_curve(self, xs: Sequence[float], ys: Sequence[float], number: int, style: str = "") -> None:
        """Add a line with a dot at each point, in the page's curve colour `number`, from 1."""
        self.add_line(xs, ys, f"line-{number} {style}".strip())
        for x, y in zip(xs, ys, strict=True):
            self.add_dot(x, y, f"dot-{number}")

    def finish(self, words: str, legend: tuple[tuple[str, str], ...] = ()) -> Drawing:
        """Return the drawing; `words` say what it shows."""
        return finish_drawing(self.parts, self.bottom + self.below + 8, words, legend)


@dataclass(frozen=True)
class Bar:
    """A row of a chart of bars."""

    name: str
    length: float
    note: str
    """Words behind the bar."""
    style: str
    start: float = 0.0
    marks: tuple[float, ...] = ()
    """Values that are marked across the bar; two of them are joined as an interval."""


def draw_bars(bars: Sequence[Bar], words: str, *, left: float = 230, behind: float = 150) -> Drawing:
    """Draw a horizontal bar a row, the longest as long as there is room.

    Args:
        bars: the rows, from above.
        words: what the drawing shows.
        left: units for the names in front of the bars.
        behind: units for the notes behind them.
    """
    row, room = 30, WIDTH - left - behind
    # of all zeros any length will do
    most = max([1e-9, *(bar.start + bar.length for bar in bars), *(mark for bar in bars for mark in bar.marks)])
    parts = []
    for place, bar in enumerate(bars):
        # A bar of nothing is a hair wide, so that its row is not taken for an empty one.
        y, x, wide = row * place, left + room * bar.start / most, max(room * bar.length / most, 1.0)
        marks = [left + room * mark / most for mark in bar.marks]
        parts += [
            make_text(left - 12, y + 20, bar.name, "end"),
            make_rectangle(x, y + 5, wide, row - 10, bar.style),
            *(make_line(mark, y + 3, mark, y + row - 3, "mark") for mark in marks),
            make_text(max([x + wide, *marks]) + 8, y + 20, bar.note),
        ]
        if len(marks) == 2:
            parts.append(make_line(marks[0], y + row / 2, marks[1], y + row / 2, "mark"))
    return finish_drawing(parts, row * len(bars) + 4, words)


@dataclass(frozen=True)
class HeatScale:
    """Colours of a heat map: classes of the style sheet by the value up to which each goes, from the lowest."""

    limits: tuple[float, ...]
    styles: tuple[str, ...]
    """One more than limits: the last is for all above."""
    names: tuple[str, ...]
    """What each colour stands for, for the legend."""

    def style(self, value: float) -> str:
        """Return the class of a value."""
        return self.styles[sum(value > limit for limit in self.limits)]

    @property
    def legend(self) -> tuple[tuple[str, str], ...]:
        """Class and name of each colour."""
        return tuple(zip(self.styles, self.names, strict=True))


def draw_heat_map(
    rows: Sequence[tuple[str, Sequence[float]]],
    scale: HeatScale,
    words: str,
    title: Callable[[str, int, float], str],
    *,
    left: float = 80,
) -> Drawing:
    """Draw a row of equal cells for each name, coloured by value.

    Args:
        rows: names and values, from above; all rows have as many values.
        scale: the colours.
        words: what the drawing shows.
        title: what is said under the pointer of the cell of a row's name, a column's number and a value.
        left: units for the names in front of the rows.
    """
    columns = max((len(values) for _, values in rows), default=1)
    # few rows are easier to see tall, many have to fit a page
    wide, tall = (WIDTH - left) / columns, max(8.0, min(24.0, 600.0 / max(len(rows), 1)))
    gap = 1.0 if wide > 4 else 0.0
    parts = []
    for place, (name, values) in enumerate(rows):
        y = place * tall
        # labels that overlap cannot be read
        if tall >= 14 or place % 2 == 0:
            parts.append(make_text(left - 10, y + tall / 2 + 5, name, "end"))
        for number, value in enumerate(values):
            x = left + number * wide
            parts.append(make_rectangle(x, y, wide - gap, tall - 1, scale.style(value), title(name, number, value)))
    bottom = tall * len(rows)
    for number in range(0, columns, max(1, math.ceil(columns / 16))):
        parts.append(make_text(left + (number + 0.5) * wide, bottom + 18, str(number), "middle"))
    return finish_drawing(parts, bottom + 24, words, scale.legend)
