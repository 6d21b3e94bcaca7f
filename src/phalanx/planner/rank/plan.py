"""A plan: the layouts worth running on so many devices, and everything that was asked about them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from phalanx.errors import PhalanxError
from phalanx.families.registry import bind
from phalanx.hardware.device import DeviceFacts, device_facts
from phalanx.planner.explain.break_even import BreakEven, break_evens
from phalanx.planner.explain.budget import Budget, Goodput, budget, goodput, power_w
from phalanx.planner.explain.causes import Why, explain, parse_choice
from phalanx.planner.explain.reliability import Reliability
from phalanx.planner.explain.scaling import Scaling, fewest_devices, scale
from phalanx.planner.rank.judge import Judged, Planner, Ranked, Task, split_of
from phalanx.planner.rank.models import Floats

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


@dataclass(frozen=True)
class Plan:
    """The answers."""

    planner: Planner
    judged: Judged
    best: Ranked
    """The best layout for each choice of tp, cp and pp, fastest first."""
    front: Ranked
    """Layouts that no other one beats in time, memory and energy at once, fastest first."""
    budget: Budget
    why: tuple[Why, ...]
    scaling: Scaling | None
    break_evens: tuple[BreakEven, ...] = ()
    """FSDP against Hybrid-STOP, where a layout of the table has both, or the model is of the kind that it was made for."""

    @property
    def task(self) -> Task:
        """What was planned."""
        return self.judged.task

    @property
    def device(self) -> DeviceFacts:
        """What one device is."""
        return device_facts(self.planner.machine.node.device)

    def watts(self, ranked: Ranked) -> Floats | None:
        """Mean power of one device in each layout; None where the board's is not known."""
        return None if self.device.power_w is None else power_w(ranked.times, self.device.power_w)


def make_plan(planner: Planner, task: Task, wishes: Wishes) -> Plan:
    """Plan a task. Raises ConfigError where nothing is legal, NothingFits where nothing fits."""
    for words in wishes.why:
        parse_choice(words)
    judged = planner.judge(task)
    if not len(judged.ranked):
        raise NothingFits(_what_binds(planner, judged))
    best = _of_each_kind(judged.ranked, wishes.best)
    return Plan(
        planner=planner,
        judged=judged,
        best=best,
        front=pareto(judged.ranked, device_facts(planner.machine.node.device).power_w or 1.0),
        budget=_budget(planner, judged, wishes),
        why=tuple(explain(planner, judged, words) for words in wishes.why),
        scaling=scale(planner, task, list(wishes.scale)) if wishes.scale else None,
        break_evens=_break_evens(planner, judged, best),
    )


def _break_evens(planner: Planner, judged: Judged, best: Ranked) -> tuple[BreakEven, ...]:
    layouts = best.candidates
    both = np.any((layouts.tp > 1) & (layouts.shards > 1) & (layouts.zero == 3))
    if not both and judged.task.run.model.family != "weather":
        return ()
    return break_evens(judged.task.run, judged.legal, layouts.recompute_of(0), planner.machine)


def fit_plan(planner: Planner, task: Task, wishes: Wishes) -> Plan:
    """The plan on the smallest number of devices that fits. Raises NothingFits where none tried will do."""
    found = fewest_devices(planner, task)
    if found is None:
        raise NothingFits(f"no number of {planner.machine.name}'s devices was found on which a layout fits")
    return make_plan(planner, found.task, wishes)


def _of_each_kind(ranked: Ranked, most: int) -> Ranked:
    _, first = np.unique(split_of(ranked.candidates), return_index=True)
    return ranked.take(np.sort(first)[:most])


def pareto(ranked: Ranked, board_w: float) -> Ranked:
    """Those that no other beats in seconds, bytes and energy at once, at most FRONT of them."""
    seconds, peak = ranked.times.total, ranked.memory.peak
    energy = seconds * power_w(ranked.times, board_w)
    goals = np.stack([seconds, peak, energy], axis=1)
    kept: list[int] = []
    for index, goal in enumerate(goals):
        # Those before are at least as fast, so that nothing kept is beaten later by more than a tie.
        if not any(np.all(goals[other] <= goal) for other in kept):
            kept.append(index)
    if len(kept) > FRONT:
        kept = [kept[round(place)] for place in np.linspace(0, len(kept) - 1, FRONT)]
    return ranked.take(kept)


def losses(planner: Planner, task: Task, reliability: Reliability) -> Goodput:
    """What failures and checkpoints cost the task."""
    nodes = math.ceil(task.devices / planner.machine.node.devices)
    return goodput(bind(task.run).parameter_count(), nodes, reliability)


def _budget(planner: Planner, judged: Judged, wishes: Wishes) -> Budget:
    task, best = judged.task, judged.ranked.take([0])
    board = device_facts(planner.machine.node.device).power_w
    return budget(
        amount=wishes.amount or task.amount * task.run.training.steps,
        unit=task.unit,
        amount_per_step=task.amount,
        step_s=float(best.times.total[0]),
        devices=task.devices,
        watts=None if board is None else float(power_w(best.times, board)[0]),
        losses=losses(planner, task, wishes.reliability),
    )


def _what_binds(planner: Planner, judged: Judged) -> str:
    """Why nothing fits, and the smallest number of devices on which something does."""
    task = judged.task
    least = planner.leanest(task.run, judged.legal, judged.peak)
    causes = planner.memory_causes(task.run, least)
    room = planner.models.device_bytes / 2**30
    layout = f"{least.layout(0)} microbatch={least.microbatch[0]} recompute={least.recompute_of(0)}"
    lines = [
        f"none of the {len(judged.legal):,} legal layouts fits into {task.devices:,} x {room:.0f} GiB: the one that needs "
        f"least needs {sum(causes.values()) / 2**30:.1f} GiB",
        f"{layout}: {_largest(causes)}",
    ]
    found = fewest_devices(planner, task)
    if found is not None and found.task.devices > task.devices:
        lines.append(f"smallest number of devices that fits: {found.task.devices:,}")
    return "\n".join(lines)


def _largest(causes: dict[str, float], most: int = 3) -> str:
    return ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in list(causes.items())[:most])
