"""The drawings of an ensemble's page. Knows names and numbers, not how they were found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from phalanx.report.scale import Scale, value_scale, value_ticks
from phalanx.report.svg import WIDTH, Drawing, along, line, svg, text, value_axis
from phalanx.report.text import number, percent, short

Row = dict[str, Any]
_LEFT, _TOP, _TALL = 110, 16, 430
_RIGHT = WIDTH - 50
_CURVE = [round(0.05 * step, 2) for step in range(1, 20)]


def curve(label: Row) -> Drawing:
    """Share of truths inside central intervals against the probability of the interval."""
    whole = Scale(0.0, 1.0)
    parts = value_axis(whole, _LEFT, _TOP, _TALL, lambda value: f"{100 * value:.0f}%")
    parts += _across(whole, lambda value: f"{100 * value:.0f}%")
    parts.append(line(_LEFT, _TOP + _TALL, _RIGHT, _TOP, "ideal"))
    for place, shares in ((2, label["raw"]["curve"]), (3, label["conformal_curve"]), (1, label["scores"]["curve"])):
        known = [(level, share) for level, share in zip(_CURVE, shares, strict=True) if share is not None]
        parts += _path(whole, whole, [level for level, _ in known], [share for _, share in known], place)
    error, raw = label["scores"]["calibration_error"], label["raw"]["calibration_error"]
    off = [abs(share - at) for at, share in zip(_CURVE, label["conformal_curve"], strict=True) if share is not None]
    conformal = f"conformal {percent(sum(off) / len(off))}, " if off else ""
    words = f"Mean distance from the diagonal: normal {percent(error)}, {conformal}members as they are {percent(raw)}."
    legend = (("dot-1", "calibrated, normal"), ("dot-3", "conformal"), ("dot-2", "spread of the members as it is"))
    return Drawing(svg(_TOP + _TALL + 44, parts), words, legend)


def reliability(label: Row) -> Drawing:
    """Root mean square error against the uncertainty stated, by parts of the numbers in order of the latter."""
    bins = {place: label[name]["bins"] for place, name in ((2, "raw"), (1, "scores"))}
    ends = [one[end] for rows in bins.values() for one in rows for end in ("stated", "found")]
    shown = np.array([value for value in ends if value > 0.0])
    if not shown.size:
        return Drawing(svg(1, []), "No error and no uncertainty.")
    # what has no uncertainty at all would stretch a logarithmic scale without end
    both = value_scale(np.maximum(shown, shown.max() / 1e4), logarithmic=True, from_zero=False)
    parts = value_axis_log(both)
    parts.append(line(_LEFT, _TOP + _TALL, _RIGHT, _TOP, "ideal"))
    for place, rows in bins.items():
        good = [one for one in rows if one["stated"] > both.low and one["found"] > both.low]
        parts += _path(both, both, [one["stated"] for one in good], [one["found"] for one in good], place)
    found = label["scores"]["rank_correlation"]
    words = (
        f"Up: error found, across: uncertainty stated ({label['unit'] or 'in their unit'}); on the diagonal they agree. "
        f"Rank correlation of uncertainty and error {'not known' if found is None else number(found)}."
    )
    return Drawing(svg(_TOP + _TALL + 44, parts), words)


def selection(facts: Row) -> Drawing | None:
    """Validation error of the mean of the first members, as they are chosen; None where nothing was chosen."""
    chosen = facts["selection"]
    ours, others = chosen["validation_error"], chosen["by_score_validation_error"]
    if len(ours) == len(facts["candidates"]) or len(ours) < 2:
        return None
    tall = 300
    up = value_scale(np.array([*ours, *others]), logarithmic=False, from_zero=False)
    across = Scale(1.0, float(len(ours)))
    parts = value_axis(up, _LEFT, _TOP, tall, lambda value: short(round(value, 6)))
    places = list(range(1, len(ours) + 1))
    spots = along(across, places, _LEFT, _RIGHT)
    parts += [text(x, _TOP + tall + 30, str(place), "middle") for x, place in zip(spots, places, strict=True)]
    parts += _path(across, up, places, others, 2, tall)
    parts += _path(across, up, places, ours, 1, tall)
    words = f"With {len(ours)} members {ours[-1]:.4g}, by score alone {others[-1]:.4g}."
    legend = (("dot-1", "by score and diversity"), ("dot-2", "by score alone"))
    return Drawing(svg(_TOP + tall + 40, parts), words, legend)


def by_lead(rows: Sequence[Row]) -> Drawing:
    """Error of the mean, of the best member, and spread, against lead time, of one variable."""
    leads = [float(row["lead_hours"]) for row in rows]
    series = (
        ("the mean's error", [row["scores"]["rmse"] for row in rows]),
        ("the best member's error", [row["best_member_rmse"] for row in rows]),
        ("spread, stretched", [row["scores"]["spread"] for row in rows]),
    )
    known = [value for _, values in series for value in values if np.isfinite(value)]
    if not known:
        return Drawing(svg(1, []), "Nothing could be scored.")
    up, across = value_scale(np.array(known), logarithmic=False, from_zero=True), Scale(0.0, max(leads))
    parts = value_axis(up, _LEFT, _TOP, _TALL, lambda value: short(round(value, 9)))
    spots = along(across, leads, _LEFT, _RIGHT)
    parts += [text(x, _TOP + _TALL + 30, f"{lead:g} h", "middle") for x, lead in zip(spots, leads, strict=True)]
    for place, (_, values) in enumerate(series, 1):
        good = [(lead, value) for lead, value in zip(leads, values, strict=True) if np.isfinite(value)]
        parts += _path(across, up, [lead for lead, _ in good], [value for _, value in good], place)
    legend = tuple((f"dot-{place}", name) for place, (name, _) in enumerate(series, 1))
    last = rows[-1]
    words = (
        f"At {leads[-1]:g} h the mean errs by {number(last['scores']['rmse'])}, the best member by "
        f"{number(last['best_member_rmse'])}; spread over error {number(last['scores']['spread_skill'])}, members as they "
        f"are {number(last['raw']['spread_skill'])}."
    )
    return Drawing(svg(_TOP + _TALL + 44, parts), words, legend)


def value_axis_log(scale: Scale) -> list[Markup]:
    """Lines and labels of one logarithmic scale, up and across."""
    parts = []
    for tick in value_ticks(scale):
        y, x = _TOP + (1 - tick.share) * _TALL, _LEFT + tick.share * (_RIGHT - _LEFT)
        parts += [
            line(_LEFT, y, _RIGHT, y, "grid"),
            text(_LEFT - 10, y + 8, tick.label, "end"),
            text(x, _TOP + _TALL + 30, tick.label, "middle"),
        ]
    return parts


def _across(scale: Scale, label: Any) -> list[Markup]:
    values = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    spots = along(scale, values, _LEFT, _RIGHT)
    return [text(x, _TOP + _TALL + 30, label(value), "middle") for x, value in zip(spots, values, strict=True)]


def _path(
    across: Scale, up: Scale, xs: Sequence[float], ys: Sequence[float], place: int, tall: float = _TALL
) -> list[Markup]:
    """A line with a dot at each point."""
    columns = along(across, xs, _LEFT, _RIGHT)
    rows = along(up, ys, _TOP + tall, _TOP)
    spots = list(zip(columns, rows, strict=True))
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    dot = Markup('<circle class="dot-{}" cx="{:.1f}" cy="{:.1f}" r="5"/>')
    return [
        Markup('<polyline class="line-{}" points="{}"/>').format(place, corners),
        *(dot.format(place, x, y) for x, y in spots),
    ]
