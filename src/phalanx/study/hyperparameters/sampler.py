"""Engines: each proposes a configuration, from the trials so far and nothing else. None keeps a state of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from phalanx.errors import ConfigError
from phalanx.study.hyperparameters.asha import Standing
from phalanx.study.hyperparameters.space import TuneSpace, Values
from phalanx.study.trials.optuna_sampler import suggest_optuna
from phalanx.study.trials.ranges import Scalar, Told
from phalanx.study.trials.trial import key_of

_ATTEMPTS = 200
"""Draws before a space counts as empty of anything new."""
_ASKED = 5
"""Of these, times that a sampler is asked; the rest is drawn at random."""

Suggest = Callable[[Sequence[Told], int], dict[str, Scalar]]


def propose(
    engine: str, space: TuneSpace, history: Sequence[Told], taken: set[str], *, seed: int, drawn: int
) -> Values | None:
    """A configuration whose key is not taken, and that constraints allow; None where none is found.

    drawn: configurations that were proposed before: the same one with the same history gives the same answer. Raises
    ConfigError where the engine's package is missing.
    """
    suggest = _suggester(engine, space)
    for attempt in range(_ATTEMPTS):
        number = (seed * 100_003 + drawn) * _ATTEMPTS + attempt
        told = suggest is not None and attempt < _ASKED and bool(history)
        if told:
            assert suggest is not None
            suggested = suggest(history, number % 2**31)
        else:
            random = np.random.default_rng(number)
            suggested = {one.name: one.range.draw(random) for one in space.parameters}
        values = space.applying(suggested)
        if key_of(values) not in taken and space.allowed(values):
            return values
    return None


def projected(standings: Sequence[Standing], rungs: int) -> dict[int, float]:
    """The score of each trial that has one, as it may be at the last rung.

    Scores of different rungs cannot be compared. What a trial may gain from its rung to the next is taken to be the
    median of what those gained that went on; where none did, nothing.
    """
    gains = [0.0] * rungs
    for rung in range(rungs - 1):
        both = [
            one.scores[rung + 1] - one.scores[rung]
            for one in standings
            if rung in one.scores and rung + 1 in one.scores
        ]
        gains[rung] = median(both) if both else 0.0
    return {one.number: one.scores[max(one.scores)] + sum(gains[max(one.scores) :]) for one in standings if one.scores}


def _suggester(engine: str, space: TuneSpace) -> Suggest | None:
    if engine == "random":
        return None
    if engine == "optuna-tpe":
        return lambda history, seed: suggest_optuna("tpe", space.ranges, history, seed)
    try:
        from phalanx.study.trials.deephyper_sampler import suggest_deephyper  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"--engine deephyper needs a package that is missing: {error}; pip install deephyper"
        ) from None
    return lambda history, seed: suggest_deephyper(space.ranges, history, seed)
