"""Why not another layout: what the best one with some choice loses, cause by cause; or that none fits, or is legal.

A layout whose time and memory are known by cause is compared with the best one; nothing is guessed from rules of thumb.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from phalanx.config.document import dotted_name
from phalanx.config.load import parse_overrides
from phalanx.errors import ConfigError, PhalanxError
from phalanx.hardware.machine import Machine
from phalanx.layout.spec import NAMED, OFFLOADS, LayoutTable, Recompute, ResolvedLayout
from phalanx.planner.rank.enumeration import CHOSEN
from phalanx.planner.rank.ranking import Planner, RankedLayouts, Ranking
from phalanx.planner.time.timing import our_framework
from phalanx.planner.trace.part_costs import part_costs
from phalanx.planner.trace.traced_model import TracedModel


@dataclass(frozen=True)
class WhyNot:
    """What one choice costs against the best layout."""

    asked: str
    """The question as it was asked: `tp=8`."""
    illegal: str = ""
    """Why no legal layout has it; empty where some do."""
    best: RankedLayouts | None = None
    """The best layout with it, one entry; None where none fits."""
    slower_by: float = 0.0
    """Seconds a step, beside the best layout of all."""
    causes: Mapping[str, float] = field(default_factory=dict)
    """Seconds of `slower` by cause, what costs most first."""
    least: Mapping[str, float] = field(default_factory=dict)
    """Where none fits: bytes by cause on the worst rank of the layout that needs least."""


def parse_choice(words: str) -> dict[str, Any]:
    """Read `tp=8` or `tp=8,pp=4`, each with or without `layout.` in front. Raises ConfigError."""
    given = [word.strip() for word in words.split(",") if word.strip()]
    chosen: dict[str, Any] = {}
    for override in parse_overrides(given):
        name, value = dotted_name(override.path).removeprefix("layout."), override.value
        if name not in CHOSEN:
            raise ConfigError(f"{words}: planning does not choose {name}; it chooses {', '.join(CHOSEN)}")
        if name in NAMED:
            if value not in NAMED[name]:
                raise ConfigError(f"{words}: {name} is one of {', '.join(NAMED[name])}")
        elif name in ("reshard_after_forward", *OFFLOADS):
            if not isinstance(value, bool):
                raise ConfigError(f"{words}: {name} is true or false")
        elif not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{words}: {name} is a whole number")
        elif value < (least := 0 if name == "zero" else 1):
            raise ConfigError(f"{words}: {name} is at least {least}")
        chosen[name] = value
    if not chosen:
        raise ConfigError(f"{words!r} names no choice; write FIELD=VALUE, such as tp=8")
    return chosen


def explain_choice(planner: Planner, ranking: Ranking, words: str) -> WhyNot:
    """Compare the best layout with this choice to the best of all. `ranking` has one that fits."""
    chosen, task = parse_choice(words), ranking.task
    for name, value in chosen.items():
        if task.fixed.get(name, value) != value:
            return WhyNot(words, illegal=f"layout.{name}={task.fixed[name]} is fixed by the command line")
    # All legal layouts were judged already: those with the choice are picked out.
    has_it = np.ones(len(ranking.legal), bool)
    for name, value in chosen.items():
        has_it &= getattr(ranking.legal, name) == (NAMED[name].index(value) if name in NAMED else value)
    if has_it.any():
        fits = has_it[ranking.fitting]
        fitting, bounds = ranking.fitting[fits], ranking.bounds.take(fits)
        # Bounds of the first ranking hold, but it simulated the best of all alone, few of which have the choice.
        legal, peak = ranking.legal.take(has_it), ranking.peak[has_it]
        ranked = planner.simulate_best(task.model, ranking.legal.take(fitting), ranking.peak[fitting], bounds)
    else:
        # Enumeration may have left it out as beyond its limits, which fixed fields do not know.
        try:
            other = planner.rank_layouts(replace(task, fixed={**task.fixed, **chosen}))
        except PhalanxError as error:
            return WhyNot(words, illegal=str(error))
        legal, peak, ranked = other.legal, other.peak, other.ranked
    if not len(ranked):
        return WhyNot(words, least=planner.memory_breakdown(task.model, planner.least_memory(task, legal, peak)))
    found, best = ranked.take([0]), ranking.ranked.times
    nothing = np.zeros(1)
    causes = {
        name: float(found.times.causes.get(name, nothing)[0] - best.causes.get(name, nothing)[0])
        for name in dict.fromkeys([*found.times.causes, *best.causes])
    }
    ordered = dict(sorted(causes.items(), key=lambda item: -item[1]))
    return WhyNot(words, best=found, slower_by=float(found.times.total[0] - best.total[0]), causes=ordered)


@dataclass(frozen=True)
class BreakEven:
    """Where the bytes of one tensor-parallel degree and of FSDP over as many devices are equal."""

    tp: int
    positions: float
    """Positions per device and micro-batch below which Hybrid-STOP receives fewer bytes."""
    samples: float
    """The same as samples of a micro-batch of the `tp` devices together."""
    times_width: float
    """`positions` * tp / width of the model: 4.5 for the textbook block."""


def break_evens(
    model: TracedModel, legal: LayoutTable, recompute: Recompute, machine: Machine
) -> tuple[BreakEven, ...]:
    """Return the break-even of each tensor-parallel degree above 1 among `legal`.

    recompute: what is computed again, exchanges of activations included.
    """
    devices = int(legal.world_size[0])
    copies = our_framework(model, machine).copy_engines
    degrees = np.unique(legal.tp[(legal.tp > 1) & (legal.cp == 1)]).tolist()
    return tuple(break_even(model, tp, devices // tp, recompute, peer_copies=copies) for tp in degrees)


def break_even(model: TracedModel, tp: int, shards: int, recompute: Recompute, *, peer_copies: bool) -> BreakEven:
    """Compare `tp` x `shards` devices with FSDP over all of them. peer_copies: whether gradients are sent as computed."""
    positions = model.positions().count
    dtype = model.precision.compute_dtype
    # FSDP gathers a parameter for either pass, and reduces its gradient once.
    each = 2 * dtype.itemsize + (dtype.itemsize if peer_copies else max(4, dtype.itemsize))
    # For one sample, uncompiled: what is communicated is the same, and tracing is quick.
    layouts = (ResolvedLayout(global_batch=1, tp=degree, recompute=recompute) for degree in (1, tp))
    kernel = model.likely_kernel(rocm=False)
    whole, part = (
        part_costs("block", model.setting_of(layout, attention=kernel, compiled=False), 1) for layout in layouts
    )
    saved = each * (whole.parameter_count * (1 - 1 / (tp * shards)) - part.parameter_count * (1 - 1 / shards))
    exchanged = sum(collective.bytes for collective in part.costs.collectives()) * (tp - 1) / tp / positions
    # Where the bytes that tensor parallelism saves and those that it exchanges are equal.
    tokens = saved / exchanged
    return BreakEven(tp, tokens / tp, tokens / positions, tokens / model.config.d_model)
