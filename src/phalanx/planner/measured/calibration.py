"""Fits a machine's constants to a few runs, held near what is known of such devices, and says how well they do on others.

Errors are relative: the logarithm of predicted over measured time. Each constant's logarithm has a normal prior around its
default. Which runs are fitted is decided before their measured times are looked at: one after another, always the run that
tells most about the constants as they are expected to be (D-optimal design). No constant belongs to a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from phalanx.planner.measured.measured_groups import MeasuredGroup
from phalanx.planner.time.operation_time import Floats
from phalanx.planner.time.profile import CONSTANTS, NamedProfile, Profile, default_profile, spread_of

NOISE = 0.05
"""Standard deviation of the logarithm of a measured time around the model."""
MOST_ROWS = 20
FOLDS = 5
_ROBUST = 2.0
"""Huber threshold, in standard deviations: some rows are wrong, and pull no harder than that."""


@dataclass(frozen=True)
class Calibration:
    """A profile fitted to runs of one machine."""

    named: NamedProfile
    rows: tuple[str, ...]
    """The runs it was fitted to."""
    fitted_errors: Floats
    """Relative errors of those, predicted over measured rate less 1."""
    held_out_errors: Floats
    """Errors of runs that were not fitted; where all were, of each by a fit without its fold."""
    errors_before: Floats
    """Errors of all runs by the default profile."""


def calibrate_machines(
    groups: Sequence[MeasuredGroup], most: int = MOST_ROWS, prior: NamedProfile | None = None
) -> list[Calibration]:
    """Fit a profile for each machine that `groups` ran on, to at most `most` of its runs. prior: see `calibrate`."""
    machines: dict[str, list[MeasuredGroup]] = {}
    for group in groups:
        machines.setdefault(group.system.profile, []).append(group)
    return [calibrate(same, most, prior) for same in machines.values()]


def calibrate(groups: Sequence[MeasuredGroup], most: int = MOST_ROWS, prior: NamedProfile | None = None) -> Calibration:
    """Return a profile, fitted to `groups`, of the machine that all of them ran on.

    prior: what the fit begins with and is held near, by default that of the device. One that was measured keeps what was
    measured of single operations and of collectives.
    """
    system = groups[0].system
    device = system.machine.node.device
    known = prior or default_profile(device)
    names = tuple(name for name in CONSTANTS if spread_of(name) > 0)
    widths = np.array([spread_of(name) for name in names])
    runs = [run for group in groups for run in group.runs]
    measured = np.log([run.rate.tokens_per_s for run in runs if run.rate is not None])

    def profile_at(shift: Floats) -> Profile:
        return known.profile.scaled(dict(zip(names, np.exp(shift * widths).tolist(), strict=True)))

    def rates(shift: Floats) -> Floats:
        return np.asarray(
            np.log(np.concatenate([group.rates(replace(known, profile=profile_at(shift))) for group in groups]))
        )

    def fit(rows: list[int]) -> Floats:
        return fit_near_priors(lambda x: (rates(x) - measured)[rows] / NOISE, start)

    def errors_at(shift: Floats) -> Floats:
        return np.asarray(np.exp(rates(shift) - measured) - 1)

    start = np.zeros(len(names))
    chosen = choose(jacobian(rates, start) / NOISE, min(most, len(runs)))
    shift = fit(chosen)
    errors = errors_at(shift)
    held_out = np.delete(errors, chosen)
    if len(chosen) == len(runs) > 1:
        # No run is left: each is judged by a fit to the others' folds.
        folds = [chosen[first::FOLDS] for first in range(min(FOLDS, len(runs)))]
        held_out = np.concatenate([errors_at(fit([row for row in chosen if row not in fold]))[fold] for fold in folds])
    rows = tuple(runs[row].row_id for row in chosen)
    fitted = {
        "rows": list(rows),
        "median_error": _rounded(np.median(np.abs(errors[chosen]))),
        "held_out": len(held_out),
        "held_out_by": "cross-validation" if len(chosen) == len(runs) else "runs that were not fitted",
    }
    if len(held_out):
        fitted["held_out_median_error"] = _rounded(np.median(np.abs(held_out)))
        fitted["held_out_p95_error"] = _rounded(np.quantile(np.abs(held_out), 0.95))
    start_words = f"the default profile of the {device}" if prior is None else f"{prior.name} ({prior.source})"
    source = f"fitted to {len(rows)} runs, from {start_words}"
    named = replace(known, name=system.profile, source=source, profile=profile_at(shift), fitted=fitted)
    return Calibration(named, rows, errors[chosen], held_out, errors_at(start))


def fit_near_priors(errors: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Return the constants for which errors, by a Huber loss, and distances from the priors are least together.

    errors: in units of their noise, a function of constants in units of their priors' spreads, 0 where these are expected.
    """

    def loss(squares: Floats) -> Floats:
        """Return the loss and its two derivatives, [3, residuals]. squares: over that of the threshold."""
        root = np.sqrt(np.maximum(squares, 1.0))
        huber = np.where(squares > 1, [2 * root - 1, 1 / root, -0.5 / root**3], [squares, squares**0, 0 * squares])
        # Priors are certain, unlike rows: their residuals, the last ones, count as squares however large they are.
        huber[:, -len(start) :] = [squares[-len(start) :], np.ones(len(start)), np.zeros(len(start))]
        return huber

    found = least_squares(
        lambda x: np.concatenate([errors(x), x]), start, jac="3-point", loss=loss, f_scale=_ROBUST, ftol=1e-6
    )
    return np.asarray(found.x, np.float64)


def jacobian(function: Callable[[Floats], Floats], x: Floats) -> Floats:
    """Return the derivatives of a function at `x` by central differences, [values, parameters]."""
    width = 1e-4
    columns = [(function(x + width * unit) - function(x - width * unit)) / (2 * width) for unit in np.eye(len(x))]
    return np.stack(columns, axis=1)


def choose(sensitivity: Floats, most: int) -> list[int]:
    """Return the numbers, ascending, of the runs that together tell most about the constants.

    sensitivity: [runs, constants], how each run's rate depends on each constant, in units of the noise and of the constant's
    prior spread.
    """
    information = np.eye(sensitivity.shape[1])
    chosen: list[int] = []
    for _ in range(most):
        gain = np.einsum("rc,rc->r", sensitivity @ np.linalg.inv(information), sensitivity)
        gain[chosen] = -np.inf
        best = int(np.argmax(gain))
        chosen.append(best)
        information += np.outer(sensitivity[best], sensitivity[best])
    return sorted(chosen)


def _rounded(value: float | np.floating[Any]) -> float:
    return round(float(value), 4)
