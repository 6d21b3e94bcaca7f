"""The drawings of a plan's page as SVG: shapes and text in the drawing's own units, colours by class.

This module knows names and numbers, not how they were found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup

from phalanx.planner.rank.models import Bar
from phalanx.planner.rank.summary import Row
from phalanx.report.scale import Scale, value_scale
from phalanx.report.svg import WIDTH, Drawing, along, line, position_axis, rect, svg, text, value_axis
from phalanx.report.text import count, duration, percent

COLOURS = 12
"""Classes fill-c1 to fill-c12 in `plan.css`."""
_GIB = 2**30
_SMALL = 0.004
"""Share of the whole below which a cause is not drawn apart."""


def waterfall(causes: Mapping[str, float]) -> Drawing:
    """Seconds by cause, each bar beginning where the one above ends."""
    total = sum(causes.values())
    shown = [
        (name, value) for name, value in sorted(causes.items(), key=lambda item: -item[1]) if value > _SMALL * total
    ]
    rest = total - sum(value for _, value in shown)
    if rest > 1e-9 * total:
        shown.append(("all else", rest))
    left, room, row = 230, WIDTH - 230 - 150, 30
    parts, start = [], 0.0
    for place, (name, value) in enumerate(shown):
        x, y, wide = left + room * start / total, row * place, max(room * value / total, 1.0)
        parts += [
            text(left - 12, y + 20, name, "end"),
            rect(x, y + 5, wide, row - 10, f"fill-c{place % COLOURS + 1}"),
            text(x + wide + 8, y + 20, f"{duration(value)}, {percent(value / total)}"),
        ]
        start += value
    words = "; ".join(f"{name} {duration(value)}" for name, value in shown)
    return Drawing(svg(row * len(shown) + 4, parts), words)


def memory_stack(stages: Sequence[Mapping[str, float]], device_bytes: float) -> Drawing:
    """Bytes by cause on each pipeline rank, one column a rank, below the line of the device's memory."""
    totals: dict[str, float] = {}
    for causes in stages:
        for name, size in causes.items():
            totals[name] = totals.get(name, 0.0) + size
    names = [name for name, size in sorted(totals.items(), key=lambda item: -item[1]) if size > 0][:COLOURS]
    left, top, tall = 70, 20, 300
    scale = Scale(0.0, 1.08 * max(device_bytes, *(sum(causes.values()) for causes in stages)) / _GIB)
    across = (WIDTH - left - 10) / len(stages)
    wide = min(across * 0.85, 80)
    parts = value_axis(scale, left, top, tall, lambda value: f"{value:g}")
    for rank, causes in enumerate(stages):
        x, below = left + across * (rank + 0.5) - wide / 2, 0.0
        for place, name in enumerate(names):
            size = causes.get(name, 0.0) / _GIB
            height = tall * size / scale.high
            parts.append(rect(x, top + tall - below - height, wide, height, f"fill-c{place + 1}"))
            below += height
        if len(stages) <= 16 or rank % -(-len(stages) // 16) == 0:
            parts.append(text(x + wide / 2, top + tall + 18, str(rank), "middle"))
    y = top + tall * (1 - device_bytes / _GIB / scale.high)
    parts += [line(left, y, WIDTH - 10, y, "limit"), text(WIDTH - 12, y - 6, "device", "end")]
    worst = max(range(len(stages)), key=lambda rank: sum(stages[rank].values()))
    words = f"Rank {worst} needs most, {sum(stages[worst].values()) / _GIB:.1f} of {device_bytes / _GIB:.0f} GiB."
    return Drawing(svg(top + tall + 28, parts), words, tuple((f"fill-c{n + 1}", name) for n, name in enumerate(names)))


_KINDS = ("forward", "backward", "input", "weight")


def timeline(bars: Sequence[Bar]) -> Drawing:
    """What each pipeline rank does over time; a rank's waiting is left blank."""
    ranks = max(bar.rank for bar in bars) + 1
    end = max(bar.end for bar in bars)
    left, row = 60, max(5.0, min(26.0, 420 / ranks))
    across = (WIDTH - left - 5) / end
    paths: dict[str, list[str]] = {}
    for bar in bars:
        x, wide = left + bar.start * across, max((bar.end - bar.start) * across - 0.3, 0.3)
        shape = f"M{x:.1f} {bar.rank * row:.1f}h{wide:.1f}v{row * 0.86:.1f}h-{wide:.1f}z"
        paths.setdefault(f"{bar.kind}-{bar.stage // ranks % 4}", []).append(shape)
    parts = [Markup('<path class="bar-{}" d="{}"/>').format(name, "".join(shapes)) for name, shapes in paths.items()]
    every = -(-ranks // 16)
    parts += [text(left - 8, rank * row + row * 0.7, str(rank), "end") for rank in range(0, ranks, every)]
    busy = sum(bar.end - bar.start for bar in bars) / (end * ranks)
    legend = tuple((f"bar-{kind}-0", kind) for kind in _KINDS if any(bar.kind == kind for bar in bars))
    return Drawing(
        svg(ranks * row + 6, parts), f"{ranks} ranks over {duration(end)}, {percent(busy)} of it busy.", legend
    )


def pareto(front: Sequence[Row], best: Sequence[Row]) -> Drawing:
    """Time against memory: the front as a line, the best of each kind as dots."""
    left, top, tall = 70, 15, 260
    rows = [*best, *front]
    seconds, sizes = (np.array([row[name] for row in rows]) for name in ("step_s", "memory_bytes"))
    across = value_scale(seconds, logarithmic=True, from_zero=False)
    up = value_scale(sizes / _GIB, logarithmic=False, from_zero=False)
    xs = left + across.share(seconds) * (WIDTH - left - 20)
    ys = top + (1 - up.share(sizes / _GIB)) * tall
    parts = value_axis(up, left, top, tall, lambda value: f"{value:g}")
    parts += position_axis(across, left, WIDTH - 20, top + tall, duration)
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs[len(best) :], ys[len(best) :], strict=True))
    parts.append(Markup('<polyline class="front" points="{}"/>').format(corners))
    for place, (row, x, y) in enumerate(zip(rows, xs, ys, strict=True)):
        label = f"tp={row['tp']} pp={row['pp']}, {duration(row['step_s'])}, {row['memory_bytes'] / _GIB:.1f} GiB"
        kind = "off-front" if place < len(best) else "on-front"
        dot = '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="5"><title>{}</title></circle>'
        parts.append(Markup(dot).format(kind, float(x), float(y), label))
    legend = (("on-front", "nothing beats it"), ("off-front", "best of its tp, cp and pp"))
    return Drawing(svg(top + tall + 30, parts), "Seconds of a step against GiB on the worst rank.", legend)


def scaling(facts: Row) -> Drawing:
    """Efficiency of strong and weak scaling over the number of devices."""
    left, top, tall = 70, 15, 260
    unit = facts["unit"]
    curves = {kind: [point for point in facts[kind] if "efficiency" in point] for kind in ("strong", "weak")}
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return Drawing(svg(1, []), "No number of devices has a layout that fits.")
    devices = sorted({point["devices"] for point in points})
    across = Scale(devices[0] / 1.1, devices[-1] * 1.1, logarithmic=True)
    up = Scale(0.0, 1.1 * max(1.0, *(point["efficiency"] for point in points)))
    parts = value_axis(up, left, top, tall, lambda value: f"{100 * value:g} %")
    spots = along(across, devices, left, WIDTH - 20)
    last = -1000.0
    for spot, number in zip(spots, devices, strict=True):
        if spot - last > 55:
            parts.append(text(spot, top + tall + 20, f"{number:,}", "middle"))
            last = spot
    for place, curve in enumerate(curves.values()):
        xs = along(across, [point["devices"] for point in curve], left, WIDTH - 20)
        ys = [top + tall * (1 - point["efficiency"] / up.high) for point in curve]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        parts.append(Markup('<polyline class="line-{}" points="{}"/>').format(place + 1, corners))
        for x, y, point in zip(xs, ys, curve, strict=True):
            rate = f"{count(point[unit + '_per_s'])} {unit}/s"
            label = f"{point['devices']:,}: {percent(point['efficiency'])}, {rate}"
            dot = '<circle class="dot-{}" cx="{:.1f}" cy="{:.1f}" r="4"><title>{}</title></circle>'
            parts.append(Markup(dot).format(place + 1, x, y, label))
    return Drawing(
        svg(top + tall + 30, parts),
        "Throughput of a device beside that of the first point, over the number of devices.",
        (("dot-1", "strong: the global batch stays"), ("dot-2", "weak: it grows with the devices")),
    )
