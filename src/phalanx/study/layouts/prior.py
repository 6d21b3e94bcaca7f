"""The planner's prior of a search: time and memory of every point of a space, before anything is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from phalanx.config.load import dump_run, parse_run
from phalanx.config.studies import Search
from phalanx.errors import ConfigError
from phalanx.layout.spec import OFFLOADS, LayoutTable
from phalanx.planner.memory.model import Kernels, memory
from phalanx.planner.memory.probability import KEPT_BY_DRIVER, communicators, device_bytes
from phalanx.planner.rank.cost_models import CostModels, Floats
from phalanx.planner.rank.enumeration import CHOSEN
from phalanx.planner.rank.ranking import Planner, Task
from phalanx.planner.time.profile import CONSTANTS, spread_of
from phalanx.planner.time.timing import our_framework
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.study.layouts.layout_space import LayoutSpace, build_layout_space, check_layout, matching_layouts

_SIMULATED = 256
"""Layouts, fastest by a bound of their time first, whose pipeline is simulated."""


@dataclass(frozen=True)
class Prior:
    """Time and memory that the planner expects. Arrays of [points]."""

    seconds: Floats
    """Seconds of a step."""
    sensitivity: Floats
    """[points, constants]: change of the logarithm of `seconds` where one constant of the device's profile is off by one
    standard deviation of what is known of it."""
    spread: float
    """One standard deviation of the logarithm of the measured over the expected time."""
    margin: Floats
    """Logarithm of the device's memory over all that is expected to be needed of it; negative where that is more."""
    peak: Floats
    """Bytes of live tensors on the worst rank, and of the buffers that peers read: what trials report."""

    def take(self, which: Any) -> Prior:
        """Return the prior of the points at these positions, or where this mask is true."""
        return Prior(self.seconds[which], self.sensitivity[which], self.spread, self.margin[which], self.peak[which])


def planned_space(planner: Planner, task: Task, search: Search) -> tuple[LayoutSpace, Prior]:
    """Return every point whose layout may fit, with what the planner expects of each.

    Raises ConfigError where nothing is legal, nothing may fit, or the section of the run file leaves nothing.
    """
    check_layout(search)
    # A single value is as good as one on the command line: the planner then enumerates no others.
    fixed = {name: values[0] for name, values in search.layout.items() if len(values) == 1 and name in CHOSEN}
    clash = [name for name, value in fixed.items() if task.fixed.get(name, value) != value]
    if clash:
        raise ConfigError(f"search.layout.{clash[0]} has only {fixed[clash[0]]}, but the command line another value")
    # Both are listed only for who asks for both.
    limits = replace(planner.limits, **{name: len(search.layout.get(name, ())) > 1 for name in OFFLOADS})
    narrow = _Narrowed(planner.machine, planner.models, planner.least_p, limits, search)
    legal, _, fitting, _ = narrow.find_fitting(Task(task.model, task.devices, {**fixed, **task.fixed}))
    if not len(fitting):
        raise ConfigError(f"none of {len(legal):,} legal layouts may fit; phalanx plan --fit finds how many devices do")
    space = build_layout_space(legal.take(fitting), search)
    return space, _expect_tunables(
        planner, task.model, space, expect_layouts(planner, task.model, space.layouts).take(space.layout_of)
    )


@dataclass(frozen=True)
class _Narrowed(Planner):
    """A planner that looks at nothing but what a search may choose, so that the model is not traced for other layouts."""

    search: Search = field(default_factory=Search)

    def every_legal(self, task: Task) -> LayoutTable:
        """Return the legal layouts with the values that the search allows; chunks of tokens are chosen later."""
        legal = super().every_legal(task)
        wanted = {name: values for name, values in self.search.layout.items() if name != "ep_chunks"}
        return legal.take(matching_layouts(legal, self.search.model_copy(update={"layout": wanted})))


def expect_layouts(planner: Planner, model: TracedModel, layouts: LayoutTable) -> Prior:
    """Return the prior of these layouts, [layouts]; the pipelines of the best are simulated."""
    models = planner.models
    times = models.bound_times(model, layouts)
    seconds = times.total.copy()
    best = np.argsort(seconds, kind="stable")[:_SIMULATED]
    simulated = models.times(model, layouts.take(best))
    # Simulated layouts take longer than their bounds; beside them all others would seem better than they are.
    seconds *= float(np.exp(np.median(np.log(simulated.total / seconds[best]))))
    seconds[best] = simulated.total
    rocm = planner.machine.node.device.startswith("MI")
    copies = our_framework(model, planner.machine).copy_engines
    held = memory(model, layouts, Kernels.on_accelerators(model, rocm=rocm), peer_copies=copies)
    needed = device_bytes(held.allocated, communicators(layouts), models.beside, held.peer_buffers)
    # How the logarithm of the time changes with an error of each constant of the device.
    names = [name for name in CONSTANTS if spread_of(name) > 0]
    sensitivity = []
    for name in names:
        # Half a standard deviation: the time is not linear, and larger errors are rare.
        changed = with_constants(models, {name: math.exp(0.5 * spread_of(name))})
        sensitivity.append(2.0 * np.log(changed.bound_times(model, layouts).total / times.total))
    return Prior(
        seconds=seconds,
        sensitivity=np.stack(sensitivity, axis=1),
        spread=float(np.median(times.spread)),
        margin=np.log(models.device_bytes * (1 - KEPT_BY_DRIVER) / needed),
        peak=held.held,
    )


def _expect_tunables(planner: Planner, model: TracedModel, space: LayoutSpace, prior: Prior) -> Prior:
    """Return `prior` with the effects of the values of tunables, each planned by itself.

    Only ratios count, so the closed form will do: what it lacks is about the same with and without the value.
    """
    models = planner.models
    seconds, margin, peak = prior.seconds.copy(), prior.margin.copy(), prior.peak.copy()
    for points, overrides in space.tunable_values():
        try:
            changed = parse_run(dump_run(model.run), "the run file", overrides)
        except ConfigError:
            # Nothing is expected of such a value; a trial that has it is refused, and says why.
            continue
        if changed == model.run:
            continue
        which, place = np.unique(space.layout_of[points], return_inverse=True)
        layouts = space.layouts.take(which)
        slower, more = (
            np.log(there / here)[place]
            for here, there in zip(
                _bound_costs(models, model, layouts), _bound_costs(models, model.rebind(changed), layouts), strict=True
            )
        )
        seconds[points] *= np.exp(slower)
        margin[points] -= more
        peak[points] *= np.exp(more)
    return replace(prior, seconds=seconds, margin=margin, peak=peak)


def _bound_costs(models: CostModels, model: TracedModel, layouts: LayoutTable) -> tuple[Floats, Floats]:
    """Return (seconds of a step, by a bound, and bytes on the worst rank), [layouts]: good for ratios."""
    return models.bound_times(model, layouts).total, models.memory(model, layouts).peak


def with_constants(models: CostModels, factors: dict[str, float]) -> CostModels:
    """Return the models with some constants of the device multiplied."""
    named = models.profile
    return replace(models, profile=replace(named, profile=named.profile.scaled(factors)))
