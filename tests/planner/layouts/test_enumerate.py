"""Enumeration lists exactly what the rules of legality accept."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_runs import run_with
from phalanx.config.check import global_batch_samples
from phalanx.families.language.config import LanguageRun
from phalanx.layout.legality import reasons
from phalanx.layout.resolve import divisors, factorisations, resolve_layout
from phalanx.layout.spec import DEGREES, ResolvedLayout
from phalanx.planner.layouts.candidates import CONTEXTS, GATHERS, RECOMPUTES, SCHEDULES, Candidates
from phalanx.planner.layouts.enumerate import CHOSEN, Limits, legal_candidates, without_twins
from phalanx.planner.memory.model import Kernels, memory

Row = tuple[Any, ...]


def rows_of(candidates: Candidates) -> list[Row]:
    """Every candidate as one comparable thing; none may stand there twice."""
    columns = [getattr(candidates, field.name).tolist() for field in fields(Candidates)]
    rows = list(zip(*columns, strict=True))
    assert len(set(rows)) == len(rows)
    return rows


def row_of(layout: ResolvedLayout, recompute: Any) -> Row:
    (row,) = rows_of(Candidates.of([layout], [recompute]))
    return row


def with_recompute(run: LanguageRun, recompute: str) -> LanguageRun:
    return run.model_copy(update={"layout": run.layout.model_copy(update={"recompute": recompute})})


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
    candidates = legal_candidates(run, world, devices_per_node, limits=Limits.none())
    listed = rows_of(candidates)

    for index in random.sample(range(len(listed)), min(150, len(listed))):
        asked = with_recompute(run, candidates.recompute_of(index))
        assert reasons(asked, candidates.layout(index), world, devices_per_node) == []

    known, batch = set(listed), global_batch_samples(run)
    splits = list(factorisations(world, len(DEGREES)))
    for _ in range(200):
        degrees = dict(zip(DEGREES, random.choice(splits), strict=True))
        schedule, per_rank, zero, reshard, context, gather = random.choice(choices_for(degrees, run))
        layout = ResolvedLayout(
            global_batch=batch,
            microbatch=random.choice(divisors(batch)),
            **degrees,
            zero=zero,
            schedule=schedule,
            stages_per_rank=per_rank,
            context=context,
            reshard_after_forward=reshard,
            gather=gather,
        )
        recompute = random.choice(RECOMPUTES)
        legal = not reasons(with_recompute(run, recompute), layout, world, devices_per_node)
        assert (row_of(layout, recompute) in known) is legal, layout


def test_every_legal_layout_of_a_small_run() -> None:
    run = run_with(global_batch=4)
    wanted = []
    for split in factorisations(8, len(DEGREES)):
        degrees = dict(zip(DEGREES, split, strict=True))
        for schedule, per_rank, zero, reshard, context, gather in choices_for(degrees, run):
            for microbatch, recompute in product(divisors(4), RECOMPUTES):
                layout = ResolvedLayout(
                    4, microbatch, **degrees, zero=zero, schedule=schedule, stages_per_rank=per_rank,
                    context=context, reshard_after_forward=reshard, gather=gather,
                )  # fmt: skip
                if not reasons(with_recompute(run, recompute), layout, 8):
                    wanted.append(row_of(layout, recompute))
    found = rows_of(legal_candidates(run, 8, limits=Limits.none()))
    assert len(wanted) > 1000 and set(found) == set(wanted)


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
    found = legal_candidates(run, 8, fixed=fixed, limits=Limits.none())
    free = rows_of(legal_candidates(run, 8, limits=Limits.none()))
    assert len(found)
    for index in range(len(found)):
        layout, recompute = found.layout(index), found.recompute_of(index)
        for name, value in fixed.items():
            # One rank has nothing to stream.
            if name != "gather" or layout.shards > 1:
                assert (recompute if name == "recompute" else getattr(layout, name)) == value
    shared = (found.dp_shard * found.cp > 1) & (found.pp > 1)
    meant = set(rows_of(found.take(shared)))
    every = Candidates(
        **{f.name: np.asarray(c) for f, c in zip(fields(Candidates), zip(*free, strict=True), strict=True)}
    )
    kept = (every.dp_shard * every.cp > 1) & (every.pp > 1)
    for name, value in fixed.items():
        names = {"schedule": SCHEDULES, "context": CONTEXTS, "recompute": RECOMPUTES, "gather": GATHERS}.get(name)
        kept &= getattr(every, name) == (value if names is None else names.index(value))
    assert meant == set(rows_of(every.take(kept)))


@pytest.mark.parametrize("zeros", [(0, 1, 2, 3), (2, 3), (3,)])
def test_of_pipelines_that_run_the_same_way_the_lowest_level_is_left(zeros: tuple[int, ...]) -> None:
    run, kernels = run_with(global_batch=16), Kernels("flash", compiled=False)
    every = legal_candidates(run, 8, limits=Limits.none())
    every = every.take(np.isin(every.zero, zeros))
    left = without_twins(every)
    assert 0.5 * len(every) < len(left) <= len(every)
    alone, streamed = (every.pp == 1) | every.reshard_after_forward, every.streamed > 1
    assert set(rows_of(every.take(alone | streamed))) <= set(rows_of(left))
    missing = set(rows_of(every)) - set(rows_of(left))
    assert bool(missing) == (len(zeros) > 1)
    place = [field.name for field in fields(Candidates)].index("zero")
    least = min(zero for zero in zeros if zero)
    twins = [(*row[:place], least, *row[place + 1 :]) for row in missing]
    assert set(twins) <= set(rows_of(left))
    some = list(missing)[:64]
    if some:
        pair = [Candidates(*map(np.asarray, zip(*rows, strict=True))) for rows in (some, twins[:64])]
        assert len({tuple(memory(run, each, kernels).allocated.tolist()) for each in pair}) == 1


@pytest.mark.parametrize("fixed", [{"tp": 3}, {"pp": 8}, {"dp_shard": 5}, {"microbatch": 3}, {"cp": 64}])
def test_nothing_is_legal(fixed: dict[str, Any]) -> None:
    assert len(legal_candidates(run_with(global_batch=16), 8, fixed=fixed)) == 0


def test_limits_bound_free_fields_only() -> None:
    run = run_with({"model.n_layers": 16}, global_batch=64)
    limits = Limits(microbatch=2, stages_per_rank=2, positions=16)
    found = legal_candidates(run, 8, limits=limits)
    assert (found.microbatch.max(), found.stages_per_rank.max(), found.cp.max()) == (2, 2, 2)
    fixed = {"microbatch": 4, "stages_per_rank": 4, "cp": 4, "pp": 2}
    assert len(legal_candidates(run, 8, fixed=fixed, limits=limits))


def test_what_is_written_resolves_to_the_same_layout() -> None:
    run = run_with(global_batch=16)
    found = legal_candidates(run, 8, limits=Limits.none())
    for index in range(0, len(found), 97):
        layout = found.layout(index)
        chosen = {name: getattr(layout, name) for name in CHOSEN if name != "recompute"}
        if layout.pp == 1:
            chosen["stages_per_rank"] = "auto"
        chosen["recompute"] = found.recompute_of(index)
        asked = run.model_copy(update={"layout": run.layout.model_copy(update=chosen)})
        assert resolve_layout(asked, 8) == replace(layout)
