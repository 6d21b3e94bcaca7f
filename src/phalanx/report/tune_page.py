"""A tuned study as one HTML page that loads nothing: the best, all trials, early stopping, devices over time, what matters.

Words and markup are in `tune.html`, looks in `page.css`, `plan.css` and `search.css`, drawings in `tune_charts`.
"""

from __future__ import annotations

from typing import Any

from phalanx.report import search_charts, tune_charts
from phalanx.report.page_parts import Tile
from phalanx.report.template import render
from phalanx.report.text import duration, number, percent

_GIB = 2**30
Row = dict[str, Any]

TRIALS: tuple[tuple[str, Any], ...] = (
    ("trial", lambda row: row["number"]),
    ("score", lambda row: number(row["score"]) if row["score"] is not None else ""),
    ("steps", lambda row: row["steps"]),
    ("state", lambda row: row["state"].replace("_", " ")),
    ("time", lambda row: duration(row["seconds"])),
    ("GiB", lambda row: "" if row["memory_bytes"] is None else f"{row['memory_bytes'] / _GIB:.2f}"),
    ("choice", lambda row: values_in_words(row["values"])),
)
"""Heads of the table of trials, and what stands below them."""

DEVICES: tuple[tuple[str, Any], ...] = (
    ("device", lambda row: row["device"]),
    ("held", lambda row: duration(row["held_s"])),
    ("busy", lambda row: duration(row["busy_s"])),
    ("shared", lambda row: duration(row["shared_s"])),
    ("idle", lambda row: percent(row["idle"])),
    ("parts of trials", lambda row: row["parts"]),
)
"""The same of the table of devices."""


def render_tune(facts: Row) -> str:
    """The page as text. facts: what `phalanx tune --json` prints."""
    by_number = {row["number"]: row for row in facts["trials"]}
    rest = [row for row in facts["trials"] if row["number"] not in facts["order"]]
    importance = facts["importance"]
    return render(
        "tune.html",
        ("page.css", "plan.css", "search.css"),
        title=f"{facts['model']}: least {facts['metric']}",
        facts=facts,
        tiles=_tiles(facts),
        best="" if facts["best"] is None else values_in_words(facts["best"]["values"]),
        trials=TRIALS,
        rows=[*(by_number[one] for one in facts["order"]), *rest],
        devices=DEVICES,
        scores=tune_charts.scores(facts["trials"], facts["metric"]),
        rungs=tune_charts.rungs(facts["stopped"]),
        timeline=tune_charts.timeline(facts["devices"]),
        importance=None if importance is None else search_charts.importance(importance),
    )


def values_in_words(values: Row) -> str:
    """A choice in one line."""
    words = [f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()]
    return " ".join(words) or "the run file as it stands"


def _tiles(facts: Row) -> list[Tile]:
    devices, failures = facts["devices"], facts["failures"]
    tiles = [
        Tile(
            "trials", "Trials", f"{len(facts['trials']):,}", "", f"rungs at steps {', '.join(map(str, facts['rungs']))}"
        ),
        Tile(
            "failed", "Failed", f"{sum(failures.values()):,}", "", ", ".join(one.replace("_", " ") for one in failures)
        ),
        Tile("idle", "Devices idle", percent(devices["idle"]), "", _beside(facts)),
    ]
    best, default = facts["best"], facts["default"]
    if best is not None:
        beside = "" if default is None else f"the run file as it stands: {number(default['score'])}"
        tiles.insert(0, Tile("best", f"Best {facts['metric']}", number(best["score"]), "", beside))
    return tiles


def _beside(facts: Row) -> str:
    without, devices = facts["without_packing"], facts["devices"]
    words = f"{len(devices['each'])} devices"
    if without is None or not any(devices["packing"]):
        return words
    return f"{words}; without packing {percent(without['idle'])}, simulated"
