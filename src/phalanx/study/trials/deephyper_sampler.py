"""DeepHyper's Bayesian optimiser, that of the published work, with failures as its `F_` objectives.

Needs the package deephyper, which nothing else does. DeepHyper maximises, so it is told minus the logarithm of the score, or
minus the score where there are scores that have no logarithm.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence

from deephyper.hpo import CBO, HpProblem

from phalanx.study.trials.ranges import Choices, Range, Scalar, Told

_FIRST = 10
"""Trials at random before the surrogate is used. DeepHyper counts only those that do not fail, and would take twice the
number of parameters and one."""


def suggest_deephyper(ranges: Mapping[str, Range], history: Sequence[Told], seed: int) -> dict[str, Scalar]:
    """What to try next: a value of each parameter, by extremely randomised trees and DeepHyper's defaults but `_FIRST`."""
    problem = HpProblem()
    names = {name: f"p{number}" for number, name in enumerate(ranges)}
    for name, given in ranges.items():
        problem.add_hyperparameter(_hyperparameter(given), names[name])
    with tempfile.TemporaryDirectory(prefix="phalanx-deephyper-") as folder:
        search = CBO(problem, random_state=seed, log_dir=folder, n_initial_points=_FIRST)
        if history:
            pairs = zip(history, goals(history), strict=True)
            search.tell([(_all_values(ranges, names, told), goal) for told, goal in pairs])
        (suggested,) = search.ask(1)
    return {name: _value(given, suggested[names[name]]) for name, given in ranges.items()}


def goals(history: Sequence[Told]) -> list[float | str]:
    """What DeepHyper is told of trials: something to maximise, or `F_` and why one failed."""
    positive = all(told.score > 0 for told in history if told.score is not None)
    return [
        f"F_{told.cause}" if told.score is None else -(math.log(told.score) if positive else told.score)
        for told in history
    ]


def _hyperparameter(given: Range) -> object:
    if isinstance(given, Choices):
        # Places rather than values: of any type, and none is mistaken for a number.
        return [str(place) for place in range(len(given.values))]
    bounds = (given.low, given.high)
    return (*bounds, "log-uniform") if given.log else bounds


def _all_values(ranges: Mapping[str, Range], names: Mapping[str, str], told: Told) -> dict[str, object]:
    """Parameters that did not apply stand at the beginning of their range."""
    found: dict[str, object] = {}
    for name, given in ranges.items():
        if isinstance(given, Choices):
            found[names[name]] = str(given.values.index(told.values[name])) if name in told.values else "0"
        else:
            found[names[name]] = told.values.get(name, given.low)
    return found


def _value(given: Range, suggested: object) -> Scalar:
    if isinstance(given, Choices):
        return given.values[int(str(suggested))]
    if isinstance(given.low, int) and isinstance(given.high, int):
        step = getattr(given, "step", 1)
        return given.low + step * round((int(suggested) - given.low) / step)  # type: ignore[call-overload, no-any-return]
    return float(suggested)  # type: ignore[arg-type]
