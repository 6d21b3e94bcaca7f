"""An ensemble as one HTML page that loads nothing: its errors beside the members', and how far its uncertainties hold.

The markup of all families is in `templates/ensemble.html`; sections for which a family has nothing are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.formatting import format_number, format_percent, format_tick
from phalanx.report.drawing import (
    WIDTH,
    Drawing,
    Plot,
    Scale,
    choose_value_ticks,
    draw_nothing,
    fit_scale,
    make_line,
)
from phalanx.report.page import Tile, render_page
from phalanx.report.table import Column

Row = dict[str, Any]
LEVELS = ("0.5", "0.68", "0.9", "0.95")
"""Probabilities of the intervals in the table of uncertainties."""
CURVE = [round(0.05 * step, 2) for step in range(1, 20)]
"""Probabilities of the intervals of a calibration curve."""


def render_ensemble(summary: Row) -> str:
    """Return the page as text. summary: what `phalanx ensemble --json` prints of the ensemble."""
    family = summary["family"]
    # Columns that members of every family have.
    members: tuple[Column[Row], ...] = (
        Column("run", lambda row: row["name"], "left"),
        Column("steps", lambda row: f"{row['step']:,}"),
    )
    page: dict[str, Any] = {"tiles": [], "tables": [], "curves": None, "selection": None}
    if family == "weather":
        rows = summary["forecasts"]
        # In the order of the summary, each variable once.
        variables = list(dict.fromkeys(row["variable"] for row in rows))
        mine = {name: [row for row in rows if row["variable"] == name] for name in variables}
        by_lead = [(name, [draw_by_lead(found), draw_ranks(found[-1])]) for name, found in mine.items()]
        page |= {
            "about": "Stretched on the validation split, scored on the test split, "
            f"{summary['hours_between']:g} h away from it.",
            "curves": (
                "Error and spread by lead time, and ranks of the truth",
                "Area-weighted, in the units of the variable. Where spread and error are alike the ensemble says how far it "
                "may be off. The truth then has every rank among the members equally often; high ends mean too little "
                "spread, a slope a bias.",
                by_lead,
            ),
            "tables": [("table", "All scores", ALL_SCORES_HINT, FORECAST_COLUMNS, rows)],
            "members": (members, summary["members"], ""),
        }
    elif family == "language":
        page |= {
            "about": f"The mean of the members' probabilities on the {summary['split']} split.",
            "tiles": [
                Tile(
                    "loss", "Loss of the mean", f"{summary['loss']:.4f}", "nats/token", f"{summary['tokens']:,} tokens"
                ),
                Tile("best", "Best member", f"{summary['best_member_loss']:.4f}", "nats/token", ""),
                Tile("perplexity", "Perplexity of the mean", format_number(summary["perplexity"])),
            ],
            "members": ((*members, Column("loss", lambda row: f"{row['loss']:.4f}")), summary["members"], ""),
        }
    else:
        page |= _fill_materials_page(summary)
    return render_page(
        "ensemble.html",
        "figures.css",
        "pairs.css",
        title=f"{len(summary['members'])} members, {family}",
        family=family,
        row_style=lambda row: "taken" if row.get("place") else "",
        **page,
    )


def _fill_materials_page(summary: Row) -> dict[str, Any]:
    """Return what `ensemble.html` shows of materials models: one row for each kind of number that they learn."""
    labels = [scale_label(label) for label in summary["labels"]]
    tiles = []
    for label in labels:
        if not label["learned"]:
            continue
        name, key = label["name"], label["name"].replace(" ", "-")
        note = f"{_format_signed(saved_share(label))} against the best member's MAE"
        tiles.append(Tile(f"mae-{key}", name, format_number(label["scores"]["mae"]), label["unit"], note))
        coverage, conformal = label["scores"]["coverage"]["0.9"], label["conformal"]["0.9"]["coverage"]
        note = "of truths in 90% intervals" + ("" if conformal is None else f"; conformal {format_percent(conformal)}")
        tiles.append(Tile(f"coverage-{key}", f"{name} inside", format_percent(coverage), "", note))
    return {
        "about": "Chosen and calibrated on the validation split, scored on the test split.",
        "tiles": tiles,
        "tables": [
            ("errors", "Errors on the test split", ERRORS_HINT, ERROR_COLUMNS, labels),
            ("uncertainty", "Uncertainties on the test split", UNCERTAINTIES_HINT, UNCERTAINTY_COLUMNS, labels),
        ],
        "curves": (
            "How far they hold",
            "Left: share of truths inside an interval (up) against the probability it states (across). Right: do "
            "numbers with a larger stated uncertainty err more?",
            [(label["name"], [draw_calibration(label), draw_reliability(label)]) for label in labels],
        ),
        "selection": draw_selection(summary),
        "members": (CANDIDATE_COLUMNS, list_candidates(summary), CANDIDATES_HINT),
    }


def saved_share(label: Row) -> float:
    """Return the share of the best member's mean absolute error that the ensemble saves."""
    best = label["best_member"]["mae"]
    return 0.0 if not best else 1.0 - float(label["scores"]["mae"]) / float(best)


def scale_label(label: Row) -> Row:
    """Return the scores of a label with their lengths in the thousandth of its unit where that is electronvolts."""
    scale, unit = (1.0, label["unit"]) if not label["unit"].startswith("eV") else (1e3, f"m{label['unit']}")

    def scaled(row: Row, *names: str) -> Row:
        return row | {name: scale * row[name] for name in names if row[name] is not None}

    def scaled_scores(row: Row) -> Row:
        bins = [scaled(one, "stated", "found") for one in row["bins"]]
        # a density of a length in thousandths is a thousandth as high
        return scaled(row, "mae", "rmse", "crps", "sharpness") | {"bins": bins, "nll": row["nll"] + math.log(scale)}

    return label | {
        "name": f"{label['source']} {label['quantity']}",
        "unit": unit,
        "scores": scaled_scores(label["scores"]),
        "raw": scaled_scores(label["raw"]),
        "best_member": scaled(label["best_member"], "mae", "rmse"),
        "by_score": None if label["by_score"] is None else scaled(label["by_score"], "mae", "rmse"),
        "conformal": {level: scaled(row, "width") for level, row in label["conformal"].items()},
    }


def list_candidates(summary: Row) -> list[Row]:
    """Return members first, in the order in which they were taken, then the rest by validation error."""
    # `taken` is in the order of choosing, which the candidates are not
    taken, by_score = summary["selection"]["members"], summary["selection"]["by_score"]
    places = {name: place for place, name in enumerate(taken, 1)}
    rows = [
        row | {"place": places.get(row["name"]), "by_score": row["name"] in by_score} for row in summary["candidates"]
    ]
    return sorted(rows, key=lambda row: (row["place"] or len(rows) + 1, row["validation_error"]))


def _format_signed(share: float) -> str:
    return f"{share:+.1%}".replace("-", "−")


def _format_known(share: float | None) -> str:
    return "–" if share is None else format_percent(share)


def _coverage_column(level: str) -> Column[Row]:
    # a function and no loop: each column must keep its own level
    return Column(f"{100 * float(level):.0f}%", lambda row: _format_known(row["scores"]["coverage"][level]))


ERRORS_HINT = (
    "The mean of the members beside the member that does best there, and beside as many members chosen by score alone. "
    "Energies count per atom, components of vectors one each."
)
ERROR_COLUMNS: tuple[Column[Row], ...] = (
    Column("", lambda row: row["name"], "left"),
    Column("MAE", lambda row: format_number(row["scores"]["mae"])),
    Column("best member", lambda row: format_number(row["best_member"]["mae"])),
    Column("saved", lambda row: _format_signed(saved_share(row))),
    Column("RMSE", lambda row: format_number(row["scores"]["rmse"])),
    Column("best member's", lambda row: format_number(row["best_member"]["rmse"])),
    Column(
        "MAE by score", lambda row: "the same" if row["by_score"] is None else format_number(row["by_score"]["mae"])
    ),
    Column("numbers", lambda row: f"{row['numbers']:,}"),
    Column("structures", lambda row: f"{row['structures']:,}"),
    Column("unit", lambda row: row["unit"]),
)
UNCERTAINTIES_HINT = (
    "Share of truths inside the central 50, 68, 90 and 95% intervals of the calibrated normal distributions; of 90% "
    "intervals by the spread of the members as it is, and of conformal ones. Widths are means of 90% intervals."
)
UNCERTAINTY_COLUMNS: tuple[Column[Row], ...] = (
    Column("", lambda row: row["name"], "left"),
    *(_coverage_column(level) for level in LEVELS),
    Column("90% as is", lambda row: _format_known(row["raw"]["coverage"]["0.9"])),
    Column("90% conformal", lambda row: _format_known(row["conformal"]["0.9"]["coverage"])),
    Column("width", lambda row: format_number(row["scores"]["sharpness"])),
    Column(
        "conformal width",
        lambda row: (
            "–" if row["conformal"]["0.9"]["width"] is None else format_number(row["conformal"]["0.9"]["width"])
        ),
    ),
    Column("CRPS", lambda row: format_number(row["scores"]["crps"])),
    Column("NLL", lambda row: format_number(row["scores"]["nll"])),
    Column("calibration error", lambda row: format_percent(row["scores"]["calibration_error"])),
    Column("rank corr.", lambda row: format_number(row["scores"]["rank_correlation"])),
    Column("calibrated by", lambda row: row["calibration"]["kind"]),
)
ALL_SCORES_HINT = (
    "CRPS of the members' empirical distribution, stretched and as they are; its fair form takes members for independent "
    "draws and is given for them as they are alone. Spread over error is 1 for a reliable ensemble. Stretch: what members' "
    'deviations from their mean are multiplied by; "as is" leaves them.'
)
FORECAST_COLUMNS: tuple[Column[Row], ...] = (
    Column("variable", lambda row: row["variable"], "left"),
    Column("hours", lambda row: row["lead_hours"]),
    Column("forecasts", lambda row: f"{row['scores']['forecasts']:,}"),
    Column("RMSE", lambda row: format_number(row["scores"]["rmse"])),
    Column("best member", lambda row: format_number(row["best_member_rmse"])),
    Column("CRPS", lambda row: format_number(row["scores"]["crps"])),
    Column("CRPS as is", lambda row: format_number(row["raw"]["crps"])),
    Column("fair CRPS as is", lambda row: format_number(row["raw"]["fair_crps"])),
    Column("spread", lambda row: format_number(row["scores"]["spread"])),
    Column("spread/error", lambda row: format_number(row["scores"]["spread_skill"])),
    Column("as is", lambda row: format_number(row["raw"]["spread_skill"])),
    Column("stretch", lambda row: format_number(row["stretch"])),
)
CANDIDATES_HINT = (
    "Validation error: root mean square, relative to the best candidate for each kind of number, over all that is "
    "learned."
)
CANDIDATE_COLUMNS: tuple[Column[Row], ...] = (
    Column("run", lambda row: row["name"], "left"),
    Column("taken", lambda row: row["place"] or ""),
    Column("validation error", lambda row: f"{row['validation_error']:.4f}"),
    Column("score", lambda row: "" if row["score"] is None else f"{row['score']:.5g}"),
    Column("by score alone", lambda row: "yes" if row["by_score"] else ""),
    Column("steps", lambda row: f"{row['step']:,}"),
)


# --- drawings ----------------------------------------------------------------------------------------------------------


def _tall_plot(across: Scale, up: Scale, tall: float = 430) -> Plot:
    """Return an empty plot for a page that shows two of them side by side, with labels that are large enough there."""
    return Plot(across, up, left=110, top=16, tall=tall, right=WIDTH - 50, below=32)


def _add_diagonal(plot: Plot) -> None:
    plot.parts.append(make_line(plot.left, plot.bottom, plot.right, plot.top, "ideal"))


def draw_calibration(label: Row) -> Drawing:
    """Draw the share of truths inside central intervals against the probability of the interval."""
    plot = _tall_plot(Scale(0.0, 1.0), Scale(0.0, 1.0))
    plot.label_up(lambda share: f"{100 * share:.0f}%")
    plot.label_across([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], lambda share: f"{100 * share:.0f}%")
    _add_diagonal(plot)
    curves = (
        (2, label["raw"]["curve"], "strong dashed"),
        (3, label["conformal_curve"], "strong"),
        (1, label["scores"]["curve"], "strong"),
    )
    for number, shares, style in curves:
        # Too few structures leave no conformal interval at high levels.
        known = [(level, share) for level, share in zip(CURVE, shares, strict=True) if share is not None]
        plot.add_curve([level for level, _ in known], [share for _, share in known], number, style)
    error, raw = label["scores"]["calibration_error"], label["raw"]["calibration_error"]
    off = [abs(share - at) for at, share in zip(CURVE, label["conformal_curve"], strict=True) if share is not None]
    conformal = f"conformal {format_percent(sum(off) / len(off))}, " if off else ""
    words = (
        f"Mean distance from the diagonal: normal {format_percent(error)}, {conformal}members as they are "
        f"{format_percent(raw)}."
    )
    legend = (("dot-1", "calibrated, normal"), ("dot-3", "conformal"), ("dot-2", "spread of the members as it is"))
    return plot.finish(words, legend)


def draw_reliability(label: Row) -> Drawing:
    """Draw the root mean square error against the uncertainty stated, by parts of the numbers in order of the latter."""
    bins = {number: label[name]["bins"] for number, name in ((2, "raw"), (1, "scores"))}
    ends = [one[end] for rows in bins.values() for one in rows for end in ("stated", "found")]
    shown = np.array([value for value in ends if value > 0.0])
    if not shown.size:
        return draw_nothing("No error and no uncertainty.")
    # what has no uncertainty at all would stretch a logarithmic scale without end
    both = fit_scale(np.maximum(shown, shown.max() / 1e4), logarithmic=True)
    plot = _tall_plot(both, both)
    plot.label_up()
    plot.label_across([tick.value for tick in choose_value_ticks(both)], format_tick)
    _add_diagonal(plot)
    for number, rows in bins.items():
        good = [one for one in rows if one["stated"] > both.low and one["found"] > both.low]
        style = "strong dashed" if number == 2 else "strong"
        plot.add_curve([one["stated"] for one in good], [one["found"] for one in good], number, style)
    found = label["scores"]["rank_correlation"]
    return plot.finish(
        f"Up: error found, across: uncertainty stated ({label['unit'] or 'in their unit'}); on the diagonal they agree. "
        f"Rank correlation of uncertainty and error {'not known' if found is None else format_number(found)}."
    )


def draw_selection(summary: Row) -> Drawing | None:
    """Draw the validation error of the mean of the first members, as they are chosen; None where nothing was chosen."""
    chosen = summary["selection"]
    ours, others = chosen["validation_error"], chosen["by_score_validation_error"]
    if len(ours) == len(summary["candidates"]) or len(ours) < 2:
        return None
    places = list(range(1, len(ours) + 1))
    plot = _tall_plot(Scale(1.0, float(len(ours))), fit_scale(np.array([*ours, *others])), tall=300)
    plot.label_up()
    plot.label_across(places, lambda place: f"{place:.0f}")
    plot.add_curve(places, others, 2, "strong dashed")
    plot.add_curve(places, ours, 1, "strong")
    words = f"With {len(ours)} members {ours[-1]:.4g}, by score alone {others[-1]:.4g}."
    return plot.finish(words, (("dot-1", "by score and diversity"), ("dot-2", "by score alone")))


def draw_by_lead(rows: Sequence[Row]) -> Drawing:
    """Draw the error of the mean, that of the best member, and the spread, against lead time, of one variable."""
    leads = [float(row["lead_hours"]) for row in rows]
    series = (
        ("the mean's error", [row["scores"]["rmse"] for row in rows], "strong"),
        ("the best member's error", [row["best_member_rmse"] for row in rows], "strong dashed"),
        ("spread, stretched", [row["scores"]["spread"] for row in rows], "strong"),
    )
    known = [value for _, values, _ in series for value in values if np.isfinite(value)]
    if not known:
        return draw_nothing("Nothing could be scored.")
    plot = _tall_plot(Scale(0.0, max(leads)), fit_scale(np.array(known), from_zero=True))
    plot.label_up()
    plot.label_across(leads, lambda lead: f"{lead:g} h")
    for number, (_, values, style) in enumerate(series, 1):
        good = [(lead, value) for lead, value in zip(leads, values, strict=True) if np.isfinite(value)]
        plot.add_curve([lead for lead, _ in good], [value for _, value in good], number, style)
    last = rows[-1]
    return plot.finish(
        f"At {leads[-1]:g} h the mean errs by {format_number(last['scores']['rmse'])}, the best member by "
        f"{format_number(last['best_member_rmse'])}; spread over error {format_number(last['scores']['spread_skill'])}, "
        f"members as they are {format_number(last['raw']['spread_skill'])}.",
        tuple((f"dot-{number}", name) for number, (name, _, _) in enumerate(series, 1)),
    )


def draw_ranks(row: Row) -> Drawing:
    """Draw the rank histogram of one variable at one lead time, stretched and as it is, beside a reliable ensemble's."""
    histograms = {"stretched": row["scores"]["ranks"], "as they are": row["raw"]["ranks"]}
    return draw_rank_histogram(row["lead_hours"], histograms)


def draw_rank_histogram(lead_hours: float, histograms: Mapping[str, Sequence[float]]) -> Drawing:
    """Draw up to two rank histograms of equally many members at one lead time, by name, beside a reliable ensemble's."""
    shown = np.array(list(histograms.values()))
    if not np.isfinite(shown).all():
        return draw_nothing("Nothing could be scored.")
    found = next(iter(histograms.values()))
    ranks, flat = list(range(len(found))), 1.0 / len(found)
    plot = _tall_plot(Scale(0.0, float(ranks[-1])), fit_scale(np.append(shown, flat), from_zero=True))
    plot.label_up(format_percent)
    plot.label_across(ranks, lambda rank: f"{rank:.0f}", apart=30)
    height = plot.place_up([flat])[0]
    plot.parts.append(make_line(plot.left, height, plot.right, height, "ideal"))
    for number, shares in reversed(list(enumerate(histograms.values(), 1))):
        plot.add_curve(ranks, shares, number, "strong" if number == 1 else "strong dashed")
    outside = format_percent(found[0] + found[-1])
    return plot.finish(
        f"At {lead_hours:g} h: share of truths above that many members. {outside} lie outside all members, of a "
        f"reliable ensemble {format_percent(2 * flat)}.",
        tuple((f"dot-{number}", name) for number, name in enumerate(histograms, 1)),
    )
