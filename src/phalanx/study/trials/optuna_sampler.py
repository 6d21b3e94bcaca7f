"""Optuna's samplers: TPE, or a Gaussian process, with failures as violated constraints.

Optuna ignores failed trials. Here one counts as finished, as bad as the worst, with its constraint violated: so the
samplers stay away from what failed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from phalanx.study.trials.ranges import Choices, Integers, Range, Scalar, Told, worst_score

_CONSTRAINT = "fails"
optuna.logging.set_verbosity(optuna.logging.WARNING)


def distribution(given: Range) -> BaseDistribution:
    """A range as Optuna writes it down."""
    match given:
        case Choices(values):
            return CategoricalDistribution(values)
        case Integers(low, high, log, step):
            return IntDistribution(low, high, log=log, step=step)
        case _:
            return FloatDistribution(given.low, given.high, log=given.log)


def suggest_optuna(sampler: str, ranges: Mapping[str, Range], history: Sequence[Told], seed: int) -> dict[str, Scalar]:
    """What to try next: a value of each parameter. sampler: tpe or gp. The same history and seed give the same values."""
    distributions = {name: distribution(given) for name, given in ranges.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(sampler=_sampler(sampler, seed), storage=None)
        worst = worst_score(history)
        for told in history:
            study.add_trial(_frozen(told, worst, distributions))
        return dict(study.ask(distributions).params)


def _sampler(name: str, seed: int) -> BaseSampler:
    return TPESampler(seed=seed) if name == "tpe" else GPSampler(seed=seed)


def _frozen(told: Told, worst: float, distributions: Mapping[str, BaseDistribution]) -> FrozenTrial:
    return create_trial(
        state=TrialState.COMPLETE,
        value=worst if told.score is None else told.score,
        params=dict(told.values),
        distributions={name: distributions[name] for name in told.values},
        constraints={_CONSTRAINT: 1.0 if told.score is None else -1.0},
    )
