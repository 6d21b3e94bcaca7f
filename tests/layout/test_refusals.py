"""What rules refuse, laid out for pages, is what they refuse when they are asked about one layout."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from layout_runs import run_with
from phalanx.families.family import BoundModel
from phalanx.families.registry import bind
from phalanx.layout.legality import RULES, reasons_against
from phalanx.layout.legality.refusals import Refusals, list_refusals
from phalanx.layout.legality.rule import Requirements
from phalanx.layout.spec import DEGREES, ResolvedLayout
from phalanx.planner.rank.enumeration import Limits, list_options, list_splits

RANKS = 24


@cache
def model() -> BoundModel:
    return bind(run_with({"data.sequence_length": 48, "model.max_positions": 48}, global_batch=48), BoundModel)


@cache
def refusals() -> list[Refusals]:
    splits = list_splits(model(), RANKS, {})
    needs = Requirements.of_model(model(), RANKS, 8)
    return list_refusals(needs, splits, np.ones(len(splits), bool), list_options(model(), {}, Limits(8, 4)))


def look_up(layout: ResolvedLayout) -> set[str]:
    """The reasons against a layout that a page finds."""
    options = list_options(model(), {}, Limits(8, 4))
    found = set()
    for one in refusals():
        split = [getattr(layout, name) for name in one.degrees]
        if split not in one.splits:
            continue
        choices = list(product(*(options[name] for name in one.fields)))
        choice = choices.index(tuple(getattr(layout, name) for name in one.fields))
        found.add(one.reasons[one.found[one.splits.index(split), choice]])
    return found - {""}


def layouts(count: int) -> list[ResolvedLayout]:
    """Layouts of every choice of degrees, with some of the other fields."""
    splits, options = list_splits(model(), RANKS, {}), list_options(model(), {}, Limits(8, 4))
    draw = random.Random(3)

    def some() -> ResolvedLayout:
        chosen: dict[str, Any] = {name: draw.choice(list(values)) for name, values in options.items()}
        return replace(splits.row(draw.randrange(len(splits))), **chosen)

    return [some() for _ in range(count)]


def test_reasons_are_the_rules_own() -> None:
    legal = 0
    needs = Requirements.of_model(model(), RANKS, 8)
    of_degrees = [rule for rule in RULES if set(rule.reads) <= {*DEGREES, "cuts_structures", "branch_groups"}]
    for layout in layouts(200):
        wanted = {reason.text for reason in reasons_against(model(), layout, RANKS, 8)}
        found = look_up(layout)
        refused = {rule.describe(needs, layout) for rule in of_degrees if np.any(rule.broken(needs, layout.table))}
        # of refused degrees nothing else is asked
        assert found >= (refused or wanted) and found <= wanted, layout
        legal += not wanted
    assert 5 < legal < 150


def test_every_kind_of_rule_is_met() -> None:
    assert len(refusals()) >= 12
    texts = "\n".join(reason for one in refusals() for reason in one.reasons)
    assert "layout.tp=3 does not divide model.n_heads (8 parts)" in texts
    assert "layout.tp=24 groups do not fit into nodes of 8 devices" in texts
    assert "micro-batches a rank computes" in texts


def test_degrees_beyond_the_limits_are_asked_about_degrees_alone() -> None:
    splits = list_splits(model(), RANKS, {})
    needs = Requirements.of_model(model(), RANKS, 8)
    options = list_options(model(), {}, Limits())
    few = list_refusals(needs, splits, splits.cp == 1, options)
    for one in few:
        if one.fields and "cp" in one.degrees:
            assert {split[one.degrees.index("cp")] for split in one.splits} == {1}
    assert any(not one.fields for one in few)
    none = list_refusals(needs, splits, np.zeros(len(splits), bool), options)
    assert [one.reasons for one in none] == [one.reasons for one in few if not one.fields]


def test_equal_texts_are_written_once() -> None:
    for one in refusals():
        assert len(set(one.reasons)) == len(one.reasons) and one.reasons[0] == ""
        assert set(np.unique(one.found)) - {0} == set(range(1, len(one.reasons)))


@pytest.mark.parametrize("fixed", [{"tp": 4}, {"schedule": "1f1b", "pp": 2}])
def test_fixed_fields_have_one_value(fixed: dict[str, Any]) -> None:
    splits, options = list_splits(model(), RANKS, fixed), list_options(model(), fixed, Limits())
    for name, value in fixed.items():
        values = options[name] if name in options else np.unique(getattr(splits, name)).tolist()
        assert values == [value]
