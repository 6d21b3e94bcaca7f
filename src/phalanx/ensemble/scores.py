"""Scores of predictions that state a normal distribution for each number: error, sharpness and calibration.

A probabilistic forecast should be as sharp as calibration allows (Gneiting, Balabdaoui and Raftery 2007). Scores are
functions of each error and of the standard deviation stated for it, and so do not depend on how predictions were batched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from phalanx.ensemble.residuals import FloatArray

LEVELS = (0.5, 0.68, 0.9, 0.95)
"""Probabilities of the central intervals that are reported."""
CURVE = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""Probabilities of the calibration curve."""
_BINS = 12
"""Most bins of the reliability diagram."""


@dataclass(frozen=True)
class Errors:
    """Mean errors of predictions without an uncertainty, in the unit of the number."""

    mae: float
    rmse: float


@dataclass(frozen=True)
class Bin:
    """A bin of the reliability diagram: numbers of about the same stated uncertainty."""

    stated: float
    """Root mean square of the standard deviations stated."""
    found: float
    """Root mean square error."""
    numbers: int
    """Numbers in the bin."""


@dataclass(frozen=True)
class Scores:
    """Scores of one kind of number."""

    mae: float
    rmse: float
    nll: float
    """Mean negative log likelihood of the truth under the normal distributions stated, in nats; infinite where a
    distribution without width is wrong."""
    crps: float
    """Mean continuous ranked probability score, in the unit of the number."""
    sharpness: float
    """Mean width of the central 90% intervals, in the unit of the number."""
    calibration_error: float
    """Mean over `CURVE` of how far the share of truths inside a central interval is from its probability (Kuleshov, Fenner
    and Ermon 2018, with absolute differences)."""
    rank_correlation: float
    """Spearman's correlation of the standard deviation stated with the absolute error; NaN where one of them is constant."""
    coverage: dict[str, float]
    """Share of truths inside the central interval, by probability (`LEVELS`)."""
    curve: tuple[float, ...]
    """Share of truths inside the central interval of each probability of `CURVE`."""
    bins: tuple[Bin, ...]
    """Bins of equal size, in the order of the uncertainty stated."""


def mean_errors(error_n: FloatArray) -> Errors:
    """Return the mean errors of predictions whose errors are [n]."""
    return Errors(float(np.abs(error_n).mean()), float(np.sqrt(np.square(error_n).mean())))


def score_predictions(error_n: FloatArray, std_n: FloatArray) -> Scores:
    """Score predictions with errors [n] and stated standard deviations [n], which are not negative, in one unit."""
    plain = mean_errors(error_n)
    # Distributions without width give inf and -inf, whose mean is NaN and no mistake.
    with np.errstate(invalid="ignore"):
        likelihood = float(normal_nll(error_n, std_n).mean())
    curve = interval_coverages(error_n, std_n, CURVE)
    # Bins of equal size: of equal width, most would be empty.
    order = np.argsort(std_n, kind="stable")
    parts = [part for part in np.array_split(order, min(_BINS, len(order))) if len(part)]
    return Scores(
        mae=plain.mae,
        rmse=plain.rmse,
        nll=likelihood,
        crps=float(normal_crps(error_n, std_n).mean()),
        sharpness=2.0 * half_width(0.9) * float(std_n.mean()),
        calibration_error=float(np.abs(np.asarray(curve) - np.asarray(CURVE)).mean()),
        rank_correlation=rank_correlation(std_n, np.abs(error_n)),
        coverage=dict(zip(map(str, LEVELS), interval_coverages(error_n, std_n, LEVELS), strict=True)),
        curve=curve,
        bins=tuple(
            Bin(
                float(np.sqrt(np.square(std_n[part]).mean())),
                float(np.sqrt(np.square(error_n[part]).mean())),
                len(part),
            )
            for part in parts
        ),
    )


def half_width(level: float) -> float:
    """Return half the width of a normal distribution's central interval of probability `level`, in standard deviations."""
    return float(ndtri(0.5 + 0.5 * level))


def interval_coverages(error_n: FloatArray, std_n: FloatArray, levels: Sequence[float]) -> tuple[float, ...]:
    """Return the share of errors inside the central interval of each level; the ends count as inside."""
    sizes = np.abs(error_n)
    return tuple(float((sizes <= half_width(level) * std_n).mean()) for level in levels)


def normal_nll(error_n: FloatArray, std_n: FloatArray) -> FloatArray:
    """Return the negative log likelihood of each number [n] in nats.

    Of a distribution without width it is infinite, or minus infinity where there is no error.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        found = 0.5 * np.log(2.0 * np.pi) + np.log(std_n) + 0.5 * np.square(error_n / std_n)
    return np.where(std_n > 0.0, found, np.where(error_n == 0.0, -np.inf, np.inf))


def normal_crps(error_n: FloatArray, std_n: FloatArray) -> FloatArray:
    """Return the continuous ranked probability score of each normal distribution [n] (Gneiting et al. 2005, equation 5).

    Of a distribution without width it is the absolute error.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        z = error_n / std_n
        density = np.exp(-0.5 * np.square(z)) / np.sqrt(2.0 * np.pi)
        found = std_n * (z * (2.0 * ndtr(z) - 1.0) + 2.0 * density - 1.0 / np.sqrt(np.pi))
    return np.where(std_n > 0.0, found, np.abs(error_n))


def rank_correlation(a_n: FloatArray, b_n: FloatArray) -> float:
    """Return Spearman's rank correlation, ties at their mean rank; NaN where one of the two is constant."""
    if len(a_n) < 2 or np.ptp(a_n) == 0.0 or np.ptp(b_n) == 0.0:
        return float("nan")
    return float(np.corrcoef(_ranks(a_n), _ranks(b_n))[0, 1])


def _ranks(values_n: FloatArray) -> FloatArray:
    # `scipy.stats.rankdata` does the same; to load it would take every process longer than all other arithmetic here.
    _, places, counts = np.unique(values_n, return_inverse=True, return_counts=True)
    means: FloatArray = np.cumsum(counts) - (counts - 1) / 2
    return means[places]
