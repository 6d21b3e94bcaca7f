"""A plan in words, for terminals of any width."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any

from phalanx.cli.console import wrapped
from phalanx.planner.explain.budget import Budget
from phalanx.planner.rank.cost_models import COMPUTING_SHARE, WAITING_SHARE
from phalanx.planner.rank.plan import Plan
from phalanx.planner.rank.summary import Row, describe_break_evens, summarize_plan
from phalanx.report.formatting import format_count, format_difference, format_duration, format_percent
from phalanx.report.plan_page import FITS, PARALLELISM_COLUMNS, RATE, STEP, layout_columns
from phalanx.report.table import write_text_table

_GIB = 2**30
_PROSE = 120
"""Columns of the longest line of prose, on wider terminals and in files."""
_LEAST_BAR = 8
"""Columns of the shortest chart; narrower terminals get none."""


_COLUMNS = (*PARALLELISM_COLUMNS, STEP, RATE, FITS)


def plan_lines(plan: Plan, width: int) -> Iterator[str]:
    """The plan, line by line; no line is wider than `width` unless a word is."""
    facts = summarize_plan(plan)
    yield from _wrapped(_headline(plan), width)
    yield from _wrapped(
        f"{facts['legal']:,} legal layouts, {facts['fitting']:,} fit into {facts['device_memory_bytes'] / _GIB:.0f} GiB "
        f"with a probability of at least {facts['least_p_fits']:g}; the best of each choice of tp, cp and pp:",
        width,
    )
    yield from _write_layouts(facts["layouts"], width)
    first = facts["layouts"][0]
    yield from _wrapped(f"time of 1: {_parts(first['time_by_cause_s'], format_duration)}", width)
    yield from _wrapped(f"memory of 1: {_parts(first['memory_by_cause_bytes'], _gib)}", width)
    yield ""
    yield from _wrapped("nothing beats these in time, memory and energy at once:", width)
    yield from _write_layouts(facts["pareto"], width)
    if facts["hybrid_break_even"]:
        yield ""
        yield from _wrapped(describe_break_evens(facts), width)
    for why in facts["why"]:
        yield ""
        yield from _wrapped(_why(why), width)
    if facts["scaling"] is not None:
        for kind, words in (("strong", "the global batch stays"), ("weak", "the global batch grows with the devices")):
            yield ""
            yield from _wrapped(f"{kind} scaling ({words}), the best layout at each point:", width)
            yield from _scaling(facts["scaling"][kind], facts["unit"], width)
    yield ""
    yield from _wrapped(f"times by the profile {facts['profile']}", width)
    yield from _wrapped(_budget(plan.budget, plan.task.devices), width)


def _headline(plan: Plan) -> str:
    task, nodes = plan.task, -(-plan.task.devices // plan.planner.machine.node.devices)
    fixed = f", with {' '.join(f'{name}={_word(value)}' for name, value in task.fixed.items())}" if task.fixed else ""
    model = task.run.model.preset or "model"
    return (
        f"{model} on {task.devices:,} x {plan.device.name} ({nodes:,} node{'s' if nodes > 1 else ''} of "
        f"{plan.planner.machine.name}), global batch {task.batch}{fixed}"
    )


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _write_layouts(rows: list[Row], width: int) -> list[str]:
    return write_text_table(layout_columns(rows, _COLUMNS), rows, width=width, numbered=True)


def _parts(causes: dict[str, float], show: Callable[[float], str]) -> str:
    """The causes that matter, largest first, with their shares."""
    total = sum(causes.values())
    ordered = sorted(causes.items(), key=lambda item: -item[1])
    return " | ".join(
        f"{name} {show(value)} ({format_percent(value / total)})" for name, value in ordered if value > 0.005 * total
    )


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB"


def _why(why: Row) -> str:
    asked = f"why not {why['asked']}: "
    if not why["legal"]:
        return asked + "no such layout is legal: " + "; ".join(why["reason"].splitlines())
    if not why["fits"]:
        return asked + f"it does not fit; the least that one needs is {_parts(why['memory_by_cause_bytes'], _gib)}"
    row, slower = why["layout"], why["slower_by_s"]
    if slower <= 0:
        return asked + "the best layout has it"
    causes = [
        f"{name} {format_difference(value)}" for name, value in why["by_cause_s"].items() if abs(value) > 0.02 * slower
    ]
    share = slower / (row["step_s"] - slower)
    names = ("pp", "dp_shard", "microbatch", "recompute", *(("gather",) if row["gather"] != "layer" else ()))
    best = " ".join(f"{name}={row[name]}" for name in names)
    return asked + f"{format_duration(slower)} a step more ({format_percent(share)}), with {best}: {', '.join(causes)}"


def _scaling(points: list[Row], unit: str, width: int) -> Iterator[str]:
    """A bar for the efficiency of each point."""
    heads = [f"{point['devices']:,}" for point in points]
    wide = max(map(len, heads))
    top = max((point.get("efficiency", 0.0) for point in points), default=0.0)
    for head, point in zip(heads, points, strict=True):
        if "efficiency" not in point:
            yield from _wrapped(f"{head:>{wide}}  {point['why_not']}", width)
            continue
        row, share = point["layout"], point["efficiency"]
        text = f"{head:>{wide}}  {format_percent(share):>7}  {format_count(point[f'{unit}_per_s']):>6} {unit}/s"
        text += f"  {row['tflops_per_device']:6.1f} TFLOP/s"
        longer = f"{text}  tp={row['tp']} pp={row['pp']} dp_shard={row['dp_shard']} dp_replicate={row['dp_replicate']}"
        text = longer if len(longer) + _LEAST_BAR + 2 <= width else text
        room = min(40, width - len(text) - 2)
        bar = "" if room < _LEAST_BAR else "  " + "█" * round(room * share / top)
        yield text + bar


def _budget(found: Budget, devices: int) -> str:
    losses = found.goodput
    energy = "" if found.energy_mwh is None else (
        f", {found.energy_mwh:,.3g} MWh (a device draws {COMPUTING_SHARE:g} of its board power while it works and "
        f"{WAITING_SHARE:g} while it waits: an assumption)"
    )  # fmt: skip
    every = f"{format_duration(losses.interval_s)}" if isfinite(losses.interval_s) else "never"
    return (
        f"{format_count(found.amount)} {found.unit}: {found.steps:,} steps, {format_duration(found.seconds)} of steps; with failures and "
        f"checkpoints {format_duration(found.elapsed_s)}, {format_count(found.device_hours)} device-hours{energy}. Goodput "
        f"{format_percent(losses.share)}: a job of {devices:,} devices fails every {format_duration(losses.failure_s)} on average; a "
        f"checkpoint every {every} (each {format_duration(losses.checkpoint_s)}) loses least."
    )


def command_lines(command: list[str], width: int) -> list[str]:
    """A command for a shell, its words quoted, in lines of at most `width` columns that may be copied as they are."""
    lines = textwrap.wrap(
        shlex.join(command),
        max(20, width - 4),
        break_long_words=False,
        break_on_hyphens=False,
        subsequent_indent="    ",
    )
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _wrapped(text: str, width: int) -> list[str]:
    """Prose in lines that can be read, where no terminal says how wide they may be."""
    return wrapped(text, min(width, _PROSE))
