"""A plan as text, for terminals of any width."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Iterator
from math import isfinite

from phalanx.formatting import format_count, format_duration, format_gibibytes, format_percent
from phalanx.hardware.reliability import TRAINING
from phalanx.planner.plan.budget import Budget
from phalanx.planner.plan.make_plan import Plan
from phalanx.planner.plan.plan_summary import Row, describe_break_evens, describe_large_batch, summarise_plan
from phalanx.planner.rank.cost_models import WAITING_SHARE
from phalanx.printable import wrap_line
from phalanx.report.plan_layouts import FITS, PARALLELISM_COLUMNS, RATE, STEP, layout_columns, name_slower_causes
from phalanx.report.table import write_text_table

_PROSE = 120
"""Columns of the longest line of prose, on wider terminals and in files."""
_SHORTEST_BAR = 8
"""Columns of the shortest bar of a chart; narrower terminals get none."""
_LONGEST_BAR = 40
_SMALL = 0.005
"""Share of the whole below which a cause is not named."""
COLUMNS = (*PARALLELISM_COLUMNS, STEP, RATE, FITS)
"""Columns of a terminal's tables of layouts."""


def write_plan_lines(plan: Plan, width: int) -> Iterator[str]:
    """Yield the lines of a plan for a terminal; none is wider than `width` columns unless a word is."""
    facts, task = summarise_plan(plan), plan.task
    nodes = -(-task.devices // plan.planner.machine.node.devices)
    # booleans as a run file has them
    words = ((name, str(value).lower() if isinstance(value, bool) else value) for name, value in task.fixed.items())
    fixed = f", with {' '.join(f'{name}={value}' for name, value in words)}" if task.fixed else ""
    best = facts["layouts"][0]
    split, sizes = "tp, cp and pp", ""
    if task.model.experts() is not None:
        split = "tp, cp, pp and ep"
        sizes = f" ({format_count(facts['parameters'])} parameters, {format_count(facts['active_parameters'])} active)"
    yield from _wrap_prose(
        f"{task.run.model.preset or 'model'}{sizes} on {task.devices:,} x {plan.device.name} ({nodes:,} "
        f"node{'s' if nodes > 1 else ''} of {plan.planner.machine.name}), global batch {task.batch}{fixed}",
        width,
    )
    yield from _wrap_prose(
        f"{facts['legal']:,} legal layouts, {facts['fitting']:,} fit into "
        f"{format_gibibytes(facts['device_memory_bytes'], 0)} GiB with a probability of at least "
        f"{facts['least_p_fits']:g}; the best of each choice of {split}:",
        width,
    )
    yield from _write_layouts(facts["layouts"], width)
    yield from _wrap_prose(f"time of 1: {_list_shares(best['time_by_cause_s'], format_duration)}", width)
    yield from _wrap_prose(f"memory of 1: {_list_shares(best['memory_by_cause_bytes'], _format_gib)}", width)
    if best["host_memory_bytes"]:
        yield from _wrap_prose(f"host memory of 1: {_format_gib(best['host_memory_bytes'])} a rank", width)
    yield ""
    yield from _wrap_prose("nothing beats these in time, memory and energy at once:", width)
    yield from _write_layouts(facts["pareto"], width)
    if facts["hybrid_break_even"]:
        yield ""
        yield from _wrap_prose(describe_break_evens(facts), width)
    for why in facts["why"]:
        yield ""
        yield from _wrap_prose(f"why not {why['asked']}: {_answer_why(why)}", width)
    if facts["scaling"] is not None:
        for kind, batch in (("strong", "stays"), ("weak", "grows with the devices")):
            yield ""
            words_of_kind = f"{kind} scaling (the global batch {batch}), the best layout at each point:"
            yield from _wrap_prose(words_of_kind, width)
            yield from _draw_scaling(facts["scaling"][kind], facts["scaling"]["unit"], width)
    yield ""
    yield from _wrap_prose(f"times by the profile {facts['profile']}", width)
    yield from _wrap_prose(_describe_budget(plan.budget, task.devices), width)
    if facts["large_batch"] is not None:
        yield from _wrap_prose(describe_large_batch(facts), width)


def _write_layouts(rows: list[Row], width: int) -> list[str]:
    return write_text_table(layout_columns(rows, COLUMNS), rows, width=width, numbered=True)


def _list_shares(causes: dict[str, float], show: Callable[[float], str]) -> str:
    """Return the causes that matter, largest first, with their shares."""
    total = sum(causes.values())
    ordered = sorted(causes.items(), key=lambda item: -item[1])
    return " | ".join(
        f"{name} {show(value)} ({format_percent(value / total)})" for name, value in ordered if value > _SMALL * total
    )


def _format_gib(size: float) -> str:
    return f"{format_gibibytes(size)} GiB"


def _answer_why(why: Row) -> str:
    """Return why the best layout does not have what was asked for."""
    if not why["legal"]:
        return "no such layout is legal: " + "; ".join(why["reason"].splitlines())
    if not why["fits"]:
        return f"it does not fit; the least that one needs is {_list_shares(why['memory_by_cause_bytes'], _format_gib)}"
    row, slower = why["layout"], why["slower_by_s"]
    if slower <= 0:
        return "the best layout has it"
    share = format_percent(slower / (row["step_s"] - slower))
    names = ("pp", "dp_shard", "microbatch", "recompute", *(("gather",) if row["gather"] != "layer" else ()))
    best = " ".join(f"{name}={row[name]}" for name in names)
    return f"{format_duration(slower)} a step more ({share}), with {best}: {', '.join(name_slower_causes(why))}"


def _draw_scaling(points: list[Row], unit: str, width: int) -> Iterator[str]:
    """Yield a line with a bar for the efficiency of each point."""
    heads = [f"{point['devices']:,}" for point in points]
    wide = max(map(len, heads))
    top = max((point.get("efficiency", 0.0) for point in points), default=0.0)
    for head, point in zip(heads, points, strict=True):
        if "efficiency" not in point:
            yield from _wrap_prose(f"{head:>{wide}}  {point['why_not']}", width)
            continue
        row, share = point["layout"], point["efficiency"]
        text = f"{head:>{wide}}  {format_percent(share):>7}  {format_count(point[f'{unit}_per_s']):>6} {unit}/s"
        text += f"  {row['tflops_per_device']:6.1f} TFLOP/s"
        longer = f"{text}  tp={row['tp']} pp={row['pp']} dp_shard={row['dp_shard']} dp_replicate={row['dp_replicate']}"
        text = longer if len(longer) + _SHORTEST_BAR + 2 <= width else text
        room = min(_LONGEST_BAR, width - len(text) - 2)
        bar = "" if room < _SHORTEST_BAR else "  " + "█" * round(room * share / top)
        yield text + bar


def _describe_budget(found: Budget, devices: int) -> str:
    losses = found.goodput
    energy = "" if found.energy_mwh is None or found.working_w is None else (
        f", {found.energy_mwh:,.3g} MWh (a device draws {found.working_w:.0f} W while it works and {WAITING_SHARE:g} of "
        "that while it waits; --watts sets it right)"
    )  # fmt: skip
    every = f"{format_duration(losses.interval_s)}" if isfinite(losses.interval_s) else "never"
    lost = ", ".join(f"{format_percent(share)} {name}" for name, share in losses.parts.items() if name != TRAINING)
    return (
        f"{format_count(found.amount)} {found.unit}: {found.steps:,} steps, {format_duration(found.seconds)} of steps; with "
        f"failures and checkpoints {format_duration(found.elapsed_s)}, {format_count(found.device_hours)} "
        f"device-hours{energy}. Goodput {format_percent(losses.share)} ({lost}): a job of {devices:,} devices fails every "
        f"{format_duration(losses.failure_s)} on average; a checkpoint every {every} (each "
        f"{format_duration(losses.checkpoint_s)}) loses least."
    )


def fold_command(command: list[str], width: int) -> list[str]:
    """Return a command for a shell, its words quoted, in lines of at most `width` columns that may be copied as they are."""
    lines = textwrap.wrap(
        shlex.join(command),
        max(20, width - 4),
        break_long_words=False,
        break_on_hyphens=False,
        subsequent_indent="    ",
    )
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _wrap_prose(text: str, width: int) -> list[str]:
    """Return prose in lines that can be read, where no terminal says how wide they may be."""
    return wrap_line(text, min(width, _PROSE))
