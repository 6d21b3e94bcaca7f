"""Fits a machine's constants to a few runs, held near what is known of such devices, and says how well they do on others.

Errors are relative: the logarithm of predicted over measured time. Each constant's logarithm has a normal prior around its
default. Which runs are fitted is decided before their measured times are looked at: one after another, always the run that
tells most about the constants as they are expected to be (D-optimal design). No constant belongs to a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.cost.check import predict
from phalanx.cost.operation_time import Floats
from phalanx.cost.profile import CONSTANTS, NamedProfile, Profile, default_profile, spread_of
from phalanx.cost.published import PublishedRun
from phalanx.cost.published_steps import Group, grouped

NOISE = 0.05
"""Standard deviation of the logarithm of a measured time around the model."""
MOST_ROWS = 20
FOLDS = 5


@dataclass(frozen=True)
class Calibration:
    """A profile fitted to runs of one machine."""

    named: NamedProfile
    rows: tuple[str, ...]
    """The runs it was fitted to."""
    fitted_errors: Floats
    """Relative errors of those, predicted over measured rate less 1."""
    held_out_errors: Floats
    """Of the other runs of the machine; where all were fitted, of each by a fit without its fold."""
    errors_before: Floats
    """Of all runs by the default profile."""


def calibrate_from_runs(runs: Sequence[PublishedRun], most: int = MOST_ROWS) -> list[Calibration]:
    """A profile for each machine in `runs`, each fitted to at most `most` of its runs."""
    machines: dict[str, list[Group]] = {}
    for group in grouped(runs):
        machines.setdefault(group.system.profile, []).append(group)
    return [calibrate(groups, most) for groups in machines.values()]


def calibrate(groups: Sequence[Group], most: int = MOST_ROWS) -> Calibration:
    """A profile for the machine that all of `groups` ran on."""
    system = groups[0].system
    device = system.machine.node.device
    prior = default_profile(device).profile
    names = tuple(name for name in CONSTANTS if spread_of(name) > 0)
    widths = np.array([spread_of(name) for name in names])
    runs = [run for group in groups for run in group.runs]
    measured = np.log([run.rate.tokens_per_s for run in runs if run.rate is not None])

    def profile_at(shift: Floats) -> Profile:
        return prior.scaled(dict(zip(names, np.exp(shift * widths).tolist(), strict=True)))

    def rates(shift: Floats) -> Floats:
        return np.asarray(np.log(np.concatenate([predict(group, profile_at(shift)) for group in groups])))

    def fit(rows: list[int]) -> Floats:
        return _fit(lambda x: (rates(x) - measured)[rows] / NOISE, start)

    def errors_at(shift: Floats) -> Floats:
        return np.asarray(np.exp(rates(shift) - measured) - 1)

    start = np.zeros(len(names))
    chosen = choose(_jacobian(rates, start) / NOISE, min(most, len(runs)))
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
    source = f"fitted to {len(rows)} published runs, from the default profile of the {device}"
    named = NamedProfile(system.profile, device, source, profile_at(shift), fitted)
    return Calibration(named, rows, errors[chosen], held_out, errors_at(start))


def choose(sensitivity: Floats, most: int) -> list[int]:
    """Runs that together tell most about the constants, ascending.

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


_ROBUST = 2.0
"""Errors, in units of the noise, from which on a run pulls no harder: some rows are wrong."""


def _fit(residuals: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Where errors, softened beyond _ROBUST, and distances from the prior are least together: Levenberg's method."""
    x, damping = start, 1e-2

    def cost(x: Floats, errors: Floats) -> float:
        large = np.abs(errors) > _ROBUST
        return float(np.where(large, _ROBUST * (2 * np.abs(errors) - _ROBUST), errors**2).sum() + x @ x)

    errors = residuals(x)
    here = cost(x, errors)
    for _ in range(60):
        jacobian = _jacobian(residuals, x)
        weights = np.minimum(1.0, _ROBUST / np.maximum(np.abs(errors), 1e-12))
        information = (jacobian.T * weights) @ jacobian + np.eye(len(x))
        gradient = (jacobian.T * weights) @ errors + x
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


def _jacobian(function: Callable[[Floats], Floats], x: Floats) -> Floats:
    """[values, parameters] by central differences."""
    width = 1e-4
    columns = [(function(x + width * unit) - function(x - width * unit)) / (2 * width) for unit in np.eye(len(x))]
    return np.stack(columns, axis=1)


def _rounded(value: float | np.floating[Any]) -> float:
    return round(float(value), 4)
