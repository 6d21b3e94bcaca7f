"""Least squares for a few constants with priors, where some data are wrong. Knows nothing of what is fitted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_ROBUST = 2.0
"""Errors, in units of the noise, from which on a run pulls no harder: some rows are wrong."""


def least_squares(residuals: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Where errors, softened beyond _ROBUST, and distances from the prior are least together: Levenberg's method.

    residuals: errors in units of their noise, of constants in units of their priors' spreads, 0 where these are expected.
    """
    x, damping = start, 1e-2

    def cost(x: Floats, errors: Floats) -> float:
        large = np.abs(errors) > _ROBUST
        return float(np.where(large, _ROBUST * (2 * np.abs(errors) - _ROBUST), errors**2).sum() + x @ x)

    errors = residuals(x)
    here = cost(x, errors)
    for _ in range(60):
        slope = jacobian(residuals, x)
        weights = np.minimum(1.0, _ROBUST / np.maximum(np.abs(errors), 1e-12))
        information = (slope.T * weights) @ slope + np.eye(len(x))
        gradient = (slope.T * weights) @ errors + x
        while damping < 1e8:
            step = -np.linalg.solve(information + damping * np.diag(np.diag(information)), gradient)
            there_errors = residuals(x + step)
            there = cost(x + step, there_errors)
            if there < here:
                break
            damping *= 5
        else:
            return x
        gain, x, errors, here, damping = here - there, x + step, there_errors, there, damping / 5
        if gain < 1e-6 * here:
            return x
    return x


def jacobian(function: Callable[[Floats], Floats], x: Floats) -> Floats:
    """[values, parameters] by central differences."""
    width = 1e-4
    columns = [(function(x + width * unit) - function(x - width * unit)) / (2 * width) for unit in np.eye(len(x))]
    return np.stack(columns, axis=1)
