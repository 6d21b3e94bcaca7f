"""A search as one HTML page that loads nothing: trials, what is believed now, and what matters most.

Words and markup are in `search.html`, looks in `page.css`, `plan.css` and `search.css`, drawings in `search_charts`.
"""

from __future__ import annotations

from typing import Any

from phalanx.report import search_charts
from phalanx.report.page_parts import Tile
from phalanx.report.template import render
from phalanx.report.text import duration, percent

_GIB = 2**30
Row = dict[str, Any]


def render_search(facts: Row) -> str:
    """The page as text. facts: what `phalanx search --json` prints."""
    planned, measured = facts["planned"], facts["measured"]
    return render(
        "search.html",
        ("page.css", "plan.css", "search.css"),
        title=search_title(facts),
        notes=search_notes(facts),
        facts=facts,
        tiles=_tiles(facts),
        trials=TRIALS,
        beliefs=BELIEFS,
        progress=search_charts.progress(facts["trials"]),
        effects=None if planned is None else search_charts.effects(planned),
        importance=None if measured is None else search_charts.importance(measured),
        interactions=[] if planned is None else [search_charts.interaction(pair) for pair in planned["interactions"]],
    )


def search_title(facts: Row) -> str:
    """What was searched and what the trials ran on: not the cluster of the plan where they ran on something else."""
    devices, on = facts["devices"], " and ".join(facts["measured_on"])
    if facts["where"] == "simulated":
        return f"{facts['model']} on {devices:,} devices of {facts['cluster']}, simulated"
    if not on:
        return f"{facts['model']} on {devices:,} devices"
    place = "this machine" if facts["where"] == "local" else facts["cluster"]
    return f"{facts['model']} on {devices:,} x {on} ({place})"


def search_notes(facts: Row) -> list[str]:
    """Cautions that belong beside every figure: that trials ran on other devices than the planner's."""
    other = [name for name in facts["measured_on"] if name != facts["cluster_device"]]
    return [other_devices(" and ".join(other), facts["cluster"], facts["cluster_device"])] if other else []


def other_devices(measured: str, cluster: str, device: str) -> str:
    """Say that what was measured on one device is no measurement of a cluster of others."""
    return (
        f"the trials ran on {measured}, not on the {device} of {cluster}: their times are those of {measured}, and the "
        f"planner's, which are for {cluster}, only order the layouts"
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else duration(value)


TRIALS: tuple[tuple[str, Any], ...] = (
    ("trial", lambda row: row["number"]),
    ("step", lambda row: _seconds(row["step_s"]) or row["state"].replace("_", " ")),
    ("planned", lambda row: _seconds(row["planned_s"])),
    ("expected", lambda row: _seconds(row["expected_s"])),
    ("device", lambda row: row["device"] or ""),
    ("GiB", lambda row: "" if row["memory_bytes"] is None else f"{row['memory_bytes'] / _GIB:.1f}"),
    ("choice", lambda row: row["words"]),
)
"""Heads of the table of trials, and what stands below them."""

BELIEFS: tuple[tuple[str, Any], ...] = (
    ("believed", lambda row: duration(row["believed_s"])),
    ("+-", lambda row: percent(row["spread"])),
    ("P(fits)", lambda row: f"{row['p_fits']:.2f}"),
    ("measured", lambda row: "yes" if row["measured"] else ""),
    ("choice", lambda row: row["words"]),
)
"""The same of the table of what is believed."""


def _tiles(facts: Row) -> list[Tile]:
    best, trials = facts["best"], facts["trials"]
    failed = sum(facts["failures"].values())
    tiles = [
        Tile("trials", "Trials", f"{len(trials):,}", "", f"of {facts['points']:,} points; {facts['stopped']}"),
        Tile("failed", "Failed", f"{failed:,}", "", ", ".join(name.replace("_", " ") for name in facts["failures"])),
    ]
    if best is not None:
        planned = "" if best["planned_s"] is None else f"planned: {duration(best['planned_s'])}"
        tiles.insert(0, Tile("best", "Best step", duration(best["step_s"]), "", planned))
    return tiles
