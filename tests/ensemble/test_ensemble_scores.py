"""Scores of uncertain predictions against other people's code, on random data."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import xarray as xr
from scores.continuous import mae, rmse
from scores.probability import crps_cdf

from phalanx.ensemble.scores import CURVE, LEVELS, normal_crps, normal_nll, score_predictions


@pytest.fixture
def drawn() -> tuple[np.ndarray, np.ndarray]:
    """Errors and standard deviations that are about right, of very different sizes."""
    draw = np.random.default_rng(3)
    std_n = np.exp(draw.normal(0.0, 1.0, 600))
    return std_n * draw.standard_t(4, 600), std_n


def test_errors_and_likelihood_are_those_of_others(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    error_n, std_n = drawn
    found = score_predictions(error_n, std_n)
    truth = xr.DataArray(np.random.default_rng(1).normal(size=len(error_n)), dims="n")
    assert found.mae == pytest.approx(float(mae(truth + error_n, truth)))
    assert found.rmse == pytest.approx(float(rmse(truth + error_n, truth)))
    assert found.nll == pytest.approx(-scipy.stats.norm.logpdf(error_n, scale=std_n).mean())
    assert found.rank_correlation == pytest.approx(scipy.stats.spearmanr(std_n, np.abs(error_n)).statistic)
    tied = np.round(std_n)
    assert score_predictions(error_n, tied).rank_correlation == pytest.approx(
        scipy.stats.spearmanr(tied, np.abs(error_n)).statistic
    )


def test_crps_is_that_of_the_distribution_function(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    error_n, std_n = drawn[0][:40], drawn[1][:40]
    grid = np.linspace(-150.0, 150.0, 60_001)
    cdf = xr.DataArray(scipy.stats.norm.cdf(grid[None], scale=std_n[:, None]), dims=("n", "x"), coords={"x": grid})
    # the prediction is at 0, so the truth lies at minus the error
    found = crps_cdf(cdf, xr.DataArray(-error_n, dims="n"), threshold_dim="x", preserve_dims="n").total
    np.testing.assert_allclose(normal_crps(error_n, std_n), found.values, rtol=1e-3, atol=1e-4)


def test_coverage_sharpness_and_curve_are_counted(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    error_n, std_n = drawn
    found = score_predictions(error_n, std_n)
    for level in LEVELS:
        low, high = scipy.stats.norm.interval(level, scale=std_n)
        assert found.coverage[str(level)] == ((low <= error_n) & (error_n <= high)).mean()
    wide = np.subtract(*scipy.stats.norm.interval(0.9, scale=std_n)[::-1])
    assert found.sharpness == pytest.approx(wide.mean())
    # where errors fall in their own distribution: uniform if all is right
    place_n = np.abs(2.0 * scipy.stats.norm.cdf(error_n, scale=std_n) - 1.0)
    shares = np.array([(place_n <= level).mean() for level in CURVE])
    np.testing.assert_allclose(found.curve, shares, atol=1e-12)
    assert found.calibration_error == pytest.approx(np.abs(shares - CURVE).mean())
    assert sum(one.numbers for one in found.bins) == len(error_n)
    order = np.argsort(std_n)[: found.bins[0].numbers]
    assert found.bins[0].found == pytest.approx(np.sqrt(np.square(error_n[order]).mean()))
    assert found.bins[0].stated == pytest.approx(np.sqrt(np.square(std_n[order]).mean()))


def test_no_width_is_right_or_infinitely_wrong() -> None:
    error_n, std_n = np.array([0.0, 1.0]), np.zeros(2)
    assert normal_nll(error_n, std_n).tolist() == [-np.inf, np.inf]
    assert normal_crps(error_n, std_n).tolist() == [0.0, 1.0]
    found = score_predictions(error_n, std_n)
    assert found.coverage["0.9"] == 0.5
    assert np.isnan(found.rank_correlation)
