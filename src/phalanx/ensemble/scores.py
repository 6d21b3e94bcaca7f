"""How good predictions with an uncertainty are: error, sharpness and calibration of a normal distribution for each number.

What is asked of probabilistic forecasts is sharpness subject to calibration (Gneiting, Balabdaoui and Raftery 2007).
Everything is a function of the error and of the standard deviation stated for it, so batches play no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri
from scipy.stats import rankdata

from phalanx.ensemble.residuals import FloatArray

LEVELS = (0.5, 0.68, 0.9, 0.95)
"""Probabilities of the central intervals that are reported."""
CURVE = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""Probabilities of the calibration curve."""
_BINS = 12


@dataclass(frozen=True)
class Errors:
    """Errors of single predictions."""

    mae: float
    rmse: float


@dataclass(frozen=True)
class Bin:
    """Numbers of about the same stated uncertainty."""

    stated: float
    """Root mean square of the standard deviations stated."""
    found: float
    """Root mean square error."""
    numbers: int


@dataclass(frozen=True)
class Scores:
    """Scores of one kind of number."""

    mae: float
    rmse: float
    nll: float
    """Mean negative log likelihood of the truth under the normal distributions stated, in nats; inf where one of no width is
    wrong."""
    crps: float
    """Mean continuous ranked probability score, in the unit of the number."""
    sharpness: float
    """Mean width of the central 90% intervals, in the unit of the number."""
    calibration_error: float
    """Mean over `CURVE` of how far the share of truths inside a central interval is from its probability (Kuleshov, Fenner
    and Ermon 2018, with absolute differences)."""
    rank_correlation: float
    """Spearman's, of the standard deviation stated with the absolute error; NaN where one of them never changes."""
    coverage: dict[str, float]
    """Share of truths inside the central interval of each of `LEVELS`."""
    curve: tuple[float, ...]
    """The same at each of `CURVE`."""
    bins: tuple[Bin, ...]
    """Numbers in order of the uncertainty stated, in parts of equal size."""


def errors_of(error_n: FloatArray) -> Errors:
    """Errors of single predictions [n]."""
    return Errors(float(np.abs(error_n).mean()), float(np.sqrt(np.square(error_n).mean())))


def score(error_n: FloatArray, std_n: FloatArray) -> Scores:
    """Scores of predictions with errors [n] and stated standard deviations [n], none negative, in one unit."""
    plain = errors_of(error_n)
    with np.errstate(invalid="ignore"):
        likelihood = float(nll(error_n, std_n).mean())
    curve = coverages(error_n, std_n, CURVE)
    return Scores(
        mae=plain.mae,
        rmse=plain.rmse,
        nll=likelihood,
        crps=float(crps(error_n, std_n).mean()),
        sharpness=2.0 * half_width(0.9) * float(std_n.mean()),
        calibration_error=float(np.abs(np.asarray(curve) - np.asarray(CURVE)).mean()),
        rank_correlation=rank_correlation(std_n, np.abs(error_n)),
        coverage=dict(zip(map(str, LEVELS), coverages(error_n, std_n, LEVELS), strict=True)),
        curve=curve,
        bins=_bins(error_n, std_n),
    )


def half_width(level: float) -> float:
    """Half the width of a normal distribution's central interval of probability `level`, in standard deviations."""
    return float(ndtri(0.5 + 0.5 * level))


def coverages(error_n: FloatArray, std_n: FloatArray, levels: Sequence[float]) -> tuple[float, ...]:
    """Share of errors inside the central interval of each level; the ends count as inside."""
    sizes = np.abs(error_n)
    return tuple(float((sizes <= half_width(level) * std_n).mean()) for level in levels)


def nll(error_n: FloatArray, std_n: FloatArray) -> FloatArray:
    """Negative log likelihood of each number [n], in nats: for no width inf, or -inf where there is no error either."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = 0.5 * np.log(2.0 * np.pi) + np.log(std_n) + 0.5 * np.square(error_n / std_n)
    return np.where(std_n > 0.0, found, np.where(error_n == 0.0, -np.inf, np.inf))


def crps(error_n: FloatArray, std_n: FloatArray) -> FloatArray:
    """Continuous ranked probability score of each normal distribution [n] (Gneiting et al. 2005, equation 5); of one
    without width it is the absolute error."""
    with np.errstate(divide="ignore", invalid="ignore"):
        z = error_n / std_n
        density = np.exp(-0.5 * np.square(z)) / np.sqrt(2.0 * np.pi)
        found = std_n * (z * (2.0 * ndtr(z) - 1.0) + 2.0 * density - 1.0 / np.sqrt(np.pi))
    return np.where(std_n > 0.0, found, np.abs(error_n))


def rank_correlation(a_n: FloatArray, b_n: FloatArray) -> float:
    """Spearman's rank correlation, ties at their mean rank; NaN where one of them never changes."""
    if len(a_n) < 2 or np.ptp(a_n) == 0.0 or np.ptp(b_n) == 0.0:
        return float("nan")
    return float(np.corrcoef(rankdata(a_n), rankdata(b_n))[0, 1])


def _bins(error_n: FloatArray, std_n: FloatArray) -> tuple[Bin, ...]:
    order = np.argsort(std_n, kind="stable")
    parts = [part for part in np.array_split(order, min(_BINS, len(order))) if len(part)]
    return tuple(
        Bin(float(np.sqrt(np.square(std_n[part]).mean())), float(np.sqrt(np.square(error_n[part]).mean())), len(part))
        for part in parts
    )
