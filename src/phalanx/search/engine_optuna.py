"""Optuna's samplers as an engine: TPE, or a Gaussian process, with failures as violated constraints.

Optuna ignores failed trials. Here one counts as finished, as slow as the slowest, with its constraint violated: so the
samplers stay away from what failed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from phalanx.search.engines import Proposal
from phalanx.search.repair import nearest_free
from phalanx.search.space import Space
from phalanx.search.trials import Trial

_CONSTRAINT = "fails"
optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True)
class OptunaEngine:
    """One of Optuna's samplers over the parameters of a space."""

    space: Space
    sampler: str
    """tpe or gp."""
    seed: int = 0

    def propose(self, trials: Sequence[Trial], taken: set[str]) -> Proposal | None:
        """What the sampler suggests, moved to the nearest point that is not taken."""
        distributions = {self.space.parameters[number].name: self._range(number) for number in self.space.varying}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study(sampler=self._sampler(len(trials)), storage=None)
            for frozen in self._history(trials, distributions):
                study.add_trial(frozen)
            asked = study.ask(distributions)
        suggested = {number: int(asked.params[self.space.parameters[number].name]) for number in self.space.varying}
        point = nearest_free(self.space, suggested, taken)
        return None if point is None else Proposal(point)

    def _sampler(self, count: int) -> BaseSampler:
        # A new draw for each proposal, and the same one when a search is repeated.
        seed = self.seed * 100_003 + count
        return TPESampler(seed=seed) if self.sampler == "tpe" else GPSampler(seed=seed)

    def _range(self, number: int) -> BaseDistribution:
        one = self.space.parameters[number]
        if one.ordered:
            return IntDistribution(0, len(one.values) - 1)
        return CategoricalDistribution(tuple(range(len(one.values))))

    def _history(self, trials: Sequence[Trial], distributions: dict[str, BaseDistribution]) -> list[FrozenTrial]:
        worst = max((trial.value for trial in trials if trial.good), default=1.0)
        found = []
        for trial in trials:
            point = self.space.find(trial.values)
            if point is None or not (trial.good or trial.failed):
                continue
            codes = self.space.codes[point]
            frozen = create_trial(
                state=TrialState.COMPLETE,
                value=trial.value if trial.good else worst,
                params={self.space.parameters[number].name: int(codes[number]) for number in self.space.varying},
                distributions=distributions,
                constraints={_CONSTRAINT: -1.0 if trial.good else 1.0},
            )
            found.append(frozen)
        return found
