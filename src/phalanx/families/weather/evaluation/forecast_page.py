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
from phalanx.families.weather.evaluation.forecast_split import FieldMap, Forecasts, LoadedForecaster
from phalanx.families.weather.evaluation.significance import Difference
from phalanx.families.weather.evaluation.spectra import Spectrum
from phalanx.formatting import format_number, format_tick
from phalanx.report.drawing import WIDTH, Drawing, Plot, Scale, choose_value_ticks, draw_nothing, fit_scale
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


def _of_members(score: str) -> ScoreOf:
    """Return a named score of a row's members; None where there is one forecast."""
    return lambda row: None if row.ensemble is None else getattr(row.ensemble, score)


def _member_column(name: str, score: str) -> Column[ScoreRow]:
    """Return the column of a named score of the members."""
    found = _of_members(score)
    return Column(name, lambda row: _format_known(found(row)))


ENSEMBLE_COLUMNS: tuple[Column[ScoreRow], ...] = (
    _member_column("CRPS", "crps"),
    _member_column("fair CRPS", "fair_crps"),
    _member_column("spread", "spread"),
    _member_column("spread/error", "spread_skill"),
)
"""Columns of ensembles, whose other scores are those of the mean."""


DIFFERENCE_COLUMNS: tuple[Column[Difference], ...] = (
    Column("variable", lambda row: row.variable, "left"),
    Column("hours", lambda row: row.lead_hours),
    Column("score", lambda row: row.score.upper(), "left"),
    Column("starts", lambda row: row.starts),
    Column(
        "difference",
        lambda row: f"{row.relative:+.2%}".replace("-", "−") if np.isfinite(row.relative) else "–",
        style=lambda row: "" if not row.significant else "better" if row.mean < 0 else "worse",
    ),
    Column("95% from", lambda row: format_number(row.low)),
    Column("to", lambda row: format_number(row.high)),
    Column("p", lambda row: f"{row.p_value:.3f}" if np.isfinite(row.p_value) else "–"),
    Column("inflation", lambda row: f"{row.inflation:.2f}" if np.isfinite(row.inflation) else "–"),
)
"""Columns of what two models differ by."""


def render_forecasts(
    loaded: LoadedForecaster, found: Forecasts, against: str = "", differences: Sequence[Difference] = ()
) -> str:
    """Return the page as text. against: the model that it is compared with, in words; differences: of their scores."""
    # Only lead times of several steps are made by rolling out.
    made = [f"{hours} h = {' + '.join(map(str, parts))}" for hours, parts in found.steps.items() if len(parts) > 1]
    steps = f"Roll-outs: {'; '.join(made)}. Other lead times are one step of the model."
    known_rain = any(row.seeps is not None for row in found.rows)
    curves = {name: draw_variable(found, name) for name in dict.fromkeys(row.variable for row in found.rows)}
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
        against=against,
        difference_columns=DIFFERENCE_COLUMNS,
        differences=differences,
    )


def draw_variable(found: Forecasts, name: str) -> list[Drawing]:
    """Draw all that is known of one variable by lead time: errors, correlations, SEEPS, spread, CRPS, spectra and ranks."""
    rows = [row for row in found.rows if row.variable == name]
    wanted: list[tuple[str, dict[str, ScoreOf], bool]] = [
        (
            "RMSE",
            {
                "this model": lambda row: row.rmse,
                "persistence": lambda row: row.persistence_rmse,
                "climatology": lambda row: row.climatology_rmse,
            },
            True,
        ),
        (
            "anomaly correlation",
            {"this model": lambda row: row.acc, "persistence": lambda row: row.persistence_acc},
            False,
        ),
        ("SEEPS", {"this model": lambda row: row.seeps, "persistence": lambda row: row.persistence_seeps}, True),
        ("error and spread", {"error of the mean": _of_members("rmse"), "spread": _of_members("spread")}, True),
        ("CRPS", {"this model": _of_members("crps"), "fair": _of_members("fair_crps")}, True),
    ]
    # SEEPS is there for precipitation alone, the correlation only with a climatology.
    drawn = [draw_scores(what, rows, series, from_zero=from_zero) for what, series, from_zero in wanted]
    drawings = [drawing for drawing in drawn if drawing is not None]
    spectra = [one for one in found.spectra if one.variable == name]
    if spectra:
        drawings.append(draw_spectra(spectra[0], spectra[-1]))
    # Of the longest lead time: one histogram a variable is enough to look at.
    if rows[-1].ensemble is not None:
        drawings.append(draw_rank_histogram(rows[-1].lead_hours, {"members": rows[-1].ensemble.ranks}))
    return drawings


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


def draw_spectra(first: Spectrum, last: Spectrum) -> Drawing:
    """Draw the zonal energy spectra of one variable's forecasts at two lead times, and of the truth at the second."""
    series = {
        f"forecast, {last.lead_hours} h": last.forecast,
        f"forecast, {first.lead_hours} h": first.forecast,
        "truth": last.truth,
    }
    # Without the mean, which has no place on a scale of wavenumbers.
    energies = {name: np.array(values[1:]) for name, values in series.items()}
    shown = np.concatenate(list(energies.values()))
    if not (shown > 0).any():
        return draw_nothing("No energy could be compared.")
    waves = np.arange(1, len(last.truth))
    up = fit_scale(shown, logarithmic=True)
    plot = Plot(fit_scale(waves.astype(np.float64), logarithmic=True), up, left=90, top=14, tall=330, right=WIDTH - 30)
    plot.label_up()
    plot.label_across([tick.value for tick in choose_value_ticks(plot.across)], format_tick)
    for number, values in enumerate(energies.values(), 1):
        there = values > 0
        style = {1: "strong", 3: "dashed"}.get(number, "")
        plot.add_line(waves[there].tolist(), values[there].tolist(), f"line-{number} {style}".strip())
    shares = energies[f"forecast, {last.lead_hours} h"][-1] / energies["truth"][-1] if energies["truth"][-1] else np.nan
    return plot.finish(
        f"Energy by zonal wavenumber; at {waves[-1]} the forecast of {last.lead_hours} h has {format_number(float(shares))} "
        "times that of the truth.",
        tuple((f"dot-{number}", name) for number, name in enumerate(series, 1)),
    )


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
