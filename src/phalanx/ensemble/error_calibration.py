"""Calibration of an ensemble: from the spread of its members to a standard deviation, fitted to validation errors.

Members that learned from the same data err alike, so they lie closer together than to the truth. Three ways to widen their
spread are fitted, and the one under whose normal distributions held-out errors are likeliest is taken:

    factor    std = a * spread
    floor     std^2 = (a * spread)^2 + b^2      b is the error that all members share, such as noise of the labels
    isotonic  std = f(spread), f never falling  f is fitted to parts of equal size

Intervals come from that normal distribution or from conformal quantiles, which hold the share they promise whatever the
distribution of errors is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression, minimize

from phalanx.ensemble.members import KINDS, Calibration, Conformal, Kind
from phalanx.ensemble.residuals import FloatArray, Int64Array, Residuals, assign_parts
from phalanx.ensemble.scores import CURVE, LEVELS, normal_nll
from phalanx.errors import DataError

BoolArray = npt.NDArray[np.bool_]

LEAST_STRUCTURES = 10
"""Least structures to calibrate on: fewer say too little of a 90% interval."""
_FOLDS = 5
"""Parts of the validation split, of which each is held out once."""
_KNOTS = 40
"""Most knots of an isotonic calibration."""
_PER_KNOT = 20
"""Least numbers that a knot is the mean of."""
_LEAST = 1e-3
"""Least standard deviation, as a share of the root mean square error: members that agree by chance know no better."""


@dataclass(frozen=True)
class Fitted:
    """A calibration of one kind of number, and how it was chosen."""

    calibration: Calibration
    held_out_nll: dict[str, float]
    """Mean negative log likelihood on held-out folds, by kind of calibration, in nats; "none" is the spread itself."""
    conformal: Conformal
    numbers: int
    """Numbers calibrated on."""
    structures: int
    """Structures that they belong to."""


def calibrate_residuals(residuals: Residuals, weights: Sequence[float], kind: Kind | None = None) -> Fitted:
    """Calibrate one kind of number on validation errors.

    residuals: errors of the chosen members. weights: one a member, with a sum of 1. kind: kind of calibration; None takes
    the likeliest on held-out structures. Raises DataError for fewer than `LEAST_STRUCTURES` structures.
    """
    structures = residuals.structures
    if structures < LEAST_STRUCTURES:
        raise DataError(
            f"the validation split has {structures} structures with {residuals.name}; calibration needs at least "
            f"{LEAST_STRUCTURES}: prepare with a larger data.validation_fraction"
        )
    error_n, spread_n = residuals.combined(weights)
    # Mean negative log likelihood under calibrations that were fitted to other structures, by kind.
    held_out = dict.fromkeys(("none", *KINDS), 0.0)
    fold_n = assign_parts(residuals.structures_n, _FOLDS, "folds")
    for fold in range(_FOLDS):
        test_n = fold_n == fold
        if not test_n.any() or test_n.all():
            continue
        # Members that agree exactly would make any error infinitely unlikely.
        least = _least_std(error_n[~test_n])
        held_out["none"] += float(normal_nll(error_n[test_n], np.maximum(spread_n[test_n], least)).sum())
        for name in KINDS:
            std_n = fit_calibration(name, error_n[~test_n], spread_n[~test_n]).std(spread_n[test_n])
            held_out[name] += float(normal_nll(error_n[test_n], std_n).sum())
    held_out = {name: value / len(error_n) for name, value in held_out.items()}
    chosen = min(KINDS, key=lambda name: held_out[name]) if kind is None else kind
    # Conformal quantiles hold only for numbers that the normaliser was not fitted to, hence two halves.
    first_n = conformal_part(residuals.structures_n)
    rest_n = ~first_n if (~first_n).any() else first_n
    normaliser = fit_calibration(chosen, error_n[rest_n], spread_n[rest_n])
    scores_n = np.abs(error_n[first_n]) / normaliser.std(spread_n[first_n])
    levels = sorted({*LEVELS, *CURVE})
    quantiles = {str(level): conformal_quantile(scores_n, residuals.structures_n[first_n], level) for level in levels}
    return Fitted(
        calibration=fit_calibration(chosen, error_n, spread_n),
        held_out_nll=held_out,
        conformal=Conformal(calibration=normaliser, quantiles=quantiles),
        numbers=residuals.count,
        structures=structures,
    )


def conformal_part(structures_n: Int64Array) -> BoolArray:
    """Return which numbers [n] conformal quantiles are taken of: those of half of the structures, always the same.

    Neither members nor calibrations are chosen by them.
    """
    chosen_n: BoolArray = assign_parts(structures_n, 2, "conformal") == 0
    return chosen_n


def fit_calibration(kind: Kind, error_n: FloatArray, spread_n: FloatArray) -> Calibration:
    """Return the likeliest calibration of one kind for errors [n] of predictions with spreads [n]."""
    return _FITS[kind](error_n, spread_n)


def conformal_quantile(scores_n: FloatArray, structures_n: Int64Array, level: float) -> float | None:
    """Return the least q such that scores of a new structure are at most q with probability `level`; None for no such q.

    scores_n: absolute errors in standard deviations, ordered by structure. A structure with k numbers weighs as one, each of
    its numbers 1/k of it, and one more structure is taken to be at infinity (Lee, Barber and Willett 2023, hierarchical
    conformal prediction; with one number a structure it is split conformal prediction, Papadopoulos et al. 2002).
    """
    if not len(scores_n):
        return None
    _, place_n, counts = np.unique(structures_n, return_inverse=True, return_counts=True)
    weight_n = 1.0 / (counts[place_n] * (len(counts) + 1))
    order = np.argsort(scores_n, kind="stable")
    reached = np.cumsum(weight_n[order])
    # Weights that add up to the level but for rounding do reach it.
    first = int(np.searchsorted(reached, level - 1e-12))
    return None if first >= len(order) else float(scores_n[order[first]])


def _least_std(error_n: FloatArray) -> float:
    """Return the least standard deviation that is ever stated, in the unit of the errors."""
    size = float(np.sqrt(np.square(error_n).mean()))
    return max(_LEAST * size, float(np.finfo(np.float32).tiny))


def _fit_factor(error_n: FloatArray, spread_n: FloatArray) -> Calibration:
    """Fit a in closed form: the root mean square of error over spread, the spread held above the least deviation."""
    least = _least_std(error_n)
    spread_n = np.maximum(spread_n, least)
    factor = float(np.sqrt(np.square(error_n / spread_n).mean()))
    return Calibration(kind="factor", factor=factor, floor=least)


def _fit_floor(error_n: FloatArray, spread_n: FloatArray) -> Calibration:
    """Fit a and b by L-BFGS in log(a^2) and log(b^2), relative to the root mean square error."""
    least, size = _least_std(error_n), float(np.sqrt(np.square(error_n).mean()))
    if size == 0.0:
        return Calibration(kind="floor", factor=0.0, floor=least)
    squares_n, spreads_n = np.square(error_n / size), np.square(spread_n / size)

    # In logarithms: both stay positive, and steps are relative to their size.
    def loss(x: FloatArray) -> tuple[float, FloatArray]:
        a, b = np.exp(x)
        variance_n = a * spreads_n + b
        value = 0.5 * float((np.log(variance_n) + squares_n / variance_n).mean())
        slope_n = 0.5 * (1.0 - squares_n / variance_n) / variance_n
        return value, np.array([a * float((slope_n * spreads_n).mean()), b * float(slope_n.mean())])

    bounds = [(-20.0, 20.0), (2.0 * np.log(_LEAST), 2.0)]
    # Begin where the factor and the floor explain half of the squared error each.
    begin = np.array([-np.log(max(2.0 * float(spreads_n.mean()), 1e-8)), np.log(0.5)])
    begin[0] = np.clip(begin[0], *bounds[0])
    found = minimize(loss, begin, jac=True, method="L-BFGS-B", bounds=bounds)
    a, b = np.exp(found.x)
    return Calibration(kind="floor", factor=float(np.sqrt(a)), floor=max(size * float(np.sqrt(b)), least))


def _fit_isotonic(error_n: FloatArray, spread_n: FloatArray) -> Calibration:
    """Fit the never-falling variance that makes the errors likeliest, by isotonic regression of their squares.

    For the variance of a normal distribution this is the maximum of the likelihood (Robertson, Wright and Dykstra 1988).
    Knots are means of at least `_PER_KNOT` numbers.
    """
    order = np.argsort(spread_n, kind="stable")
    knots = max(1, min(_KNOTS, len(order) // _PER_KNOT))
    pieces = np.array_split(order, knots)
    spreads = np.array([float(spread_n[piece].mean()) for piece in pieces])
    squares = np.array([float(np.square(error_n[piece]).mean()) for piece in pieces])
    # Interpolation needs rising spreads: knots of one spread, as where it is mostly zero, become one.
    kept, place, counts = np.unique(spreads, return_inverse=True, return_counts=True)
    squares = np.bincount(place, squares) / counts
    least = _least_std(error_n)
    stds = np.sqrt(np.maximum(isotonic_regression(squares, weights=counts).x, least**2))
    return Calibration(
        kind="isotonic", factor=1.0, floor=least, spreads=tuple(kept.tolist()), stds=tuple(stds.tolist())
    )


_FITS: dict[Kind, Callable[[FloatArray, FloatArray], Calibration]] = {
    "factor": _fit_factor,
    "floor": _fit_floor,
    "isotonic": _fit_isotonic,
}
