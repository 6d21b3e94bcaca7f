"""A plan as one HTML page that loads nothing: what a step's time and memory go to, the pipeline, the trade-offs, scaling.

The markup is in `templates/plan.html`. The columns of a table of layouts and the words of a budget are the terminal's, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup

from phalanx.planner.plan.make_plan import Plan
from phalanx.planner.plan.plan_summary import Row, describe_break_evens, describe_large_batch, summarise_plan
from phalanx.planner.rank.cost_models import COMPUTING_SHARE, WAITING_SHARE
from phalanx.planner.rank.cost_models import Bar as StageBar
from phalanx.planner.rank.enumeration import write_section
from phalanx.report.drawing import (
    WIDTH,
    Bar,
    Drawing,
    Plot,
    Scale,
    choose_value_ticks,
    draw_bars,
    draw_nothing,
    finish_drawing,
    fit_scale,
    make_line,
    make_rectangle,
    make_text,
)
from phalanx.report.formatting import (
    format_count,
    format_difference,
    format_duration,
    format_gibibytes,
    format_interval,
    format_number,
    format_percent,
)
from phalanx.report.page import Tile, render_page
from phalanx.report.table import Column

GIB = 2**30
COLOURS = 12
"""Classes fill-c1 to fill-c12 in `figures.css`."""
_SMALL = 0.004
"""Share of the whole below which a cause is not drawn apart."""
_MATTERS = 0.02
"""Share of the time that a choice costs more below which a cause of it is not named."""


def render_plan(plan: Plan, command: str) -> str:
    """Return the page as text. command: what runs the best layout."""
    summary = summarise_plan(plan)
    best = plan.best.take([0])
    models, run = plan.planner.models, plan.task.run
    bars = models.timeline(plan.task.model, best.layouts)
    fixed = " ".join(f"{name}={value}" for name, value in summary["fixed"].items())
    subtitle = [
        plan.planner.machine.about,
        f"global batch {summary['global_batch']}",
        f"{summary['legal']:,} legal layouts, {summary['fitting']:,} likely to fit",
        *([f"fixed: {fixed}"] if fixed else []),
    ]
    return render_page(
        "plan.html",
        "figures.css",
        title=f"{run.model.preset or 'Model'} on {plan.task.devices:,} x {plan.device.name}",
        summary=summary,
        subtitle=subtitle,
        tiles=_headline_tiles(summary),
        columns=layout_columns([*summary["layouts"], *summary["pareto"]], LAYOUT_COLUMNS),
        command=command,
        layout=write_section(run, best.layouts.row(0)),
        waterfall=draw_time_breakdown(summary["layouts"][0]["time_by_cause_s"]),
        memory=draw_memory(models.stage_memory(plan.task.model, best.layouts), summary["device_memory_bytes"]),
        timeline=draw_pipeline(bars) if bars else None,
        pareto=draw_pareto(summary["pareto"], summary["layouts"]),
        scaling=None if summary["scaling"] is None else draw_scaling(summary["scaling"]),
        why=[(row["asked"], _answer_why(row)) for row in summary["why"]],
        hybrid=describe_break_evens(summary) if summary["hybrid_break_even"] else "",
        budget=_describe_budget(summary["budget"]),
        large_batch="" if summary["large_batch"] is None else describe_large_batch(summary),
    )


def _unless_alone(row: Row, text: object) -> str:
    """Return - where parameters lie whole on every rank, so that nothing is sharded and gathered."""
    return "-" if row["dp_shard"] * row["cp"] == 1 else str(text)


def _schedule_cell(row: Row) -> str:
    if row["pp"] == 1:
        return "-"
    return str(row["schedule"]) + (f" x{row['stages_per_rank']}" if row["stages_per_rank"] > 1 else "")


PARALLELISM_COLUMNS: tuple[Column[Row], ...] = (
    Column("tp", lambda row: row["tp"]),
    Column("pp", lambda row: row["pp"]),
    Column("cp", lambda row: row["cp"], gives_way=4),
    Column("ep", lambda row: row["ep"], gives_way=4),
    Column("dp_shard", lambda row: row["dp_shard"], gives_way=1),
    Column("dp_rep", lambda row: row["dp_replicate"], gives_way=2),
    Column("mbs", lambda row: row["microbatch"], gives_way=1),
    # r where parameters are resharded after the forward pass
    Column(
        "zero",
        lambda row: _unless_alone(row, f"{row['zero']}{'r' if row['reshard_after_forward'] else ''}"),
        gives_way=3,
    ),
    Column("gather", lambda row: _unless_alone(row, row["gather"]), gives_way=3),
    Column("schedule", _schedule_cell, gives_way=2),
    Column("recompute", lambda row: row["recompute"], gives_way=2),
    Column("GiB", lambda row: format_gibibytes(row["memory_bytes"])),
)
"""Columns for how a layout splits the work, and the memory that takes: on a terminal and on the page."""

FITS: Column[Row] = Column("P(fits)", lambda row: f"{row['p_fits']:.2f}", gives_way=3)
STEP: Column[Row] = Column(
    "step, 90% interval",
    lambda row: format_interval(row["step_s"], *row["step_s_interval"]),
    gives_way=4,
    narrow=Column("step", lambda row: format_duration(row["step_s"])),
)
RATE: Column[Row] = Column("TFLOP/s", lambda row: f"{row['tflops_per_device']:.1f}", gives_way=1)
LAYOUT_COLUMNS: tuple[Column[Row], ...] = (
    *PARALLELISM_COLUMNS,
    FITS,
    STEP,
    RATE,
    Column("MFU", lambda row: "" if row["mfu"] is None else format_percent(row["mfu"])),
    Column("bubble", lambda row: format_percent(row["bubble_share"])),
    Column("exposed", lambda row: format_percent(row["exposed_share"])),
)
"""Columns of the page's tables of layouts."""


def layout_columns(rows: Sequence[Row], columns: Sequence[Column[Row]]) -> list[Column[Row]]:
    """Return the columns without that of the gathering where all rows gather a layer at a time."""
    differ = any(row["gather"] != "layer" for row in rows)
    return [column for column in columns if column.head != "gather" or differ]


def _headline_tiles(summary: Row) -> list[Tile]:
    row, budget = summary["layouts"][0], summary["budget"]
    step, _, interval = format_interval(row["step_s"], *row["step_s_interval"]).partition(" (")
    mfu = "" if row["mfu"] is None else f"{format_percent(row['mfu'])} of nominal peak"
    room = f"of {format_gibibytes(summary['device_memory_bytes'], 0)}"
    amount = f"{format_count(budget['amount'])} {budget['unit']}"
    goodput = format_percent(budget["goodput"]["share"])
    tiles = [
        Tile("step", "Step", step, "", f"90%: {interval.rstrip(')')} {step.rpartition(' ')[2]}"),
        Tile("tflops", "Model TFLOP/s a device", f"{row['tflops_per_device']:.1f}", "", mfu),
        Tile("memory", "Memory, worst rank", format_gibibytes(row["memory_bytes"]), "GiB", room),
        Tile("fits", "P(fits)", f"{row['p_fits']:.2f}"),
        Tile("bubble", "Pipeline bubble", format_percent(row["bubble_share"]), "", "of a step"),
        Tile("exposed", "Exposed communication", format_percent(row["exposed_share"]), "", "of a step"),
        Tile("elapsed", "Training", format_duration(budget["elapsed_s"]), "", amount),
        Tile("hours", "Device-hours", format_count(budget["device_hours"])),
        Tile("goodput", "Goodput", goodput, "", "left by failures and checkpoints"),
    ]
    if budget["energy_mwh"] is not None:
        tiles.append(Tile("energy", "Energy", format_number(budget["energy_mwh"]), "MWh", "of the devices"))
    return tiles


def name_slower_causes(row: Row) -> list[str]:
    """Return by which causes another choice is slower than the best layout, those that matter, with their signs."""
    return [
        f"{name} {format_difference(value)}"
        for name, value in row["by_cause_s"].items()
        if abs(value) > _MATTERS * row["slower_by_s"]
    ]


def _answer_why(row: Row) -> str:
    """Return why the best layout does not have what was asked for."""
    if not row["legal"]:
        return "not legal: " + "; ".join(row["reason"].splitlines())
    if not row["fits"]:
        most = list(row["memory_by_cause_bytes"].items())[:4]
        causes = ", ".join(f"{name} {format_gibibytes(size)} GiB" for name, size in most)
        return f"does not fit: at least {format_gibibytes(row['least_memory_bytes'])} GiB ({causes})"
    if row["slower_by_s"] <= 0:
        return "the best layout has it"
    return f"{format_duration(row['slower_by_s'])} a step more: {', '.join(name_slower_causes(row))}"


def _describe_budget(budget: Row) -> str:
    losses = budget["goodput"]
    words = (
        f"{budget['steps']:,} steps take {format_duration(budget['seconds'])}; with failures and checkpoints "
        f"{format_duration(budget['elapsed_s'])}. The job fails every {format_duration(losses['failure_s'])} on average; a "
        f"checkpoint every {format_duration(losses['interval_s'])} loses least (Young, Daly), each takes "
        f"{format_duration(losses['checkpoint_s'])}."
    )
    if budget["energy_mwh"] is None:
        return words
    return words + (
        f" Energy assumes that a device draws {COMPUTING_SHARE:g} of its board power while it works and "
        f"{WAITING_SHARE:g} while it waits."
    )


# --- drawings ----------------------------------------------------------------------------------------------------------


def draw_time_breakdown(causes: Mapping[str, float]) -> Drawing:
    """Draw the seconds of a step by cause, each bar beginning where the one above ends."""
    total = sum(causes.values())
    ordered = sorted(causes.items(), key=lambda item: -item[1])
    shown = [(name, value) for name, value in ordered if value > _SMALL * total]
    rest = total - sum(value for _, value in shown)
    # a rest of rounding errors alone is none
    if rest > 1e-9 * total:
        shown.append(("all else", rest))
    bars, start = [], 0.0
    for place, (name, value) in enumerate(shown):
        note = f"{format_duration(value)}, {format_percent(value / total)}"
        bars.append(Bar(name, value, note, f"fill-c{place % COLOURS + 1}", start))
        start += value
    return draw_bars(bars, "; ".join(f"{name} {format_duration(value)}" for name, value in shown))


def draw_memory(stages: Sequence[Mapping[str, float]], device_bytes: float) -> Drawing:
    """Draw the bytes by cause on each pipeline rank, a column a rank, below the line of the device's memory."""
    totals: dict[str, float] = {}
    for causes in stages:
        for name, size in causes.items():
            totals[name] = totals.get(name, 0.0) + size
    names = [name for name, size in sorted(totals.items(), key=lambda item: -item[1]) if size > 0][:COLOURS]
    needs = [sum(causes.values()) for causes in stages]
    up = Scale(0.0, 1.08 * max(device_bytes, *needs) / GIB)
    plot = Plot(Scale(-0.5, len(stages) - 0.5), up, left=70, top=20, tall=300, right=WIDTH - 10)
    plot.label_up(lambda value: f"{value:g}")
    wide = min((plot.right - plot.left) / len(stages) * 0.85, 80)
    centres = plot.place_across(list(range(len(stages))))
    for centre, causes in zip(centres, stages, strict=True):
        below = 0.0
        for place, name in enumerate(names):
            size = causes.get(name, 0.0) / GIB
            bottom, top = plot.place_up([below, below + size])
            plot.parts.append(make_rectangle(centre - wide / 2, top, wide, bottom - top, f"fill-c{place + 1}"))
            below += size
    # labels of more than 16 ranks would overlap
    every = -(-len(stages) // 16)
    plot.label_across(list(range(0, len(stages), every)), lambda rank: f"{rank:.0f}")
    (limit,) = plot.place_up([device_bytes / GIB])
    plot.parts += [
        make_line(plot.left, limit, WIDTH - 10, limit, "limit"),
        make_text(WIDTH - 12, limit - 6, "device", "end"),
    ]
    worst = int(np.argmax(needs))
    words = f"Rank {worst} needs most, {format_gibibytes(needs[worst])} of {format_gibibytes(device_bytes, 0)} GiB."
    return plot.finish(words, tuple((f"fill-c{number}", name) for number, name in enumerate(names, 1)))


def draw_pipeline(bars: Sequence[StageBar]) -> Drawing:
    """Draw what each pipeline rank does over time; a rank's waiting is left blank."""
    ranks = max(bar.rank for bar in bars) + 1
    end = max(bar.end for bar in bars)
    left, row = 60, max(5.0, min(26.0, 420 / ranks))
    across = (WIDTH - left - 5) / end
    # one path for all bars of a kind: thousands of rectangles would make the page slow
    paths: dict[str, list[str]] = {}
    for bar in bars:
        x, wide = left + bar.start * across, max((bar.end - bar.start) * across - 0.3, 0.3)
        shape = f"M{x:.1f} {bar.rank * row:.1f}h{wide:.1f}v{row * 0.86:.1f}h-{wide:.1f}z"
        paths.setdefault(f"{bar.kind}-{bar.stage // ranks % 4}", []).append(shape)
    parts = [Markup('<path class="bar-{}" d="{}"/>').format(name, "".join(shapes)) for name, shapes in paths.items()]
    every = -(-ranks // 16)
    parts += [make_text(left - 8, rank * row + row * 0.7, str(rank), "end") for rank in range(0, ranks, every)]
    busy = sum(bar.end - bar.start for bar in bars) / (end * ranks)
    kinds = [kind for kind in ("forward", "backward", "input", "weight") if any(bar.kind == kind for bar in bars)]
    words = f"{ranks} ranks over {format_duration(end)}, {format_percent(busy)} of it busy."
    return finish_drawing(parts, ranks * row + 6, words, tuple((f"bar-{kind}-0", kind) for kind in kinds))


def draw_pareto(front: Sequence[Row], best: Sequence[Row]) -> Drawing:
    """Draw time against memory: the Pareto front as a line, the best layout of each tp, cp and pp as dots."""
    points = {
        kind: [(row["step_s"], row["memory_bytes"] / GIB) for row in rows]
        for kind, rows in (("off-front", best), ("on-front", front))
    }
    seconds, sizes = (np.array(values) for values in zip(*points["off-front"], *points["on-front"], strict=True))
    plot = Plot(fit_scale(seconds, logarithmic=True), fit_scale(sizes), left=70)
    plot.label_up(lambda value: f"{value:g}")
    plot.label_across([tick.value for tick in choose_value_ticks(plot.across)], format_duration)
    xs, ys = zip(*points["on-front"], strict=True)
    plot.add_line(xs, ys, "front")
    for kind, rows in (("off-front", best), ("on-front", front)):
        for row, (x, y) in zip(rows, points[kind], strict=True):
            plot.add_dot(x, y, kind, f"tp={row['tp']} pp={row['pp']}, {format_duration(x)}, {y:.1f} GiB")
    legend = (("on-front", "nothing beats it"), ("off-front", "best of its tp, cp and pp"))
    return plot.finish("Seconds of a step against GiB on the worst rank.", legend)


def draw_scaling(summary: Row) -> Drawing:
    """Draw the efficiency of strong and weak scaling over the number of devices."""
    unit = summary["unit"]
    curves = {kind: [point for point in summary[kind] if "efficiency" in point] for kind in ("strong", "weak")}
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return draw_nothing("No number of devices has a layout that fits.")
    devices = sorted({point["devices"] for point in points})
    # a little air left and right of the first and the last point
    across = Scale(devices[0] / 1.1, devices[-1] * 1.1, logarithmic=True)
    up = Scale(0.0, 1.1 * max(1.0, *(point["efficiency"] for point in points)))
    plot = Plot(across, up, left=70)
    plot.label_up(lambda value: f"{100 * value:g} %")
    plot.label_across(devices, lambda number: f"{number:,.0f}", apart=55)
    for number, curve in enumerate(curves.values(), 1):
        xs, ys = ([point[name] for point in curve] for name in ("devices", "efficiency"))
        plot.add_line(xs, ys, f"line-{number}")
        for x, y, point in zip(xs, ys, curve, strict=True):
            rate = f"{format_count(point[unit + '_per_s'])} {unit}/s"
            plot.add_dot(x, y, f"dot-{number}", f"{x:,}: {format_percent(y)}, {rate}", radius=4)
    return plot.finish(
        "Throughput of a device beside that of the first point, over the number of devices.",
        (("dot-1", "strong: the global batch stays"), ("dot-2", "weak: it grows with the devices")),
    )
