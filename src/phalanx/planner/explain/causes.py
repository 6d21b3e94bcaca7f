"""Why not another layout: what the best one with some choice loses, cause by cause; or that none fits, or is legal.

A layout whose time and memory are known by cause is compared with the best one; nothing is guessed from rules of thumb.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from phalanx.config.document import dotted
from phalanx.config.override import parse_overrides
from phalanx.errors import ConfigError, PhalanxError
from phalanx.planner.layouts.candidates import CONTEXTS, GATHERS, RECOMPUTES, SCHEDULES
from phalanx.planner.layouts.enumerate import CHOSEN
from phalanx.planner.rank.judge import Judged, Planner, Ranked, Task

_NAMES: dict[str, tuple[str, ...]] = {
    "schedule": SCHEDULES,
    "context": CONTEXTS,
    "recompute": RECOMPUTES,
    "gather": GATHERS,
}


@dataclass(frozen=True)
class Why:
    """What becomes of one choice."""

    asked: str
    """As it was asked: `tp=8`."""
    illegal: str = ""
    """Why no legal layout has it; empty where some do."""
    best: Ranked | None = None
    """The best layout with it, one entry; None where none fits."""
    slower_by: float = 0.0
    """Seconds a step, beside the best layout of all."""
    causes: Mapping[str, float] = field(default_factory=dict)
    """Those seconds by cause, what costs most first."""
    least: Mapping[str, float] = field(default_factory=dict)
    """Where none fits: bytes by cause on the worst rank of the layout that needs least."""


def parse_choice(words: str) -> dict[str, Any]:
    """`tp=8` or `tp=8,pp=4`, each with or without `layout.` in front. Raises ConfigError."""
    given = [word.strip() for word in words.split(",") if word.strip()]
    chosen: dict[str, Any] = {}
    for override in parse_overrides(given):
        name = dotted(override.path).removeprefix("layout.")
        if name not in CHOSEN:
            raise ConfigError(f"{words}: planning does not choose {name}; it chooses {', '.join(CHOSEN)}")
        value, known = override.value, _NAMES.get(name)
        if known is not None and value not in known:
            raise ConfigError(f"{words}: {name} is one of {', '.join(known)}")
        if known is None:
            _check_number(words, name, value)
        chosen[name] = value
    if not chosen:
        raise ConfigError(f"{words!r} names no choice; write FIELD=VALUE, such as tp=8")
    return chosen


def _check_number(words: str, name: str, value: Any) -> None:
    whether = name == CHOSEN[-1]
    if not isinstance(value, int) or isinstance(value, bool) != whether:
        raise ConfigError(f"{words}: {name} is {'true or false' if whether else 'a whole number'}")
    least = 0 if name == "zero" or whether else 1
    if value < least:
        raise ConfigError(f"{words}: {name} is at least {least}")


def explain(planner: Planner, judged: Judged, words: str) -> Why:
    """What the best layout with this choice loses against the best of all. `judged` has one that fits."""
    chosen = parse_choice(words)
    task = judged.task
    clash = [name for name, value in chosen.items() if task.fixed.get(name, value) != value]
    if clash:
        name = clash[0]
        return Why(words, illegal=f"layout.{name}={task.fixed[name]} is fixed by the command line")
    which = np.ones(len(judged.legal), bool)
    for name, value in chosen.items():
        wanted = _NAMES[name].index(value) if name in _NAMES else value
        which &= getattr(judged.legal, name) == wanted
    if not which.any():
        return _beyond(planner, judged, words, chosen)
    return _compare(planner, judged, words, which)


def _beyond(planner: Planner, judged: Judged, words: str, chosen: dict[str, Any]) -> Why:
    """A choice that the enumeration does not hold: beyond its limits, or not legal."""
    task: Task = replace(judged.task, fixed={**judged.task.fixed, **chosen})
    try:
        other = planner.judge(task)
    except PhalanxError as error:
        return Why(words, illegal=str(error))
    if not len(other.ranked):
        least = planner.leanest(task.run, other.legal, other.peak)
        return Why(words, least=planner.memory_causes(task.run, least))
    return _difference(judged, words, other.ranked.take([0]))


def _compare(planner: Planner, judged: Judged, words: str, which: np.ndarray[Any, np.dtype[np.bool_]]) -> Why:
    with_it = np.flatnonzero(which[judged.fitting])
    if not len(with_it):
        least = planner.leanest(judged.task.run, judged.legal.take(which), judged.peak[which])
        return Why(words, least=planner.memory_causes(judged.task.run, least))
    order = with_it[np.argsort(judged.seconds[with_it], kind="stable")][: planner.simulated]
    ranked = planner.rank(judged.task.run, judged.legal.take(judged.fitting[order]))
    return _difference(judged, words, ranked.take([0]))


def _difference(judged: Judged, words: str, found: Ranked) -> Why:
    best = judged.ranked.times
    names = dict.fromkeys([*found.times.causes, *best.causes])
    nothing = np.zeros(1)
    causes = {
        name: float(found.times.causes.get(name, nothing)[0] - best.causes.get(name, nothing)[0]) for name in names
    }
    ordered = dict(sorted(causes.items(), key=lambda item: -item[1]))
    return Why(words, best=found, slower_by=float(found.times.total[0] - best.total[0]), causes=ordered)
