"""Cost models and sharing out: nothing lost, never far from the best there is, the same on every machine."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.families.materials.cost_fitting import CostFit, sum_timings
from phalanx.families.materials.data import balance
from phalanx.families.materials.data.balance import (
    CostModel,
    Division,
    assign_longest_first,
    divide_by_cost,
    divide_in_turn,
    divide_within_budget,
    step_balance,
    summarise_balance,
)

costs_of = st.lists(st.integers(1, 10**6), min_size=1, max_size=60).map(lambda c: np.array(c, dtype=np.int64))


def uneven(structures: int, seed: int = 0) -> np.ndarray:
    """Costs with a long tail: the largest is some 50 times the median."""
    return np.random.default_rng(seed).lognormal(8.0, 1.0, structures).astype(np.int64) + 1


def one_at_a_time(costs: np.ndarray, bins: int) -> np.ndarray:
    """Longest first as the book has it: sorted loads."""
    loads = [(0, place) for place in range(bins)]
    totals = np.zeros(bins, dtype=np.int64)
    for cost in sorted(costs.tolist(), reverse=True):
        load, place = heapq.heappop(loads)
        totals[place] = load + cost
        heapq.heappush(loads, (load + cost, place))
    return totals


def check_whole(division: Division, costs: np.ndarray, ranks: int, parts: int) -> None:
    assert division.loads.shape == (ranks, parts)
    expected = np.zeros((ranks, parts), dtype=np.int64)
    np.add.at(expected, (division.rank, division.part), costs)
    assert np.array_equal(division.loads, expected)
    assert division.loads.sum() == costs.sum()


@settings(max_examples=150, deadline=None)
@given(costs_of, st.integers(1, 9), st.integers(1, 4))
@example(np.array([1, 1, 1, 3, 196900, 196900, 196900, 196902]), 4, 1)
def test_every_structure_is_shared_out_once_and_no_rank_gets_much_more(
    costs: np.ndarray, ranks: int, parts: int
) -> None:
    division = divide_by_cost(costs, ranks, parts)
    check_whole(division, costs, ranks, parts)
    loads = division.loads.sum(axis=1)
    # No rank could have been given its last structure while another had less.
    smallest = [int(costs[division.rank == rank].min()) for rank in range(ranks) if (division.rank == rank).any()]
    heaviest = int(loads.argmax())
    last = int(costs[division.rank == heaviest].min())
    assert loads[heaviest] - last <= loads.min()
    assert smallest
    if len(costs) >= ranks:
        assert (loads > 0).all()


@pytest.mark.parametrize("ranks", [2, 7, 64, 512])
def test_serving_many_bins_at_once_is_as_good_as_one_at_a_time(ranks: int) -> None:
    costs = uneven(6 * ranks, seed=ranks)
    ours = divide_by_cost(costs, ranks, 1).loads.max()
    assert ours <= 1.01 * one_at_a_time(costs, ranks).max()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=120), st.integers(2, 70))
def test_few_bins_and_many_are_served_alike(costs: list[int], bins: int) -> None:
    each = np.array(costs, dtype=np.int64)
    order = np.argsort(-each, kind="stable")
    loads, expected = [0] * bins, [0] * len(costs)
    for item in order.tolist():
        expected[item] = loads.index(min(loads))
        loads[expected[item]] += costs[item]
    for serve in (balance._fill_one_by_one, balance._fill_many_at_once):
        assert serve(each, order, bins).tolist() == expected, serve
    assert assign_longest_first(each, bins).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_it_stays_within_a_third_of_the_best(costs: list[int], ranks: int) -> None:
    best = min(
        max(sum(c for c, r in zip(costs, chosen, strict=True) if r == rank) for rank in range(ranks))
        for chosen in itertools.product(range(ranks), repeat=len(costs))
    )
    loads = divide_by_cost(np.array(costs), ranks, 1).loads
    assert loads.max() <= (4 / 3) * best


def test_balanced_ranks_beat_structures_in_turn() -> None:
    costs = np.minimum(uneven(4096 * 16), 20_000)
    balanced, usual = divide_by_cost(costs, 4096, 2), divide_in_turn(costs, 4096, 2)
    check_whole(usual, costs, 4096, 2)
    assert balanced.imbalance < 1.02 < 1.8 < usual.imbalance
    assert np.array_equal(np.bincount(usual.rank), np.full(4096, 16))


def test_fewer_structures_than_ranks_leave_some_without() -> None:
    division = divide_by_cost(np.array([5, 3, 9]), ranks=8, parts=2)
    check_whole(division, np.array([5, 3, 9]), 8, 2)
    assert (division.loads.sum(axis=1) == 0).sum() == 5


def test_no_microbatch_is_over_the_budget_unless_a_structure_is() -> None:
    costs = uneven(200)
    costs[7] = budget = int(costs.max()) + 5
    division = divide_within_budget(costs, 3, costs, budget)
    check_whole(division, costs, 3, division.loads.shape[1])
    assert division.loads.max() <= budget
    fewer = divide_by_cost(costs, 3, division.loads.shape[1] - 1)
    assert fewer.loads.max() > budget
    costs[11] = 3 * budget
    division = divide_within_budget(costs, 3, costs, budget)
    alone = (division.rank == division.rank[11]) & (division.part == division.part[11])
    assert alone.sum() == 1
    assert np.sort(division.loads.ravel())[-2] <= budget < division.loads.max()


def test_micro_batches_are_added_until_all_fit() -> None:
    costs = np.array([6, 6, 6])
    assert divide_within_budget(costs, 1, costs, 10).loads.tolist() == [[6, 6, 6]]
    costs = np.array([6, 6, 6, 12, 1, 1])
    assert divide_within_budget(costs, 2, costs, 10).loads.shape == (2, 2)
    assert divide_within_budget(costs, 1, costs, 11).loads.tolist() == [[12, 7, 7, 6]]


def test_the_budget_holds_for_sizes_while_ranks_are_equal_in_cost() -> None:
    costs, sizes = uneven(300), uneven(300, seed=9)
    budget = 4 * int(sizes.max())
    division = divide_within_budget(costs, 4, sizes, budget)
    assert np.array_equal(division.rank, assign_longest_first(costs, 4))
    held = np.zeros_like(division.loads)
    np.add.at(held, (division.rank, division.part), sizes)
    assert held.max() <= budget


def test_costs_are_whole_and_in_proportion() -> None:
    model = CostModel(node=1.0, edge=0.3, graph=2.0)
    atoms, edges = np.array([10, 0, 1000]), np.array([100, 0, 40000])
    assert np.allclose(model.whole(atoms, edges) * model.unit, 1.0 * atoms + 0.3 * edges + 2.0, rtol=1e-4)
    seconds = CostModel(node=1e-7, edge=3e-8, graph=2e-7)
    assert np.array_equal(seconds.whole(atoms, edges), model.whole(atoms, edges))
    assert CostModel(node=1.0, edge=0.0).whole(np.array([0]), np.array([5])).tolist() == [1]


def timed(node: float, edge: float, graph: float, fixed: float, *, steps: int, seed: int = 0, noise: float = 0.02):
    """Measurements of micro-batches, step by step, with noise."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        graphs = random.integers(1, 30, 4).astype(float)
        atoms = graphs * random.integers(4, 60, 4)
        edges = atoms * random.uniform(8, 40, 4)
        seconds = node * atoms + edge * edges + graph * graphs + fixed
        yield sum_timings(atoms, edges, graphs, seconds * random.normal(1.0, noise, 4))


def test_a_fit_finds_what_the_times_were_made_of() -> None:
    fit = CostFit(CostModel(1.0, 0.3), memory=1.0)
    for sums in timed(2e-6, 5e-7, 1e-5, 1e-3, steps=300):
        fit.update(sums)
    assert fit.seconds() == pytest.approx([2e-6, 5e-7, 1e-5, 1e-3], rel=0.15)
    found = fit.model()
    assert found.edge / found.node == pytest.approx(0.25, rel=0.15)


def test_a_fit_follows_times_that_change() -> None:
    fit = CostFit(CostModel(1.0, 0.3), memory=0.95)
    for node, seed in ((1e-6, 1), (6e-6, 2)):
        for sums in timed(node, 5e-7, 0.0, 1e-3, steps=200, seed=seed):
            fit.update(sums)
    assert fit.seconds()[0] == pytest.approx(6e-6, rel=0.2)


def test_what_times_cannot_tell_apart_is_left_as_it_was_given() -> None:
    fit = CostFit(CostModel(node=1.0, edge=0.3))
    assert fit.model() == CostModel(node=1.0, edge=0.3)
    graphs = np.array([3.0, 8.0, 20.0])
    # Every atom has 20 edges: a second of an atom looks like a twentieth of one of an edge.
    atoms = graphs * 10.0
    for _ in range(50):
        fit.update(sum_timings(atoms, 20.0 * atoms, graphs, 7e-6 * atoms))
    found = fit.model()
    assert found.edge / found.node == pytest.approx(0.3, rel=0.05)
    assert found.node + 20.0 * found.edge == pytest.approx(7e-6, rel=0.05)


def test_no_cost_is_negative_and_sums_of_ranks_are_sums_of_their_times() -> None:
    fit = CostFit(CostModel(1.0, 0.3), memory=1.0)
    whole = CostFit(CostModel(1.0, 0.3), memory=1.0)
    steps = list(timed(0.0, 5e-7, 0.0, 0.0, steps=40, noise=0.2))
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        fit.update(first + second)
        whole.update(first)
        whole.update(second)
    assert (fit.seconds() >= 0.0).all()
    assert np.allclose(fit.seconds(), whole.seconds(), rtol=1e-6)
    resumed = CostFit(CostModel(1.0, 0.3), memory=1.0)
    resumed.state = fit.state.copy()
    assert np.array_equal(resumed.seconds(), fit.seconds())


def test_the_report_says_what_ranks_wait() -> None:
    even = Division(np.array([0, 1]), np.zeros(2, int), np.array([[4], [4]]))
    uneven_step = Division(np.array([0, 1, 1]), np.zeros(3, int), np.array([[2], [6]]))
    first, second = step_balance(even, unit=0.5), step_balance(uneven_step, unit=0.5)
    assert (first.imbalance, first.wait_seconds, first.seconds) == (1.0, 0.0, 2.0)
    assert (second.imbalance, second.wait_seconds, second.seconds) == (1.5, 1.0, 3.0)
    both = summarise_balance([first, second])
    assert (both.steps, both.imbalance_max, both.wait_seconds_mean) == (2, 1.5, 0.5)
    assert both.wait_mean == pytest.approx(1.0 / 5.0)
