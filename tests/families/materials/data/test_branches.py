"""Sub-groups of ranks that read some branches each: structures go to ranks of their branch, steps stay what they are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_files import prepared_sources
from phalanx.families.materials.config import GraphData
from phalanx.families.materials.data.balance import (
    assign_by_head_group,
    assign_longest_first,
    divide_by_cost,
    divide_within_budget,
)
from phalanx.families.materials.data.graph_batches import graph_columns
from phalanx.families.materials.data.graph_shards import PreparedSource, open_prepared
from phalanx.families.materials.data.graph_stream import GraphBatchStream, graph_order
from phalanx.layout.data_parallel.task_heads import BranchGroups, sizes_by_cost

STEPS = range(1, 9)
sizes_of = st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(lambda sizes: sizes[0] > 0).map(tuple)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> GraphData:
    return prepared_sources(tmp_path_factory.mktemp("branches"))


@pytest.fixture(scope="module")
def sources(data: GraphData) -> list[PreparedSource]:
    return open_prepared(data, "train")


def streams(
    data: GraphData, sources: list[PreparedSource], groups: BranchGroups | None, ranks: int
) -> list[GraphBatchStream]:
    order = graph_order(sources, data, seed=5, global_batch=12)
    return [
        GraphBatchStream(order, graph_columns(sources), parts=2, rank=rank, ranks=ranks, branches=groups, prefetch=0)
        for rank in range(ranks)
    ]


def test_groups_are_runs_of_ranks_and_of_branches() -> None:
    groups = BranchGroups((2, 0, 1, 3, 0, 0))
    assert groups.ranks == 6
    assert [(group.branches, group.ranks) for group in groups.groups] == [
        (range(2), range(2)),
        (range(2, 3), range(2, 3)),
        (range(3, 6), range(3, 6)),
    ]
    assert [groups.of_rank(rank).branches.start for rank in range(6)] == [0, 0, 2, 3, 3, 3]


@settings(max_examples=80, deadline=None)
@given(sizes_of, st.integers(0, 40), st.integers(1, 3), st.integers(0, 2**16))
def test_a_structure_goes_to_a_rank_of_its_branch_and_nowhere_else(
    sizes: tuple[int, ...], structures: int, parts: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    groups = BranchGroups(sizes)
    # Some branches have no structure: those above a random one.
    source = random.integers(0, random.integers(1, len(sizes) + 1), structures)
    costs = random.lognormal(3.0, 1.0, structures).astype(np.int64) + 1
    division = divide_by_cost(costs, groups.ranks, parts, assign_by_head_group(groups, source))
    assert len(division.rank) == structures and division.loads.sum() == costs.sum()
    for branch, rank in zip(source.tolist(), division.rank.tolist(), strict=True):
        assert branch in groups.of_rank(rank).branches
    for group in groups.groups:
        mine = np.isin(source, np.arange(group.branches.start, group.branches.stop))
        alone = assign_longest_first(costs[mine], len(group.ranks))
        assert np.array_equal(division.rank[mine], group.ranks.start + alone)


def test_a_budget_holds_on_the_busiest_rank_of_any_branch() -> None:
    costs, source = np.full(24, 10, dtype=np.int64), np.array([0] * 20 + [1] * 4)
    groups = BranchGroups((1, 3))
    division = divide_within_budget(costs, 4, costs, 50, assign_by_head_group(groups, source))
    assert division.loads.shape == (4, 4) and division.loads.max() == 50
    assert division.loads.sum(axis=1).tolist() == [200, 20, 10, 10]


def test_every_step_has_the_structures_that_it_has_without_groups(
    data: GraphData, sources: list[PreparedSource]
) -> None:
    plain = streams(data, sources, None, 1)[0]
    apart = streams(data, sources, BranchGroups((1, 2)), 3)
    assert {stream.fingerprint for stream in apart} == {plain.fingerprint}
    for step in STEPS:
        batches = [stream.batch(step) for stream in apart]
        numbers = sorted(number for batch in batches for number in batch.sample_indices.tolist())
        assert numbers == sorted(plain.batch(step).sample_indices.tolist())
        assert [set(batch.source_G.tolist()) for batch in batches[1:]] == [{1}, {1}]
        assert set(batches[0].source_G.tolist()) == {0}
        # Every rank makes as many micro-batches, and counts the targets of tasks that its branch knows nothing of.
        assert {len(list(batch.split(2))) for batch in batches} == {2}
        counts = np.sum([batch.target_counts().numpy() for batch in batches], axis=0)
        assert np.array_equal(counts, plain.batch(step).target_counts().numpy())


def test_a_step_may_lack_a_branch(data: GraphData, sources: list[PreparedSource]) -> None:
    # Two structures a step: some steps have none of the crystals.
    order = graph_order(sources, data.model_copy(update={"batch_by": "graphs"}), seed=5, global_batch=2)
    ranks = [
        GraphBatchStream(order, graph_columns(sources), rank=rank, ranks=2, branches=BranchGroups((1, 1)), prefetch=0)
        for rank in (0, 1)
    ]
    counts = [tuple(len(stream.batch(step).sample_indices) for stream in ranks) for step in range(1, 13)]
    assert (2, 0) in counts and {sum(pair) for pair in counts} == {2}
    batch = next(ranks[1].batch(step) for step, pair in enumerate(counts, 1) if pair == (2, 0))
    assert batch.forces_N3 is not None and not batch.target_counts().any()


def test_sizes_follow_cost_and_not_the_number_of_structures() -> None:
    # HydraGNN sizes its sub-groups by structures, which would be (10, 1) here: large crystals are few and costly.
    structures, cost_of_one = (900, 100), (1.0, 90.0)
    costs = [n * cost for n, cost in zip(structures, cost_of_one, strict=True)]
    assert sizes_by_cost(costs, 11) == (1, 10)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(1, 7))
def test_no_other_sizes_leave_the_busiest_rank_with_less(costs: list[int], ranks: int) -> None:
    sizes = sizes_by_cost(costs, ranks)
    assert len(sizes) == len(costs) and sum(sizes) == ranks
    assert sizes.count(0) == max(0, len(costs) - ranks) and sizes[0] > 0

    def busiest(chosen: tuple[int, ...]) -> float:
        groups = BranchGroups(chosen).groups
        return max(sum(costs[g.branches.start : g.branches.stop]) / len(g.ranks) for g in groups)

    few = ranks < len(costs)
    allowed = [
        chosen
        for chosen in itertools.product(range(2) if few else range(1, ranks + 1), repeat=len(costs))
        if sum(chosen) == ranks and chosen[0] > 0
    ]
    assert busiest(sizes) == min(map(busiest, allowed))
