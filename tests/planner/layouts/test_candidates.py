"""Candidates hold what the layouts they are made of say."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from layout_runs import run_with
from phalanx.layout.resolve import every_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.layouts.candidates import RECOMPUTES, Candidates

LAYOUTS = list(every_layout(run_with({}), 8))


def test_layouts_come_back_as_they_went_in() -> None:
    recompute = [RECOMPUTES[i % 3] for i in range(len(LAYOUTS))]
    candidates = Candidates.of(LAYOUTS, recompute)
    assert len(candidates) == len(LAYOUTS) > 100
    assert [candidates.layout(i) for i in range(len(LAYOUTS))] == LAYOUTS
    assert [candidates.recompute_of(i) for i in range(len(LAYOUTS))] == recompute
    some = candidates.take(np.arange(3, 9))
    assert [some.layout(i) for i in range(6)] == LAYOUTS[3:9]


def test_every_field_of_a_layout_is_a_column_and_what_follows_is_the_same() -> None:
    # Materials models alone have these, and are not planned for.
    known = {f.name for f in fields(ResolvedLayout)} - {"branch_groups", "cuts_structures"}
    assert known | {"recompute"} == {f.name for f in fields(Candidates)}
    candidates = Candidates.of(LAYOUTS, ["none"] * len(LAYOUTS))
    for name in ("world_size", "data_ranks", "accumulation", "n_stages", "shards"):
        assert getattr(candidates, name).tolist() == [getattr(layout, name) for layout in LAYOUTS], name
