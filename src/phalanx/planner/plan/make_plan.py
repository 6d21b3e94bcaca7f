"""A plan: the layouts worth running on so many devices, and everything that was asked about them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from phalanx.errors import PhalanxError
from phalanx.hardware.device_facts import DeviceFacts, device_facts
from phalanx.planner.plan.budget import (
    Budget,
    LargeBatch,
    Reliability,
    estimate_budget,
    estimate_goodput,
    judge_batch,
)
from phalanx.planner.plan.compare_layouts import BreakEven, WhyNot, break_evens, explain_choice, parse_choice
from phalanx.planner.plan.scaling import Scaling, find_fewest_devices, scale_devices
from phalanx.planner.rank.cost_models import Floats, working_watts
from phalanx.planner.rank.ranking import Planner, RankedLayouts, Ranking, Task, number_splits, pareto_front

FRONT = 12
"""Layouts of the Pareto front that are shown."""


class NothingFits(PhalanxError):
    """No layout fits into the memory of so many devices; the message says what binds and how many would do."""

    exit_code = 2


@dataclass(frozen=True)
class Wishes:
    """What a plan should answer besides which layouts are best."""

    best: int = 10
    """Layouts in the table."""
    why: tuple[str, ...] = ()
    scale: tuple[int, ...] = ()
    """Numbers of devices."""
    amount: int | None = None
    """Tokens, or samples, to train on; None takes those of `training.steps`."""
    reliability: Reliability = field(default_factory=Reliability)
    critical_batch: float | None = None
    """Samples of the critical batch, where it is known."""
    working_w: float | None = None
    """Watts of a device that works, as a run measured them; None takes the device table's."""


@dataclass(frozen=True)
class Plan:
    """The layouts worth running, and the answers to what was asked about them."""

    planner: Planner
    ranking: Ranking
    best: RankedLayouts
    """The best layout for each choice of tp, cp and pp, fastest first."""
    front: RankedLayouts
    """Layouts that no other one beats in time, memory and energy at once, fastest first."""
    budget: Budget
    why: tuple[WhyNot, ...]
    scaling: Scaling | None
    break_evens: tuple[BreakEven, ...] = ()
    """FSDP against Hybrid-STOP, where a layout of the table has both, or the model is of the kind that it was made for."""
    large_batch: LargeBatch | None = None
    """What the global batch costs in samples, where the critical batch is known."""

    @property
    def task(self) -> Task:
        """The task that was planned."""
        return self.ranking.task

    @property
    def device(self) -> DeviceFacts:
        """The device of the machine."""
        return device_facts(self.planner.machine.node.device)

    def watts(self, ranked: RankedLayouts) -> Floats | None:
        """Return the mean power of one device in each layout; None where it is not known."""
        working_w = self.budget.working_w
        return None if working_w is None else ranked.times.mean_power(working_w)


def make_plan(planner: Planner, task: Task, wishes: Wishes) -> Plan:
    """Plan a task. Raises ConfigError where nothing is legal, NothingFits where nothing fits."""
    for words in wishes.why:
        # Before the planning, which takes much longer: a choice that cannot be read is an error of the command line.
        parse_choice(words)
    ranking = planner.rank_layouts(task)
    if not len(ranking.ranked):
        raise NothingFits(_explain_nothing_fits(planner, ranking))
    # Layouts are sorted: the first of each split is its fastest. Neighbours of the best one would fill the table otherwise.
    _, first_of_split = np.unique(number_splits(ranking.ranked.layouts), return_index=True)
    best = ranking.ranked.take(np.sort(first_of_split)[: wishes.best])
    working_w = working_watts(device_facts(planner.machine.node.device), wishes.working_w)
    # Elsewhere the comparison says nothing about a layout of the table.
    tensor_and_sharded = np.any((best.layouts.tp > 1) & (best.layouts.shards > 1) & (best.layouts.zero == 3))
    compares_hybrid = tensor_and_sharded or task.run.model.family == "weather"
    # Nodes fail, not devices: a part of a node fails as often as a whole one.
    nodes = math.ceil(task.devices / planner.machine.node.devices)
    budget = estimate_budget(
        amount=wishes.amount or task.amount * task.run.training.steps,
        unit=task.unit,
        amount_per_step=task.amount,
        step_s=float(best.times.total[0]),
        devices=task.devices,
        watts=None if working_w is None else float(best.times.mean_power(working_w)[0]),
        losses=estimate_goodput(task.model.parameter_count(), nodes, wishes.reliability),
        working_w=working_w,
    )
    critical = wishes.critical_batch
    return Plan(
        planner=planner,
        ranking=ranking,
        best=best,
        front=choose_front(ranking.ranked),
        budget=budget,
        why=tuple(explain_choice(planner, ranking, words) for words in wishes.why),
        scaling=scale_devices(planner, task, list(wishes.scale)) if wishes.scale else None,
        break_evens=break_evens(task.model, ranking.legal, best.layouts.row(0).recompute, planner.machine)
        if compares_hybrid
        else (),
        large_batch=None if critical is None else judge_batch(budget, task.samples, critical),
    )


def make_smallest_plan(planner: Planner, task: Task, wishes: Wishes) -> Plan:
    """Plan on the smallest number of devices that fits. Raises NothingFits where none tried will do."""
    found = find_fewest_devices(planner, task)
    if found is None:
        raise NothingFits(f"no number of {planner.machine.name}'s devices was found on which a layout fits")
    return make_plan(planner, found.task, wishes)


def choose_front(ranked: RankedLayouts) -> RankedLayouts:
    """Return at most FRONT layouts that are Pareto-optimal in seconds, bytes and energy, fastest first."""
    seconds, peak = ranked.times.total, ranked.memory.peak
    # At 1 W a device: what a device draws multiplies the energy of all layouts alike.
    front = pareto_front(seconds, peak, seconds * ranked.times.mean_power(1.0))
    if len(front) > FRONT:
        front = front[np.round(np.linspace(0, len(front) - 1, FRONT)).astype(np.int64)]
    return ranked.take(front)


def _explain_nothing_fits(planner: Planner, ranking: Ranking) -> str:
    """Return why nothing fits, and the smallest number of devices on which something does."""
    task = ranking.task
    least = planner.least_memory(task, ranking.legal, ranking.peak)
    causes = planner.memory_breakdown(task.model, least)
    row, room = least.row(0), planner.models.device_bytes / 2**30
    largest = ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in list(causes.items())[:3])
    lines = [
        f"none of the {len(ranking.legal):,} legal layouts fits into {task.devices:,} x {room:.0f} GiB: the one that needs "
        f"least needs {sum(causes.values()) / 2**30:.1f} GiB",
        f"{row} microbatch={row.microbatch} recompute={row.recompute}: {largest}",
    ]
    if shortage := planner.models.explain_host_shortage(task.model, least):
        lines.append(shortage)
    found = find_fewest_devices(planner, task)
    if found is not None and found.task.devices > task.devices:
        lines.append(f"smallest number of devices that fits: {found.task.devices:,}")
    return "\n".join(lines)
