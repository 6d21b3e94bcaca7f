"""An ensemble as one HTML page that loads nothing: its errors beside the members', and how far its uncertainties hold.

Words and markup are in `ensemble.html`, looks in `page.css`, `plan.css` and `ensemble.css`, drawings in `ensemble_charts`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from phalanx.report import ensemble_charts
from phalanx.report.page_parts import Tile
from phalanx.report.template import render
from phalanx.report.text import number, percent

Row = dict[str, Any]
_LEVELS = ("0.5", "0.68", "0.9", "0.95")


def render_ensemble(facts: Row) -> str:
    """The page as text. facts: what `phalanx ensemble --json` prints of the ensemble."""
    if facts["family"] == "weather":
        return _forecasts(facts)
    if facts["family"] == "language":
        return _losses(facts)
    labels = [_in_unit(label) for label in facts["labels"]]
    return render(
        "ensemble.html",
        ("page.css", "plan.css", "ensemble.css"),
        title=f"{len(facts['members'])} members, {facts['family']}",
        facts=facts,
        tiles=list(_tiles(labels)),
        selection=ensemble_charts.selection(facts),
        candidates=_candidates(facts),
        panels=[(label, ensemble_charts.curve(label), ensemble_charts.reliability(label)) for label in labels],
        errors=ERRORS,
        uncertainties=UNCERTAINTIES,
        labels=labels,
    )


def _forecasts(facts: Row) -> str:
    rows = facts["forecasts"]
    variables = list(dict.fromkeys(row["variable"] for row in rows))
    return render(
        "ensemble_weather.html",
        ("page.css", "plan.css", "ensemble.css"),
        title=f"{len(facts['members'])} members, weather",
        facts=facts,
        panels=[
            (name, ensemble_charts.by_lead([row for row in rows if row["variable"] == name])) for name in variables
        ],
        columns=FORECASTS,
        rows=rows,
    )


def _losses(facts: Row) -> str:
    return render(
        "ensemble_language.html",
        ("page.css", "plan.css", "ensemble.css"),
        title=f"{len(facts['members'])} members, language",
        facts=facts,
        tiles=[
            Tile("loss", "Loss of the mean", f"{facts['loss']:.4f}", "nats/token", f"{facts['tokens']:,} tokens"),
            Tile("best", "Best member", f"{facts['best_member_loss']:.4f}", "nats/token", ""),
            Tile("perplexity", "Perplexity of the mean", number(facts["perplexity"])),
        ],
    )


def saved(label: Row) -> float:
    """Share of the best member's mean absolute error that the ensemble saves."""
    best = label["best_member"]["mae"]
    return 0.0 if not best else 1.0 - float(label["scores"]["mae"]) / float(best)


def _signed(share: float) -> str:
    return f"{share:+.1%}".replace("-", "−")


def _share(value: float | None) -> str:
    return "–" if value is None else percent(value)


ERRORS: tuple[tuple[str, Any], ...] = (
    ("", lambda row: row["name"]),
    ("MAE", lambda row: number(row["scores"]["mae"])),
    ("best member", lambda row: number(row["best_member"]["mae"])),
    ("saved", lambda row: _signed(saved(row))),
    ("RMSE", lambda row: number(row["scores"]["rmse"])),
    ("best member's", lambda row: number(row["best_member"]["rmse"])),
    ("MAE by score", lambda row: "the same" if row["by_score"] is None else number(row["by_score"]["mae"])),
    ("numbers", lambda row: f"{row['numbers']:,}"),
    ("structures", lambda row: f"{row['structures']:,}"),
    ("unit", lambda row: row["unit"]),
)
"""Heads of the table of errors, and what stands below them."""

UNCERTAINTIES: tuple[tuple[str, Any], ...] = (
    ("", lambda row: row["name"]),
    *(
        (f"{100 * float(level):.0f}%", lambda row, level=level: _share(row["scores"]["coverage"][level]))
        for level in _LEVELS
    ),
    (
        "90% as is",
        lambda row: _share(row["raw"]["coverage"]["0.9"]),
    ),
    ("90% conformal", lambda row: _share(row["conformal"]["0.9"]["coverage"])),
    ("width", lambda row: number(row["scores"]["sharpness"])),
    (
        "conformal width",
        lambda row: "–" if row["conformal"]["0.9"]["width"] is None else number(row["conformal"]["0.9"]["width"]),
    ),
    ("CRPS", lambda row: number(row["scores"]["crps"])),
    ("NLL", lambda row: number(row["scores"]["nll"])),
    ("calibration error", lambda row: percent(row["scores"]["calibration_error"])),
    ("rank corr.", lambda row: number(row["scores"]["rank_correlation"])),
    ("calibrated by", lambda row: row["calibration"]["kind"]),
)
"""The same of the table of uncertainties."""

FORECASTS: tuple[tuple[str, Any], ...] = (
    ("variable", lambda row: row["variable"]),
    ("hours", lambda row: row["lead_hours"]),
    ("forecasts", lambda row: f"{row['scores']['forecasts']:,}"),
    ("RMSE", lambda row: number(row["scores"]["rmse"])),
    ("best member", lambda row: number(row["best_member_rmse"])),
    ("CRPS", lambda row: number(row["scores"]["crps"])),
    ("CRPS as is", lambda row: number(row["raw"]["crps"])),
    ("fair CRPS as is", lambda row: number(row["raw"]["fair_crps"])),
    ("spread", lambda row: number(row["scores"]["spread"])),
    ("spread/error", lambda row: number(row["scores"]["spread_skill"])),
    ("as is", lambda row: number(row["raw"]["spread_skill"])),
    ("stretch", lambda row: number(row["stretch"])),
)
"""The same of the table of forecasts."""


def _in_unit(label: Row) -> Row:
    """The same label with its lengths in the thousandth of its unit where that is electronvolts."""
    scale, unit = (1.0, label["unit"]) if not label["unit"].startswith("eV") else (1e3, f"m{label['unit']}")

    def scaled(row: Row | None, *names: str) -> Row | None:
        return None if row is None else row | {name: scale * row[name] for name in names if row[name] is not None}

    def scores(row: Row) -> Row:
        bins = [scaled(one, "stated", "found") for one in row["bins"]]
        found = scaled(row, "mae", "rmse", "crps", "sharpness")
        assert found is not None
        return found | {"bins": bins, "nll": row["nll"] + math.log(scale)}

    return label | {
        "name": f"{label['source']} {label['quantity']}",
        "unit": unit,
        "scores": scores(label["scores"]),
        "raw": scores(label["raw"]),
        "best_member": scaled(label["best_member"], "mae", "rmse"),
        "by_score": scaled(label["by_score"], "mae", "rmse"),
        "conformal": {level: scaled(row, "width") for level, row in label["conformal"].items()},
    }


def _tiles(labels: list[Row]) -> Iterator[Tile]:
    for label in labels:
        if not label["learned"]:
            continue
        note = f"{_signed(saved(label))} against the best member's MAE"
        yield Tile(f"mae-{label['name']}", label["name"], number(label["scores"]["mae"]), label["unit"], note)
        coverage, conformal = label["scores"]["coverage"]["0.9"], label["conformal"]["0.9"]["coverage"]
        note = "of truths in 90% intervals" + ("" if conformal is None else f"; conformal {percent(conformal)}")
        yield Tile(f"coverage-{label['name']}", f"{label['name']} inside", percent(coverage), "", note)


def _candidates(facts: Row) -> list[Row]:
    """Members first, in the order in which they were taken, then the rest by validation error."""
    taken, by_score = facts["selection"]["members"], facts["selection"]["by_score"]
    rows = [
        row
        | {"place": taken.index(row["name"]) + 1 if row["name"] in taken else None, "by_score": row["name"] in by_score}
        for row in facts["candidates"]
    ]
    return sorted(rows, key=lambda row: (row["place"] or len(rows) + 1, row["validation_error"]))
