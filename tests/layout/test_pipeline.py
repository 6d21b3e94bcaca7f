"""Which layers make a stage and which stages a rank has; PyTorch's schedules take what the rules call legal."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from layout_runs import run_with
from phalanx.families.language.declare import DeclaredLanguage
from phalanx.families.registry import bind
from phalanx.layout import stage_assignment
from phalanx.layout.legality import reasons_against
from phalanx.layout.resolve import every_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage_assignment import model_chunks, rank_of_stage, split_layers, stages_of_rank

COSTS = st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0, 1.3, 2.0, 2.6, 3.9])
SIZES = st.integers(1, 9).flatmap(lambda layers: st.tuples(st.just(layers), st.integers(1, layers)))


def costs_of(ranges: list[range], first: float, last: float) -> list[float]:
    costs = [float(len(layers)) for layers in ranges]
    costs[0] += first
    costs[-1] += last
    return costs


def every_split(n_layers: int, n_stages: int) -> list[list[range]]:
    cuts = combinations(range(1, n_layers), n_stages - 1)
    return [[range(a, b) for a, b in pairwise((0, *cut, n_layers))] for cut in cuts]


def check_split(ranges: list[range], n_layers: int, n_stages: int) -> None:
    assert [layer for layers in ranges for layer in layers] == list(range(n_layers))
    assert len(ranges) == n_stages and all(len(layers) >= 1 for layers in ranges)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SIZES, COSTS, COSTS)
def test_no_split_has_a_cheaper_costliest_stage(size: tuple[int, int], first: float, last: float) -> None:
    ranges = split_layers(*size, first, last)
    check_split(ranges, *size)
    best = min(max(costs_of(other, first, last)) for other in every_split(*size))
    assert max(costs_of(ranges, first, last)) == pytest.approx(best, abs=1e-12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SIZES, COSTS, COSTS)
def test_of_equally_good_splits_the_most_even_is_taken(size: tuple[int, int], first: float, last: float) -> None:
    def unevenness(ranges: list[range]) -> tuple[float, float]:
        costs = costs_of(ranges, first, last)
        return max(costs), sum(cost * cost for cost in costs)

    found = unevenness(split_layers(*size, first, last))
    assert found == pytest.approx(min(unevenness(other) for other in every_split(*size)), abs=1e-9)


def test_a_costly_head_leaves_its_stage_fewer_layers() -> None:
    assert [len(layers) for layers in split_layers(32, 4, 0.0, 0.0)] == [8, 8, 8, 8]
    assert [len(layers) for layers in split_layers(32, 4, 0.0, 2.4)] == [8, 9, 9, 6]
    assert [len(layers) for layers in split_layers(4, 4, 0.0, 9.0)] == [1, 1, 1, 1]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.integers(2, 40).flatmap(lambda layers: st.tuples(st.just(layers), st.integers(1, layers))),
    st.floats(0.0, 4.0),
    st.floats(0.0, 4.0),
)
def test_many_layers_are_split_as_well(size: tuple[int, int], first: float, last: float) -> None:
    exact = split_layers(*size, first, last)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_assignment, "_EXACT", 0)
        filled = split_layers(*size, first, last)
    check_split(filled, *size)
    assert max(costs_of(filled, first, last)) == pytest.approx(max(costs_of(exact, first, last)), abs=1e-6)


@pytest.mark.parametrize(("n_layers", "n_stages"), [(168, 84), (168, 1), (300, 100)])
@pytest.mark.parametrize("cost", [0.002, 0.006, 0.13])
def test_many_layers_fill_their_stages_whatever_the_rounding_of_costs(
    n_layers: int, n_stages: int, cost: float
) -> None:
    ranges = split_layers(n_layers, n_stages, 0.0, cost)
    check_split(ranges, n_layers, n_stages)
    assert max(costs_of(ranges, 0.0, cost)) == pytest.approx(n_layers // n_stages + cost)


def test_a_thousand_layers() -> None:
    ranges = split_layers(1000, 128, 0.0, 3.7)
    check_split(ranges, 1000, 128)
    assert max(costs_of(ranges, 0.0, 3.7)) == 8.0


# --- stages and ranks --------------------------------------------------------------------------------------------------

SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 3),
    ("interleaved_zero_bubble", 2),
    ("interleaved_zero_bubble", 4),
    ("zbv", 2),
]


def pipelined(schedule: str, per_rank: int, pp: int, global_batch: int = 8) -> ResolvedLayout:
    return ResolvedLayout(global_batch=global_batch, pp=pp, schedule=schedule, stages_per_rank=per_rank)


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_every_stage_has_one_rank_which_knows_it(schedule: str, per_rank: int, pp: int) -> None:
    layout = pipelined(schedule, per_rank, pp)
    held = {rank: stages_of_rank(layout, rank) for rank in range(pp)}
    assert sorted(stage for stages in held.values() for stage in stages) == list(range(pp * per_rank))
    assert all(len(stages) == per_rank and stages == sorted(stages) for stages in held.values())
    assert all(rank_of_stage(layout, stage) == rank for rank, stages in held.items() for stage in stages)


def test_one_rank_holds_the_only_stage_whatever_the_schedule() -> None:
    layout = pipelined("zbv", 1, 1)
    assert stages_of_rank(layout, 0) == [0] and rank_of_stage(layout, 0) == 0


def test_zbv_turns_round_at_the_last_rank() -> None:
    layout = pipelined("zbv", 2, 4)
    assert [rank_of_stage(layout, stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [rank_of_stage(pipelined("interleaved_1f1b", 2, 4), stage) for stage in range(8)] == [0, 1, 2, 3] * 2


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES)
def test_the_parts_of_all_ranks_are_the_model(schedule: str, per_rank: int) -> None:
    layout = pipelined(schedule, per_rank, 4)
    costs = DeclaredLanguage(run_with().model, 32).block_costs()
    parts = {stage: part for rank in range(4) for stage, part in model_chunks(layout, rank, 19, costs).items()}
    assert [layer for stage in sorted(parts) for layer in parts[stage].blocks] == list(range(19))
    assert [stage for stage, part in parts.items() if part.first] == [0]
    assert [stage for stage, part in parts.items() if part.last] == [layout.n_stages - 1]


# --- PyTorch's schedules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_schedule_exists_for_whatever_number_of_microbatches_is_legal(schedule: str, per_rank: int, pp: int) -> None:
    run = run_with({"model.n_layers": 16}, schedule=schedule, stages_per_rank=per_rank, pp=pp)
    legal = 0
    for count in range(1, 25):
        layout = pipelined(schedule, per_rank, pp, count)
        if reasons_against(bind(run), layout, pp):
            continue
        legal += 1
        actions = get_schedule_ops(stage_assignment.TORCH_SCHEDULES[schedule], pp, count, per_rank)
        for rank, steps in enumerate(actions):
            forward = Counter(step.stage_index for step in steps if step and step.computation_type.value == "F")
            assert forward == dict.fromkeys(stages_of_rank(layout, rank), count)
    assert legal >= 8


def test_every_pipelined_layout_of_eight_ranks_has_a_schedule() -> None:
    layouts = {
        (layout.schedule, layout.pp, layout.accumulation, layout.stages_per_rank)
        for layout in every_layout(bind(run_with()), 8)
        if layout.pp > 1
    }
    assert len({schedule for schedule, *_ in layouts}) == 5
    for schedule, pp, count, per_rank in layouts:
        assert len(get_schedule_ops(stage_assignment.TORCH_SCHEDULES[schedule], pp, count, per_rank)) == pp
