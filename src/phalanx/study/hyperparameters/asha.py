"""Asynchronous successive halving (ASHA): which trials are promoted to the next rung, as a function of the scores so far.

Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020, algorithm 2: of the trials that have a score at
a rung, one in `eta` is promoted, the best first, as soon as there are enough; nobody waits for a rung to fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from phalanx.config.studies import Asha


def rung_steps(asha: Asha | None, total: int) -> tuple[int, ...]:
    """Return the optimizer steps at each rung, ascending; the last one is `total`. Without ASHA it is the only one."""
    if asha is None:
        return (total,)
    # Rungs that would begin below one step, or reach the end early, are left out.
    step = asha.first_steps or max(1, round(total / asha.eta ** (asha.rungs - 1)))
    found: list[int] = []
    while step < total and len(found) < asha.rungs - 1:
        found.append(step)
        step *= asha.eta
    return (*found, total)


@dataclass
class Standing:
    """Progress of a configuration: its scores, and the rung that it runs towards."""

    number: int
    scores: dict[int, float] = field(default_factory=dict)
    """Scores by rung; lower is better."""
    begun: int = 0
    """Highest rung that it runs towards, or has reached."""
    over: bool = False
    """Whether it failed, and so is never promoted."""

    @property
    def waits(self) -> bool:
        """Whether it has the score of its rung and nothing is under way."""
        return not self.over and self.begun in self.scores


def promotable_trials(standings: Sequence[Standing], eta: int, rungs: int) -> list[Standing]:
    """Return the trials that ASHA promotes to the next rung, the highest rung and the best score first."""
    found = []
    entered = len(_by_score(standings, 0))
    # From the highest rung down, as in the paper: what is nearest to the end is worth most.
    for rung in reversed(range(rungs - 1)):
        at_rung = _by_score(standings, rung)
        # Backfilled trials do not change the quota: they would make room for more at the rungs after theirs.
        quota = min(len(at_rung) // eta, entered // eta ** (rung + 1))
        found += [one for one in at_rung[:quota] if one.begun == rung and one.waits]
    return found


def backfill_order(standings: Sequence[Standing], rungs: int) -> list[Standing]:
    """Return the trials that wait at a rung, those that are likeliest to be promoted first."""
    found = []
    for rung in reversed(range(rungs - 1)):
        found += [one for one in _by_score(standings, rung) if one.begun == rung and one.waits]
    return found


def project_scores(standings: Sequence[Standing], rungs: int) -> dict[int, float]:
    """Return the score of each trial that has one, by number, as it may be at the last rung.

    Scores of different rungs cannot be compared. What a trial may gain from its rung to the next is taken to be the median
    of what promoted trials gained there; where none was promoted, nothing.
    """
    gains = [0.0] * rungs
    for rung in range(rungs - 1):
        both = [one.scores for one in standings if rung in one.scores and rung + 1 in one.scores]
        # The median: one trial that diverged after its promotion must not make all others look worse.
        gains[rung] = median(scores[rung + 1] - scores[rung] for scores in both) if both else 0.0
    return {one.number: one.scores[max(one.scores)] + sum(gains[max(one.scores) :]) for one in standings if one.scores}


def _by_score(standings: Sequence[Standing], rung: int) -> list[Standing]:
    return sorted((one for one in standings if rung in one.scores), key=lambda one: (one.scores[rung], one.number))
