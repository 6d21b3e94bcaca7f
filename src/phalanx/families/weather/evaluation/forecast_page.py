"""Forecasts as one HTML page that loads nothing: scores by lead time beside the baselines, and maps.

The markup is in `templates/forecast.html`.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.families.weather.evaluation.compare_forecasts import ScoreRow, skill_by_lead
from phalanx.families.weather.evaluation.forecast_scores import EnsembleScore
from phalanx.families.weather.evaluation.forecast_split import FieldMap, Forecasts, LoadedForecaster
from phalanx.formatting import format_number
from phalanx.report.drawing import WIDTH, Drawing, Plot, Scale, fit_scale
from phalanx.report.ensemble_page import draw_rank_histogram
from phalanx.report.page import Tile, render_page
from phalanx.report.run_log import FloatArray
from phalanx.report.table import Column

Pixels = npt.NDArray[np.uint8]
Anchors = tuple[tuple[int, int, int], ...]

SEQUENTIAL: Anchors = ((27, 31, 76), (46, 89, 141), (62, 149, 160), (127, 194, 132), (230, 215, 105), (252, 243, 196))
"""Colours from dark to bright, so that order shows without colour vision."""
DIVERGING: Anchors = (
    (20, 67, 122),
    (90, 153, 200),
    (201, 222, 236),
    (247, 246, 243),
    (245, 208, 180),
    (214, 116, 84),
    (130, 27, 40),
)
"""Colours from blue below the middle to red above."""
_MISSING = (160, 160, 160)
MOST_LEADS = 8
"""Most lead times that are named below a curve."""
ScoreOf = Callable[[ScoreRow], float | None]


@dataclass(frozen=True)
class Picture:
    """One map of the page."""

    title: str
    address: str
    """The picture itself, as a data address."""
    low: str
    """Value of the first colour."""
    high: str
    """Value of the last colour."""


def _format_known(value: float | None) -> str:
    """Write a number; a dash where it is not known."""
    return "–" if value is None else format_number(value)


SCORE_COLUMNS: tuple[Column[ScoreRow], ...] = (
    Column("variable", lambda row: row.variable, "left"),
    Column("hours", lambda row: row.lead_hours),
    Column("forecasts", lambda row: row.forecasts),
    Column("RMSE", lambda row: _format_known(row.rmse)),
    Column("persistence", lambda row: _format_known(row.persistence_rmse)),
    Column("climatology", lambda row: _format_known(row.climatology_rmse)),
    Column(
        "saved",
        lambda row: f"{row.skill:+.0%}".replace("-", "−") if np.isfinite(row.skill) else "–",
        style=lambda row: "better" if row.skill > 0 else "worse",
    ),
    Column("ACC", lambda row: _format_known(row.acc)),
    Column("ACC of persistence", lambda row: _format_known(row.persistence_acc)),
    Column("MAE", lambda row: _format_known(row.mae)),
    Column("bias", lambda row: _format_known(row.bias)),
)
SEEPS_COLUMNS: tuple[Column[ScoreRow], ...] = (
    Column("SEEPS", lambda row: _format_known(row.seeps)),
    Column("SEEPS of persistence", lambda row: _format_known(row.persistence_seeps)),
)
"""Columns of runs that predict precipitation."""


def _of_members(score_of: Callable[[EnsembleScore], float | None]) -> ScoreOf:
    """Return the score of a row's members; None where there is one forecast."""
    return lambda row: None if row.ensemble is None else score_of(row.ensemble)


def _member_column(name: str, score_of: Callable[[EnsembleScore], float | None]) -> Column[ScoreRow]:
    """Return the column of a score of the members."""
    found = _of_members(score_of)
    return Column(name, lambda row: _format_known(found(row)))


ENSEMBLE_COLUMNS: tuple[Column[ScoreRow], ...] = (
    _member_column("CRPS", lambda score: score.crps),
    _member_column("fair CRPS", lambda score: score.fair_crps),
    _member_column("spread", lambda score: score.spread),
    _member_column("spread/error", lambda score: score.spread_skill),
)
"""Columns of ensembles, whose other scores are those of the mean."""


def render_forecasts(loaded: LoadedForecaster, found: Forecasts) -> str:
    """Return the page as text."""
    # Only lead times of several steps are made by rolling out.
    made = [f"{hours} h = {' + '.join(map(str, parts))}" for hours, parts in found.steps.items() if len(parts) > 1]
    steps = f"Roll-outs: {'; '.join(made)}. Other lead times are one step of the model."
    known_rain = any(row.seeps is not None for row in found.rows)
    curves: dict[str, list[Drawing]] = {}
    for name in dict.fromkeys(row.variable for row in found.rows):
        rows = [row for row in found.rows if row.variable == name]
        errors = draw_scores(
            "RMSE",
            rows,
            {
                "this model": lambda row: row.rmse,
                "persistence": lambda row: row.persistence_rmse,
                "climatology": lambda row: row.climatology_rmse,
            },
            from_zero=True,
        )
        spread = draw_scores(
            "error and spread",
            rows,
            {
                "error of the mean": _of_members(lambda score: score.rmse),
                "spread": _of_members(lambda score: score.spread),
            },
            from_zero=True,
        )
        scored = draw_scores(
            "CRPS",
            rows,
            {"this model": _of_members(lambda score: score.crps), "fair": _of_members(lambda score: score.fair_crps)},
            from_zero=True,
        )
        correlations = draw_scores(
            "anomaly correlation",
            rows,
            {"this model": lambda row: row.acc, "persistence": lambda row: row.persistence_acc},
            from_zero=False,
        )
        rain = draw_scores(
            "SEEPS",
            rows,
            {"this model": lambda row: row.seeps, "persistence": lambda row: row.persistence_seeps},
            from_zero=True,
        )
        # SEEPS is there for precipitation alone, the correlation only with a climatology.
        curves[name] = [drawing for drawing in (errors, correlations, rain, spread, scored) if drawing is not None]
        # Of the longest lead time: one histogram a variable is enough to look at.
        if rows[-1].ensemble is not None:
            curves[name].append(draw_rank_histogram(rows[-1].lead_hours, {"members": rows[-1].ensemble.ranks}))
    return render_page(
        "forecast.html",
        "figures.css",
        "pairs.css",
        title=loaded.where.parent.parent.resolve().name,
        where=str(loaded.where),
        step=loaded.step,
        found=found,
        steps=steps if made else "Every lead time is one step of the model.",
        tiles=[
            Tile(
                f"skill-{at.lead_hours}",
                f"{at.lead_hours} h",
                at.percent.replace("-", "−"),
                note=f"{at.better} of {at.variables} variables better",
            )
            for at in skill_by_lead(found.rows)
        ],
        curves=curves,
        columns=(*SCORE_COLUMNS, *SEEPS_COLUMNS * known_rain, *ENSEMBLE_COLUMNS * (found.members > 1)),
        rain=known_rain,
        maps=[(one, paint_maps(one)) for one in found.maps],
    )


def draw_scores(what: str, rows: Sequence[ScoreRow], series: dict[str, ScoreOf], *, from_zero: bool) -> Drawing | None:
    """Draw a score of one variable against lead time; None where nothing is known.

    Args:
        what: the score's name.
        rows: scores of the variable, by lead time.
        series: for each curve its name and its score.
        from_zero: whether the scale begins at zero.
    """
    points = {
        name: [(row.lead_hours, score) for row in rows if (score := score_of(row)) is not None and np.isfinite(score)]
        for name, score_of in series.items()
    }
    scores = np.array([score for pairs in points.values() for _, score in pairs], dtype=np.float64)
    if not scores.size:
        return None
    leads = [row.lead_hours for row in rows]
    up = fit_scale(scores, from_zero=from_zero)
    plot = Plot(Scale(0.0, float(max(leads))), up, left=90, top=14, tall=330, right=WIDTH - 30, below=30)
    plot.label_up()
    plot.label_across(leads[:: -(-len(leads) // MOST_LEADS)], lambda lead: f"{lead:.0f} h")
    known = [(number, name, pairs) for number, (name, pairs) in enumerate(points.items(), 1) if pairs]
    for number, _, pairs in known:
        # The model stands out, and climatology is told from persistence without colours
        style = {1: "strong", 3: "dashed"}.get(number, "")
        plot.add_curve([lead for lead, _ in pairs], [score for _, score in pairs], number, style)
    ends = "; ".join(f"{name} {format_number(pairs[-1][1])} at {pairs[-1][0]} h" for _, name, pairs in known)
    return plot.finish(f"{what}: {ends}.", tuple((f"dot-{number}", name) for number, name, _ in known))


def paint_maps(one: FieldMap) -> list[Picture]:
    """Return forecast and truth on one scale of colours, and their difference on one around zero; north on top."""
    # Rows of fields go from south to north, those of pictures from the top
    forecast, truth = (field[::-1].astype(np.float64) for field in (one.forecast, one.truth))
    error = forecast - truth
    shown = np.concatenate([forecast[np.isfinite(forecast)], truth[np.isfinite(truth)]])
    low, high = (float(shown.min()), float(shown.max())) if shown.size else (0.0, 1.0)
    most = float(np.nanmax(np.abs(error))) if np.isfinite(error).any() else 1.0
    pictures = []
    for title, values, least, top, colours in (
        ("forecast", forecast, low, high, SEQUENTIAL),
        ("truth", truth, low, high, SEQUENTIAL),
        ("forecast − truth", error, -most, most, DIVERGING),
    ):
        # Inside the page itself, which loads nothing.
        content = base64.b64encode(encode_png(paint_values(values, least, top, colours))).decode()
        address = f"data:image/png;base64,{content}"
        pictures.append(Picture(title, address, format_number(least), format_number(top)))
    return pictures


def paint_values(values: FloatArray, low: float, high: float, anchors: Anchors) -> Pixels:
    """Return colours [H, W, 3] of values [H, W] from `low` to `high`, ends held; grey where a value is not finite."""
    # A constant field has no range to divide by.
    share = np.clip((values - low) / ((high - low) or 1.0), 0.0, 1.0)
    known = np.isfinite(share)
    places = np.linspace(0.0, 1.0, len(anchors))
    table = np.array(anchors, dtype=np.float64)
    parts = [np.interp(np.where(known, share, 0.0), places, table[:, channel]) for channel in range(3)]
    pixels = np.stack(parts, axis=-1).round().astype(np.uint8)
    return np.where(known[..., None], pixels, np.array(_MISSING, dtype=np.uint8))


def encode_png(pixels: Pixels) -> bytes:
    """Return an RGB picture [H, W, 3] as a PNG file (ISO/IEC 15948), its first row on top."""
    height, width, _ = pixels.shape
    # Each row begins with the number of its filter, 0 for none
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")):
        content += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return content
