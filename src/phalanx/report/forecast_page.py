"""Forecasts as one HTML page that loads nothing: scores by lead time beside the baselines, and maps.

Words and markup are in `forecast.html`, looks in `page.css`, `plan.css` and `forecast.css`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from phalanx.families.weather.evaluation.forecast import FieldMap, Forecasts, LoadedForecaster
from phalanx.families.weather.evaluation.table import ScoreRow, skill_by_lead
from phalanx.report.page_parts import Tile
from phalanx.report.png import DIVERGING, SEQUENTIAL, data_address
from phalanx.report.png import colours as coloured
from phalanx.report.run_log import FloatArray
from phalanx.report.scale import Scale, value_scale
from phalanx.report.svg import WIDTH, Drawing, along, svg, text, value_axis
from phalanx.report.template import render
from phalanx.report.text import number, short

_LEFT, _TOP, _TALL = 90, 14, 330
_Value = Callable[[ScoreRow], float | None]
_RMSE: tuple[tuple[str, _Value], ...] = (
    ("this model", lambda row: row.rmse),
    ("persistence", lambda row: row.persistence_rmse),
    ("climatology", lambda row: row.climatology_rmse),
)
_ACC: tuple[tuple[str, _Value], ...] = (
    ("this model", lambda row: row.acc),
    ("persistence", lambda row: row.persistence_acc),
)


@dataclass(frozen=True)
class Picture:
    """One map."""

    title: str
    address: str
    low: str
    high: str
    """The values of the first and the last colour."""


def render_forecasts(loaded: LoadedForecaster, found: Forecasts) -> str:
    """The page as text."""
    rows = {name: [row for row in found.rows if row.variable == name] for name in _names(found.rows)}
    return render(
        "forecast.html",
        ("page.css", "plan.css", "forecast.css"),
        title=loaded.where.parent.parent.resolve().name,
        where=str(loaded.where),
        step=loaded.step,
        found=found,
        steps=_steps_in_words(found),
        tiles=list(_tiles(found)),
        curves={name: [drawing for drawing in _curves(of_name) if drawing] for name, of_name in rows.items()},
        rows=found.rows,
        number=lambda value: "–" if value is None else number(value),
        percent=lambda share: f"{share:+.0%}".replace("-", "−") if np.isfinite(share) else "–",
        maps=[(one, _pictures(one)) for one in found.maps],
    )


def _names(rows: Sequence[ScoreRow]) -> list[str]:
    return list(dict.fromkeys(row.variable for row in rows))


def _steps_in_words(found: Forecasts) -> str:
    made = [f"{hours} h = {' + '.join(map(str, parts))}" for hours, parts in found.steps.items() if len(parts) > 1]
    if not made:
        return "Every lead time is one step of the model."
    return f"Roll-outs: {'; '.join(made)}. Other lead times are one step of the model."


def _tiles(found: Forecasts) -> Iterator[Tile]:
    for at in skill_by_lead(found.rows):
        value = at.percent.replace("-", "−")
        note = f"{at.better} of {at.variables} variables better"
        yield Tile(f"skill-{at.lead_hours}", f"{at.lead_hours} h", value, "", note)


def _curves(rows: Sequence[ScoreRow]) -> Iterator[Drawing | None]:
    yield _curve("RMSE", rows, _RMSE, from_zero=True)
    yield _curve("anomaly correlation", rows, _ACC, from_zero=False)


def _curve(
    what: str, rows: Sequence[ScoreRow], series: Sequence[tuple[str, _Value]], *, from_zero: bool
) -> Drawing | None:
    """A score against lead time; None where nothing is known."""
    known = {name: [(row.lead_hours, value(row)) for row in rows] for name, value in series}
    points = {
        name: [(lead, score) for lead, score in pairs if score is not None and np.isfinite(score)]
        for name, pairs in known.items()
    }
    scores = np.array([score for pairs in points.values() for _, score in pairs], dtype=np.float64)
    if not scores.size:
        return None
    up = value_scale(scores, logarithmic=False, from_zero=from_zero)
    leads = [row.lead_hours for row in rows]
    across = Scale(0.0, float(max(leads)))
    parts = value_axis(up, _LEFT, _TOP, _TALL, lambda value: short(round(value, 9)))
    parts += [
        text(x, _TOP + _TALL + 28, f"{lead} h", "middle")
        for x, lead in zip(along(across, leads, _LEFT, WIDTH - 30), leads, strict=True)
        if lead in leads[:: -(-len(leads) // 8)]
    ]
    for place, pairs in enumerate(points.values(), 1):
        if not pairs:
            continue
        xs = along(across, [lead for lead, _ in pairs], _LEFT, WIDTH - 30)
        ys = along(up, [score for _, score in pairs], _TOP + _TALL, _TOP)
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        parts.append(Markup('<polyline class="line-{}" points="{}"/>').format(place, corners))
        parts += [
            Markup('<circle class="dot-{}" cx="{:.1f}" cy="{:.1f}" r="5"/>').format(place, x, y)
            for x, y in zip(xs, ys, strict=True)
        ]
    legend = tuple((f"dot-{place}", name) for place, (name, pairs) in enumerate(points.items(), 1) if pairs)
    ends = "; ".join(f"{name} {number(pairs[-1][1])} at {pairs[-1][0]} h" for name, pairs in points.items() if pairs)
    return Drawing(svg(_TOP + _TALL + 40, parts), f"{what}: {ends}.", legend)


def _pictures(one: FieldMap) -> list[Picture]:
    """Forecast and truth on one scale, and their difference on one around zero; north on top."""
    forecast, truth = (field[::-1].astype(np.float64) for field in (one.forecast, one.truth))
    error = forecast - truth
    shown = np.concatenate([forecast[np.isfinite(forecast)], truth[np.isfinite(truth)]])
    low, high = (float(shown.min()), float(shown.max())) if shown.size else (0.0, 1.0)
    most = float(np.nanmax(np.abs(error))) if np.isfinite(error).any() else 1.0
    return [
        _picture("forecast", forecast, low, high, SEQUENTIAL),
        _picture("truth", truth, low, high, SEQUENTIAL),
        _picture("forecast − truth", error, -most, most, DIVERGING),
    ]


def _picture(title: str, values: FloatArray, low: float, high: float, anchors: Any) -> Picture:
    return Picture(title, data_address(coloured(values, low, high, anchors)), number(low), number(high))
