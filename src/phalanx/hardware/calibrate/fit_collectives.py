"""Fit the constants of the collective model to measured collectives, held near what is known of such links.

Times range over five orders of magnitude, so errors are relative: the logarithm of predicted over measured time. Each
constant's logarithm has a normal prior around its default. The fit is the maximum of the posterior; the curvature there says
how well each constant is known afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from phalanx.hardware.collectives import COLLECTIVES, Constants
from phalanx.hardware.topology import Floats, Placement, join_placements

SPREAD: Mapping[str, float] = {
    "launch_s": 0.7,
    "step_s": 0.7,
    "efficiency": 0.15,
    "pass_b_s": 0.7,
    "ramp": 0.7,
    "multicast": 0.15,
    "step_across_s": 0.7,
    "efficiency_across": 0.15,
    "tree": 0.1,
}
"""Prior standard deviation of the logarithm of each constant: latencies are known within a factor of two, the share of the
bandwidth that large messages reach within 15%."""
SHARES = frozenset({"efficiency", "ramp", "multicast", "efficiency_across", "tree"})
"""Constants that cannot exceed 1."""
NOISE = 0.08
"""Standard deviation of the logarithm of a measured time around the model."""


@dataclass(frozen=True)
class Point:
    """One measured collective."""

    collective: str
    """A name in `COLLECTIVES`."""
    size: float
    """Bytes, as the collective counts them."""
    placement: Placement
    """Placement of the one group."""
    seconds: float


@dataclass(frozen=True)
class Fit:
    """Fitted constants, their uncertainty and their errors."""

    constants: Constants
    spread: dict[str, float]
    """Posterior standard deviation of the logarithm of each fitted constant."""
    errors: Floats
    """Predicted over measured time less 1, in the order of the points."""

    @property
    def median(self) -> float:
        """Median of the absolute relative errors."""
        return float(np.median(np.abs(self.errors)))

    @property
    def p95(self) -> float:
        """95th percentile of the absolute relative errors."""
        return float(np.quantile(np.abs(self.errors), 0.95))


def fit_constants(
    points: Sequence[Point], prior: Constants, spread: Mapping[str, float] = SPREAD, noise: float = NOISE
) -> Fit:
    """Return the constants near `prior` that fit `points` best.

    spread: for each constant to fit, the standard deviation of its logarithm around `prior`; all others, and constants that
    are 0, stay as they are. noise: standard deviation of the logarithm of measured times. Constants that no point depends on
    keep their prior values and spreads.
    """
    assert points and all(point.seconds > 0 for point in points) and noise > 0
    names = [name for name in spread if getattr(prior, name) > 0]
    widths = np.array([spread[name] for name in names])
    times = make_predictor(points)
    measured = np.log([point.seconds for point in points])

    def constants_at(shift: Floats) -> Constants:
        values = {
            name: getattr(prior, name) * factor for name, factor in zip(names, np.exp(shift).tolist(), strict=True)
        }
        return replace(prior, **{name: min(value, 1.0) if name in SHARES else value for name, value in values.items()})

    def residuals(shift: Floats) -> Floats:
        # The sum of squares of errors over the noise and shifts over the prior's widths is -2 log of the posterior.
        errors = (np.log(times(constants_at(shift))) - measured) / noise
        return np.concatenate([errors, shift / widths])

    # Central differences: the minimum is then the same to many digits on every machine.
    solution = least_squares(residuals, np.zeros(len(names)), jac="3-point", xtol=1e-10, ftol=1e-12, gtol=1e-10)
    fitted = constants_at(solution.x)
    # Laplace's approximation: the inverse of the Gauss-Newton Hessian is the posterior's covariance.
    deviations = np.sqrt(np.diag(np.linalg.inv(solution.jac.T @ solution.jac)))
    return Fit(
        constants=fitted,
        spread=dict(zip(names, deviations.tolist(), strict=True)),
        errors=times(fitted) / np.exp(measured) - 1,
    )


def make_predictor(points: Sequence[Point]) -> Callable[[Constants], Floats]:
    """Return a function from constants to the predicted seconds of each point."""
    # Points of one collective are computed together, as arrays.
    parts = []
    for name, collective in COLLECTIVES.items():
        rows = [row for row, point in enumerate(points) if point.collective == name]
        if rows:
            size = np.array([points[row].size for row in rows], np.float64)
            parts.append((rows, collective, size, join_placements([points[row].placement for row in rows])))
    assert sum(len(rows) for rows, *_ in parts) == len(points), "a point names a collective that is not known"

    def seconds(constants: Constants) -> Floats:
        result = np.empty(len(points))
        for rows, collective, size, placement in parts:
            result[rows] = collective(size, placement, constants)
        return result

    return seconds
