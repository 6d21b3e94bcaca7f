"""Asynchronous successive halving: which trials go on from their rung, as a function of the scores so far.

ASHA (Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020, algorithm 2): of those that have a score
at a rung, one in `eta` goes on, the best first, as soon as there are enough; nobody waits for a rung to fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.config.tune import Asha


def rung_steps(asha: Asha | None, total: int) -> tuple[int, ...]:
    """Optimizer steps at each rung, ascending; the last one is `total`."""
    if asha is None:
        return (total,)
    step = asha.first_steps or max(1, round(total / asha.eta ** (asha.rungs - 1)))
    found: list[int] = []
    while step < total and len(found) < asha.rungs - 1:
        found.append(step)
        step *= asha.eta
    return (*found, total)


@dataclass
class Standing:
    """How far a trial has come."""

    number: int
    scores: dict[int, float] = field(default_factory=dict)
    """By rung; lower is better."""
    begun: int = 0
    """Highest rung that it runs towards, or has reached."""
    over: bool = False
    """Whether it failed, and so goes nowhere any more."""

    @property
    def waits(self) -> bool:
        """Whether it stands at a rung and nothing is under way."""
        return not self.over and self.begun in self.scores


def promotions(standings: Sequence[Standing], eta: int, rungs: int) -> list[Standing]:
    """Trials that are to go on to the rung after theirs, the highest rung and the best score first."""
    found = []
    entered = len(_by_score(standings, 0))
    for rung in reversed(range(rungs - 1)):
        at_rung = _by_score(standings, rung)
        # Trials that went on early do not make room for more at the rungs after theirs.
        places = min(len(at_rung) // eta, entered // eta ** (rung + 1))
        found += [one for one in at_rung[:places] if one.begun == rung and one.waits]
    return found


def early(standings: Sequence[Standing], rungs: int) -> list[Standing]:
    """Trials that wait at a rung, in the order in which they would be promoted if others did not turn out better."""
    found = []
    for rung in reversed(range(rungs - 1)):
        found += [one for one in _by_score(standings, rung) if one.begun == rung and one.waits]
    return found


def _by_score(standings: Sequence[Standing], rung: int) -> list[Standing]:
    return sorted((one for one in standings if rung in one.scores), key=lambda one: (one.scores[rung], one.number))
