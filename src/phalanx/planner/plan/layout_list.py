"""The legal layouts of a plan as one list, for pages: likely to fit or not, exact or bounded; and what refuses others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.layout.legality.refusals import Refusals, list_refusals
from phalanx.layout.legality.rule import Requirements
from phalanx.layout.spec import DEGREES, Bools, Ints, LayoutTable, ResolvedLayout
from phalanx.planner.distinct_rows import distinct_rows
from phalanx.planner.plan.make_plan import Plan
from phalanx.planner.rank.cost_models import Floats, Times
from phalanx.planner.rank.enumeration import CHOSEN, keeps_positions, list_options, list_splits
from phalanx.planner.rank.ranking import bound_memory

MOST_LISTED = 6_000
"""Layouts that a list holds."""
MOST_ASKED = 10_000
"""Choices of degrees whose legality is told."""
_FITTING_SHARE = 0.75
"""Share of a full list that layouts which fit may take of it."""


@dataclass(frozen=True)
class LayoutList:
    """Legal layouts: first those that are likely to fit, fastest first, then the others, least memory first."""

    layouts: LayoutTable
    legal: int
    """Legal layouts in all, of which the list may leave some out."""
    fitting: int
    """How many of the list are likely to fit; these come first."""
    exact: Bools
    """Whose times hold, [layouts]: without a pipeline, or with one that was simulated. Other times are lower bounds."""
    times: Times
    """Times of the layouts that fit, [fitting]."""
    memory_bytes: Floats
    """Bytes on the worst rank, [layouts]."""
    bounded: Bools
    """Where those bytes are a lower bound, [layouts]."""
    p_fits: Floats
    """Probability of fitting, [layouts]; NaN where it was not computed, since layouts that need less do not fit."""

    def __len__(self) -> int:
        return len(self.layouts)

    def find(self, wanted: LayoutTable) -> Ints:
        """Return the positions of the given layouts in the list, [wanted]. Every one of them is in it."""
        return _find_rows(self.layouts, wanted)


def list_layouts(plan: Plan, most: int = MOST_LISTED) -> LayoutList:
    """Return the layouts of a plan: all, or of more than `most` those that a reader asks for first.

    These are the simulated ones and the best of each choice of degrees; then others that fit, fastest first, and others that
    need little memory.
    """
    ranking, model, models = plan.ranking, plan.task.model, plan.planner.models
    legal, ranked = ranking.legal, ranking.ranked
    # simulated times where there are some, else lower bounds
    fitting = legal.take(ranking.fitting)
    times = ranking.bounds.put(_find_rows(fitting, ranked.layouts), ranked.times)
    seconds = np.full(len(legal), np.inf)
    seconds[ranking.fitting] = times.total
    fits = np.isfinite(seconds)
    needs = np.where(np.isnan(ranking.peak), bound_memory(model, legal), ranking.peak)
    simulated = np.zeros(len(legal), bool)
    simulated[_find_rows(legal, ranked.layouts)] = True

    # The last key of lexsort is the first to sort by.
    order = np.lexsort((needs, seconds, ~fits))
    order = order[_keep_positions(legal.take(order), fits[order], simulated[order], most)]
    kept, known = legal.take(order), np.isfinite(ranking.peak[order])
    p_fits = np.full(len(order), np.nan)
    p_fits[known] = models.memory(model, kept.take(known)).p_fits
    place = np.searchsorted(ranking.fitting, order[fits[order]])
    return LayoutList(
        layouts=kept,
        legal=len(legal),
        fitting=int(fits[order].sum()),
        exact=simulated[order] | (kept.pp == 1),
        times=times.take(place),
        memory_bytes=needs[order],
        bounded=~known,
        p_fits=p_fits,
    )


def _find_rows(table: LayoutTable, wanted: LayoutTable) -> Ints:
    """Return where the layouts `wanted` stand in a table that has each of them once, [wanted]."""
    columns = [np.concatenate([getattr(one, name) for one in (table, wanted)]).astype(np.int64) for name in CHOSEN]
    number = distinct_rows(columns)[1]
    place = np.full(int(number.max(initial=0)) + 1, -1, np.int64)
    place[number[: len(table)]] = np.arange(len(table))
    found = place[number[len(table) :]]
    assert (found >= 0).all()
    return np.asarray(found)


def _keep_positions(layouts: LayoutTable, fits: Bools, simulated: Bools, most: int) -> Ints:
    """Return which of the sorted layouts a list of `most` keeps, ascending."""
    if len(layouts) <= most:
        return np.arange(len(layouts))
    first = np.zeros(len(layouts), bool)
    # In sorted order the first layout with some degrees is the best one.
    split = distinct_rows([getattr(layouts, name) for name in (*DEGREES, "ep", "expert_tp")])[1]
    first[np.unique(split, return_index=True)[1]] = True
    wanted = np.flatnonzero(simulated | first)[:most]
    others = np.flatnonzero(~(simulated | first))
    room = most - len(wanted)
    fast, little = others[fits[others]], others[~fits[others]]
    taken = min(len(fast), max(int(room * _FITTING_SHARE), room - len(little)))
    return np.sort(np.concatenate([wanted, fast[:taken], little[: room - taken]]))


@dataclass(frozen=True)
class Questions:
    """What may be asked about layouts beside those of a list, with what the rules of legality answer."""

    splits: LayoutTable
    """Choices of degrees whose product is the number of devices."""
    possible: int
    """How many such choices there are in all."""
    options: dict[str, list[Any]]
    """Values of the other fields."""
    refusals: list[Refusals]


def list_questions(plan: Plan, most: int = MOST_ASKED) -> Questions:
    """Return choices of degrees, of more than `most` those of least `cp`, and what the rules refuse of them and the rest."""
    task, planner = plan.task, plan.planner
    splits = list_splits(task.model, task.devices, task.fixed)
    some = splits.take(np.sort(np.argsort(splits.cp, kind="stable")[:most]))
    needs = Requirements.of_model(task.model, task.devices, planner.machine.node.devices)
    # Beyond the limits no layout is enumerated, and to ask about all choices of the rest would take long.
    within = keeps_positions(task.model, some, task.fixed, planner.limits)
    options = list_options(task.model, task.fixed, planner.limits)
    refusals = list_refusals(needs, some, within, options)
    return Questions(some, len(splits), {name: list(values) for name, values in options.items()}, refusals)


def pick_drawn(plan: Plan, listed: LayoutList) -> list[tuple[int, ResolvedLayout]]:
    """Return positions in the list and layouts of those that a page draws: of the table, then of the front."""
    both = [place for ranked in (plan.best, plan.front) for place in listed.find(ranked.layouts).tolist()]
    return [(place, listed.layouts.row(place)) for place in dict.fromkeys(both)]
