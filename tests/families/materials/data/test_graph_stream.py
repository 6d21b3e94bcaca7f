"""What global batch k holds: a function of seed, step and budget; every structure once an epoch; the same for all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phalanx.errors import ConfigError
from phalanx.families.materials.data.balance import CostModel, divide_by_cost
from phalanx.families.materials.data.graph_stream import GraphOrder

COST = CostModel(1.0, 0.3)


class Sizes:
    """The index of a source: all that the order looks at."""

    def __init__(self, structures: int, seed: int = 0, largest: int = 300) -> None:
        random = np.random.default_rng(seed)
        self.path, self.split, self.fingerprint = f"source-{seed}", "train", f"{structures}/{seed}"
        self.atoms = np.minimum(random.lognormal(3.0, 0.8, structures).astype(np.int64) + 1, largest)
        self.edges = self.atoms * random.integers(5, 40, structures)

    def __len__(self) -> int:
        return len(self.atoms)

    def sizes(self, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.atoms[items], self.edges[items]


def order_of(sources: list[Any], *, weights: list[float | None] | None = None, **changes: Any) -> GraphOrder:
    given: dict[str, Any] = {"seed": 3, "global_batch": 64, "batch_by": "cost", "cost": COST} | changes
    return GraphOrder(sources, weights or [None] * len(sources), **given)


def steps_per_epoch(order: GraphOrder) -> float:
    """Steps in which the source that takes longest is read once."""
    return order._steps * order._windows / order._epochs


@pytest.mark.parametrize(
    ("structures", "global_batch"), [(1, 1), (1, 64), (37, 1), (37, 64), (1009, 7), (1009, 700), (20_000, 64)]
)
def test_nothing_is_dropped_or_repeated_over_many_epochs(structures: int, global_batch: int) -> None:
    order = order_of([Sizes(structures)], global_batch=global_batch)
    epochs, step, read = max(6, 20 * global_batch // structures), 0, []
    end = 0
    while end < epochs * structures:
        step += 1
        found = order.batch(step)
        assert len(found.numbers) >= 1
        assert np.array_equal(found.numbers, np.arange(end, end + len(found.numbers)))
        end += len(found.numbers)
        read.append(found.item)
    items = np.concatenate(read)[: epochs * structures].reshape(epochs, structures)
    assert (np.sort(items, axis=1) == np.arange(structures)).all()
    assert end / step == pytest.approx(global_batch, rel=0.05, abs=0.5)
    assert structures < 1000 or not np.array_equal(items[0], items[1])


@pytest.mark.parametrize("structures", [1009, 100_003])
def test_the_length_of_an_epoch_never_changes(structures: int) -> None:
    order = order_of([Sizes(structures)], global_batch=60)
    steps = steps_per_epoch(order)
    assert steps == int(steps) == pytest.approx(structures / 60, abs=max(1, structures / 60 / 20))
    for epoch in range(1, 4):
        first, _ = order.span(epoch * int(steps) + 1)
        assert first == epoch * structures


def test_batches_cut_by_cost_are_equal_in_cost() -> None:
    source = Sizes(20_000)
    by_cost, by_count = order_of([source]), order_of([source], batch_by="graphs")
    spread = []
    for order in (by_cost, by_count):
        batches = [order.batch(step) for step in range(1, 200)]
        costs = np.array([COST.whole(found.atoms, found.edges).sum() * COST.unit for found in batches])
        spread.append(costs.std() / costs.mean())
    assert spread[0] < 0.02 < 0.08 < spread[1]
    assert [by_count.span(step) for step in (1, 2)] == [(0, 64), (64, 128)]


def test_a_structure_that_outweighs_a_batch_leaves_none_empty() -> None:
    source = Sizes(200)
    source.edges[17] = 10**7
    order = order_of([source], global_batch=10)
    counts = [len(order.batch(step).numbers) for step in range(1, 2 * int(steps_per_epoch(order)) + 1)]
    assert min(counts) >= 1 and sum(counts) == 400


@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 1.0]])
def test_a_mixture_reads_each_source_in_proportion(weights: list[float | None] | None) -> None:
    sources = [Sizes(1000, seed=1), Sizes(300, seed=2), Sizes(40, seed=3, largest=900)]
    order = order_of(sources, weights=weights, global_batch=32)
    numbers = np.arange(order.epoch_samples)
    found = order.locate(numbers)
    shares = np.bincount(found.source) / len(numbers)
    expected = np.array([1000, 300, 40]) / 1340 if weights is None else np.array([0.6, 0.2, 0.2])
    assert np.allclose(shares, expected, atol=0.002)
    turns = np.bincount(found.source) / [len(source) for source in sources]
    assert turns.min() >= 0.999
    for index, source in enumerate(sources):
        counts = np.bincount(found.item[found.source == index], minlength=len(source))
        assert counts.max() - counts.min() <= 1


def test_any_step_is_found_without_those_before_it() -> None:
    sources = [Sizes(5000, seed=1), Sizes(700, seed=2)]
    order = order_of(sources)
    in_turn = [order.span(step) for step in range(1, 300)]
    afresh = order_of(sources)
    backwards = [afresh.span(step) for step in range(299, 0, -1)]
    assert backwards[::-1] == in_turn
    far = 10**9
    first, last = order_of(sources).span(far)
    assert first < last and first == order.span(far - 1)[1]
    assert first / far == pytest.approx(order.epoch_samples / steps_per_epoch(order))


def test_the_division_is_of_the_same_batch_for_every_number_of_ranks() -> None:
    order = order_of([Sizes(30_000)], global_batch=9000)
    found = order.batch(5)
    costs = COST.whole(found.atoms, found.edges)
    for ranks in (1, 2, 3, 4, 5, 6, 7, 8, 4096):
        division = divide_by_cost(costs, ranks, 2)
        members = [found.numbers[division.rank == rank] for rank in range(ranks)]
        assert np.array_equal(np.sort(np.concatenate(members)), found.numbers)


def test_seed_budget_and_data_decide_and_are_in_the_fingerprint() -> None:
    source = Sizes(5000)
    base = order_of([source])
    others = [
        order_of([source], seed=4),
        order_of([source], global_batch=65),
        order_of([source], batch_by="graphs"),
        order_of([source], cost=CostModel(1.0, 0.0)),
        order_of([Sizes(5000, seed=1)]),
    ]
    assert len({order.fingerprint for order in [base, *others]}) == 6
    assert order_of([source]).fingerprint == base.fingerprint
    assert not np.array_equal(base.batch(1).item[:40], others[0].batch(1).item[:40])
    # Another unit of cost is the same cost.
    scaled = order_of([source], cost=CostModel(10.0, 3.0))
    assert [scaled.span(step) for step in range(1, 50)] == [base.span(step) for step in range(1, 50)]


def test_an_empty_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="source-0 has no structures in its train split"):
        order_of([Sizes(0)])


def test_windows_whose_share_of_the_samples_is_no_whole_number() -> None:
    """Of two windows of 8,192.5 samples one has a sample less than the other."""
    order = order_of([Sizes(16_385)], global_batch=1)
    found = [order.batch(step).numbers.tolist() for step in (1, 2, 8192, 8193, 16_384)]
    assert all(len(numbers) >= 1 for numbers in found)
    assert found[0][0] == 0 and found[-1][-1] == 16_384
