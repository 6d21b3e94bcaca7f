"""Schedules placed in time: against a plain event loop, against published bubbles, and bounds below them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.schedule.bounds import bound_makespan
from phalanx.planner.schedule.schedule_table import Action, Pass, ScheduleTable, schedule_table
from phalanx.planner.schedule.simulate import StageTimes, makespans, simulate

SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("interleaved_zero_bubble", 2),
    ("interleaved_zero_bubble", 3),
    ("zbv", 2),
]
IDS = [f"{schedule} {per_rank}" for schedule, per_rank in SCHEDULES]


def even(table: ScheduleTable, forward: float, inputs: float, weight: float, transfer: float = 0.0) -> StageTimes:
    ones = np.ones(table.n_stages)
    return StageTimes(forward * ones, (inputs + weight) * ones, weight * ones, transfer)


def plain_loop(table: ScheduleTable, times: StageTimes) -> dict[Action, tuple[float, float]]:
    """Start and end of every action, one at a time and without any arrays."""
    forward, backward, weight = (np.asarray(part) for part in (times.forward, times.backward, times.weight))
    seconds = {
        Pass.FORWARD: list(forward),
        Pass.BACKWARD: list(backward),
        Pass.INPUT: [0.0, *(backward - weight)[1:]],
        Pass.WEIGHT: [backward[0], *weight[1:]],
    }
    gradient = Pass.INPUT if table.split_backward else Pass.BACKWARD
    when: dict[Action, tuple[float, float]] = {}
    queues = {rank: table.actions(rank) for rank in range(table.pp)}
    free = [0.0] * table.pp
    while any(queues.values()):
        before = len(when)
        for rank, queue in queues.items():
            while queue:
                action = queue[0]
                needed = None
                if action.kind == Pass.FORWARD and action.stage > 0:
                    needed = Action(Pass.FORWARD, action.stage - 1, action.microbatch)
                if action.kind == gradient and action.stage < table.n_stages - 1:
                    needed = Action(gradient, action.stage + 1, action.microbatch)
                if needed is not None and needed not in when:
                    break
                start = free[rank]
                if needed is not None:
                    away = table.rank_of_stage[needed.stage] != rank
                    travel = np.broadcast_to(times.transfer, table.n_stages - 1)[min(needed.stage, action.stage)] * away
                    arrived = when[needed][1]
                    if table.stages_per_rank > 1:
                        start = max(start, arrived + travel)
                    else:
                        start = max(start, arrived) + travel
                free[rank] = start + seconds[action.kind][action.stage]
                when[action] = start, free[rank]
                queue.pop(0)
        assert len(when) > before
    return when


@st.composite
def cases(draw: st.DrawFn) -> tuple[ScheduleTable, StageTimes]:
    schedule, per_rank = draw(st.sampled_from(SCHEDULES))
    pp = draw(st.integers(2, 5))
    rounds = draw(st.integers(1, 3))
    table = schedule_table(schedule, pp, per_rank, pp * rounds)
    seconds = st.lists(st.floats(0.1, 3.0), min_size=table.n_stages, max_size=table.n_stages)
    forward, inputs, weight = (np.array(draw(seconds)) for _ in range(3))
    transfer = np.array(draw(seconds))[:-1] * draw(st.sampled_from([0.0, 0.3]))
    return table, StageTimes(forward, inputs + weight, weight, transfer)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_every_action_runs_when_a_plain_loop_runs_it(case: tuple[ScheduleTable, StageTimes]) -> None:
    table, times = case
    found, wanted = simulate(table, times), plain_loop(table, times)
    for rank in range(table.pp):
        for number, action in enumerate(table.actions(rank)):
            assert (found.start[rank, number], found.end[rank, number]) == pytest.approx(wanted[action])
        own = [end - start for action, (start, end) in wanted.items() if table.rank_of_stage[action.stage] == rank]
        assert found.busy[rank] == pytest.approx(sum(own))
    assert found.makespan == pytest.approx(max(end for _, end in wanted.values()))
    assert makespans(table, times) == pytest.approx([found.makespan])


def test_candidates_are_computed_together_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    table = schedule_table("interleaved_1f1b", 4, 2, 8)
    random = np.random.default_rng(0)
    forward, backward = random.uniform(0.5, 2.0, (2, 9, 8))
    transfer, after = random.uniform(0.0, 0.2, (9, 7)), random.uniform(0.0, 3.0, (9, 4))
    single = [
        simulate(table, StageTimes(forward[n], backward[n], None, transfer[n], after[n])).makespan for n in range(9)
    ]
    together = StageTimes(forward, backward, None, transfer, after)
    assert makespans(table, together) == pytest.approx(single)
    monkeypatch.setattr("phalanx.planner.schedule.simulate._AT_ONCE", 250)
    assert makespans(table, together) == pytest.approx(single)
    one_speed = StageTimes(forward[0], backward[0], None, transfer, 0.5)
    assert makespans(table, one_speed)[3] == pytest.approx(
        simulate(table, StageTimes(forward[0], backward[0], None, transfer[3], 0.5)).makespan
    )


def test_what_ranks_do_afterwards_counts_from_their_own_last_action() -> None:
    table = schedule_table("1f1b", 4, 1, 8)
    times = even(table, 1.0, 1.0, 1.0)
    assert simulate(table, times).end[:, -1].tolist() == [33.0, 31.0, 29.0, 27.0]
    late = StageTimes(times.forward, times.backward, after=[1.0, 2.0, 3.0, 4.0])
    found = simulate(table, late)
    assert found.makespan == 34.0 and found.busy.tolist() == [25.0, 26.0, 27.0, 28.0]
    assert simulate(table, StageTimes(times.forward, times.backward, after=[0.0, 0.0, 0.0, 20.0])).makespan == 47.0


def test_an_order_that_never_ends_is_noticed() -> None:
    table = schedule_table("1f1b", 2, 1, 2)
    # The first stage waits for a backward pass before it sends what that pass needs.
    turned = table.kind.copy()
    numbers = table.microbatch.copy()
    turned[0], numbers[0] = [0, 1, 0, 1], [0, 1, 1, 0]
    with pytest.raises(AssertionError, match="for ever"):
        simulate(ScheduleTable("1f1b", 2, 1, 2, turned, table.stage, numbers), even(table, 1.0, 1.0, 1.0))


# --- published bubbles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "per_rank", "bubble"),
    [
        ("gpipe", 1, 15.0),
        ("1f1b", 1, 15.0),
        ("interleaved_1f1b", 2, 7.5),
        ("interleaved_1f1b", 4, 3.75),
        # Zero for a single rank; with the gradient norm's all-reduce one ramp of forward passes is left.
        ("interleaved_zero_bubble", 2, 2.5),
        ("zbv", 2, 2.5),
    ],
)
def test_sixteen_ranks_with_64_microbatches(schedule: str, per_rank: int, bubble: float) -> None:
    """In units of what one rank computes for one micro-batch; forward, input and weight gradients take equally long."""
    table = schedule_table(schedule, 16, per_rank, 64)
    third = 1.0 / (3 * per_rank)
    assert simulate(table, even(table, third, third, third)).makespan == pytest.approx(64.0 + bubble)


def test_bigscience_182b() -> None:
    """TP4 PP12, 1F1B: the step takes 0.742 s for each further micro-batch, so the bubble is 11 x 0.742 = 8.16 s."""
    table = schedule_table("1f1b", 12, 1, 128)
    times = even(table, 0.742 / 4, 0.742 / 4, 0.742 / 2)
    assert simulate(table, times).makespan - 128 * 0.742 == pytest.approx(8.16, abs=0.01)


# --- bounds ------------------------------------------------------------------------------------------------------------


def layout_of(table: ScheduleTable) -> ResolvedLayout:
    return ResolvedLayout(
        global_batch=table.microbatches, pp=table.pp, schedule=table.schedule, stages_per_rank=table.stages_per_rank
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases(), st.sampled_from([0.0, 0.1, 1.0, 5.0]))
def test_nothing_takes_less_than_its_bound(case: tuple[ScheduleTable, StageTimes], transfer: float) -> None:
    table, times = case
    times = StageTimes(times.forward, times.backward, times.weight, transfer)
    assert bound_makespan(layout_of(table), times) <= makespans(table, times) * (1 + 1e-12)


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES, ids=IDS)
def test_fewer_microbatches_than_fill_the_pipeline_take_no_less_than_their_bound(schedule: str, per_rank: int) -> None:
    random = np.random.default_rng(2)
    for pp in (2, 4, 8):
        for count in range(1, 2 * pp):
            if schedule.startswith("interleaved") and count % max(1, count // pp):
                continue
            table = schedule_table(schedule, pp, per_rank, count)
            forward, inputs, weight = random.uniform(0.5, 2.0, (3, 20, table.n_stages))
            times = StageTimes(forward, inputs + weight, weight, random.uniform(0.0, 1.0, (20, 1)))
            assert (bound_makespan(layout_of(table), times) <= makespans(table, times) * (1 + 1e-12)).all()


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES, ids=IDS)
def test_bounds_are_near_for_even_stages(schedule: str, per_rank: int) -> None:
    for pp, rounds in ((2, 2), (4, 2), (8, 4)):
        table = schedule_table(schedule, pp, per_rank, pp * rounds)
        for transfer in (0.0, 0.05):
            times = even(table, 1.0, 1.0, 1.0, transfer)
            found, wanted = bound_makespan(layout_of(table), times)[0], makespans(table, times)[0]
            exact = schedule in ("gpipe", "1f1b", "interleaved_1f1b") and transfer == 0
            assert found == pytest.approx(wanted, rel=1e-12 if exact else 0.06)
