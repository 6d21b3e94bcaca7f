"""Schedules placed in time: against a plain event loop, against published bubbles, and closed forms against both."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.planner.schedule.bubble import MeanStage, makespan
from phalanx.planner.schedule.simulate import StageTimes, makespans, makespans_together, simulate
from phalanx.planner.schedule.table import Action, Pass, ScheduleTable, schedule_table

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
    assert found.idle == pytest.approx(found.makespan - found.busy)
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


def test_pipelines_side_by_side_take_what_each_takes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(4)
    pipelines = []
    for (schedule, per_rank), candidates in zip(SCHEDULES, (3, 1, 4, 2, 1, 3, 2), strict=True):
        for pp, rounds in ((2, 2), (4, 3), (3, 5)):
            table = schedule_table(schedule, pp, per_rank, pp * rounds)
            forward, inputs, weight = random.uniform(0.5, 2.0, (3, candidates, table.n_stages))
            after = random.uniform(0.0, 3.0, (candidates, pp))
            transfer = random.uniform(0.0, 0.2, (candidates, 1))
            pipelines.append((table, StageTimes(forward, inputs + weight, weight, transfer, after)))
    alone = [makespans(*pipeline).tolist() for pipeline in pipelines]
    for room in (1, 2_000, 10**9):
        monkeypatch.setattr("phalanx.planner.schedule.simulate._TOGETHER", room)
        assert [found.tolist() for found in makespans_together(pipelines)] == alone
    assert makespans_together([]) == []


def test_what_ranks_do_afterwards_counts_from_their_own_last_action() -> None:
    table = schedule_table("1f1b", 4, 1, 8)
    times = even(table, 1.0, 1.0, 1.0)
    assert simulate(table, times).end[:, -1].tolist() == [33.0, 31.0, 29.0, 27.0]
    late = StageTimes(times.forward, times.backward, after=[1.0, 2.0, 3.0, 4.0])
    found = simulate(table, late)
    assert found.makespan == 34.0 and found.busy.tolist() == [25.0, 26.0, 27.0, 28.0]
    assert found.idle.tolist() == [9.0, 8.0, 7.0, 6.0] and found.bubble == pytest.approx(7.5 / 34.0)
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
    assert makespan(schedule, 16, per_rank, 64, MeanStage(third, 2 * third, third)) == pytest.approx(64.0 + bubble)


def test_bigscience_182b() -> None:
    """TP4 PP12, 1F1B: the step takes 0.742 s for each further micro-batch, so the bubble is 11 x 0.742 = 8.16 s."""
    table = schedule_table("1f1b", 12, 1, 128)
    times = even(table, 0.742 / 4, 0.742 / 4, 0.742 / 2)
    assert simulate(table, times).makespan - 128 * 0.742 == pytest.approx(8.16, abs=0.01)


# --- closed forms ------------------------------------------------------------------------------------------------------


def enough(schedule: str, pp: int) -> int:
    return 2 * pp - 1 if schedule == "zbv" else pp


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES, ids=IDS)
def test_closed_forms_are_exact_for_even_stages(schedule: str, per_rank: int) -> None:
    random = np.random.default_rng(1)
    for pp, rounds in ((2, 2), (3, 2), (4, 2), (5, 3), (8, 4), (9, 2)):
        table = schedule_table(schedule, pp, per_rank, pp * rounds)
        forward, inputs, weight = random.uniform(0.2, 3.0, (3, 300))
        ones = np.ones((300, table.n_stages))
        times = StageTimes(forward[:, None] * ones, (inputs + weight)[:, None] * ones, weight[:, None] * ones)
        closed = makespan(schedule, pp, per_rank, pp * rounds, MeanStage(forward, inputs + weight, weight))
        assert closed == pytest.approx(makespans(table, times), rel=1e-12)


def errors(schedule: str, per_rank: int, speeds: np.ndarray, pp: int, count: int, transfer: float = 0.0) -> np.ndarray:
    """Relative errors of the closed form for [candidates, stages] multiples of a stage of 1.0, 1.2 and 0.9 seconds."""
    table = schedule_table(schedule, pp, per_rank, count)
    rank = np.stack([speeds[:, mine].mean(axis=1) for mine in table.stages_of_rank], axis=1)
    slowest = rank.max(axis=1)
    others = (rank.sum(axis=1) - slowest) / (pp - 1) / slowest
    exact = makespans(table, StageTimes(1.0 * speeds, 2.1 * speeds, 0.9 * speeds, transfer))
    mean = MeanStage(1.0 * slowest, 2.1 * slowest, 0.9 * slowest, transfer, others)
    return np.asarray(makespan(schedule, pp, per_rank, count, mean) / exact - 1.0)


CASES = [(pp, rounds * pp) for pp in (2, 3, 4, 8, 16) for rounds in (2, 4)]


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES, ids=IDS)
@pytest.mark.parametrize(("spread", "bound"), [(0.1, 0.10), (0.3, 0.15)])
def test_closed_forms_for_stages_of_any_speed(schedule: str, per_rank: int, spread: float, bound: float) -> None:
    random = np.random.default_rng(3)
    for pp, count in CASES:
        speeds = 1.0 + spread * random.uniform(-1.0, 1.0, (50, pp * per_rank))
        found = errors(schedule, per_rank, speeds, pp, count)
        assert np.abs(found).max() < bound, (pp, count, found.min(), found.max())
        assert np.abs(found).mean() < bound / 3.0, (pp, count, found.mean())
        if schedule == "gpipe":
            assert np.abs(found).max() < 1e-12


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES, ids=IDS)
@pytest.mark.parametrize("head", [1.5, 2.0])
def test_closed_forms_for_a_costly_head(schedule: str, per_rank: int, head: float) -> None:
    for pp, count in CASES:
        speeds = np.ones((1, pp * per_rank))
        speeds[:, -1] = head
        bound = 1e-12 if schedule in ("gpipe", "1f1b", "interleaved_1f1b") else 0.05
        assert np.abs(errors(schedule, per_rank, speeds, pp, count)).max() < bound, (pp, count)


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES, ids=IDS)
def test_closed_forms_for_transfers(schedule: str, per_rank: int) -> None:
    for pp, count in CASES:
        found = errors(schedule, per_rank, np.ones((1, pp * per_rank)), pp, count, 0.05)
        assert np.abs(found).max() < (1e-12 if per_rank == 1 else 0.01), (pp, count, found)


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES, ids=IDS)
def test_closed_forms_for_fewer_microbatches_than_fill_the_pipeline(schedule: str, per_rank: int) -> None:
    for pp in (2, 4, 8, 16):
        for count in range(1, enough(schedule, pp)):
            if schedule.startswith("interleaved") and count % max(1, count // pp):
                continue
            found = errors(schedule, per_rank, np.ones((1, pp * per_rank)), pp, count)
            exact = schedule in ("gpipe", "1f1b", "interleaved_1f1b")
            assert np.abs(found).max() < (1e-12 if exact else 0.15), (pp, count, found)
            if per_rank == 1:
                assert np.abs(errors(schedule, 1, np.ones((1, pp)), pp, count, 0.05)).max() < 1e-12


def test_closed_forms_take_arrays_of_layouts() -> None:
    pp, count = np.array([1, 2, 4, 8]), np.array([8, 8, 16, 32])
    times = MeanStage(np.array([[1.0], [2.0]]), 2.0, 1.0, 0.01, np.array([1.0, 0.9, 1.0, 0.8]))
    found = makespan("zbv", pp, 2, count, times)
    assert found.shape == (2, 4) and found[0, 0] == 48.0
    single = makespan("zbv", 8, 2, 32, MeanStage(2.0, 2.0, 1.0, 0.01, 0.8))
    assert found[1, 3] == pytest.approx(float(single))
