"""The drawings of a tuned study's page. Knows names and numbers, not how they were found."""

from __future__ import annotations

from typing import Any

import numpy as np
from markupsafe import Markup

from phalanx.report.scale import Scale, value_scale
from phalanx.report.svg import WIDTH, Drawing, along, rect, svg, text, value_axis
from phalanx.report.text import duration, number, percent

Row = dict[str, Any]
_LEFT = 170
_MOST_DEVICES = 64


def scores(trials: list[Row], metric: str) -> Drawing:
    """The score of each trial at the rung it reached, the further the darker; those that failed below."""
    good = [row for row in trials if row["score"] is not None and row["failed"] is None]
    if not good:
        return Drawing(svg(1, []), "No trial has a score.")
    left, top, tall = 90, 15, 240
    up = value_scale(np.array([row["score"] for row in good]), logarithmic=False, from_zero=False)
    numbers = [float(row["number"]) for row in trials]
    spots = along(Scale(min(numbers) - 0.5, max(numbers) + 0.5), numbers, left, WIDTH - 20)
    parts = value_axis(up, left, top, tall, number)
    furthest = max(row["steps"] for row in good)
    for x, row in zip(spots, trials, strict=True):
        failed = row["failed"] is not None or row["score"] is None
        y = top + tall + 14 if failed else top + (1 - float(up.share(np.array([row["score"]]))[0])) * tall
        style = "failed" if failed else "dot-1" if row["steps"] == furthest else "off-front"
        said = row["state"] if failed else f"{number(row['score'])} after {row['steps']} steps"
        dot = '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="5"><title>{}</title></circle>'
        parts.append(Markup(dot).format(style, x, y, f"trial {row['number']}: {said}"))
    legend = (("dot-1", "trained to the end"), ("off-front", "stopped at a rung"), ("failed", "failed or interrupted"))
    return Drawing(
        svg(top + tall + 30, parts), f"The least {metric} is {number(min(r['score'] for r in good))}.", legend
    )


def timeline(devices: Row) -> Drawing:
    """When each device computed; the more trials at once, the darker."""
    windows, each = devices["windows"], devices["each"][:_MOST_DEVICES]
    if not windows:
        return Drawing(svg(1, []), "Nothing has run.")
    row, end = 26, max(window[1] for window in windows)
    scale = Scale(0.0, max(end, 1e-9))
    parts = []
    for place, one in enumerate(each):
        y = 6 + row * place
        parts.append(text(_LEFT - 10, y + 16, one["device"], "end"))
        held = [window for window in windows if one["device"] in window[2]]
        for begin, until, _ in held:
            parts.append(_bar(scale, begin, until, y, row, "off-front", f"{one['device']} held"))
        for _, begin, until, label in (span for span in devices["spans"] if span[0] == one["device"]):
            said = f"trial {label}, {duration(until - begin)}"
            parts.append(_bar(scale, begin, until, y, row, "shade-3", said))
    parts += [
        text(_LEFT, 6 + row * len(each) + 16, "0 s"),
        text(WIDTH - 20, 6 + row * len(each) + 16, duration(end), "end"),
    ]
    words = f"Empty: held and idle, {percent(devices['idle'])} of the time. Darker: several trials at once."
    return Drawing(svg(6 + row * len(each) + 26, parts), words)


def rungs(stopped: list[Row]) -> Drawing:
    """How many trials reached each rung."""
    row, room, most = 28, WIDTH - _LEFT - 160, max(max((one["reached"] for one in stopped), default=1), 1)
    parts = []
    for place, one in enumerate(stopped):
        y, wide = row * place, max(room * one["reached"] / most, 1.0)
        parts += [
            text(_LEFT - 12, y + 19, f"step {one['steps']}", "end"),
            rect(_LEFT, y + 5, wide, row - 10, "fill-c1"),
            text(_LEFT + wide + 8, y + 19, f"{one['reached']} reached, {one['stopped']} stay"),
        ]
    return Drawing(svg(row * len(stopped) + 4, parts), "Early stopping lets the best of each rung go on.")


def _bar(scale: Scale, begin: float, end: float, y: float, row: float, style: str, title: str) -> Markup:
    left, right = along(scale, [begin, end], _LEFT, WIDTH - 20)
    shape = '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
    return Markup(shape).format(style, left, y, max(right - left, 0.5), row - 6, title)
