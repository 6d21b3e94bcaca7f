"""A plan as plain values: what `--json` prints, and what the words and the page are made of."""

from __future__ import annotations

from dataclasses import asdict
from math import exp
from typing import Any

from phalanx.families.registry import bind
from phalanx.planner.explain.budget import waits
from phalanx.planner.explain.causes import Why
from phalanx.planner.explain.scaling import Point
from phalanx.planner.rank.judge import Ranked, Task, tflops, throughput
from phalanx.planner.rank.models import WAITING
from phalanx.planner.rank.plan import Plan

INTERVAL = 1.645
"""Standard deviations to each side that hold 90% of what may come."""

Row = dict[str, Any]


def plan_facts(plan: Plan) -> Row:
    """Everything, with units in the names; times in seconds, memory in bytes."""
    task, judged = plan.task, plan.judged
    return {
        "cluster": plan.planner.machine.name,
        "device": plan.device.name,
        "profile": plan.planner.models.profile_words,
        "devices": task.devices,
        "device_memory_bytes": plan.planner.models.device_bytes,
        "unit": task.unit,
        f"{task.unit}_per_step": task.amount,
        "global_batch": task.batch,
        "flops_convention": task.run.training.flops,
        "fixed": dict(task.fixed),
        "legal": len(judged.legal),
        "fitting": len(judged.fitting),
        "least_p_fits": plan.planner.least_p,
        "layouts": layout_rows(plan, plan.best),
        "pareto": layout_rows(plan, plan.front),
        "budget": asdict(plan.budget),
        "why": [_why(plan, one) for one in plan.why],
        "positions_per_device": _positions(plan),
        "hybrid_break_even": [asdict(one) for one in plan.break_evens],
        "scaling": None if plan.scaling is None else scaling_facts(plan),
    }


def _positions(plan: Plan) -> float:
    """Positions that a device computes in a micro-batch of the best layout."""
    layout = plan.best.candidates.layout(0)
    return bind(plan.task.run).positions().count * layout.microbatch / (layout.tp * layout.cp)


def interval(seconds: float, spread: float) -> tuple[float, float]:
    """Seconds between which a step that is expected to take `seconds` lies in 90% of cases.

    spread: one standard deviation of the logarithm of a step's time.
    """
    factor = exp(INTERVAL * spread)
    return seconds / factor, seconds * factor


def layout_rows(plan: Plan, ranked: Ranked, task: Task | None = None) -> list[Row]:
    """One row for each layout. task: where it is not the plan's own."""
    task = task or plan.task
    rates, speeds, watts = tflops(task, ranked.times.total), throughput(task, ranked.times.total), plan.watts(ranked)
    peak = plan.device.peak_tflops.get(task.run.layout.precision)
    rows = []
    for index in range(len(ranked)):
        layout, seconds = ranked.candidates.layout(index), float(ranked.times.total[index])
        causes = {name: float(values[index]) for name, values in ranked.times.causes.items()}
        rows.append(
            {
                **{name: value for name, value in asdict(layout).items() if name != "global_batch"},
                "global_batch": layout.global_batch,
                "recompute": ranked.candidates.recompute_of(index),
                "accumulation": layout.accumulation,
                "step_s": seconds,
                "step_s_interval": list(interval(seconds, float(ranked.times.spread[index]))),
                f"{task.unit}_per_s_per_device": float(speeds[index]),
                "tflops_per_device": float(rates[index]),
                "mfu": None if peak is None else float(rates[index]) / peak,
                "bubble_share": causes.get(WAITING, 0.0) / seconds,
                "exposed_share": sum(value for name, value in causes.items() if waits(name) and name != WAITING)
                / seconds,
                "watts_per_device": None if watts is None else float(watts[index]),
                "time_by_cause_s": causes,
                "memory_bytes": float(ranked.memory.peak[index]),
                "memory_by_cause_bytes": plan.planner.memory_causes(task.run, ranked.candidates.take([index])),
                "p_fits": float(ranked.memory.p_fits[index]),
            }
        )
    return rows


def hybrid_words(facts: Row) -> str:
    """FSDP or Hybrid-STOP, for a person. facts: of `plan_facts`, with at least one break-even."""
    rows, best = facts["hybrid_break_even"], facts["layouts"][0]
    below = ", ".join(f"{row['positions']:,.0f} with tp={row['tp']}" for row in rows)
    tp = f" with tp={best['tp']}" if best["tp"] > 1 else ""
    return (
        "FSDP or Hybrid-STOP: tp x dp_shard receives fewer bytes than FSDP on as many devices while a device computes, in a "
        f"micro-batch, fewer positions than {below} ({rows[0]['times_width']:.2g} x width / tp). The best layout has "
        f"{facts['positions_per_device']:,.0f}{tp}. Bytes are not time: exchanges of tp hide behind nothing, those of FSDP "
        "behind the blocks, as far as these last."
    )


def _why(plan: Plan, why: Why) -> Row:
    found: Row = {"asked": why.asked, "legal": not why.illegal, "fits": why.best is not None}
    if why.illegal:
        return found | {"reason": why.illegal}
    if why.best is None:
        return found | {"least_memory_bytes": sum(why.least.values()), "memory_by_cause_bytes": dict(why.least)}
    (row,) = layout_rows(plan, why.best)
    return found | {"slower_by_s": why.slower_by, "by_cause_s": dict(why.causes), "layout": row}


def scaling_facts(plan: Plan) -> Row:
    """Strong and weak scaling; efficiency is throughput a device beside that of the first point that has one."""
    assert plan.scaling is not None
    return {
        "unit": plan.task.unit,
        "strong": _points(plan, plan.scaling.strong),
        "weak": _points(plan, plan.scaling.weak),
    }


def _points(plan: Plan, points: tuple[Point, ...]) -> list[Row]:
    rows: list[Row] = []
    first: float | None = None
    for point in points:
        row: Row = {"devices": point.devices, "global_batch": point.global_batch, "why_not": point.why or None}
        if point.best is not None:
            task = Task(point.run, point.devices, plan.task.fixed)
            (layout,) = layout_rows(plan, point.best, task)
            speed = layout[f"{task.unit}_per_s_per_device"]
            first = first or speed
            row |= {f"{task.unit}_per_s": speed * point.devices, "efficiency": speed / first, "layout": layout}
        rows.append(row)
    return rows
