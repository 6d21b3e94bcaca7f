"""Loads of experts as a distribution: the busiest rank of many, from what routers logged or from a prior."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from phalanx.planner.trace.expert_loads import BALANCED, PRIOR, ExpertLoads, read_loads, whole_rows


def test_logged_loads_are_summed_over_the_experts_of_a_rank() -> None:
    loads = read_loads([[0.4, 0.2, 0.2, 0.2], [0.25, 0.25, 0.25, 0.25]])
    # Of two ranks the first has 0.6 of the first layer's rows and half of the second's.
    assert loads.busiest(4, 2) == pytest.approx((1.2 + 1.0) / 2)
    assert loads.busiest(4, 4) == pytest.approx((1.6 + 1.0) / 2)
    assert loads.busiest_spread(4, 2) == pytest.approx(0.1)


def test_one_rank_has_all_rows() -> None:
    assert PRIOR.busiest(64, 1) == 1.0
    assert PRIOR.busiest_spread(64, 1) == 0.0
    assert BALANCED.busiest(64, 8) == 1.0


@pytest.mark.parametrize(("experts", "ranks"), [(64, 64), (128, 16), (8, 4)])
def test_the_prior_is_the_mean_of_the_most_of_many_normal_numbers(experts: int, ranks: int) -> None:
    drawn = 1.0 + PRIOR.spread * np.random.default_rng(0).standard_normal((4000, ranks, experts // ranks)).mean(axis=2)
    assert PRIOR.busiest(experts, ranks) == pytest.approx(float(drawn.max(axis=1).mean()), rel=0.01)


def test_no_rank_gets_more_than_all_rows() -> None:
    assert ExpertLoads(spread=50.0).busiest(8, 4) == 4.0


def test_loads_make_whole_rows() -> None:
    assert whole_rows(1.1, 128) == Fraction(141, 128)
    assert whole_rows(0.001, 8) * 8 == 1


@pytest.mark.parametrize("rows", [[], [[0.5, 0.5], [1.0]], [[0.0, 0.0]], [[-0.5, 1.5]]])
def test_loads_that_cannot_be_are_refused(rows: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="one row a layer"):
        read_loads(rows)
