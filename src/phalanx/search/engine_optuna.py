"""Optuna's samplers as an engine: what they suggest, moved to the nearest point that is legal and not taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.search.engines import Proposal
from phalanx.search.repair import nearest_free, position_ranges, position_values, told_of
from phalanx.search.space import Space
from phalanx.trials.optuna_sampler import suggest_optuna
from phalanx.trials.trial import Trial


@dataclass(frozen=True)
class OptunaEngine:
    """One of Optuna's samplers over the parameters of a space."""

    space: Space
    sampler: str
    """tpe or gp."""
    seed: int = 0

    def propose(self, trials: Sequence[Trial], taken: set[str]) -> Proposal | None:
        """What the sampler suggests, moved to the nearest point that is not taken."""
        # A new draw for each proposal, and the same one when a search is repeated.
        seed = self.seed * 100_003 + len(trials)
        suggested = suggest_optuna(self.sampler, position_ranges(self.space), told_of(self.space, trials), seed)
        point = nearest_free(self.space, position_values(self.space, suggested), taken)
        return None if point is None else Proposal(point)
