"""Closed forms of pipelines beside their simulation."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.planner.schedule.schedule_table import schedule_table
from phalanx.planner.schedule.simulate import StageTimes, makespans
from published.bubble import MeanStage, makespan

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


@pytest.mark.parametrize(
    ("schedule", "per_rank", "bubble"),
    [
        ("gpipe", 1, 15.0),
        ("1f1b", 1, 15.0),
        ("interleaved_1f1b", 2, 7.5),
        ("interleaved_1f1b", 4, 3.75),
        ("interleaved_zero_bubble", 2, 2.5),
        ("zbv", 2, 2.5),
    ],
)
def test_sixteen_ranks_with_64_microbatches(schedule: str, per_rank: int, bubble: float) -> None:
    third = 1.0 / (3 * per_rank)
    assert makespan(schedule, 16, per_rank, 64, MeanStage(third, 2 * third, third)) == pytest.approx(64.0 + bubble)


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
