"""Fit the constants of the collective model to measured collectives, held near what is known of such links.

Times range over five orders of magnitude, so errors are relative: the logarithm of predicted over measured time. Each
constant's logarithm has a normal prior around its default. The maximum of the posterior is found by damped Gauss-Newton
steps, without randomness; its curvature gives how well each constant is known afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.hardware.collectives import COLLECTIVES, Constants
from phalanx.hardware.topology import Floats, Placement, join

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
"""Standard deviation of the logarithm of each constant before anything is measured: latencies within a factor of two, what
large messages reach within 15%."""
SHARES = frozenset({"efficiency", "ramp", "multicast", "efficiency_across", "tree"})
"""Constants that cannot be more than 1."""
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
    """Where the group lies; one group."""
    seconds: float


@dataclass(frozen=True)
class Fit:
    """Fitted constants and how good they are."""

    constants: Constants
    spread: dict[str, float]
    """Standard deviation of the logarithm of each fitted constant, the prior and the points taken together."""
    errors: Floats
    """Relative error of each point, predicted over measured time less 1, in the order of the points."""

    @property
    def median(self) -> float:
        """Median of the absolute relative errors."""
        return float(np.median(np.abs(self.errors)))

    @property
    def p95(self) -> float:
        """The absolute relative error that 95% of the points do not exceed."""
        return float(np.quantile(np.abs(self.errors), 0.95))


def predict(points: Sequence[Point], constants: Constants) -> Floats:
    """Seconds of each point by the model."""
    return _predictor(points)(constants)


def fit_constants(
    points: Sequence[Point], prior: Constants, spread: Mapping[str, float] = SPREAD, noise: float = NOISE
) -> Fit:
    """The constants that fit `points` best, of those near `prior`.

    spread: for each constant to fit, the standard deviation of its logarithm around `prior`; others, and those that are 0,
    stay as they are. noise: the standard deviation of the logarithm of measured times. Constants that no point depends on
    keep their prior values and spreads.
    """
    assert points and all(point.seconds > 0 for point in points) and noise > 0
    names = [name for name in spread if getattr(prior, name) > 0]
    widths = np.array([spread[name] for name in names])
    times = _predictor(points)
    measured = np.log([point.seconds for point in points])

    def constants_at(shift: Floats) -> Constants:
        return _scaled(prior, dict(zip(names, np.exp(shift).tolist(), strict=True)))

    def residuals(shift: Floats) -> Floats:
        """Errors over the noise, then distances from the prior over its widths."""
        errors = (np.log(times(constants_at(shift))) - measured) / noise
        return np.concatenate([errors, shift / widths])

    shift, information = _least_squares(residuals, np.zeros(len(names)))
    fitted = constants_at(shift)
    deviations = np.sqrt(np.diag(np.linalg.inv(information)))
    return Fit(
        constants=fitted,
        spread=dict(zip(names, deviations.tolist(), strict=True)),
        errors=times(fitted) / np.exp(measured) - 1,
    )


def _predictor(points: Sequence[Point]) -> Callable[[Constants], Floats]:
    """A function from constants to the seconds of each point; points of one collective are computed together."""
    parts = []
    for name, collective in COLLECTIVES.items():
        rows = [row for row, point in enumerate(points) if point.collective == name]
        if rows:
            size = np.array([points[row].size for row in rows], np.float64)
            parts.append((rows, collective, size, join([points[row].placement for row in rows])))
    assert sum(len(rows) for rows, *_ in parts) == len(points), "a point names a collective that is not known"

    def seconds(constants: Constants) -> Floats:
        result = np.empty(len(points))
        for rows, collective, size, placement in parts:
            result[rows] = collective(size, placement, constants)
        return result

    return seconds


def _scaled(constants: Constants, factors: dict[str, float]) -> Constants:
    """`constants` with the named fields multiplied; shares stay at most 1."""
    values = {name: getattr(constants, name) * factor for name, factor in factors.items()}
    return replace(constants, **{name: min(value, 1.0) if name in SHARES else value for name, value in values.items()})


def _least_squares(residuals: Callable[[Floats], Floats], start: Floats) -> tuple[Floats, Floats]:
    """(where the sum of squares is least, its curvature J^T J there), by Levenberg's method from `start`."""
    x, damping = start, 1e-3
    here = residuals(x)
    for _ in range(100):
        jacobian = _jacobian(residuals, x)
        information, gradient = jacobian.T @ jacobian, jacobian.T @ here
        step = -np.linalg.solve(information + damping * np.diag(np.diag(information)), gradient)
        there = residuals(x + step)
        if there @ there < here @ here:
            gain = float(here @ here - there @ there)
            x, here, damping = x + step, there, damping / 5
            if gain < 1e-10 * float(there @ there):
                break
        elif damping > 1e8:
            break
        else:
            damping *= 5
    jacobian = _jacobian(residuals, x)
    return x, jacobian.T @ jacobian


def _jacobian(residuals: Callable[[Floats], Floats], x: Floats) -> Floats:
    """[residuals, parameters] by central differences."""
    width = 1e-5
    columns = [(residuals(x + width * unit) - residuals(x - width * unit)) / (2 * width) for unit in np.eye(len(x))]
    return np.stack(columns, axis=1)
