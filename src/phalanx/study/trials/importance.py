"""Which parameter matters most by a few measured trials, with error bars.

It is the mean absolute Shapley value of a random forest's prediction (Lundberg and Lee, NeurIPS 2017), by all subsets of
parameters, with those that are not known filled in from the trials; the whole is repeated on resampled trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.ensemble import RandomForestRegressor

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[Any]
"""Whole numbers, or shares from 0 to 1: only their order matters to a forest."""

MOST_FACTORS = 7
"""Parameters of which measured trials are explained; the others are one factor together."""
CAUTION = "ranks 2 to 4 of a study of 25 to 50 trials change with the seed"
"""What everyone who reads an importance should know."""
_TREES = 40
_BACKGROUND = 20
"""Trials that stand for the values of parameters that are not known."""


@dataclass(frozen=True)
class Measured:
    """What matters by measured trials, the largest first."""

    names: tuple[str, ...]
    importance: Floats
    """Mean absolute Shapley value of the forest's prediction, in units of the figure."""
    low: Floats
    """5% of resampled studies have less."""
    high: Floats
    """5% have more."""
    ranks: Floats
    """[parameters, ranks]: share of resampled studies in which a parameter comes at that place."""
    values: Floats
    """[trials, parameters]: Shapley values of each trial."""
    trials: int


def measured_importance(
    names: Sequence[str], codes: Codes, values: Floats, *, resampled: int = 30, seed: int = 0
) -> Measured:
    """What a forest makes of trials. codes: [trials, parameters]; values: [trials], larger or smaller is better alike."""
    varying = np.flatnonzero(np.ptp(codes, axis=0) > 0)
    assert len(varying) and len(values) >= 4
    random = np.random.default_rng(seed)
    first = _forest(codes[:, varying], values, seed)
    factors = _factors(first.feature_importances_, len(varying))
    shown = [names[varying[place[0]]] if len(place) == 1 else "all others" for place in factors]
    explained = _shapley_values(first, codes[:, varying], codes[:, varying], factors, random)
    studies = []
    for number in range(resampled):
        some = random.integers(0, len(values), len(values))
        forest = _forest(codes[some][:, varying], values[some], seed + 1 + number)
        some_codes = codes[some][:, varying]
        studies.append(np.abs(_shapley_values(forest, some_codes, some_codes, factors, random)).mean(axis=0))
    spread = np.stack(studies)
    importance = np.abs(explained).mean(axis=0)
    order = np.argsort(-importance, kind="stable")
    places = np.argsort(np.argsort(-spread, axis=1, kind="stable"), axis=1, kind="stable")
    ranks = np.stack([(places == rank).mean(axis=0) for rank in range(len(factors))], axis=1)
    low, high = np.quantile(spread, [0.05, 0.95], axis=0)
    return Measured(
        tuple(shown[place] for place in order),
        importance[order],
        low[order],
        high[order],
        ranks[order],
        explained[:, order],
        len(values),
    )


def _forest(codes: Codes, values: Floats, seed: int) -> RandomForestRegressor:
    return RandomForestRegressor(_TREES, random_state=seed, min_samples_leaf=1, n_jobs=1).fit(codes, values)


def _factors(importances: Floats, count: int) -> list[list[int]]:
    order = np.argsort(-importances, kind="stable").tolist()
    if count <= MOST_FACTORS:
        return [[place] for place in order]
    return [*([place] for place in order[: MOST_FACTORS - 1]), order[MOST_FACTORS - 1 :]]


def _shapley_values(
    forest: RandomForestRegressor, codes: Codes, others: Codes, factors: list[list[int]], random: np.random.Generator
) -> Floats:
    """[trials, factors], by all subsets of the factors."""
    background = others if len(others) <= _BACKGROUND else others[random.permutation(len(others))[:_BACKGROUND]]
    count, rows = len(factors), len(codes)
    filled = np.repeat(background[None, :, :], rows, axis=0)
    asked = []
    for subset in range(1 << count):
        mixed = filled.copy()
        for place in (place for place in range(count) if subset >> place & 1):
            mixed[:, :, factors[place]] = codes[:, None, factors[place]]
        asked.append(mixed.reshape(-1, codes.shape[1]))
    together = np.concatenate(asked)
    # Most rows are alike: a forest is asked once for each.
    distinct, which = np.unique(together, axis=0, return_inverse=True)
    answers = forest.predict(distinct)[which.reshape(-1)]
    means = answers.reshape(1 << count, rows, len(background)).mean(axis=2)
    found = np.zeros((rows, count))
    for subset in range(1 << count):
        for place in range(count):
            if not subset >> place & 1:
                size = subset.bit_count()
                weight = factorial(size) * factorial(count - size - 1) / factorial(count)
                found[:, place] += weight * (means[subset | 1 << place] - means[subset])
    return found
