"""A search as plain values: what `--json` prints, and what words and page are made of."""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx.study.layouts.loop import Found
from phalanx.study.layouts.prior import Prior
from phalanx.study.layouts.runner import DEVICE
from phalanx.study.layouts.sensitivity import can_be_told_apart, interactions, shapley_effects
from phalanx.study.layouts.space import Space
from phalanx.study.layouts.surrogate import Belief
from phalanx.study.trials.importance import CAUTION, measured_importance
from phalanx.study.trials.trial import Trial

_SHOWN = 10
_PAIRS = 3
_LEAST_TRIALS = 6
"""Good trials below which nothing is said of what matters by measurement."""
_LIKELY = 0.5

Row = dict[str, Any]


def study_facts(space: Space, prior: Prior, found: Found, belief: Belief) -> Row:
    """Everything, with units in the names."""
    best = found.best
    return {
        "points": len(space),
        "stopped": found.stopped,
        "trials": [_trial(space, trial, prior) for trial in found.trials],
        "failures": _failures(found.trials),
        "best": None if best is None else _trial(space, best, prior),
        "next": _next(space, belief, {trial.key for trial in found.trials}),
        "planned": _planned(space, prior, belief),
        "measured": _measured(space, found.trials),
    }


def _trial(space: Space, trial: Trial, prior: Prior) -> Row:
    point, outcome = space.find(trial.values), trial.outcome
    return {
        "number": trial.number,
        "engine": trial.engine,
        "values": dict(trial.values),
        "words": trial.key if point is None else space.describe(point),
        "state": "running" if outcome is None else outcome.cause,
        "step_s": outcome.value if outcome else None,
        "planned_s": None if point is None else float(prior.seconds[point]),
        "expected_s": trial.note.get("expected_s"),
        "memory_bytes": outcome.memory_bytes if outcome else None,
        "loss": outcome.losses[-1] if outcome and outcome.losses else None,
        "said": outcome.words if outcome else "",
        "seconds": outcome.seconds if outcome else None,
        "device": outcome.more.get(DEVICE) if outcome else None,
    }


def _failures(trials: list[Trial]) -> dict[str, int]:
    causes = [trial.outcome.cause for trial in trials if trial.outcome is not None and not trial.good]
    return {cause: causes.count(cause) for cause in sorted(set(causes))}


def _next(space: Space, belief: Belief, done: set[str]) -> list[Row]:
    """What is believed to be best, measured or not."""
    order = np.argsort(np.where(belief.fits >= _LIKELY, belief.log_seconds, np.inf), kind="stable")[:_SHOWN]
    return [
        {
            "words": space.describe(point),
            "believed_s": float(np.exp(belief.log_seconds[point])),
            "spread": float(belief.spread[point]),
            "p_fits": float(belief.fits[point]),
            "measured": space.key(point) in done,
        }
        for point in order.tolist()
    ]


def _planned(space: Space, prior: Prior, belief: Belief) -> Row | None:
    """What matters over all points that are likely to fit, exactly, for the logarithm of what is believed of their time."""
    some = np.flatnonzero(belief.fits >= _LIKELY)
    codes = space.codes[some]
    if not can_be_told_apart(codes):
        return None
    varying = np.flatnonzero(np.ptp(codes, axis=0) > 0)
    names = [one.name for one in space.parameters]
    values = belief.log_seconds[some]
    effects = shapley_effects(names, codes, values)
    shown = [names[number] for number in varying]
    sizes = [len(space.parameters[number].values) for number in varying]
    pairs = interactions(shown, codes[:, varying], values, sizes)[:_PAIRS]
    labels = {one.name: [str(value) for value in one.values] for one in space.parameters}
    return {
        "points": len(some),
        "of": "logarithm of a step's time",
        "standard_deviation": effects.variance**0.5,
        "shapley_effects": dict(zip(effects.names, effects.shares.tolist(), strict=True)),
        "alone": dict(zip(effects.names, effects.alone.tolist(), strict=True)),
        "interactions": [
            {
                "of": list(pair.names),
                "share": pair.share,
                "values": [labels[name] for name in pair.names],
                "mean_s": [[None if np.isnan(cell) else float(np.exp(cell)) for cell in row] for row in pair.means],
            }
            for pair in pairs
        ],
    }


def _measured(space: Space, trials: list[Trial]) -> Row | None:
    """What matters by the good trials alone, with error bars."""
    good = [(point, trial) for trial in trials if trial.good and (point := space.find(trial.values)) is not None]
    codes = np.array([space.codes[point] for point, _ in good])
    if len(good) < _LEAST_TRIALS or not np.ptp(codes, axis=0).any():
        return None
    names = [one.name for one in space.parameters]
    found = measured_importance(names, codes, np.log([trial.value for _, trial in good]))
    rows = zip(found.names, found.importance, found.low, found.high, found.ranks, strict=True)
    return {
        "trials": found.trials,
        "of": "logarithm of a step's time",
        "caution": CAUTION,
        "importance": [
            {"name": name, "mean": float(mean), "low": float(low), "high": float(high), "ranks": ranks.tolist()}
            for name, mean, low, high, ranks in rows
        ],
    }
