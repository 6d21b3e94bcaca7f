"""The search itself: propose, claim, measure, record, and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from optuna.distributions import CategoricalDistribution

from phalanx.study.layouts.runner import Runner
from phalanx.study.layouts.samplers import Engine
from phalanx.study.layouts.space import Space
from phalanx.study.trials.storage import Study
from phalanx.study.trials.trial import INTERRUPTED, Outcome, Trial, best_of

_LOST_RACES = 100
"""Times in a row that another search may be first before this one gives up."""


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    trials: list[Trial]
    """Of the whole study, of which other searches may have looked elsewhere."""
    stopped: str
    """Why it stopped, in words."""
    space: Space

    @property
    def best(self) -> Trial | None:
        """The good trial of least value, of those that this search might have chosen."""
        return best_of(of_space(self.trials, self.space))


def of_space(trials: Sequence[Trial], space: Space) -> list[Trial]:
    """Those whose choice `space` has."""
    return [trial for trial in trials if space.find(trial.values) is not None]


def search(
    study: Study,
    space: Space,
    engine: Engine,
    runner: Runner,
    *,
    engine_name: str,
    most: int,
    limit_s: float = 600.0,
    tell: Callable[[Trial], None] = lambda trial: None,
) -> Found:
    """Measure until the study has `most` trials of `space` that ended, or the engine proposes nothing more.

    limit_s: seconds that a trial may take, for other searches that wonder whether this one is alive. tell: called with
    every trial of this search when it begins and when it has ended. A trial that fails is recorded like any other; what
    interrupts the search itself (KeyboardInterrupt) ends the trial as interrupted and goes on up.
    """
    ranges = {one.name: CategoricalDistribution(one.values) for one in space.parameters}
    lost = 0
    while True:
        study.recover()
        trials = study.trials()
        mine = of_space(trials, space)
        if len(_counted(trials, space)) >= most:
            return Found(trials, f"{most} trials are done", space)
        proposal = engine.propose(mine, study.taken())
        if proposal is None:
            return Found(trials, "another trial is not expected to help", space)
        key, values = space.key(proposal.point), space.values(proposal.point)
        trial = study.claim(
            key,
            values,
            ranges,
            engine=engine_name,
            limit_s=limit_s,
            note=proposal.note,
        )
        if trial is None:
            lost += 1
            if lost >= _LOST_RACES:
                return Found(study.trials(), "other searches were always first", space)
            continue
        lost = 0
        # Searches that share a study may each have taken the last place: the journal's order decides.
        if sum(one.number < trial.number for one in _counted(study.trials(), space)) >= most:
            study.withdraw(trial)
            continue
        tell(trial)
        try:
            outcome = runner.measure(space, proposal.point, trial, study.folder / str(trial.number), trials)
        except BaseException as error:
            study.finish(trial, Outcome(INTERRUPTED, words=f"{type(error).__name__}: {error}"))
            raise
        study.finish(trial, outcome)
        tell(next(one for one in study.trials() if one.number == trial.number))


def _counted(trials: Sequence[Trial], space: Space) -> list[Trial]:
    """Those of `space` that count among the most: all that run or ended, but not those that were interrupted."""
    mine = of_space(trials, space)
    return [one for one in mine if one.outcome is None or one.outcome.cause != INTERRUPTED]
