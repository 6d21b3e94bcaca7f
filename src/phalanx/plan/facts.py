"""A plan as plain values: what `--json` prints, and what the words and the page are made of."""

from __future__ import annotations

from dataclasses import asdict
from math import exp
from typing import Any

from phalanx.plan.budget import waits
from phalanx.plan.explain import Why
from phalanx.plan.judge import Ranked, Task, tflops, tokens_per_s
from phalanx.plan.models import WAITING
from phalanx.plan.plan import Plan
from phalanx.plan.scaling import Point

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
        "tokens_per_step": task.tokens,
        "flops_convention": task.run.training.flops,
        "fixed": dict(task.fixed),
        "legal": len(judged.legal),
        "fitting": len(judged.fitting),
        "least_p_fits": plan.planner.least_p,
        "layouts": layout_rows(plan, plan.best),
        "pareto": layout_rows(plan, plan.front),
        "budget": asdict(plan.budget),
        "why": [_why(plan, one) for one in plan.why],
        "scaling": None if plan.scaling is None else scaling_facts(plan),
    }


def layout_rows(plan: Plan, ranked: Ranked, task: Task | None = None) -> list[Row]:
    """One row for each layout. task: where it is not the plan's own."""
    task = task or plan.task
    rates, speeds, watts = tflops(task, ranked.times.total), tokens_per_s(task, ranked.times.total), plan.watts(ranked)
    peak = plan.device.peak_tflops.get(task.run.layout.precision)
    rows = []
    for index in range(len(ranked)):
        layout, seconds = ranked.candidates.layout(index), float(ranked.times.total[index])
        spread = exp(INTERVAL * float(ranked.times.spread[index]))
        causes = {name: float(values[index]) for name, values in ranked.times.causes.items()}
        rows.append(
            {
                **{name: value for name, value in asdict(layout).items() if name != "global_batch"},
                "global_batch": layout.global_batch,
                "recompute": ranked.candidates.recompute_of(index),
                "accumulation": layout.accumulation,
                "step_s": seconds,
                "step_s_interval": [seconds / spread, seconds * spread],
                "tokens_per_s_per_device": float(speeds[index]),
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
    return {"strong": _points(plan, plan.scaling.strong), "weak": _points(plan, plan.scaling.weak)}


def _points(plan: Plan, points: tuple[Point, ...]) -> list[Row]:
    rows: list[Row] = []
    first: float | None = None
    for point in points:
        row: Row = {"devices": point.devices, "global_batch": point.global_batch, "why_not": point.why or None}
        if point.best is not None:
            task = Task(point.run, point.devices, plan.task.fixed)
            (layout,) = layout_rows(plan, point.best, task)
            speed = layout["tokens_per_s_per_device"]
            first = first or speed
            row |= {"tokens_per_s": speed * point.devices, "efficiency": speed / first, "layout": layout}
        rows.append(row)
    return rows
