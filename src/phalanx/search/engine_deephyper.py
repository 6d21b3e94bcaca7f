"""DeepHyper's Bayesian optimiser as an engine: the search of the published work, failures as its `F_` objectives.

Needs the package deephyper, which nothing else does. DeepHyper maximises, so it is told minus the logarithm of the time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from deephyper.hpo import CBO, HpProblem

from phalanx.search.engines import Proposal
from phalanx.search.repair import nearest_free
from phalanx.search.space import Space
from phalanx.search.trials import Trial, objective

_FIRST = 10
"""Trials at random before the surrogate is used. DeepHyper counts only those that do not fail, and would take twice the
number of parameters and one."""


@dataclass(frozen=True)
class DeepHyperEngine:
    """Centralised Bayesian optimisation with extremely randomised trees, DeepHyper's defaults but for `_FIRST`."""

    space: Space
    seed: int = 0

    def propose(self, trials: Sequence[Trial], taken: set[str]) -> Proposal | None:
        """What it suggests, moved to the nearest point that is not taken."""
        problem = HpProblem()
        for number in self.space.varying:
            one = self.space.parameters[number]
            places = list(range(len(one.values)))
            problem.add_hyperparameter((0, places[-1]) if one.ordered else places, f"p{number}")
        with tempfile.TemporaryDirectory(prefix="phalanx-deephyper-") as folder:
            # A new draw for each proposal, and the same one when a search is repeated.
            search = CBO(
                problem, random_state=self.seed * 100_003 + len(trials), log_dir=folder, n_initial_points=_FIRST
            )
            told = [
                (
                    {f"p{number}": int(self.space.codes[point][number]) for number in self.space.varying},
                    objective(trial),
                )
                for trial in trials
                if (trial.good or trial.failed) and (point := self.space.find(trial.values)) is not None
            ]
            if told:
                search.tell(told)
            (suggested,) = search.ask(1)
        point = nearest_free(self.space, {number: int(suggested[f"p{number}"]) for number in self.space.varying}, taken)
        return None if point is None else Proposal(point)
