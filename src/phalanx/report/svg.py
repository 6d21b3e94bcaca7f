"""Shapes and text of drawings as SVG, in the drawing's own units, colours by class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

from phalanx.report.scale import Scale, value_ticks

WIDTH = 1000


@dataclass(frozen=True)
class Drawing:
    """One SVG, and what it shows in words."""

    svg: Markup
    words: str
    legend: tuple[tuple[str, str], ...] = ()
    """Class and name of each colour."""


def along(scale: Scale, values: Sequence[float], left: float, right: float) -> list[float]:
    """Where values lie between two ends of a drawing."""
    shares = scale.share(np.asarray(values, np.float64))
    return [float(left + share * (right - left)) for share in shares]


def value_axis(scale: Scale, left: float, top: float, tall: float, label: Callable[[float], str]) -> list[Markup]:
    """Lines and labels of a scale that goes up."""
    parts = []
    for tick in value_ticks(scale):
        y = top + (1 - tick.share) * tall
        value = scale.low + tick.share * (scale.high - scale.low)
        parts += [
            line(left, y, WIDTH - 10, y, "grid"),
            text(left - 8, y + 5, label(float(f"{value:.6g}")), "end"),
        ]
    return parts


def position_axis(scale: Scale, left: float, right: float, y: float, label: Callable[[float], str]) -> list[Markup]:
    """Ticks of a logarithmic scale from left to right."""
    values = [scale.low * (scale.high / scale.low) ** tick.share for tick in value_ticks(scale)]
    spots = along(scale, values, left, right)
    return [text(x, y + 22, label(float(f"{value:.6g}")), "middle") for x, value in zip(spots, values, strict=True)]


def svg(height: float, parts: Iterable[Markup]) -> Markup:
    """A drawing of WIDTH by `height` units."""
    start = Markup('<svg viewBox="0 0 {} {:.0f}" role="img" class="drawing">').format(WIDTH, height)
    return start + Markup("").join(parts) + Markup("</svg>")


def rect(x: float, y: float, wide: float, tall: float, style: str) -> Markup:
    """A rectangle; `style` is its class."""
    shape = '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>'
    return Markup(shape).format(style, x, y, wide, tall)


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    """A line; `style` is its class."""
    shape = '<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>'
    return Markup(shape).format(style, x1, y1, x2, y2)


def text(x: float, y: float, words: str, anchor: str = "start") -> Markup:
    """Words; their start, middle or end is at x."""
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, escape(words))
