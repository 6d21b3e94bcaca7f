"""Engines: each proposes the point to measure next, from the trials so far and nothing else.

An engine keeps no state of its own. So a killed search goes on with any engine, and searches that share a study share what
they learned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from phalanx.errors import ConfigError
from phalanx.study.layouts.prior import Prior
from phalanx.study.layouts.repair import nearest_free, position_ranges, position_values, told_of
from phalanx.study.layouts.space import Space
from phalanx.study.layouts.surrogate import Believer
from phalanx.study.trials.ranges import Range, Scalar, Told
from phalanx.study.trials.trial import Trial, best_of

ENGINES = ("planner", "optuna-tpe", "optuna-gp", "deephyper", "random", "exhaustive")
_LEAST_TRIALS = 3
"""Trials before the planner's engine may stop: from fewer nobody knows how far it is off."""


@dataclass(frozen=True)
class Proposal:
    """What to measure next."""

    point: int
    note: Mapping[str, Any] = field(default_factory=dict)
    """What the engine expects of it, as plain values."""


class Engine(Protocol):
    """Chooses what to measure next."""

    def propose(self, trials: Sequence[Trial], taken: set[str]) -> Proposal | None:
        """A point whose key is not taken; None where there is none, or where another trial is not expected to help."""


@dataclass(frozen=True)
class PlannerEngine:
    """The planner's expectation, corrected by what was measured; the point of largest expected improvement.

    The first trial is the point of least expected time, weighed with its probability of fitting.
    """

    space: Space
    prior: Prior
    stop_gain: float = 0.0
    """Expected improvement, as a share of the best time, below which nothing is proposed any more."""

    def propose(self, trials: Sequence[Trial], taken: set[str]) -> Proposal | None:
        """The point of largest expected improvement over the best trial."""
        free = _free(self.space, taken)
        if not free.any():
            return None
        belief = Believer(self.space, self.prior).after(trials)
        best = best_of(list(trials))
        if best is None:
            # A first trial that fails says little: a risk of a tenth has to be worth a tenth of the time.
            risk = np.log(np.maximum(belief.fits, 1e-12))
            point = int(np.argmin(np.where(free, belief.log_seconds - risk, np.inf)))
            gain = None
        else:
            gains = np.where(free, belief.improvement(best.value), -1.0)
            point = int(np.argmax(gains))
            gain = float(gains[point]) / best.value
            if gain < self.stop_gain and sum(trial.outcome is not None for trial in trials) >= _LEAST_TRIALS:
                return None
        note = {
            "expected_s": float(np.exp(belief.log_seconds[point])),
            "spread": float(belief.spread[point]),
            "p_fits": float(belief.fits[point]),
            "expected_gain": gain,
        }
        return Proposal(point, note)


@dataclass(frozen=True)
class RandomEngine:
    """Points in an order that the seed decides."""

    space: Space
    seed: int = 0

    def propose(self, trials: Sequence[Trial], taken: set[str]) -> Proposal | None:
        """The first in that order that is not taken."""
        return _first(self.space, np.random.default_rng(self.seed).permutation(len(self.space)).tolist(), taken)


@dataclass(frozen=True)
class ExhaustiveEngine:
    """All points, in the order of the space."""

    space: Space

    def propose(self, trials: Sequence[Trial], taken: set[str]) -> Proposal | None:
        """The first that is not taken."""
        return _first(self.space, range(len(self.space)), taken)


Suggest = Callable[[Mapping[str, Range], Sequence[Told], int], dict[str, Scalar]]
"""A sampler of another package: what to try next, of these ranges, after this history, with this seed."""


@dataclass(frozen=True)
class SampledEngine:
    """A sampler that knows nothing of layouts: what it suggests, moved to the nearest point that is legal and not taken."""

    space: Space
    suggest: Suggest
    seed: int = 0

    def propose(self, trials: Sequence[Trial], taken: set[str]) -> Proposal | None:
        """What the sampler suggests, moved to the nearest point that is not taken."""
        # A new draw for each proposal, and the same one when a search is repeated.
        seed = self.seed * 100_003 + len(trials)
        suggested = self.suggest(position_ranges(self.space), told_of(self.space, trials), seed)
        point = nearest_free(self.space, position_values(self.space, suggested), taken)
        return None if point is None else Proposal(point)


def make_engine(name: str, space: Space, prior: Prior, *, seed: int, stop_gain: float) -> Engine:
    """The engine of that name, one of ENGINES. Raises ConfigError for another, or where its package is missing."""
    makers: dict[str, Callable[[], Engine]] = {
        "planner": lambda: PlannerEngine(space, prior, stop_gain),
        "random": lambda: RandomEngine(space, seed),
        "exhaustive": lambda: ExhaustiveEngine(space),
        "optuna-tpe": lambda: _optuna("tpe", space, seed),
        "optuna-gp": lambda: _optuna("gp", space, seed),
        "optuna": lambda: _optuna("tpe", space, seed),
        "deephyper": lambda: _deephyper(space, seed),
    }
    if name not in makers:
        raise ConfigError(f"--engine {name} is not known; give one of {', '.join(ENGINES)}")
    return makers[name]()


def _optuna(sampler: str, space: Space, seed: int) -> Engine:
    from phalanx.study.trials.optuna_sampler import suggest_optuna  # noqa: PLC0415

    return SampledEngine(space, partial(suggest_optuna, sampler), seed)


def _deephyper(space: Space, seed: int) -> Engine:
    try:
        from phalanx.study.trials.deephyper_sampler import suggest_deephyper  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"--engine deephyper needs a package that is missing: {error}; pip install deephyper"
        ) from None
    return SampledEngine(space, suggest_deephyper, seed)


def _free(space: Space, taken: set[str]) -> Any:
    free = np.ones(len(space), bool)
    for point in (space.point_of_key(key) for key in taken):
        if point is not None:
            free[point] = False
    return free


def _first(space: Space, order: Sequence[int] | range, taken: set[str]) -> Proposal | None:
    point = next((point for point in order if space.key(point) not in taken), None)
    return None if point is None else Proposal(point)
