"""The drawings of a search's page. Knows names and numbers, not how they were found."""

from __future__ import annotations

from typing import Any

import numpy as np
from markupsafe import Markup

from phalanx.report.scale import Scale, value_scale
from phalanx.report.svg import WIDTH, Drawing, along, line, rect, svg, text, value_axis
from phalanx.report.text import duration, percent

Row = dict[str, Any]
_SHADES = 6
"""Classes shade-0 (best) to shade-5 in `search.css`."""


def progress(trials: list[Row]) -> Drawing:
    """Seconds of a step of each trial, those that failed below, and the best so far as a line."""
    good = [row for row in trials if row["step_s"] is not None]
    if not good:
        return Drawing(svg(1, []), "No trial was good.")
    left, top, tall = 80, 15, 240
    up = value_scale(np.array([row["step_s"] for row in good]), logarithmic=False, from_zero=False)
    numbers = [float(row["number"]) for row in trials]
    spots = along(Scale(min(numbers) - 0.5, max(numbers) + 0.5), numbers, left, WIDTH - 20)
    parts = value_axis(up, left, top, tall, duration)
    corners: list[tuple[float, float]] = []
    best = float("inf")
    for x, row in zip(spots, trials, strict=True):
        value = row["step_s"]
        label = f"trial {row['number']}: {row['words']}, {row['state'] if value is None else duration(value)}"
        y = top + tall + 14 if value is None else top + (1 - float(up.share(np.array([value]))[0])) * tall
        dot = '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="5"><title>{}</title></circle>'
        parts.append(Markup(dot).format("failed" if value is None else "dot-1", x, y, label))
        if value is not None and value < best:
            if corners:
                corners.append((x, corners[-1][1]))
            corners.append((x, y))
            best = value
    corners.append((WIDTH - 20.0, corners[-1][1]))
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    parts.append(Markup('<polyline class="front" points="{}"/>').format(path))
    legend = (("dot-1", "a trial"), ("failed", "a trial that failed"))
    return Drawing(svg(top + tall + 30, parts), f"The best takes {duration(best)} a step.", legend)


def effects(planned: Row) -> Drawing:
    """Shapley effects as bars, what each parameter explains alone as a mark."""
    shares = planned["shapley_effects"]
    left, row, room = 230, 28, WIDTH - 230 - 90
    most = max(*shares.values(), *planned["alone"].values(), 1e-9)
    parts = []
    for place, (name, share) in enumerate(shares.items()):
        y, wide = row * place, max(room * max(share, 0.0) / most, 1.0)
        alone = left + room * planned["alone"][name] / most
        parts += [
            text(left - 12, y + 19, name, "end"),
            rect(left, y + 5, wide, row - 10, "fill-c1"),
            line(alone, y + 3, alone, y + row - 3, "mark"),
            text(left + max(wide, alone - left) + 8, y + 19, percent(max(share, 0.0))),
        ]
    words = "Bars: Shapley effects, exact, over all points; marks: what a parameter explains on its own."
    return Drawing(svg(row * len(shares) + 4, parts), words)


def importance(measured: Row) -> Drawing:
    """Importance by measured trials as bars with what 90% of resampled studies have."""
    rows = measured["importance"]
    left, row, room = 230, 28, WIDTH - 230 - 170
    most = max(*(one["high"] for one in rows), *(one["mean"] for one in rows), 1e-9)
    parts = []
    for place, one in enumerate(rows):
        y = row * place
        low, high = (left + room * one[end] / most for end in ("low", "high"))
        parts += [
            text(left - 12, y + 19, one["name"], "end"),
            rect(left, y + 7, max(room * one["mean"] / most, 1.0), row - 14, "fill-c2"),
            line(low, y + row / 2, high, y + row / 2, "mark"),
            line(low, y + 6, low, y + row - 6, "mark"),
            line(high, y + 6, high, y + row - 6, "mark"),
            text(left + room + 14, y + 19, f"first in {percent(one['ranks'][0])}"),
        ]
    parts.append(text(left, row * len(rows) + 18, f"Caution: {measured['caution']}."))
    words = (
        f"{measured['trials']} trials; lines hold 90% of studies resampled from them; beside: how many have it first."
    )
    return Drawing(svg(row * len(rows) + 28, parts), words)


def interaction(pair: Row) -> Drawing:
    """Mean time for each pair of values, the darker the faster."""
    (down, across), (rows, columns) = pair["of"], pair["values"]
    cells = [cell for line_ in pair["mean_s"] for cell in line_ if cell is not None]
    low, high = min(cells), max(cells)
    left, top, tall = 170, 48, 30
    wide = min(90.0, (WIDTH - left - 10) / len(columns))
    parts = [text(left, 16, f"{across} (across) and {down} (down)")]
    parts += [text(left + (place + 0.5) * wide, top - 8, name, "middle") for place, name in enumerate(columns)]
    for number, (name, line_) in enumerate(zip(rows, pair["mean_s"], strict=True)):
        y = top + number * tall
        parts.append(text(left - 10, y + 20, name, "end"))
        for place, cell in enumerate(line_):
            if cell is not None:
                shade = min(_SHADES - 1, int(_SHADES * (np.log(cell / low) / max(float(np.log(high / low)), 1e-9))))
                parts.append(rect(left + place * wide, y, wide - 2, tall - 2, f"shade-{shade}"))
                parts.append(text(left + (place + 0.5) * wide, y + 20, f"{cell:.3g}", "middle"))
    words = f"Mean seconds of a step; beyond what each explains alone the two explain {100 * pair['share']:.1f}%."
    return Drawing(svg(top + tall * len(rows) + 6, parts), words)
