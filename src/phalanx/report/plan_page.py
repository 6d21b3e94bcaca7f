"""A plan as one HTML page that loads nothing: what a step's time and memory go to, the pipeline, the trade-offs, scaling.

Words and markup are in `plan.html`, looks in `page.css` and `plan.css`, drawings in `plan_charts`.
"""

from __future__ import annotations

from typing import Any

from phalanx.planner.explain.budget import COMPUTING_SHARE, WAITING_SHARE
from phalanx.planner.rank.plan import Plan
from phalanx.planner.rank.summary import Row, hybrid_words, plan_facts
from phalanx.planner.rank.write import planned_layout
from phalanx.report import plan_charts
from phalanx.report.page_parts import Tile
from phalanx.report.plan_cells import gather_cell, gathers_differ, schedule_cell, step_cell, zero_cell
from phalanx.report.template import render
from phalanx.report.text import count, duration, number, percent, signed_duration

GIB = 2**30


def render_plan(plan: Plan, command: str) -> str:
    """The page as text. command: what runs the best layout."""
    facts = plan_facts(plan)
    every = [*facts["layouts"], *facts["pareto"]]
    best = plan.best.take([0])
    models, run = plan.planner.models, plan.task.run
    stages = models.stage_memory(run, best.candidates)
    bars = models.timeline(run, best.candidates)
    causes = facts["layouts"][0]["time_by_cause_s"]
    return render(
        "plan.html",
        ("page.css", "plan.css"),
        title=_title(plan),
        facts=facts,
        subtitle=_subtitle(plan, facts),
        tiles=_tiles(facts),
        columns=[column for column in COLUMNS if column[0] != "gather" or gathers_differ(every)],
        command=command,
        layout=planned_layout(run, best.candidates),
        waterfall=plan_charts.waterfall(causes),
        memory=plan_charts.memory_stack(stages, facts["device_memory_bytes"]),
        timeline=plan_charts.timeline(bars) if bars else None,
        pareto=plan_charts.pareto(facts["pareto"], facts["layouts"]),
        scaling=None if facts["scaling"] is None else plan_charts.scaling(facts["scaling"]),
        why=[_why(row) for row in facts["why"]],
        hybrid=hybrid_words(facts) if facts["hybrid_break_even"] else "",
        budget=_budget(facts["budget"]),
    )


COLUMNS: tuple[tuple[str, Any], ...] = (
    ("tp", lambda row: row["tp"]),
    ("pp", lambda row: row["pp"]),
    ("cp", lambda row: row["cp"]),
    ("dp_shard", lambda row: row["dp_shard"]),
    ("dp_rep", lambda row: row["dp_replicate"]),
    ("mbs", lambda row: row["microbatch"]),
    ("zero", zero_cell),
    ("gather", gather_cell),
    ("schedule", schedule_cell),
    ("recompute", lambda row: row["recompute"]),
    ("GiB", lambda row: f"{row['memory_bytes'] / GIB:.1f}"),
    ("P(fits)", lambda row: f"{row['p_fits']:.2f}"),
    ("step, 90% interval", step_cell),
    ("TFLOP/s", lambda row: f"{row['tflops_per_device']:.1f}"),
    ("MFU", lambda row: "" if row["mfu"] is None else percent(row["mfu"])),
    ("bubble", lambda row: percent(row["bubble_share"])),
    ("exposed", lambda row: percent(row["exposed_share"])),
)
"""Heads of a table of layouts, and what stands below them."""


def _title(plan: Plan) -> str:
    return f"{plan.task.run.model.preset or 'Model'} on {plan.task.devices:,} x {plan.device.name}"


def _subtitle(plan: Plan, facts: Row) -> list[str]:
    words = [
        plan.planner.machine.about,
        f"global batch {facts['global_batch']}",
        f"{facts['legal']:,} legal layouts, {facts['fitting']:,} likely to fit",
    ]
    fixed = " ".join(f"{name}={value}" for name, value in facts["fixed"].items())
    return [*words, f"fixed: {fixed}"] if fixed else words


def _tiles(facts: Row) -> list[Tile]:
    row, budget = facts["layouts"][0], facts["budget"]
    step, _, interval = step_cell(row).partition(" (")
    mfu = "" if row["mfu"] is None else f"{percent(row['mfu'])} of nominal peak"
    room = facts["device_memory_bytes"] / GIB
    tiles = [
        Tile("step", "Step", step, "", f"90%: {interval.rstrip(')')} {step.rpartition(' ')[2]}"),
        Tile("tflops", "Model TFLOP/s a device", f"{row['tflops_per_device']:.1f}", "", mfu),
        Tile("memory", "Memory, worst rank", f"{row['memory_bytes'] / GIB:.1f}", "GiB", f"of {room:.0f}"),
        Tile("fits", "P(fits)", f"{row['p_fits']:.2f}"),
        Tile("bubble", "Pipeline bubble", percent(row["bubble_share"]), "", "of a step"),
        Tile("exposed", "Exposed communication", percent(row["exposed_share"]), "", "of a step"),
        Tile("elapsed", "Training", duration(budget["elapsed_s"]), "", f"{count(budget['amount'])} {budget['unit']}"),
        Tile("hours", "Device-hours", count(budget["device_hours"])),
        Tile("goodput", "Goodput", percent(budget["goodput"]["share"]), "", "left by failures and checkpoints"),
    ]
    if budget["energy_mwh"] is not None:
        tiles.append(Tile("energy", "Energy", number(budget["energy_mwh"]), "MWh", "of the devices"))
    return tiles


def _why(row: Row) -> tuple[str, str]:
    if not row["legal"]:
        return row["asked"], "not legal: " + "; ".join(row["reason"].splitlines())
    if not row["fits"]:
        most = list(row["memory_by_cause_bytes"].items())[:4]
        causes = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in most)
        return row["asked"], f"does not fit: at least {row['least_memory_bytes'] / GIB:.1f} GiB ({causes})"
    if row["slower_by_s"] <= 0:
        return row["asked"], "the best layout has it"
    causes = ", ".join(
        f"{name} {signed_duration(value)}"
        for name, value in row["by_cause_s"].items()
        if abs(value) > 0.02 * row["slower_by_s"]
    )
    return row["asked"], f"{duration(row['slower_by_s'])} a step more: {causes}"


def _budget(budget: Row) -> str:
    losses = budget["goodput"]
    words = (
        f"{budget['steps']:,} steps take {duration(budget['seconds'])}; with failures and checkpoints "
        f"{duration(budget['elapsed_s'])}. The job fails every {duration(losses['failure_s'])} on average; a checkpoint "
        f"every {duration(losses['interval_s'])} loses least (Young, Daly), each takes {duration(losses['checkpoint_s'])}."
    )
    if budget["energy_mwh"] is None:
        return words
    return words + (
        f" Energy assumes that a device draws {COMPUTING_SHARE:g} of its board power while it works and "
        f"{WAITING_SHARE:g} while it waits."
    )
