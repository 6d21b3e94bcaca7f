"""A plan as one HTML page that loads nothing: what a step's time and memory go to, the pipeline, the trade-offs, scaling.

The markup is in `templates/plan.html`; `plan.js` filters, sorts and looks up, and the page is whole without it. The columns
of a table of layouts and the words of a budget are the terminal's, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from phalanx.formatting import (
    format_count,
    format_duration,
    format_gibibytes,
    format_interval,
    format_number,
    format_percent,
)
from phalanx.hardware.reliability import TRAINING
from phalanx.planner.plan.layout_list import LayoutList, list_layouts, pick_drawn
from phalanx.planner.plan.make_plan import Plan
from phalanx.planner.plan.plan_summary import Row, describe_break_evens, describe_large_batch, summarise_plan
from phalanx.planner.rank.cost_models import WAITING_SHARE
from phalanx.planner.rank.cost_models import Bar as StageBar
from phalanx.planner.rank.enumeration import write_section
from phalanx.report.drawing import (
    WIDTH,
    Bar,
    Drawing,
    Plot,
    Scale,
    draw_bars,
    draw_nothing,
    finish_drawing,
    make_line,
    make_rectangle,
    make_text,
)
from phalanx.report.page import Tile, render_page, write_script_json
from phalanx.report.plan_layouts import (
    GIB,
    LAYOUT_COLUMNS,
    LISTED_COLUMNS,
    MOST_SHOWN,
    explore_layouts,
    layout_columns,
    list_choices,
    list_filters,
    list_rows,
    name_layout,
    name_memory_causes,
    name_slower_causes,
)

COLOURS = 12
"""Classes fill-c1 to fill-c12 in `figures.css`."""
_SMALL = 0.004
"""Share of the whole below which a cause is not drawn apart."""
MOST_DRAWN = 1_800_000
"""Characters of the drawings of single layouts; long pipelines take a hundred thousand each."""


def render_plan(plan: Plan, command: str) -> str:
    """Return the page as text. command: what runs the best layout."""
    summary = summarise_plan(plan)
    run, listed = plan.task.run, list_layouts(plan)
    rows = list_rows(plan, listed)
    pictures = draw_pictures(plan, listed)
    explorer, trade_off = explore_layouts(plan, listed, rows, [picture.place for picture in pictures])
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
        "plan.css",
        scripts=["plan.js"],
        title=f"{run.model.preset or 'Model'} on {plan.task.devices:,} x {plan.device.name}",
        summary=summary,
        subtitle=subtitle,
        tiles=_headline_tiles(summary),
        columns=layout_columns([*summary["layouts"], *summary["pareto"]], LAYOUT_COLUMNS),
        command=command,
        layout=write_section(run, plan.best.layouts.row(0)),
        pictures=pictures,
        trade_off=trade_off,
        listed_columns=[column for column, _ in LISTED_COLUMNS],
        listed_rows=rows[:MOST_SHOWN],
        listed=len(listed),
        filters=list_filters(explorer["fields"]),
        choices=list_choices(explorer, plan.task.fixed),
        scaling=None if summary["scaling"] is None else draw_scaling(summary["scaling"]),
        why=[(row["asked"], _answer_why(row)) for row in summary["why"]],
        hybrid=describe_break_evens(summary) if summary["hybrid_break_even"] else "",
        budget=_describe_budget(summary["budget"]),
        large_batch="" if summary["large_batch"] is None else describe_large_batch(summary),
        explorer=write_script_json(explorer),
    )


@dataclass(frozen=True)
class Picture:
    """What the page draws of one layout."""

    place: int
    """Position in the list."""
    name: str
    time: Drawing
    memory: Drawing
    pipeline: Drawing | None


def draw_pictures(plan: Plan, listed: LayoutList) -> list[Picture]:
    """Draw the layouts of the page's tables, the best one first, as many as go into MOST_DRAWN characters."""
    models, model = plan.planner.models, plan.task.model
    pictures: list[Picture] = []
    room = MOST_DRAWN
    for place, layout in pick_drawn(plan, listed):
        bars = models.timeline(model, layout.table)
        picture = Picture(
            place,
            name_layout(layout),
            draw_time_breakdown({name: float(values[place]) for name, values in listed.times.causes.items()}),
            draw_memory(models.stage_memory(model, layout.table), models.device_bytes),
            draw_pipeline(bars) if bars else None,
        )
        room -= sum(len(drawn.svg) for drawn in (picture.time, picture.memory, picture.pipeline) if drawn is not None)
        # the best layout is drawn whatever it takes
        if room < 0 and pictures:
            break
        pictures.append(picture)
    return pictures


def _headline_tiles(summary: Row) -> list[Tile]:
    row, budget = summary["layouts"][0], summary["budget"]
    step, _, interval = format_interval(row["step_s"], *row["step_s_interval"]).partition(" (")
    mfu = "" if row["mfu"] is None else f"{format_percent(row['mfu'])} of nominal peak"
    room = f"of {format_gibibytes(summary['device_memory_bytes'], 0)}"
    amount = f"{format_count(budget['amount'])} {budget['unit']}"
    parts = budget["goodput"]["parts"]
    goodput = format_percent(parts[TRAINING])
    lost = ", ".join(f"{format_percent(share)} {name}" for name, share in parts.items() if name != TRAINING)
    tiles = [
        Tile("step", "Step", step, "", f"90%: {interval.rstrip(')')} {step.rpartition(' ')[2]}"),
        Tile("tflops", "Model TFLOP/s a device", f"{row['tflops_per_device']:.1f}", "", mfu),
        Tile("memory", "Memory, worst rank", format_gibibytes(row["memory_bytes"]), "GiB", room),
        Tile("fits", "P(fits)", f"{row['p_fits']:.2f}"),
        Tile("bubble", "Pipeline bubble", format_percent(row["bubble_share"]), "", "of a step"),
        Tile("exposed", "Exposed communication", format_percent(row["exposed_share"]), "", "of a step"),
        Tile("elapsed", "Training", format_duration(budget["elapsed_s"]), "", amount),
        Tile("hours", "Device-hours", format_count(budget["device_hours"])),
        Tile("goodput", "Goodput", goodput, "", f"left by {lost}"),
    ]
    if budget["energy_mwh"] is not None:
        tiles.append(Tile("energy", "Energy", format_number(budget["energy_mwh"]), "MWh", "of the devices"))
    return tiles


def _answer_why(row: Row) -> str:
    """Return why the best layout does not have what was asked for."""
    if not row["legal"]:
        return "not legal: " + "; ".join(row["reason"].splitlines())
    if not row["fits"]:
        causes = name_memory_causes(row["memory_by_cause_bytes"])
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
        f" Energy is that of devices that draw {budget['working_w']:.0f} W while they work and {WAITING_SHARE:g} of that "
        "while they wait."
    )


# --- drawings ----------------------------------------------------------------------------------------------------------


def draw_time_breakdown(causes: Mapping[str, float]) -> Drawing:
    """Draw the seconds of a step by cause, each bar beginning where the one above ends."""
    total = sum(causes.values())
    ordered = sorted(causes.items(), key=lambda item: -item[1])
    shown = [(name, value) for name, value in ordered if value > _SMALL * total]
    rest = total - sum(value for _, value in shown)
    # a rest of rounding errors alone is none
    if rest > 1e-6 * total:
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
    # As many causes as there are colours, what takes most first.
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
    # one path for all bars of a kind: thousands of rectangles would make the page slow and large
    kinds_of_bars: dict[str, list[StageBar]] = {}
    for bar in bars:
        kinds_of_bars.setdefault(f"{bar.kind}-{bar.stage // ranks % 4}", []).append(bar)
    lane = Markup('<path class="lane bar-{}" stroke-width="{:.1f}" d="{}"/>')
    parts = []
    for name, some in kinds_of_bars.items():
        # a line for each bar, thick enough to be one, that begins relative to the end of the one before
        path, rank, last = [], -1, 0
        for bar in sorted(some, key=lambda bar: (bar.rank, bar.start)):
            # Tenths of a unit are whole numbers here: what is rounded does not add up from one line to the next.
            start = round(10 * (left + bar.start * across))
            stop = max(round(10 * (left + bar.end * across - 0.3)), start + 3)
            if bar.rank != rank:
                rank, last = bar.rank, 0
                path.append(f"M0 {(rank + 0.43) * row:.1f}")
            path.append(f"m{(start - last) / 10:g} 0h{(stop - start) / 10:g}")
            last = stop
        parts.append(lane.format(name, 0.86 * row, "".join(path)))
    every = -(-ranks // 16)
    parts += [make_text(left - 8, rank * row + row * 0.7, str(rank), "end") for rank in range(0, ranks, every)]
    busy = sum(bar.end - bar.start for bar in bars) / (end * ranks)
    kinds = [kind for kind in ("forward", "backward", "input", "weight") if any(bar.kind == kind for bar in bars)]
    words = f"{ranks} ranks over {format_duration(end)}, {format_percent(busy)} of it busy."
    return finish_drawing(parts, ranks * row + 6, words, tuple((f"bar-{kind}-0", kind) for kind in kinds))


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
