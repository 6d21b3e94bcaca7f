"""Forecast scores against an independent implementation and against their definitions; the published defects stay out."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import xarray
from scores.continuous import additive_bias, mae, mse
from scores.probability import crps_for_ensemble, rank_histogram

from phalanx.families.weather.data.coordinates import Grid
from phalanx.families.weather.evaluation.forecast_scores import (
    EnsembleScores,
    ForecastScores,
    Score,
)
from phalanx.families.weather.model.field_head import almost_fair_crps

VARIABLES = ("z500", "t850")
LEADS = (24, 72)
GRID = Grid(np.linspace(-90, 90, 7), np.arange(10) * 36.0)
WEIGHTS = torch.from_numpy(GRID.area_weights())
FORECASTS = 23


def random_fields(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, *GRID.shape, generator=torch.Generator().manual_seed(seed)) * 3 + 1


FORECAST, TRUTH, USUAL = (random_fields(seed, FORECASTS, len(VARIABLES)) for seed in (0, 1, 2))
LEAD_HOURS = torch.tensor([24, 72, 72])[torch.arange(FORECASTS) % 3]


def scored(
    parts: list[slice] | None = None, *, truth: torch.Tensor = TRUTH, usual: torch.Tensor | None = USUAL
) -> list[Score]:
    scores = ForecastScores(VARIABLES, LEADS, WEIGHTS)
    for part in parts or [slice(None)]:
        scores.add(FORECAST[part], truth[part], LEAD_HOURS[part], None if usual is None else usual[part])
    return scores.results()


def arrays(lead: int, variable: int, *fields: torch.Tensor) -> list[xarray.DataArray]:
    """Double-precision fields [time, lat, lon] of one lead time and variable."""
    return [
        xarray.DataArray(
            field[lead == LEAD_HOURS][..., variable, :, :].double().numpy(),
            dims=(*"te"[: field.ndim - 3], "lat", "lon"),
        )
        for field in fields
    ]


AREA = xarray.DataArray(GRID.area_weights(), dims=("lat", "lon"))


def table(scores: list[Score]) -> np.ndarray:
    return np.array([dataclasses.astuple(score)[2:] for score in scores])


@pytest.mark.parametrize("number", range(4))
def test_scores_are_those_of_an_independent_implementation(number: int) -> None:
    score = scored()[number]
    lead, variable = divmod(number, 2)
    assert (score.lead_hours, score.variable) == (LEADS[lead], VARIABLES[variable])
    forecast, truth, usual = arrays(LEADS[lead], variable, FORECAST, TRUTH, USUAL)
    assert score.forecasts == len(forecast)
    assert score.rmse == pytest.approx(math.sqrt(float(mse(forecast, truth, weights=AREA))), rel=1e-10)
    assert score.mae == pytest.approx(float(mae(forecast, truth, weights=AREA)), rel=1e-10)
    assert score.bias == pytest.approx(float(additive_bias(forecast, truth, weights=AREA)), rel=1e-9)
    a, b = forecast - usual, truth - usual
    mean = lambda field: field.weighted(AREA).mean(("lat", "lon"))  # noqa: E731
    assert score.acc == pytest.approx(float((mean(a * b) / np.sqrt(mean(a**2) * mean(b**2))).mean()), rel=1e-9)


def test_ensemble_scores_are_those_of_an_independent_implementation() -> None:
    members = random_fields(5, FORECASTS, 6, len(VARIABLES))
    scores = EnsembleScores(VARIABLES, LEADS, WEIGHTS, members=6)
    scores.add(members, TRUTH, LEAD_HOURS)
    for number, score in enumerate(scores.results()):
        lead, variable = divmod(number, 2)
        ensemble, truth = arrays(LEADS[lead], variable, members, TRUTH)
        for method, found in (("ecdf", score.crps), ("fair", score.fair_crps)):
            expected = crps_for_ensemble(ensemble, truth, "e", method=method, weights=AREA)
            assert found == pytest.approx(float(expected), rel=1e-10)
        assert score.rmse == pytest.approx(math.sqrt(float(mse(ensemble.mean("e"), truth, weights=AREA))), rel=1e-10)
        variance = float((ensemble.var("e", ddof=1) * AREA).mean())
        assert score.spread == pytest.approx(math.sqrt(variance), rel=1e-10)
        assert score.spread_skill == pytest.approx(score.spread / score.rmse * math.sqrt(7 / 6), rel=1e-12)


def test_ranks_with_ties_are_those_of_an_independent_implementation() -> None:
    # Whole numbers, as of amounts that are often nothing: many members equal the truth.
    members, truth = random_fields(8, FORECASTS, 5, len(VARIABLES)).div(3).round(), TRUTH.div(3).round()
    assert (members == truth[:, None]).float().mean() > 0.1
    scores = EnsembleScores(VARIABLES, LEADS, WEIGHTS, members=5)
    scores.add(members, truth, LEAD_HOURS)
    for number, score in enumerate(scores.results()):
        lead, variable = divmod(number, 2)
        ensemble, known = arrays(LEADS[lead], variable, members, truth)
        expected = rank_histogram(ensemble, known, "e", weights=AREA)
        assert score.ranks == pytest.approx(expected.values.tolist(), rel=1e-10)


def test_a_truth_among_equal_members_has_each_of_its_ranks_alike() -> None:
    members = torch.tensor([1.0, 2.0, 2.0, 5.0])[None, :, None, None, None].expand(3, 4, 1, *GRID.shape)
    truth = torch.tensor([0.0, 2.0, 9.0])[:, None, None, None].expand(3, 1, *GRID.shape)
    scores = EnsembleScores(("z500",), (24,), WEIGHTS, members=4)
    scores.add(members, truth, torch.full((3,), 24))
    # Below all, above one and level with two, above all.
    assert scores.results()[0].ranks == pytest.approx([1 / 3, 1 / 9, 1 / 9, 1 / 9, 1 / 3])


def test_a_member_without_values_has_no_ranks() -> None:
    members = random_fields(6, FORECASTS, 3, len(VARIABLES))
    members[0, 1, 0, 2, 2] = math.nan
    scores = EnsembleScores(VARIABLES, LEADS, WEIGHTS, members=3)
    scores.add(members, TRUTH, LEAD_HOURS)
    found = scores.results()
    assert all(map(math.isnan, found[0].ranks)) and sum(found[1].ranks) == pytest.approx(1.0)


def test_the_fair_crps_does_not_depend_on_the_number_of_members() -> None:
    generator = torch.Generator().manual_seed(3)
    truth = torch.randn(200_000, generator=generator, dtype=torch.float64)
    found = [
        almost_fair_crps(torch.randn(200_000, members, generator=generator, dtype=torch.float64), truth, 1.0)
        .mean()
        .item()
        for members in (2, 10)
    ]
    # Of a standard normal distribution and truth: 1 / sqrt(pi).
    assert found == pytest.approx([1 / math.sqrt(math.pi)] * 2, abs=0.005)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_spreading_members_beyond_the_truth_scores_worse(count: int) -> None:
    generator = torch.Generator().manual_seed(7)
    truth = torch.randn(50_000, generator=generator, dtype=torch.float64)
    # Members that err alike, as models of the same data do: their error is 1, they lie 0.1 apart.
    members = 0.1 * torch.randn(50_000, count, generator=generator, dtype=torch.float64)
    mean = members.mean(1, keepdim=True)
    stretched = [mean + factor * (members - mean) for factor in (1, 10, 20, 40, 160, 640)]
    proper = [almost_fair_crps(one, truth, 0.0).mean().item() for one in stretched]
    assert proper.index(min(proper)) == 1 and proper[1:] == sorted(proper[1:])
    assert proper[-1] > 10 * proper[0]


def test_the_fair_score_is_none_of_stretched_members() -> None:
    generator = torch.Generator().manual_seed(7)
    truth = torch.randn(50_000, generator=generator, dtype=torch.float64)
    members = 0.1 * torch.randn(50_000, 2, generator=generator, dtype=torch.float64)
    mean = members.mean(1, keepdim=True)
    fair = [almost_fair_crps(mean + factor * (members - mean), truth, 1.0).mean().item() for factor in (1, 10, 40, 640)]
    # Half of the distance of two members is subtracted, so that whatever lies between them costs nothing.
    assert fair == sorted(fair, reverse=True) and fair[-1] < 0.05 * fair[0]


def test_members_that_are_not_independent_have_no_fair_score() -> None:
    scores = EnsembleScores(VARIABLES, LEADS, WEIGHTS, members=3, independent=False)
    scores.add(random_fields(6, FORECASTS, 3, len(VARIABLES)), TRUTH, LEAD_HOURS)
    assert {score.fair_crps for score in scores.results()} == {None}


def test_a_reliable_ensemble_has_a_spread_that_equals_its_skill() -> None:
    generator = torch.Generator().manual_seed(4)
    centre = torch.randn(300, 1, *GRID.shape, generator=generator) * 5
    members = centre[:, None] + torch.randn(300, 4, 1, *GRID.shape, generator=generator)
    scores = EnsembleScores(("z500",), (24,), WEIGHTS, members=4)
    scores.add(members, centre + torch.randn(300, 1, *GRID.shape, generator=generator), torch.full((300,), 24))
    assert scores.results()[0].spread_skill == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("size", [1, 5, 7, 22])
def test_batches_of_any_size_give_the_same_scores(size: int) -> None:
    # The last batch is short. The published metrics averaged over batches, and took anomalies about the batch's mean.
    parts = [slice(first, first + size) for first in range(0, FORECASTS, size)]
    np.testing.assert_allclose(table(scored(parts)), table(scored()), rtol=1e-12)


@pytest.mark.parametrize("ends", [[0, 23], [0, 1, 23], [0, 9, 10, 10, 23]])
def test_uneven_shares_add_up(ends: list[int]) -> None:
    total = ForecastScores(VARIABLES, LEADS, WEIGHTS)
    ensemble, whole = (EnsembleScores(VARIABLES, LEADS, WEIGHTS, members=3) for _ in range(2))
    members = random_fields(6, FORECASTS, 3, len(VARIABLES))
    whole.add(members, TRUTH, LEAD_HOURS)
    for first, last in pairwise(ends):
        share, ensemble_share = (
            ForecastScores(VARIABLES, LEADS, WEIGHTS),
            EnsembleScores(VARIABLES, LEADS, WEIGHTS, members=3),
        )
        share.add(FORECAST[first:last], TRUTH[first:last], LEAD_HOURS[first:last], USUAL[first:last])
        ensemble_share.add(members[first:last], TRUTH[first:last], LEAD_HOURS[first:last])
        # As `all_reduce` adds them up.
        total._sums += share._sums
        ensemble._sums += ensemble_share._sums
    np.testing.assert_allclose(table(total.results()), table(scored()), rtol=1e-12)
    for found, expected in zip(ensemble.results(), whole.results(), strict=True):
        assert dataclasses.astuple(found)[2:-1] == pytest.approx(dataclasses.astuple(expected)[2:-1], rel=1e-12)
        assert found.ranks == pytest.approx(expected.ranks, rel=1e-12)


def test_the_error_of_a_mean_state_counts_although_its_pattern_is_right() -> None:
    # Anomalies are not centred: a forecast that is right but for a constant has no perfect correlation.
    scores = ForecastScores(("z500",), (24,), WEIGHTS)
    truth, usual = TRUTH[:4, :1], torch.zeros(4, 1, *GRID.shape)
    scores.add(truth + 20, truth, torch.full((4,), 24), usual)
    assert 0.1 < scores.results()[0].acc < 0.9
    assert scores.results()[0].bias == pytest.approx(20, rel=1e-6)


def test_the_square_root_comes_after_the_mean_over_forecasts() -> None:
    scores = ForecastScores(("z500",), (24,), WEIGHTS)
    error = torch.tensor([3.0, 4.0])[:, None, None, None] * torch.ones(2, 1, *GRID.shape)
    scores.add(error, torch.zeros_like(error), torch.full((2,), 24))
    assert scores.results()[0].rmse == pytest.approx(math.sqrt((9 + 16) / 2), rel=1e-12)


def test_missing_truth_is_left_out_point_by_point_and_forecast_by_forecast() -> None:
    holes = TRUTH.clone()
    holes[3, 0, 2:4, 1:8] = math.nan
    holes[4] = math.nan
    found = scored(truth=holes)
    forecast, truth, usual = arrays(72, 0, FORECAST, holes, USUAL)
    error = ((forecast - truth) ** 2).weighted(AREA).mean(("lat", "lon"))
    assert found[2].rmse == pytest.approx(math.sqrt(float(error.mean())), rel=1e-10)
    assert found[2].forecasts == int((LEAD_HOURS == 72).sum()) - 1
    assert not math.isnan(found[2].acc)
    assert len(usual) == len(error)


def test_a_forecast_without_values_does_not_score_well() -> None:
    broken = FORECAST.clone()
    broken[0, 0, 3, 3] = math.nan
    scores = ForecastScores(VARIABLES, LEADS, WEIGHTS)
    scores.add(broken, TRUTH, LEAD_HOURS)
    assert math.isnan(scores.results()[0].rmse)
    assert not math.isnan(scores.results()[1].rmse)


def test_a_broken_forecast_does_not_vanish_from_the_correlation() -> None:
    broken = FORECAST.clone()
    broken[0, 0, 3, 3] = math.nan
    scores = ForecastScores(VARIABLES, LEADS, WEIGHTS)
    scores.add(broken, TRUTH, LEAD_HOURS, USUAL)
    assert math.isnan(scores.results()[0].acc)


def test_nothing_scored_is_nan_and_no_climatology_no_correlation() -> None:
    assert all(math.isnan(score.acc) for score in scored(usual=None))
    empty = ForecastScores(VARIABLES, LEADS, WEIGHTS).results()
    assert [score.forecasts for score in empty] == [0] * 4
    assert all(math.isnan(score.rmse) for score in empty)


def test_a_lead_time_that_is_not_asked_for_is_refused() -> None:
    scores = ForecastScores(VARIABLES, LEADS, WEIGHTS)
    with pytest.raises(ValueError, match=r"48 hours is not among those scored: \(24, 72\)"):
        scores.add(FORECAST[:2], TRUTH[:2], torch.tensor([24, 48]))


def test_a_result_is_plain_numbers_that_cannot_change() -> None:
    score = scored()[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        score.rmse = 0.0  # type: ignore[misc]
    assert all(type(value) in (str, int, float) for value in dataclasses.astuple(score))


def test_single_precision_fields_far_from_zero_are_scored_in_double_precision() -> None:
    truth = (TRUTH * 0 + 54000).float()
    scores = ForecastScores(VARIABLES, LEADS, WEIGHTS)
    scores.add(truth + 0.25, truth, LEAD_HOURS)
    assert scores.results()[0].rmse == pytest.approx(0.25, rel=1e-12)
