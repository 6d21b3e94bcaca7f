"""Published figures of Frontier and of MI250s: the shipped profiles give them within the bars of docs/planning.md."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.cost.profile import load_profile
from phalanx.cost.studies import Study, calibrate_to_studies, predicted, studies

PEAK = 191.5
"""TFLOP/s of a GCD, which shares of the peak are of."""


@pytest.mark.parametrize("study", studies("frontier"), ids=lambda study: study.row)
def test_frontier_is_within_three_points(study: Study) -> None:
    found = predicted(study, load_profile("frontier"))
    points = 100 * (found - study.value) * (1.0 if study.relative else 1 / PEAK)
    assert abs(points) <= 3.0


@pytest.mark.parametrize("study", studies("aac-mi250"), ids=lambda study: study.row)
def test_mpt_on_mi250_is_within_three_percent(study: Study) -> None:
    assert predicted(study, load_profile("aac-mi250")) == pytest.approx(study.value, rel=0.03)


@pytest.mark.parametrize("name", ["frontier", "aac-mi250"])
def test_figures_that_are_judged_were_not_fitted(name: str) -> None:
    rows = (load_profile(name).fitted or {})["rows"]
    assert rows == [study.row for study in studies(name) if study.fitted]
    assert any(not study.fitted for study in studies(name))


def test_the_shipped_profile_is_what_fitting_gives() -> None:
    again, shipped = calibrate_to_studies("aac-mi250").profile, load_profile("aac-mi250").profile
    assert again.matmul_flop_s == pytest.approx(shipped.matmul_flop_s, rel=1e-3)


def test_a_slower_ramp_costs_strong_scaling_and_not_weak() -> None:
    strong, weak = (
        next(study for study in studies("frontier") if study.row == f"frontier-dash-000{number}") for number in (4, 6)
    )
    named = load_profile("frontier")
    plain = replace(named, profile=replace(named.profile, pipeline_ramp=1.0))
    assert predicted(strong, plain) > predicted(strong, named) + 0.03
    assert predicted(weak, plain) == pytest.approx(predicted(weak, named), abs=0.01)
