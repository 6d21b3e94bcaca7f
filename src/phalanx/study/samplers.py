"""Samplers: each proposes the choice to try next, from what was observed so far and nothing else.

A sampler keeps no state of its own. So a killed study resumes with any sampler, and processes that share a study share what
they learned. The sampler that knows the planner's expectations is in
`study.layouts.surrogate`.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import GPSampler, TPESampler
from optuna.trial import TrialState, create_trial

from phalanx.errors import ConfigError
from phalanx.study.space import Choices, Integers, Range, Scalar, Space, Values
from phalanx.study.trial import Trial

_ASKED = 5
"""Suggestions asked of a general sampler before a choice is drawn at random: all may be taken or break a constraint."""
_FIRST_TRIALS = 10
"""Trials at random before DeepHyper's surrogate is used. It counts only those that do not fail, and by default would take
twice the number of parameters and one."""
# A sampler's study lives in memory for one suggestion: what Optuna logs of it is noise.
optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True)
class Observation:
    """The result of a trial, as samplers see it."""

    values: Mapping[str, Scalar]
    score: float | None
    """Figure that is minimised; None for a failure."""
    cause: str = "crash"
    """Why the trial failed, where it did."""
    memory_bytes: float | None = None
    """Peak bytes of live tensors on the worst rank, where they are known."""


def observe_trials(trials: Iterable[Trial]) -> list[Observation]:
    """Return the results of the trials that gave a value or failed."""
    return [
        Observation(one.values, one.outcome.value if one.good else None, one.outcome.cause, one.outcome.memory_bytes)
        for one in trials
        if one.outcome is not None and (one.good or one.failed)
    ]


@dataclass(frozen=True)
class Proposal:
    """A choice to try next."""

    values: Values
    note: Mapping[str, Any] = field(default_factory=dict)
    """Expectations of the sampler for the trial, as plain values."""


class Sampler(Protocol):
    """Chooses what to try next."""

    def propose(self, history: Sequence[Observation], taken: set[str]) -> Proposal | None:
        """Return a choice whose key is not taken; None where none is left or expected to help."""


@dataclass(frozen=True)
class RandomSampler:
    """Draws choices at random."""

    space: Space
    seed: int = 0

    def propose(self, history: Sequence[Observation], taken: set[str]) -> Proposal | None:
        """Return a choice at random. The same seed and number of taken choices give the same one."""
        # No generator is kept between proposals: a killed study draws on as if it had never stopped.
        values = self.space.draw(np.random.default_rng(self.seed * 100_003 + len(taken)), taken)
        return None if values is None else Proposal(values)


Suggest = Callable[[Mapping[str, Range], Sequence[Observation], int], dict[str, Scalar]]
"""A general sampler: (ranges, history in terms of these, seed) -> a value from each range."""


@dataclass(frozen=True)
class GeneralSampler:
    """A sampler of another package, which knows ranges of parameters and nothing of what they mean."""

    space: Space
    suggest: Suggest
    seed: int = 0

    def propose(self, history: Sequence[Observation], taken: set[str]) -> Proposal | None:
        """Return what the sampler suggests, as far as the space has it and it is not taken; else a choice at random."""
        encoded = [(one, self.space.encode(one.values)) for one in history]
        known = [replace(one, values=values) for one, values in encoded if values is not None]
        # Without history a general sampler would draw at random too, but from choices of which few may be legal.
        for attempt in range(_ASKED if known else 0):
            # A new seed for each proposal, and the same one when a study is repeated: a prime keeps studies apart.
            seed = ((self.seed * 100_003 + len(taken)) * _ASKED + attempt) % 2**31
            values = self.space.decode(self.suggest(self.space.ranges, known, seed), taken)
            if values is not None:
                return Proposal(values)
        return RandomSampler(self.space, self.seed).propose(history, taken)


def make_sampler(name: str, space: Space, seed: int, **further: Sampler) -> Sampler:
    """Return the sampler of that name: one of `further`, or a general one.

    Raises ConfigError for names that are not known, and where a sampler's package is missing.
    """
    check_sampler(name, further)
    if name in further:
        return further[name]
    return RandomSampler(space, seed) if name == "random" else GeneralSampler(space, _SUGGESTS[name], seed)


def check_sampler(name: str, further: Iterable[str]) -> None:
    """Raise ConfigError for the name of no sampler, and where a sampler's package is missing. further: names beside ours."""
    known = [*further, *_SUGGESTS, "random"]
    if name not in known:
        raise ConfigError(f"--engine {name} is not known; give one of {', '.join(known)}")
    if name == "deephyper":
        _import_deephyper()


def optuna_distribution(given: Range) -> BaseDistribution:
    """Return a range as Optuna writes it."""
    match given:
        case Choices(values):
            return CategoricalDistribution(values)
        case Integers(low, high, log, step):
            return IntDistribution(low, high, log=log, step=step)
        case _:
            return FloatDistribution(given.low, given.high, log=given.log)


def suggest_optuna(
    sampler: str, ranges: Mapping[str, Range], history: Sequence[Observation], seed: int
) -> dict[str, Scalar]:
    """Return what one of Optuna's samplers suggests: a value from each range.

    sampler: tpe (tree-structured Parzen estimators) or gp (a Gaussian process). Equal history and seed give equal values.
    """
    distributions = {name: optuna_distribution(given) for name, given in ranges.items()}
    # A failure's score must not be better than any trial's, nor so bad that it flattens a Gaussian process.
    worst = max((one.score for one in history if one.score is not None), default=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(sampler=TPESampler(seed=seed) if sampler == "tpe" else GPSampler(seed=seed))
        for one in history:
            # Optuna ignores failed trials. As finished ones, as bad as the worst and with a violated constraint, they keep
            # samplers away from what failed.
            trial = create_trial(
                state=TrialState.COMPLETE,
                value=worst if one.score is None else one.score,
                params=dict(one.values),
                distributions={name: distributions[name] for name in one.values},
                constraints={"fails": 1.0 if one.score is None else -1.0},
            )
            study.add_trial(trial)
        return dict(study.ask(distributions).params)


def suggest_deephyper(ranges: Mapping[str, Range], history: Sequence[Observation], seed: int) -> dict[str, Scalar]:
    """Return what DeepHyper's Bayesian optimiser, by extremely randomised trees, suggests: a value from each range."""
    hpo = _import_deephyper()
    problem = hpo.HpProblem()
    # DeepHyper takes no dots in names.
    names = {name: f"p{number}" for number, name in enumerate(ranges)}
    for name, given in ranges.items():
        if isinstance(given, Choices):
            # Indices rather than values: values may be of any type, and none must be mistaken for a number.
            problem.add_hyperparameter([str(index) for index in range(len(given.values))], names[name])
        else:
            bounds = (given.low, given.high)
            problem.add_hyperparameter((*bounds, "log-uniform") if given.log else bounds, names[name])
    # DeepHyper knows no parameters that do not apply: these are the first value or the lowest.
    rows = [
        {
            names[name]: str(given.values.index(one.values[name]) if name in one.values else 0)
            if isinstance(given, Choices)
            else one.values.get(name, given.low)
            for name, given in ranges.items()
        }
        for one in history
    ]
    # DeepHyper always writes a log folder, by default into the working directory.
    with tempfile.TemporaryDirectory(prefix="phalanx-deephyper-") as folder:
        search = hpo.CBO(problem, random_state=seed, log_dir=folder, n_initial_points=_FIRST_TRIALS)
        if history:
            search.tell(list(zip(rows, deephyper_goals(history), strict=True)))
        (suggested,) = search.ask(1)
    found: dict[str, Scalar] = {}
    for name, given in ranges.items():
        value = suggested[names[name]]
        if isinstance(given, Choices):
            found[name] = given.values[int(str(value))]
        elif isinstance(given, Integers):
            # DeepHyper knows no steps.
            found[name] = given.low + given.step * round((int(value) - given.low) / given.step)
        else:
            found[name] = float(value)
    return found


def deephyper_goals(history: Sequence[Observation]) -> list[float | str]:
    """Return the objectives for DeepHyper: a figure to maximise, or `F_` and the cause of a failure.

    The figure is minus the logarithm of the score, or minus the score where some score has no logarithm.
    """
    positive = all(one.score > 0 for one in history if one.score is not None)
    return [
        f"F_{one.cause}" if one.score is None else -(math.log(one.score) if positive else one.score) for one in history
    ]


def _import_deephyper() -> Any:
    try:
        from deephyper import hpo  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"--engine deephyper needs a package that is missing: {error}; pip install deephyper"
        ) from None
    return hpo


_SUGGESTS: dict[str, Suggest] = {
    "optuna-tpe": partial(suggest_optuna, "tpe"),
    "optuna-gp": partial(suggest_optuna, "gp"),
    "deephyper": suggest_deephyper,
}
"""Samplers of other packages, by the names that run files and options give them."""
