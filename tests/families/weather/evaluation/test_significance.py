"""The paired t-test of two models' scores: against formulas written out, and how often it errs on series made up."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from phalanx.errors import ConfigError
from phalanx.families.weather.evaluation.significance import (
    StartScores,
    compare_scores,
    inflation_factor,
    mean_test,
)

HOUR = 3600


def correlated(count: int, first: float, second: float, seed: int) -> np.ndarray:
    """A stationary AR(2) series with these coefficients."""
    noise = np.random.default_rng(seed).standard_normal(count + 200)
    values = np.zeros(count + 200)
    for place in range(2, count + 200):
        values[place] = first * values[place - 1] + second * values[place - 2] + noise[place]
    return values[200:]


def by_hand(values: np.ndarray) -> tuple[float, float]:
    """Half width of the 95% interval and p of Geer's test, as `GeerAR2Corrected` of weatherbenchX has it."""
    count, deviations = len(values), values - values.mean()
    variance = deviations.var(ddof=1)
    one, two = ((deviations[:-lag] * deviations[lag:]).mean() / variance for lag in (1, 2))
    phi = (one * (1 - two) / (1 - one**2), (two - one**2) / (1 - one**2))
    inflation = math.sqrt((1 - one * phi[0] - two * phi[1]) / (1 - phi[0] - phi[1]) ** 2)
    error = math.sqrt(variance / count) * inflation
    return stats.t(count - 1).ppf(0.975) * error, 2 * (1 - stats.t(count - 1).cdf(abs(values.mean()) / error))


@pytest.mark.parametrize("coefficients", [(0.5, 0.2), (0.3, 0.0), (0.9, -0.2)])
def test_intervals_are_those_of_the_source(coefficients: tuple[float, float]) -> None:
    values = 0.4 + correlated(120, *coefficients, seed=1)
    found = mean_test(values, np.arange(120) * 12 * HOUR, np.zeros(120, dtype=np.int64))
    assert found.inflation > 1.0
    assert (found.half_width, found.p_value) == pytest.approx(by_hand(values), rel=1e-6)
    assert found.mean == pytest.approx(values.mean())


def test_the_inflation_is_that_of_an_autoregressive_process() -> None:
    # Of order one: sqrt((1 + r) / (1 - r)).
    assert inflation_factor(0.5, 0.25) == pytest.approx(math.sqrt(3))
    assert inflation_factor(0.0, 0.0) == 1.0
    assert inflation_factor(-0.6, 0.36) == 1.0
    assert inflation_factor(1.0, 1.0) == inflation_factor(0.5, 1.2) == math.inf


def test_equal_models_seldom_differ_and_more_often_without_the_correction() -> None:
    seconds, one = np.arange(200) * 12 * HOUR, np.zeros(200, dtype=np.int64)
    series = [correlated(200, 0.5, 0.1, seed) for seed in range(300)]
    found = sum(mean_test(values, seconds, one).p_value < 0.05 for values in series)
    naive = sum(stats.ttest_1samp(values, 0).pvalue < 0.05 for values in series)
    assert 300 * 0.02 < found < 300 * 0.1 < 300 * 0.2 < naive


def test_a_gap_shifts_nothing_and_series_are_apart() -> None:
    """Correlations are those of values a step apart: taking neighbours in their place would miss them."""
    values = correlated(400, 0.8, 0.0, seed=3)
    kept = np.r_[0:100, 150:300, 303:400]
    seconds = kept * 12 * HOUR
    found = mean_test(values[kept], seconds, np.zeros(len(kept), dtype=np.int64))
    assert found.inflation == pytest.approx(3.0, rel=0.35)
    alternating = values[::2]
    # Two series of the same times: values of one say nothing about those of the other.
    both = np.concatenate((alternating, -alternating))
    times, series = np.tile(np.arange(200) * 24 * HOUR, 2), np.repeat([0, 1], 200)
    assert mean_test(both, times, series).inflation == pytest.approx(
        mean_test(alternating - alternating.mean(), times[:200], series[:200]).inflation, rel=0.05
    )


def test_too_few_and_constant_series_say_so() -> None:
    few = mean_test(np.arange(9.0), np.arange(9), np.zeros(9, dtype=np.int64))
    assert few.mean == 4.0 and math.isnan(few.p_value) and math.isnan(few.half_width)
    for value, chance in ((0.0, 1.0), (0.5, 0.0)):
        found = mean_test(np.full(20, value), np.arange(20), np.zeros(20, dtype=np.int64))
        assert (found.mean, found.half_width, found.p_value) == (value, 0.0, chance)


def scores_of(variables: tuple[str, ...], starts: range, lead: int, values: np.ndarray) -> StartScores:
    """Scores `values` of every variable, the second score ten times the first."""
    count = len(starts)
    columns = np.repeat(values[:count, None], len(variables), axis=1)
    seconds = np.array(starts, dtype=np.int64) * 12 * HOUR
    whole = np.full(count, lead, dtype=np.int64)
    return StartScores(variables, 0 * whole, seconds, whole, np.stack((columns, 10 * columns)))


def test_models_are_compared_on_what_both_forecast() -> None:
    noise = np.random.default_rng(0).standard_normal(50)
    mine = StartScores.join([scores_of(("u", "z"), range(40), lead, 3 + noise) for lead in (48, 24)])
    # Starts 5 to 44 in another order, one variable more, another lead time.
    parts = [scores_of(("z", "q", "u"), range(5, 45), lead, 4 + noise[5:]) for lead in (72, 24)]
    other = StartScores.join(parts)
    found = compare_scores(mine, other)
    assert [(one.variable, one.lead_hours, one.score) for one in found] == [
        (name, 24, score) for name in ("u", "z") for score in ("rmse", "crps")
    ]
    for one in found:
        assert one.starts == 35 and one.significant
        assert one.mean == pytest.approx(-1.0 if one.score == "rmse" else -10.0)
        assert one.relative == pytest.approx(-1 / (4 + noise[5:40].mean()))
        assert one.as_dict()["significant"] is True
    with pytest.raises(ConfigError, match="no variable, lead time and time of the input in common"):
        compare_scores(mine, scores_of(("q",), range(40), 24, noise))
