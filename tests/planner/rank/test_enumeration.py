"""Enumeration lists exactly what the rules of legality accept."""

from __future__ import annotations

from dataclasses import replace
from itertools import compress, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_runs import run_with
from phalanx.config.check import global_batch_samples
from phalanx.config.load import load_run
from phalanx.families.language.config import LanguageRun
from phalanx.families.registry import bind
from phalanx.layout.legality import is_legal
from phalanx.layout.legality.rule import Requirements
from phalanx.layout.resolve import all_factorisations, list_divisors, resolve_layout
from phalanx.layout.spec import CONTEXTS, DEGREES, GATHERS, RECOMPUTES, SCHEDULES, LayoutTable, ResolvedLayout
from phalanx.planner.memory.model import Kernels, memory
from phalanx.planner.rank.enumeration import CHOSEN, Limits, drop_equivalent, enumerate_layouts
from phalanx.planner.trace.traced_model import TracedModel


def rows_of(table: LayoutTable) -> list[ResolvedLayout]:
    """Every layout; none may stand there twice."""
    rows = [table.row(index) for index in range(len(table))]
    assert len(set(rows)) == len(rows)
    return rows


def choices_for(degrees: dict[str, int], run: LanguageRun) -> list[tuple[str, int, int, bool, str, str]]:
    """(schedule, stages a rank, ZeRO level, resharding, context, gather) without two that mean the same."""
    staged = product(SCHEDULES, range(1, run.model.n_layers + 1)) if degrees["pp"] > 1 else [("1f1b", 1)]
    sharded = degrees["dp_shard"] * degrees["cp"] > 1
    levels = [(0, False), (3, False)] if degrees["dp_replicate"] > 1 else [(3, False)]
    if sharded:
        levels = list(product(range(4), (False, True)))
    contexts = CONTEXTS if degrees["cp"] > 1 else ("ring",)
    gathers = GATHERS if sharded else ("layer",)
    return [(*a, *b, c, d) for a, b, c, d in product(staged, levels, contexts, gathers)]


EXAMPLES = Path(__file__).parents[3] / "examples"
RUNS = st.builds(
    lambda heads, groups, layers, ff, vocab, length, batch, tied, compiled, across: run_with(
        {
            "model.n_heads": heads * groups,
            "model.n_kv_heads": heads,
            "model.d_model": heads * groups * 4,
            "model.n_layers": layers,
            "model.d_ff": ff,
            "model.vocab_size": vocab,
            "model.tied_head": tied,
            "data.sequence_length": length,
            "training.compile": compiled,
        },
        global_batch=batch,
        tp_across_nodes=across,
    ),
    *(st.sampled_from(values) for values in ((1, 2, 4, 6), (1, 2), (2, 4, 7), (48, 64), (7, 61), (12, 16, 24, 30))),
    st.integers(1, 48),
    st.booleans(),
    st.sampled_from((True, False, "auto")),
    st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(RUNS, st.sampled_from((1, 2, 4, 6, 8, 12, 16)), st.sampled_from((None, 2, 4, 8)), st.randoms())
def test_same_as_legality(run: LanguageRun, world: int, devices_per_node: int | None, random: Any) -> None:
    needs = Requirements.of_model(bind(run), world, devices_per_node)
    found = enumerate_layouts(bind(run), world, devices_per_node, limits=Limits.none())
    assert is_legal(needs, found).all()

    known, batch = set(rows_of(found)), global_batch_samples(run)
    splits = list(all_factorisations(world, len(DEGREES)))
    drawn = []
    for _ in range(200):
        degrees = dict(zip(DEGREES, random.choice(splits), strict=True))
        schedule, per_rank, zero, reshard, context, gather = random.choice(choices_for(degrees, run))
        layout = ResolvedLayout(
            global_batch=batch,
            microbatch=random.choice(list_divisors(batch)),
            **degrees,
            zero=zero,
            schedule=schedule,
            stages_per_rank=per_rank,
            context=context,
            reshard_after_forward=reshard,
            gather=gather,
            recompute=random.choice(RECOMPUTES),
        )
        drawn.append(layout)
    assert [layout in known for layout in drawn] == is_legal(needs, LayoutTable.from_rows(drawn)).tolist()


def test_every_legal_layout_of_a_small_run() -> None:
    run = run_with(global_batch=4)
    possible = []
    for split in all_factorisations(8, len(DEGREES)):
        degrees = dict(zip(DEGREES, split, strict=True))
        for schedule, per_rank, zero, reshard, context, gather in choices_for(degrees, run):
            for microbatch, recompute in product(list_divisors(4), RECOMPUTES):
                layout = ResolvedLayout(
                    4, microbatch, **degrees, zero=zero, schedule=schedule, stages_per_rank=per_rank,
                    context=context, reshard_after_forward=reshard, gather=gather, recompute=recompute,
                )  # fmt: skip
                possible.append(layout)
    legal = is_legal(Requirements.of_model(bind(run), 8), LayoutTable.from_rows(possible))
    wanted = set(compress(possible, legal))
    assert len(wanted) > 1000 and set(rows_of(enumerate_layouts(bind(run), 8, limits=Limits.none()))) == wanted


@pytest.mark.parametrize(
    ("example", "devices", "legal", "different"),
    [
        ("gpt-1t", 3072, 231219, 141097),
        ("gpt-175b", 1024, 160023, 99299),
        ("llama3-8b", 64, 89644, 54814),
        ("orbit-113b", 512, 66546, 41458),
        ("lumi-140b", 512, 259358, 152000),
    ],
)
def test_as_many_layouts_of_large_runs_as_two_independent_implementations_found(
    example: str, devices: int, legal: int, different: int
) -> None:
    run = load_run(EXAMPLES / f"{example}.yaml", [])
    found = enumerate_layouts(bind(run), devices, 8)
    assert (len(found), len(drop_equivalent(found))) == (legal, different)


@pytest.mark.parametrize(
    "fixed",
    [
        {"tp": 2},
        {"pp": 2, "schedule": "interleaved_1f1b"},
        {"zero": 1, "recompute": "full"},
        {"zero": 0},
        {"reshard_after_forward": True, "cp": 2, "context": "all_to_all"},
        {"dp_shard": 2, "dp_replicate": 2},
        {"gather": "stream", "tp": 2},
        {"microbatch": 2, "stages_per_rank": 2, "pp": 2},
    ],
)
def test_fixed_fields(fixed: dict[str, Any]) -> None:
    run = run_with(global_batch=16)
    found = enumerate_layouts(bind(run), 8, fixed=fixed, limits=Limits.none())
    free = rows_of(enumerate_layouts(bind(run), 8, limits=Limits.none()))
    assert len(found)
    for index in range(len(found)):
        layout = found.row(index)
        for name, value in fixed.items():
            # One rank has nothing to stream.
            if name != "gather" or layout.shards > 1:
                assert getattr(layout, name) == value
    # Where every field has an effect, fixing some is the same as leaving out all that has other values.
    effective = [layout for layout in free if layout.table.sharding_ranks > 1 and layout.pp > 1]
    wanted = {x for x in effective if all(getattr(x, name) == value for name, value in fixed.items())}
    assert {x for x in rows_of(found) if x.table.sharding_ranks > 1 and x.pp > 1} == wanted


@pytest.mark.parametrize("zeros", [(0, 1, 2, 3), (2, 3), (3,)])
def test_of_pipelines_that_run_the_same_way_the_lowest_level_is_left(zeros: tuple[int, ...]) -> None:
    run, kernels = run_with(global_batch=16), Kernels("flash", compiled=False)
    every = enumerate_layouts(bind(run), 8, limits=Limits.none())
    every = every.take(np.isin(every.zero, zeros))
    left = drop_equivalent(every)
    assert 0.5 * len(every) < len(left) <= len(every)
    alone, streamed = (every.pp == 1) | every.reshard_after_forward, every.streamed > 1
    assert set(rows_of(every.take(alone | streamed))) <= set(rows_of(left))
    missing = set(rows_of(every)) - set(rows_of(left))
    assert bool(missing) == (len(zeros) > 1)
    least = min(zero for zero in zeros if zero)
    pairs = [(row, replace(row, zero=least)) for row in missing]
    assert {twin for _, twin in pairs} <= set(rows_of(left))
    if pairs:
        both = [
            memory(bind(run, TracedModel), LayoutTable.from_rows(rows), kernels)
            for rows in zip(*pairs[:64], strict=True)
        ]
        assert len({tuple(each.allocated.tolist()) for each in both}) == 1


@pytest.mark.parametrize("fixed", [{"tp": 3}, {"pp": 8}, {"dp_shard": 5}, {"microbatch": 3}, {"cp": 64}])
def test_nothing_is_legal(fixed: dict[str, Any]) -> None:
    assert len(enumerate_layouts(bind(run_with(global_batch=16)), 8, fixed=fixed)) == 0


def test_limits_bound_free_fields_only() -> None:
    run = run_with({"model.n_layers": 16}, global_batch=64)
    limits = Limits(microbatch=2, stages_per_rank=2, positions=16)
    found = enumerate_layouts(bind(run), 8, limits=limits)
    assert (found.microbatch.max(), found.stages_per_rank.max(), found.cp.max()) == (2, 2, 2)
    fixed = {"microbatch": 4, "stages_per_rank": 4, "cp": 4, "pp": 2}
    assert len(enumerate_layouts(bind(run), 8, fixed=fixed, limits=limits))


def test_what_is_written_resolves_to_the_same_layout() -> None:
    run = run_with(global_batch=16)
    found = enumerate_layouts(bind(run), 8, limits=Limits.none())
    for index in range(0, len(found), 97):
        layout = found.row(index)
        chosen = {name: getattr(layout, name) for name in CHOSEN}
        if layout.pp == 1:
            chosen["stages_per_rank"] = "auto"
        asked = run.model_copy(update={"layout": run.layout.model_copy(update=chosen)})
        assert resolve_layout(bind(asked), 8) == layout
