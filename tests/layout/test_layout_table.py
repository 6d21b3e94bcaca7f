"""Tables hold what the layouts they are made of say."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from layout_runs import run_with
from phalanx.families.registry import bind
from phalanx.layout.resolve import every_layout
from phalanx.layout.spec import RECOMPUTES, LayoutTable, ResolvedLayout

LAYOUTS = list(every_layout(bind(run_with({})), 8))


def test_layouts_come_back_as_they_went_in() -> None:
    layouts = [replace(layout, recompute=RECOMPUTES[i % 3]) for i, layout in enumerate(LAYOUTS)]
    layouts += [ResolvedLayout(8, branch_groups=(3, 5)), ResolvedLayout(8, cuts_structures=True, cp=2)]
    table = LayoutTable.from_rows(layouts)
    assert len(table) == len(layouts) > 100
    assert [table.row(i) for i in range(len(layouts))] == layouts
    some = table.take(np.arange(3, 9))
    assert [some.row(i) for i in range(6)] == layouts[3:9]


def test_every_field_of_a_layout_is_a_column_and_what_follows_is_the_same() -> None:
    assert [f.name for f in fields(ResolvedLayout)] == [f.name for f in fields(LayoutTable)]
    table = LayoutTable.from_rows(LAYOUTS)
    for name in (
        "world_size",
        "data_ranks",
        "samples_per_rank",
        "accumulation",
        "n_stages",
        "splits_backward",
        "shards",
    ):
        assert getattr(table, name).tolist() == [getattr(layout, name) for layout in LAYOUTS], name


def test_what_follows_from_a_layout() -> None:
    layout = ResolvedLayout(96, 2, dp_replicate=2, dp_shard=3, cp=2, tp=4, pp=2, schedule="zbv", stages_per_rank=2)
    assert (layout.world_size, layout.data_ranks, layout.samples_per_rank, layout.accumulation) == (96, 6, 16, 8)
    assert (layout.n_stages, layout.splits_backward, layout.shards) == (4, True, 6)
    assert not replace(layout, pp=1).splits_backward and replace(layout, zero=0).shards == 1
    assert layout.table.replicas.tolist() == [2] and replace(layout, zero=0).table.replicas.tolist() == [12]
    assert replace(layout, gather="stream").table.streamed.tolist() == [6]
