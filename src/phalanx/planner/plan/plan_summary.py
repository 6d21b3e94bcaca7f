"""A plan as plain values: `--json` prints them, and text and page are made of them."""

from __future__ import annotations

from dataclasses import asdict
from math import exp
from typing import Any

from phalanx.formatting import format_count, format_duration
from phalanx.planner.plan.make_plan import Plan
from phalanx.planner.plan.scaling import Point
from phalanx.planner.rank.cost_models import WAITING, is_waiting
from phalanx.planner.rank.ranking import RankedLayouts, Task

INTERVAL = 1.645
"""Standard deviations to each side that hold 90% of what may come."""

Row = dict[str, Any]


def summarise_plan(plan: Plan) -> Row:
    """Return everything that a plan says, with units in the names; times in seconds, memory in bytes."""
    task, ranking = plan.task, plan.ranking
    first = plan.best.layouts.row(0)
    answers: list[Row] = []
    for why in plan.why:
        answer: Row = {"asked": why.asked, "legal": not why.illegal, "fits": why.best is not None}
        if why.illegal:
            answer |= {"reason": why.illegal}
        elif why.best is None:
            # no layout with this choice fits: what its least demanding one needs says how far it is from fitting
            answer |= {"least_memory_bytes": sum(why.least.values()), "memory_by_cause_bytes": dict(why.least)}
        else:
            (row,) = layout_rows(plan, why.best)
            answer |= {"slower_by_s": why.slower_by, "by_cause_s": dict(why.causes), "layout": row}
        answers.append(answer)
    return {
        "cluster": plan.planner.machine.name,
        "device": plan.device.name,
        "profile": plan.planner.models.profile_words,
        "parameters": task.model.parameter_count(),
        "active_parameters": task.model.active_parameter_count(),
        "devices": task.devices,
        "device_memory_bytes": plan.planner.models.device_bytes,
        "unit": task.unit,
        f"{task.unit}_per_step": task.amount,
        "global_batch": task.batch,
        "flops_convention": task.run.training.flops,
        "fixed": dict(task.fixed),
        "legal": len(ranking.legal),
        "fitting": len(ranking.fitting),
        "least_p_fits": plan.planner.least_p,
        "layouts": layout_rows(plan, plan.best),
        "pareto": layout_rows(plan, plan.front),
        "budget": asdict(plan.budget),
        "large_batch": None if plan.large_batch is None else asdict(plan.large_batch),
        "why": answers,
        # Of a micro-batch of the best layout.
        "positions_per_device": task.model.positions().count * first.microbatch / (first.tp * first.cp),
        "hybrid_break_even": [asdict(one) for one in plan.break_evens],
        "scaling": None if plan.scaling is None else summarise_scaling(plan),
    }


def time_interval(seconds: float, spread: float) -> tuple[float, float]:
    """Return the seconds between which a step that is expected to take `seconds` lies in 90% of cases.

    spread: one standard deviation of the logarithm of a step's time.
    """
    factor = exp(INTERVAL * spread)
    return seconds / factor, seconds * factor


def layout_rows(plan: Plan, ranked: RankedLayouts, task: Task | None = None) -> list[Row]:
    """Return one row for each layout. task: where it is not the plan's own."""
    task = task or plan.task
    seconds_per_step, watts = ranked.times.total, plan.watts(ranked)
    rates, speeds = task.model_tflops(seconds_per_step), task.device_throughput(seconds_per_step)
    # Without a published peak of this format there is no MFU.
    peak = plan.device.peak_tflops.get(task.run.layout.peak_format)
    rows = []
    for index in range(len(ranked)):
        layout, seconds = ranked.layouts.row(index), float(seconds_per_step[index])
        causes = {name: float(values[index]) for name, values in ranked.times.causes.items()}
        rows.append(
            {
                **asdict(layout),
                "accumulation": layout.accumulation,
                "step_s": seconds,
                "step_s_interval": list(time_interval(seconds, float(ranked.times.spread[index]))),
                f"{task.unit}_per_s_per_device": float(speeds[index]),
                "tflops_per_device": float(rates[index]),
                "mfu": None if peak is None else float(rates[index]) / peak,
                "bubble_share": causes.get(WAITING, 0.0) / seconds,
                "exposed_share": sum(value for name, value in causes.items() if is_waiting(name) and name != WAITING)
                / seconds,
                "watts_per_device": None if watts is None else float(watts[index]),
                "time_by_cause_s": causes,
                "memory_bytes": float(ranked.memory.peak[index]),
                "host_memory_bytes": float(ranked.memory.host[index]),
                "memory_by_cause_bytes": plan.planner.memory_breakdown(task.model, ranked.layouts.take([index])),
                "p_fits": float(ranked.memory.p_fits[index]),
            }
        )
    return rows


def describe_break_evens(summary: Row) -> str:
    """Say when Hybrid-STOP beats FSDP. summary: of `summarise_plan`, with at least one break-even."""
    rows, best = summary["hybrid_break_even"], summary["layouts"][0]
    below = ", ".join(f"{row['positions']:,.0f} with tp={row['tp']}" for row in rows)
    tp = f" with tp={best['tp']}" if best["tp"] > 1 else ""
    return (
        "FSDP or Hybrid-STOP: tp x dp_shard receives fewer bytes than FSDP on as many devices while a device computes, in "
        f"a micro-batch, fewer positions than {below} ({rows[0]['times_width']:.2g} x width / tp). The best layout has "
        f"{summary['positions_per_device']:,.0f}{tp}. Bytes are not time: exchanges of tp hide behind nothing, those of "
        "FSDP behind the blocks, as far as these last."
    )


def describe_large_batch(summary: Row) -> str:
    """Say what the global batch costs in samples. summary: of `summarise_plan`, with a critical batch."""
    found, unit = summary["large_batch"], summary["unit"]
    share = found["samples"] / found["critical"]
    past = "warning: " if share > 1.0 else ""
    times = f"{share:.2g} times" if share > 1.0 else f"{share:.2g} of"
    advice = "; fewer data-parallel ranks or a smaller global batch waste fewer" if share > 1.0 else ""
    return (
        f"{past}the global batch of {found['samples']:,} samples is {times} the critical batch of {found['critical']:,.4g}: "
        f"to the loss that a small batch reaches after {format_count(summary['budget']['amount'])} {unit} it takes "
        f"{format_count(found['amount'])} ({found['factor']:.2f} times), in {format_duration(found['elapsed_s'])}{advice}"
    )


def summarise_scaling(plan: Plan) -> Row:
    """Return strong and weak scaling; efficiency is throughput a device beside that of the first point that has one."""
    assert plan.scaling is not None
    return {
        "unit": plan.task.unit,
        "strong": _summarise_points(plan, plan.scaling.strong),
        "weak": _summarise_points(plan, plan.scaling.weak),
    }


def _summarise_points(plan: Plan, points: tuple[Point, ...]) -> list[Row]:
    rows: list[Row] = []
    first: float | None = None
    for point in points:
        row: Row = {"devices": point.task.devices, "global_batch": point.global_batch, "why_not": point.why or None}
        if point.best is not None:
            (layout,) = layout_rows(plan, point.best, point.task)
            speed = layout[f"{plan.task.unit}_per_s_per_device"]
            first = first or speed
            row |= {
                f"{plan.task.unit}_per_s": speed * point.task.devices,
                "efficiency": speed / first,
                "layout": layout,
            }
        rows.append(row)
    return rows
