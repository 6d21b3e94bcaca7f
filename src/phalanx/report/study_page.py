"""Studies as HTML pages that load nothing: measured layouts (`phalanx search`) and tuned hyperparameters (`phalanx tune`).

Both pages have headline figures, a drawing and a table of the trials, and what matters; the markup of both is in
`templates/study.html`. How the figures were found is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.formatting import format_duration, format_gibibytes, format_number, format_percent
from phalanx.report.drawing import (
    WIDTH,
    Bar,
    Drawing,
    Plot,
    Scale,
    draw_bars,
    draw_nothing,
    finish_drawing,
    fit_scale,
    make_circle,
    make_polyline,
    make_rectangle,
    make_text,
)
from phalanx.report.page import Tile, render_page
from phalanx.report.table import Column

Row = dict[str, Any]
SHADES = 6
"""Classes shade-0 (best) to shade-5 in `figures.css`."""
MOST_PARAMETERS = 5
"""Parameters that are listed by what they matter."""
MOST_DEVICES = 64
"""Devices that are drawn of a study."""


@dataclass(frozen=True)
class Section:
    """A part of the page of a study."""

    key: str
    title: str
    hint: str = ""
    figures: tuple[tuple[Drawing, str], ...] = ()
    """Drawings with their captions."""
    columns: tuple[Column[Row], ...] = ()
    """Columns of a table below the drawings; none where there is no table."""
    rows: tuple[Row, ...] = ()


def _render_study(
    command: str,
    title: str,
    about: str,
    tiles: list[Tile],
    best: str,
    notes: list[str],
    sections: list[Section],
    live: str | None,
) -> str:
    """Return the page of a study. command: its subcommand; about: what stands below the title; live: see `render_page`."""
    return render_page(
        "study.html",
        "figures.css",
        live=live,
        command=command,
        title=title,
        about=about,
        tiles=tiles,
        best=best,
        notes=[f"{note[:1].upper()}{note[1:]}." for note in notes],
        sections=sections,
    )


def _draw_trials(trials: list[Row], key: str, plot: Plot, styles: list[str], titles: list[str]) -> None:
    """Add a dot for each trial in the order of their numbers, those without a value of `key` below the scale."""
    places = plot.place_across([float(row["number"]) for row in trials])
    for x, row, style, title in zip(places, trials, styles, titles, strict=True):
        y = plot.bottom + 14 if style == "failed" else plot.place_up([row[key]])[0]
        plot.parts.append(make_circle(x, y, 5, style, f"trial {row['number']}: {title}"))


def _plot_of_trials(trials: list[Row], values: list[float]) -> Plot:
    """Return an empty plot of values over the numbers of trials."""
    # By number and not by place: several searches share a study, and one may have looked elsewhere in between.
    numbers = [float(row["number"]) for row in trials]
    return Plot(Scale(min(numbers) - 0.5, max(numbers) + 0.5), fit_scale(np.array(values)), left=90, tall=240)


def _failed_tile(failures: dict[str, int]) -> Tile:
    causes = ", ".join(name.replace("_", " ") for name in failures)
    return Tile("failed", "Failed", f"{sum(failures.values()):,}", "", causes)


def list_importance(measured: Row) -> str:
    """Return in one line what matters most by trials, with the bounds around it."""
    rows = measured["importance"][:MOST_PARAMETERS]
    return ", ".join(f"{row['name']} {row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})" for row in rows)


def draw_importance(measured: Row) -> Drawing:
    """Draw importances found from trials as bars, with marks around what 90% of resampled studies have."""
    bars = [
        Bar(
            row["name"],
            row["mean"],
            f"first in {format_percent(row['ranks'][0])}",
            "fill-c2",
            0.0,
            (row["low"], row["high"]),
        )
        for row in measured["importance"]
    ]
    return draw_bars(
        bars,
        f"{measured['trials']} trials; lines hold 90% of studies resampled from them; beside: how many have it first. "
        f"Caution: {measured['caution']}.",
    )


# --- layouts that were searched ----------------------------------------------------------------------------------------


def render_search(summary: Row, live: str | None = None) -> str:
    """Return the page of a search of layouts. summary: what `phalanx search --json` prints. live: see `render_page`."""
    planned, measured, best = summary["planned"], summary["measured"], summary["best"]
    sections = [
        Section(
            "trials",
            "Trials",
            figures=((draw_search_progress(summary["trials"]), "Seconds of a step, in the order of the trials."),),
            columns=SEARCH_TRIALS,
            rows=tuple(summary["trials"]),
        ),
    ]
    if summary["next"]:
        words = "The fastest choices that are likely to fit, by the planner and all trials together."
        beliefs = tuple(summary["next"])
        sections.append(Section("believed", "What is believed now", words, columns=SEARCH_BELIEFS, rows=beliefs))
    if planned is not None:
        effects = (draw_effects(planned), "Share of the variance of the logarithm of a step's time.")
        pairs = ((draw_interaction(pair), "Two parameters together.") for pair in planned["interactions"])
        title = "What matters, over all layouts that are likely to fit"
        sections.append(Section("matters", title, figures=(effects, *pairs)))
    if measured is not None:
        caption = "Permutation importance in a random forest, for the logarithm of a step's time."
        figures = ((draw_importance(measured), caption),)
        sections.append(Section("measured", "What matters, by the trials alone", figures=figures))
    return _render_study(
        "search",
        name_search(summary),
        f"planned for {summary['cluster']} · {summary['storage']}",
        list_search_tiles(summary),
        "" if best is None else best["words"],
        list_search_notes(summary),
        sections,
        live,
    )


def list_search_tiles(summary: Row) -> list[Tile]:
    """Return the headline figures of a search."""
    best, points = summary["best"], summary["points"]
    # what stopped the search, and of how many points, a journal alone does not tell
    words = "" if points is None else f"of {points:,} points; {summary['stopped']}"
    tiles = [
        Tile("trials", "Trials", f"{len(summary['trials']):,}", "", words),
        _failed_tile(summary["failures"]),
    ]
    if best is not None:
        expected = "" if best["planned_s"] is None else f"planned: {format_duration(best['planned_s'])}"
        tiles.insert(0, Tile("best", "Best step", format_duration(best["step_s"]), "", expected))
    return tiles


def name_search(summary: Row) -> str:
    """Return what was searched and what the trials ran on, which may be something else than the cluster of the plan."""
    devices, on = summary["devices"], " and ".join(summary["measured_on"])
    if summary["where"] == "simulated":
        return f"{summary['model']} on {devices:,} devices of {summary['cluster']}, simulated"
    if not on:
        return f"{summary['model']} on {devices:,} devices"
    place = "this machine" if summary["where"] == "local" else summary["cluster"]
    return f"{summary['model']} on {devices:,} x {on} ({place})"


def list_search_notes(summary: Row) -> list[str]:
    """Return what must stand beside every figure: that trials ran on other devices than the planner's."""
    cluster, device = summary["cluster"], summary["cluster_device"]
    measured = " and ".join(name for name in summary["measured_on"] if name != device)
    if not measured:
        return []
    return [
        f"the trials ran on {measured}, not on the {device} of {cluster}: their times are those of {measured}, and the "
        f"planner's, which are for {cluster}, only order the layouts"
    ]


def _format_seconds(value: float | None) -> str:
    return "" if value is None else format_duration(value)


def _format_memory(row: Row, decimals: int) -> str:
    return "" if row["memory_bytes"] is None else format_gibibytes(row["memory_bytes"], decimals)


SEARCH_TRIALS: tuple[Column[Row], ...] = (
    Column("trial", lambda row: row["number"]),
    Column("step", lambda row: _format_seconds(row["step_s"]) or row["state"].replace("_", " ")),
    Column("planned", lambda row: _format_seconds(row["planned_s"]), gives_way=4),
    Column("expected", lambda row: _format_seconds(row["expected_s"]), gives_way=2),
    Column("device", lambda row: row["device"] or "", gives_way=3),
    Column("GiB", lambda row: _format_memory(row, 1), gives_way=1),
    Column("choice", lambda row: row["words"], "left"),
)
SEARCH_BELIEFS: tuple[Column[Row], ...] = (
    Column("believed", lambda row: format_duration(row["believed_s"])),
    Column("+-", lambda row: format_percent(row["spread"])),
    Column("P(fits)", lambda row: f"{row['p_fits']:.2f}"),
    Column("measured", lambda row: "yes" if row["measured"] else ""),
    Column("choice", lambda row: row["words"], "left"),
)


def draw_search_progress(trials: list[Row]) -> Drawing:
    """Draw the seconds of a step of each trial, those that failed below, and the best so far as a line."""
    good = [row for row in trials if row["step_s"] is not None]
    if not good:
        return draw_nothing("No trial was good.")
    plot = _plot_of_trials(trials, [row["step_s"] for row in good])
    plot.label_up(format_duration)
    styles = ["failed" if row["step_s"] is None else "dot-1" for row in trials]
    titles = [f"{row['words']}, {_format_seconds(row['step_s']) or row['state']}" for row in trials]
    _draw_trials(trials, "step_s", plot, styles, titles)
    corners: list[tuple[float, float]] = []
    best = float("inf")
    for row in good:
        if row["step_s"] < best:
            (x,), (y,) = plot.place_across([row["number"]]), plot.place_up([row["step_s"]])
            # the line goes down in steps: the old best holds until the new one is measured
            corners += [*([(x, corners[-1][1])] if corners else []), (x, y)]
            best = row["step_s"]
    corners.append((plot.right, corners[-1][1]))
    plot.parts.append(make_polyline(corners, "front"))
    legend = (("dot-1", "a trial"), ("failed", "a trial that failed"))
    return plot.finish(f"The best takes {format_duration(best)} a step.", legend)


def draw_effects(planned: Row) -> Drawing:
    """Draw Shapley effects as bars, and what each parameter explains alone as a mark."""
    bars = [
        Bar(name, max(share, 0.0), format_percent(max(share, 0.0)), "fill-c1", marks=(planned["alone"][name],))
        for name, share in planned["shapley_effects"].items()
    ]
    words = "Bars: Shapley effects, exact, over all points; marks: what a parameter explains on its own."
    return draw_bars(bars, words, behind=90)


def draw_interaction(pair: Row) -> Drawing:
    """Draw the mean time for each pair of values of two parameters, the darker the faster."""
    (down, across), (rows, columns) = pair["of"], pair["values"]
    cells = [cell for times in pair["mean_s"] for cell in times if cell is not None]
    # One scale for all pairs of the drawing: a darker cell is faster than any lighter one.
    low, high = min(cells), max(cells)
    left, top, tall = 170, 48, 30
    wide = min(90.0, (WIDTH - left - 10) / len(columns))
    parts = [make_text(left, 16, f"{across} (across) and {down} (down)")]
    parts += [make_text(left + (place + 0.5) * wide, top - 8, name, "middle") for place, name in enumerate(columns)]
    for number, (name, times) in enumerate(zip(rows, pair["mean_s"], strict=True)):
        y = top + number * tall
        parts.append(make_text(left - 10, y + 20, name, "end"))
        for place, cell in enumerate(times):
            # no layout that is likely to fit has this pair
            if cell is None:
                continue
            # By ratios, as times of layouts differ by factors.
            shade = min(SHADES - 1, int(SHADES * (np.log(cell / low) / max(float(np.log(high / low)), 1e-9))))
            parts += [
                make_rectangle(left + place * wide, y, wide - 2, tall - 2, f"shade-{shade}"),
                make_text(left + (place + 0.5) * wide, y + 20, f"{cell:.3g}", "middle"),
            ]
    words = f"Mean seconds of a step; beyond what each explains alone the two explain {100 * pair['share']:.1f}%."
    return finish_drawing(parts, top + tall * len(rows) + 6, words)


# --- hyperparameters that were tuned -----------------------------------------------------------------------------------


def render_tune(summary: Row, live: str | None = None) -> str:
    """Return the page of a study of hyperparameters. summary: what `phalanx tune --json` prints. live: see `render_page`."""
    devices, best, importance = summary["devices"], summary["best"], summary["importance"]
    scores = draw_scores(summary["trials"], summary["metric"])
    sections = [
        Section(
            "trials",
            "Trials",
            figures=((scores, "The score of each trial where it stands, the less the better."),),
            columns=TUNE_TRIALS,
            rows=tuple(rank_tuned(summary)),
        ),
        Section(
            "rungs", "Early stopping", figures=((draw_rungs(summary["stopped"]), "Trials that reached each rung."),)
        ),
        Section(
            "devices",
            "Devices",
            "A device is busy while at least one trial on it is in its training loop; starting processes and waiting "
            "count as idle.",
            figures=((draw_device_use(devices), "Devices over the time of the study."),),
            columns=TUNE_DEVICES,
            rows=tuple(devices["each"]),
        ),
    ]
    if importance is not None:
        caption = f"Permutation importance in a random forest, for the {importance['of']}."
        sections.append(Section("matters", "What matters", figures=((draw_importance(importance), caption),)))
    return _render_study(
        "tune",
        f"{summary['model']}: least {summary['metric']}",
        summary["study"],
        list_tune_tiles(summary),
        "" if best is None else format_choice(best["values"]),
        [summary["unfinished"]] if best is not None and summary["unfinished"] else [],
        sections,
        live,
    )


def list_tune_tiles(summary: Row) -> list[Tile]:
    """Return the headline figures of a study of hyperparameters."""
    devices, best, default = summary["devices"], summary["best"], summary["default"]
    without = summary["without_packing"]
    rungs = f"rungs at steps {', '.join(map(str, summary['rungs']))}"
    idle = f"{len(devices['each'])} devices"
    if without is not None and any(devices["packing"]):
        idle += f"; without packing {format_percent(without['idle'])}, simulated"
    tiles = [
        Tile("trials", "Trials", f"{len(summary['trials']):,}", "", rungs),
        _failed_tile(summary["failures"]),
        Tile("idle", "Devices idle", format_percent(devices["idle"]), "", idle),
    ]
    if best is not None:
        beside = "" if default is None else f"the run file as it stands: {format_number(default['score'])}"
        tiles.insert(0, Tile("best", f"Best {summary['metric']}", format_number(best["score"]), "", beside))
    return tiles


def rank_tuned(summary: Row) -> list[Row]:
    """Return the trials that have a score, the best first, then the others as they began."""
    by_number = {row["number"]: row for row in summary["trials"]}
    # Trials without a score cannot be ranked.
    rest = [row for row in summary["trials"] if row["number"] not in summary["order"]]
    return [*(by_number[number] for number in summary["order"]), *rest]


def format_choice(values: Row) -> str:
    """Write the values of a trial in one line."""
    words = [f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()]
    return " ".join(words) or "the run file as it stands"


TUNE_TRIALS: tuple[Column[Row], ...] = (
    Column("trial", lambda row: row["number"]),
    Column("score", lambda row: "" if row["score"] is None else format_number(row["score"])),
    Column("steps", lambda row: row["steps"]),
    Column("state", lambda row: row["state"].replace("_", " ")),
    Column("time", lambda row: format_duration(row["seconds"]), gives_way=2),
    Column("GiB", lambda row: _format_memory(row, 2), gives_way=1),
    Column("choice", lambda row: format_choice(row["values"]), "left"),
)
TUNE_DEVICES: tuple[Column[Row], ...] = (
    Column("device", lambda row: row["device"]),
    Column("held", lambda row: format_duration(row["held_s"])),
    Column("busy", lambda row: format_duration(row["busy_s"])),
    Column("shared", lambda row: format_duration(row["shared_s"])),
    Column("idle", lambda row: format_percent(row["idle"])),
    Column("parts of trials", lambda row: row["parts"], "left"),
)


def draw_scores(trials: list[Row], metric: str) -> Drawing:
    """Draw the score of each trial at the rung it reached, those that were trained to the end filled, failed ones below."""
    failed = [row["failed"] is not None or row["score"] is None for row in trials]
    good = [row for row, bad in zip(trials, failed, strict=True) if not bad]
    if not good:
        return draw_nothing("No trial has a score.")
    plot = _plot_of_trials(trials, [row["score"] for row in good])
    plot.label_up(format_number)
    # Scores at different rungs cannot be compared, so they look different.
    furthest = max(row["steps"] for row in good)
    styles = [
        "failed" if bad else "dot-1" if row["steps"] == furthest else "off-front"
        for row, bad in zip(trials, failed, strict=True)
    ]
    titles = [
        row["state"] if bad else f"{format_number(row['score'])} after {row['steps']} steps"
        for row, bad in zip(trials, failed, strict=True)
    ]
    _draw_trials(trials, "score", plot, styles, titles)
    legend = (("dot-1", "trained to the end"), ("off-front", "stopped at a rung"), ("failed", "failed or interrupted"))
    return plot.finish(f"The least {metric} is {format_number(min(row['score'] for row in good))}.", legend)


def draw_device_use(devices: Row) -> Drawing:
    """Draw when each device was held and when it computed; the more trials at once, the darker."""
    windows, each = devices["windows"], devices["each"][:MOST_DEVICES]
    if not windows:
        return draw_nothing("Nothing has run.")
    end = max(window[1] for window in windows)
    row, left, right = 26, 170, WIDTH - 20
    across = (right - left) / max(end, 1e-9)
    parts = []
    for place, device in enumerate(each):
        name, y = device["device"], 6 + row * place
        held = [(begin, until, "off-front", f"{name} held") for begin, until, names in windows if name in names]
        busy = [
            (begin, until, "shade-3", f"trial {label}, {format_duration(until - begin)}")
            for owner, begin, until, label in devices["spans"]
            if owner == name
        ]
        parts.append(make_text(left - 10, y + 16, name, "end"))
        for begin, until, style, title in [*held, *busy]:
            wide = max((until - begin) * across, 0.5)
            parts.append(make_rectangle(left + begin * across, y, wide, row - 6, style, title))
    below = 6 + row * len(each)
    parts += [make_text(left, below + 16, "0 s"), make_text(right, below + 16, format_duration(end), "end")]
    words = f"Empty: held and idle, {format_percent(devices['idle'])} of the time. Darker: several trials at once."
    return finish_drawing(parts, below + 26, words)


def draw_rungs(stopped: list[Row]) -> Drawing:
    """Draw how many trials reached each rung."""
    bars = [
        Bar(f"step {row['steps']}", row["reached"], f"{row['reached']} reached, {row['stopped']} stay", "fill-c1")
        for row in stopped
    ]
    return draw_bars(bars, "Early stopping lets the best of each rung go on.", left=170, behind=160)
