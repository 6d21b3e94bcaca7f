"""DeepHyper's Bayesian optimiser as an engine: the search of the published work. Needs the package deephyper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.search.engines import Proposal
from phalanx.search.repair import nearest_free, position_ranges, position_values, told_of
from phalanx.search.space import Space
from phalanx.trials.deephyper_sampler import suggest_deephyper
from phalanx.trials.trial import Trial


@dataclass(frozen=True)
class DeepHyperEngine:
    """See `trials.deephyper_sampler`."""

    space: Space
    seed: int = 0

    def propose(self, trials: Sequence[Trial], taken: set[str]) -> Proposal | None:
        """What it suggests, moved to the nearest point that is not taken."""
        # A new draw for each proposal, and the same one when a search is repeated.
        seed = self.seed * 100_003 + len(trials)
        suggested = suggest_deephyper(position_ranges(self.space), told_of(self.space, trials), seed)
        point = nearest_free(self.space, position_values(self.space, suggested), taken)
        return None if point is None else Proposal(point)
