"""The layouts of a plan on a page: columns of their tables, the chart of time against memory, and what `plan.js` reads.

Whatever the script says about a layout stands in its data as text: it filters, sorts and looks up, and computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from phalanx.formatting import (
    format_difference,
    format_duration,
    format_gibibytes,
    format_interval,
    format_percent,
)
from phalanx.layout.legality.refusals import Refusals
from phalanx.layout.spec import DEGREES, NAMED, OFFLOADS, Ints, ResolvedLayout
from phalanx.planner.plan.layout_list import LayoutList, Questions, list_questions
from phalanx.planner.plan.make_plan import Plan
from phalanx.planner.plan.plan_summary import Row
from phalanx.planner.rank.cost_models import WAITING, Floats, is_waiting
from phalanx.planner.rank.enumeration import CHOSEN, EFFECTIVE_WITH, SELDOM, Limits
from phalanx.planner.rank.ranking import pareto_front
from phalanx.report.drawing import WIDTH, Drawing, Plot, choose_value_ticks, fit_scale, make_line, make_text
from phalanx.report.table import Column

GIB = 2**30
MOST_SHOWN = 50
"""Rows of the table of all layouts before a reader asks for more, or without the script."""
MOST_BROKEN_DOWN = 40
"""Layouts that do not fit whose memory is told by cause."""
_MATTERS = 0.02
"""Share of the time that a choice costs more below which a cause of it is not named."""
_NAMED_CAUSES = 4
_HOPELESS = "; layouts that split the model alike do not fit with smaller micro-batches and more recompute either"
_FILTERED = (
    "tp",
    "pp",
    "cp",
    "ep",
    "dp_shard",
    "dp_replicate",
    "microbatch",
    "schedule",
    "zero",
    "recompute",
    "gather",
)
"""Fields by which the table may be filtered, in the order of their controls."""


def _unless_alone(row: Row, text: object) -> str:
    """Return - where parameters lie whole on every rank, so that nothing is sharded and gathered."""
    return "-" if row["dp_shard"] * row["cp"] == 1 else str(text)


_SPLIT_COLUMNS: tuple[Column[Row], ...] = (
    Column("tp", lambda row: row["tp"]),
    Column("pp", lambda row: row["pp"]),
    Column("cp", lambda row: row["cp"], gives_way=4),
    # ranks over which experts are sharded; times those over which each one is
    Column("ep", lambda row: f"{row['ep']}" + (f" x{row['expert_tp']}" if row["expert_tp"] > 1 else ""), gives_way=4),
    Column("chunks", lambda row: row["ep_chunks"], gives_way=3),
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
    Column(
        "schedule",
        lambda row: (
            "-"
            if row["pp"] == 1
            else f"{row['schedule']}" + (f" x{row['stages_per_rank']}" if row["stages_per_rank"] > 1 else "")
        ),
        gives_way=2,
    ),
    Column("recompute", lambda row: row["recompute"], gives_way=2),
    Column("offload", lambda row: " ".join(_offloaded(row)) or "-", gives_way=3),
)
PARALLELISM_COLUMNS = (*_SPLIT_COLUMNS, Column[Row]("GiB", lambda row: format_gibibytes(row["memory_bytes"])))
"""Columns for how a layout splits the work, and the memory that takes: on a terminal and on the page."""

FITS: Column[Row] = Column("P(fits)", lambda row: f"{row['p_fits']:.2f}", gives_way=3)
STEP: Column[Row] = Column(
    "step, 90% interval",
    lambda row: format_interval(row["step_s"], *row["step_s_interval"]),
    gives_way=4,
    narrow=Column("step", lambda row: format_duration(row["step_s"])),
)
RATE: Column[Row] = Column("TFLOP/s", lambda row: f"{row['tflops_per_device']:.1f}", gives_way=1)
_SHARES: tuple[Column[Row], ...] = (
    Column("bubble", lambda row: format_percent(row["bubble_share"])),
    Column("exposed", lambda row: format_percent(row["exposed_share"])),
)
LAYOUT_COLUMNS: tuple[Column[Row], ...] = (
    *PARALLELISM_COLUMNS,
    FITS,
    STEP,
    RATE,
    Column("MFU", lambda row: "" if row["mfu"] is None else format_percent(row["mfu"])),
    *_SHARES,
)
"""Columns of the page's tables of layouts."""


def _offloaded(row: Row) -> list[str]:
    """Return what a layout puts into host memory."""
    return [name.removeprefix("offload_") for name in OFFLOADS if row[name]]


def layout_columns(rows: Sequence[Row], columns: Sequence[Column[Row]]) -> list[Column[Row]]:
    """Return the columns without those of what all rows have plain: gathering by layer, tokens that travel in one chunk,
    all on the device."""
    plain = {
        "gather": all(row["gather"] == "layer" for row in rows),
        "chunks": all(row["ep_chunks"] == 1 for row in rows),
        "offload": not any(_offloaded(row) for row in rows),
    }
    return [column for column in columns if not plain.get(column.head, False)]


def name_slower_causes(row: Row) -> list[str]:
    """Return by which causes another choice is slower than the best layout, those that matter, with their signs."""
    return [
        f"{name} {format_difference(value)}"
        for name, value in row["by_cause_s"].items()
        if abs(value) > _MATTERS * row["slower_by_s"]
    ]


def name_memory_causes(causes: Mapping[str, float]) -> str:
    """Return what takes most memory, in GiB. causes: bytes by cause, largest first."""
    most = list(causes.items())[:_NAMED_CAUSES]
    return ", ".join(f"{name} {format_gibibytes(size)} GiB" for name, size in most)


# --- the list of all layouts -------------------------------------------------------------------------------------------


def _bound(row: Row, name: str, text: str) -> str:
    """Return a figure, as a lower bound where it is one."""
    return f"≥ {text}" if name in row["bounds"] else text


def _if_timed(column: Column[Row]) -> Column[Row]:
    """Return the column with empty cells for layouts that do not fit: these have no times."""
    return Column(column.head, lambda row: column.cell(row) if row["step_s"] is not None else "", column.align)


LISTED_COLUMNS: tuple[tuple[Column[Row], str], ...] = (
    *((column, "") for column in _SPLIT_COLUMNS),
    (Column("GiB", lambda row: _bound(row, "memory", format_gibibytes(row["memory_bytes"]))), "memory_bytes"),
    (Column("P(fits)", lambda row: "" if math.isnan(row["p_fits"]) else f"{row['p_fits']:.2f}"), "p_fits"),
    (_if_timed(Column("step", lambda row: _bound(row, "time", format_duration(row["step_s"])))), "step_s"),
    (_if_timed(RATE), "tflops_per_device"),
    *zip(map(_if_timed, _SHARES), ("bubble_share", "exposed_share"), strict=True),
)
"""Columns of the list, each with the figure by which it is sorted; by its text where that is empty."""


def list_rows(plan: Plan, listed: LayoutList) -> list[Row]:
    """Return a row for each layout of the list, with the figures that its columns show."""
    timed, times = listed.fitting, listed.times
    waiting = [seconds for name, seconds in times.causes.items() if is_waiting(name) and name != WAITING]
    figures: dict[str, Floats] = {
        "step_s": times.total,
        "tflops_per_device": plan.task.model_tflops(times.total),
        "bubble_share": times.causes[WAITING] / times.total,
        "exposed_share": np.sum(waiting, axis=0) / times.total,
    }
    # Column by column: an access to a row of arrays takes longer than the row of lists that pages need.
    columns: dict[str, list[Any]] = {name: getattr(listed.layouts, name).tolist() for name in CHOSEN}
    columns |= {name: [NAMED[name][place] for place in columns[name]] for name in NAMED}
    columns |= {"memory_bytes": listed.memory_bytes.tolist(), "p_fits": listed.p_fits.tolist()}
    # Layouts that do not fit have no times.
    columns |= {name: [*values.tolist(), *[None] * (len(listed) - timed)] for name, values in figures.items()}
    bounds = zip(listed.bounded.tolist(), listed.exact.tolist(), strict=True)
    columns["bounds"] = [[*["memory"] * bounded, *["time"] * (not exact)] for bounded, exact in bounds]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def answer_rows(plan: Plan, listed: LayoutList, rows: Sequence[Row]) -> list[str]:
    """Return what each layout of the list loses against the best one, or why it does not fit."""
    times, best = listed.times, listed.times.total[0]
    differences = {name: (values - values[0]).tolist() for name, values in times.causes.items()}
    # The list begins with the fastest layout that fits.
    answers = ["the best layout"]
    for place in range(1, listed.fitting):
        by_cause = {name: values[place] for name, values in differences.items()}
        slower = float(times.total[place] - best)
        least = "at least " if "time" in rows[place]["bounds"] else ""
        ordered = dict(sorted(by_cause.items(), key=lambda item: -item[1]))
        causes = name_slower_causes({"by_cause_s": ordered, "slower_by_s": slower})
        answers.append(
            f"{least}{format_duration(slower)} a step more: {', '.join(causes)}" if slower > 0 else "as fast"
        )
    # layouts that do not fit have no time but a reason, with causes for those that need least
    room, least_p = format_gibibytes(plan.planner.models.device_bytes, 0), plan.planner.least_p
    broken_down: set[tuple[int, ...]] = set()
    for place in range(listed.fitting, len(listed)):
        row = rows[place]
        needed = f"{format_gibibytes(row['memory_bytes'])} of {room} GiB"
        if math.isnan(row["p_fits"]):
            beside = "" if row["memory_bytes"] > plan.planner.models.device_bytes else _HOPELESS
            answers.append(f"does not fit: at least {needed}{beside}")
            continue
        answer = f"does not fit: {'at least ' if 'memory' in row['bounds'] else ''}{needed}"
        if "memory" not in row["bounds"]:
            answer += f", P(fits) {row['p_fits']:.2f} of the {least_p:g} asked for"
        split = tuple(row[name] for name in (*DEGREES, "ep", "expert_tp"))
        # the first one of a split needs least; taking a pipeline's memory apart takes a while
        if split not in broken_down and len(broken_down) < MOST_BROKEN_DOWN:
            broken_down.add(split)
            taken = plan.planner.memory_breakdown(plan.task.model, listed.layouts.take([place]))
            answer += f" ({name_memory_causes(taken)})"
        answers.append(answer)
    return answers


def draw_trade_off(listed: LayoutList, front: Ints, best: Ints, device_bytes: float) -> tuple[Drawing, Plot]:
    """Draw time against memory of all layouts that fit, with their front as a line; return the plot as well.

    front, best: positions in the list of the layouts that nothing beats in time and memory, and of the best choices of tp,
    cp and pp; these are dots, in this order.
    """
    seconds, sizes = listed.times.total, listed.memory_bytes[: listed.fitting] / GIB
    plot = Plot(fit_scale(seconds, logarithmic=True), fit_scale(np.append(sizes, device_bytes / GIB)), left=70)
    plot.label_up(lambda value: f"{value:g}")
    plot.label_across([tick.value for tick in choose_value_ticks(plot.across)], format_duration, apart=70)
    (limit,) = plot.place_up([device_bytes / GIB])
    plot.parts += [
        make_line(plot.left, limit, WIDTH - 10, limit, "limit"),
        make_text(WIDTH - 12, limit + 16, "device", "end"),
    ]
    # one path for thousands of points; lines of no length show their round caps
    points = zip(*place_points(plot, listed), strict=True)
    plot.parts.append(Markup('<path class="cloud" d="{}"/>').format("".join(f"M{x} {y}h0" for x, y in points)))
    plot.add_line(seconds[front].tolist(), sizes[front].tolist(), "front")
    for places, style in ((front, "on-front"), (best, "off-front")):
        for place in places.tolist():
            row = listed.layouts.row(place)
            title = f"{name_layout(row)}: {format_duration(seconds[place])}, {sizes[place]:.1f} GiB"
            plot.add_dot(float(seconds[place]), float(sizes[place]), style, title)
    legend = (
        ("on-front", "nothing beats it in time and memory"),
        ("off-front", "best of its tp, cp and pp"),
        ("cloud", "other layouts that fit"),
    )
    return plot.finish("Seconds of a step against GiB on the worst rank.", legend), plot


def place_points(plot: Plot, listed: LayoutList) -> tuple[list[int], list[int]]:
    """Return where the layouts that fit lie on the chart, from left to right and from top to bottom, in its units."""
    sizes = listed.memory_bytes[: listed.fitting] / GIB
    across, up = plot.place_across(listed.times.total.tolist()), plot.place_up(sizes.tolist())
    return [round(x) for x in across], [round(y) for y in up]


def find_front(listed: LayoutList) -> Ints:
    """Return the positions of the layouts that nothing beats in time and memory, fastest first."""
    # What is beaten by no simulated time is simulated: bounds have no place on the front.
    exact = np.flatnonzero(listed.exact[: listed.fitting])
    return exact[pareto_front(listed.times.total[exact], listed.memory_bytes[exact])]


# --- what the script reads ---------------------------------------------------------------------------------------------


def explore_layouts(
    plan: Plan, listed: LayoutList, rows: Sequence[Row], drawn: Sequence[int]
) -> tuple[dict[str, Any], Drawing]:
    """Return the data of `plan.js`, and the chart of time against memory. drawn: positions of the layouts with pictures."""
    front = find_front(listed)
    best = np.setdiff1d(listed.find(plan.best.layouts), front)
    chart, plot = draw_trade_off(listed, front, best, plan.planner.models.device_bytes)
    across, up = place_points(plot, listed)
    asked = list_questions(plan)
    unlisted = f" be one of {listed.legal - len(listed):,} that this page leaves out," * (listed.legal > len(listed))
    data = {
        "fitting": listed.fitting,
        "answers": _encode_texts(answer_rows(plan, listed, rows), _sort_keys(rows, "")),
        "across": across,
        "up": up,
        "dots": [*front.tolist(), *best.tolist()],
        "drawn": list(drawn),
        "shown": MOST_SHOWN,
        **encode_layouts(rows),
        **encode_questions(asked, describe_limits(plan.planner.limits), unlisted),
    }
    return data, chart


def list_filters(fields: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the fields by which the list may be filtered, and their values; those with one value alone are left out."""
    return [(name, fields[name]["texts"]) for name in _FILTERED if len(fields[name]["texts"]) > 1]


def list_choices(explorer: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[tuple[str, list[str], str]]:
    """Return the fields that may be asked about, the values to choose among (none: any number), and the fixed value."""
    values: dict[str, list[str]] = {name: [] for name in DEGREES} | explorer["options"]
    return [
        (name, values[name], write_value(fixed[name]) if name in fixed else "")
        for name in CHOSEN
        # a model without experts has nothing to spread
        if name not in SELDOM or len(values[name]) > 1
    ]


def encode_layouts(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the fields of the layouts and the cells of their table: distinct texts, and which of them each row has.

    Texts of a column stand in the order by which it is sorted.
    """
    columns = [
        {"head": column.head, **_encode_texts([str(column.cell(row)) for row in rows], _sort_keys(rows, figure))}
        for column, figure in LISTED_COLUMNS
    ]
    fields = {name: _encode_texts([write_value(row[name]) for row in rows], _sort_keys(rows, "")) for name in CHOSEN}
    return {"columns": columns, "fields": fields}


def _sort_keys(rows: Sequence[Row], figure: str) -> list[float]:
    return [math.inf if not figure or row[figure] is None else float(row[figure]) for row in rows]


def _encode_texts(texts: Sequence[str], keys: Sequence[float]) -> dict[str, Any]:
    # Numbers come in their order, before names; what is unknown comes last.
    cells = []
    for key, text in zip(keys, texts, strict=True):
        digits = text.rstrip("r")
        number = float(digits) if digits.isdecimal() else math.inf
        cells.append((math.inf if math.isnan(key) else key, number, text))
    distinct = {cell: place for place, cell in enumerate(sorted(set(cells)))}
    return {"texts": [text for _, _, text in distinct], "cells": [distinct[cell] for cell in cells]}


def write_value(value: object) -> str:
    """Return the value of a field as a run file has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def name_layout(layout: ResolvedLayout) -> str:
    """Return the fields of a layout that are not plain, as on a command line: what `plan.js` writes of a chosen one."""
    words = {name: write_value(getattr(layout, name)) for name in CHOSEN}
    changed = [f"{name}={word}" for name, word in words.items() if word != _PLAIN[name]]
    return " ".join(changed) or "all on one rank"


def encode_questions(asked: Questions, limits: str, unlisted: str) -> dict[str, Any]:
    """Return what the script looks up about layouts that the list has not. limits, unlisted: why it may not, in words."""
    columns = [getattr(asked.splits, name).tolist() for name in DEGREES]
    known = f" (this page knows {len(asked.splits):,} of {asked.possible:,} choices of degrees)"
    devices = int(asked.splits.world_size[0])
    return {
        "degrees": DEGREES,
        "splits": list(zip(*columns, strict=True)),
        "options": {name: [write_value(value) for value in values] for name, values in asked.options.items()},
        "plain": _PLAIN,
        "effective_with": EFFECTIVE_WITH,
        "rules": [_encode_refusals(refusals) for refusals in asked.refusals],
        "words": {
            "no_split": f"Not legal: {' x '.join(DEGREES)} has to be {devices:,} devices, and with these degrees it cannot"
            + known * (len(asked.splits) < asked.possible),
            "illegal": "Not legal:",
            "no_effect": {name: f"{name} has no effect where {degree} is 1" for name, degree in EFFECTIVE_WITH.items()},
            "unlisted": "No listed layout has it. It may run as a listed one does, lie beyond what plans look at "
            f"({limits}),{unlisted} or be refused in combination. Ask with this option of the command:",
        },
    }


def _encode_refusals(refusals: Refusals) -> dict[str, Any]:
    """Return the answers of a rule; choices of degrees with equal answers share one block of them."""
    blocks, block = np.unique(refusals.found, axis=0, return_inverse=True)
    return {
        "degrees": refusals.degrees,
        "fields": refusals.fields,
        "reasons": refusals.reasons,
        "blocks": blocks.tolist(),
        "splits": {
            ",".join(map(str, split)): place
            for split, place in zip(refusals.splits, block.reshape(-1).tolist(), strict=True)
        },
    }


_PLAIN = {name: write_value(getattr(ResolvedLayout(1), name)) for name in CHOSEN}
"""Values of fields that need no mention."""


def describe_limits(limits: Limits) -> str:
    """Return how far a plan's free choices go, in words."""
    return (
        f"micro-batches of up to {limits.microbatch:g} samples, up to {limits.stages_per_rank:g} stages a rank, at least "
        f"{limits.positions:,} positions of a sample on a rank of cp, weights streamed over up to {limits.streamed:g} "
        f"ranks, up to {limits.ep_chunks:g} chunks of tokens in the fastest layouts"
    )
