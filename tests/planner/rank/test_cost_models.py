"""How far a profile says that predicted times may be off."""

from dataclasses import replace

import pytest

from phalanx.planner.rank.cost_models import SPREAD, estimate_spread
from phalanx.planner.time.profile import default_profile


def _spread(median: float | None, count: int) -> float:
    fitted = {"held_out": count, "held_out_median_error": median}
    return estimate_spread(replace(default_profile("H200"), fitted=fitted))


def test_where_nothing_judges_a_profile_its_times_may_be_off_by_what_is_assumed() -> None:
    assert estimate_spread(default_profile("H200")) == _spread(None, 0) == SPREAD


def test_a_few_runs_hardly_narrow_what_is_assumed_and_many_do() -> None:
    one, some, many = (_spread(0.01, count) for count in (1, 10, 1000))
    assert 0.9 * SPREAD < one < SPREAD
    assert one > some > many
    assert many == pytest.approx(1.4826 * 0.01, rel=0.15)


def test_one_run_that_is_far_off_is_believed() -> None:
    assert _spread(0.25, 1) == pytest.approx(1.4826 * 0.25)
    assert _spread(0.25, 1) > _spread(0.0, 1)
