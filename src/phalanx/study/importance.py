"""Which parameter matters most: by measured trials with error bars, or exactly over all points of an enumerated space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import factorial, prod
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.ensemble import RandomForestRegressor
from sklearn.inspection import permutation_importance

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

CAUTION = "ranks 2 to 4 of a study of 25 to 50 trials change with the seed"
"""Caution beside every importance."""
_LEAST_TRIALS = 6
"""Measured trials below which nothing is said of what matters."""
_TREES = 40
_SHUFFLES = 3
_RESAMPLED = 30
MOST_PARAMETERS = 16
"""Parameters of an enumerated space: 65,536 subsets."""
_MOST_WORK = 2**31
"""Points times subsets: a minute or two."""
_MOST_CELLS = 2**62
"""Combinations of values, whether there is a point or not: each gets a number of 64 bits."""
_MOST_EMPTY = 16
"""Combinations for each point up to which all are counted, empty ones too: sorting points is slower than that."""


@dataclass(frozen=True)
class MeasuredImportance:
    """Importance of parameters by measured trials, the most important one first."""

    names: tuple[str, ...]
    importance: Floats
    """Growth of a random forest's mean absolute error where the parameter's values are shuffled, in units of the figure."""
    low: Floats
    """5% of resampled studies have less."""
    high: Floats
    """5% of resampled studies have more."""
    ranks: Floats
    """[parameters, ranks]: share of resampled studies in which a parameter has that rank."""


def measured_importance(
    names: Sequence[str], codes: npt.NDArray[Any], values: Floats, *, resampled: int = _RESAMPLED, seed: int = 0
) -> MeasuredImportance:
    """Return the permutation importance (Breiman, Machine Learning 45, 2001) of the parameters that vary.

    The whole is repeated on `resampled` studies drawn from the trials with replacement, for error bars.
    codes: [trials, parameters], of which only the order matters to a forest. values: [trials], such as logarithms of times.
    """
    varying = np.flatnonzero(np.ptp(codes, axis=0) > 0)
    assert len(varying) and len(values) >= 4
    random = np.random.default_rng(seed)

    # Each forest has one process: several would start threads for fractions of a second.
    # On the trials that the forest was fitted to: there are too few to hold any out, and ranks are what is asked for.
    def shuffled_error(chosen: Ints, number: int) -> Floats:
        rows, figures = codes[chosen][:, varying], values[chosen]
        forest = RandomForestRegressor(_TREES, random_state=number, n_jobs=1).fit(rows, figures)
        found = permutation_importance(
            forest, rows, figures, scoring="neg_mean_absolute_error", n_repeats=_SHUFFLES, random_state=number
        )
        return np.asarray(found.importances_mean)

    importance = shuffled_error(np.arange(len(values)), seed)
    studies = np.stack(
        [shuffled_error(random.integers(0, len(values), len(values)), seed + 1 + number) for number in range(resampled)]
    )
    order = np.argsort(-importance, kind="stable")
    # The argsort of an argsort is the rank of each parameter in each study.
    place = np.argsort(np.argsort(-studies, axis=1, kind="stable"), axis=1, kind="stable")
    ranks = np.stack([(place == rank).mean(axis=0) for rank in range(len(varying))], axis=1)
    low, high = np.quantile(studies, [0.05, 0.95], axis=0)
    shown = tuple(names[number] for number in varying[order])
    return MeasuredImportance(shown, importance[order], low[order], high[order], ranks[order])


def summarise_importance(
    names: Sequence[str], codes: npt.NDArray[Any], values: Floats, figure: str
) -> dict[str, Any] | None:
    """Return the importance of parameters by measured trials as plain values; None where these are too few to tell.

    figure: what `values` are, in words.
    """
    if len(values) < _LEAST_TRIALS or not np.ptp(codes, axis=0).any():
        return None
    found = measured_importance(names, codes, values)
    rows = zip(found.names, found.importance, found.low, found.high, found.ranks, strict=True)
    return {
        "trials": len(values),
        "of": figure,
        "caution": CAUTION,
        "importance": [
            {"name": name, "mean": float(mean), "low": float(low), "high": float(high), "ranks": ranks.tolist()}
            for name, mean, low, high, ranks in rows
        ],
    }


@dataclass(frozen=True)
class ShapleyEffects:
    """Effects of parameters over an enumerated space, the largest first."""

    names: tuple[str, ...]
    shares: Floats
    """Shares of the variance; they add up to 1."""
    variance: float
    alone: Floats
    """Part of the variance that each parameter explains on its own; the parts may add up to more than 1 where parameters
    depend on each other."""


def can_be_told_apart(codes: Ints) -> bool:
    """Return whether `shapley_effects` takes these points, [points, parameters].

    Some parameter must vary, and not too many for so many points.
    """
    if not len(codes):
        return False
    ranges = [len(np.unique(column)) for column in codes.T]
    varying = sum(count > 1 for count in ranges)
    few = varying <= MOST_PARAMETERS and len(codes) << varying <= _MOST_WORK
    return varying > 0 and few and prod(ranges) <= _MOST_CELLS


def shapley_effects(names: Sequence[str], codes: Ints, values: Floats) -> ShapleyEffects:
    """Return the exact Shapley effects of parameters on a figure, over points that all count the same.

    A parameter's effect is what knowing it adds to the variance that is explained, the mean over all orders in which
    parameters become known (Owen, SIAM/ASA J. Uncertainty Quantification 2, 2014; Song, Nelson and Staum, ibid. 4, 2016).
    Unlike Sobol indices it needs no independence: legal layouts are no product of ranges.
    codes: [points, parameters]; values: [points]. Parameters that are the same everywhere are left out.
    """
    assert can_be_told_apart(codes), f"{codes.shape} points and parameters"
    varying = np.flatnonzero(np.ptp(codes, axis=0) > 0).tolist()
    count = len(varying)
    # All subsets of parameters: nothing is sampled, so that equal parameters get equal effects.
    explained = {
        subset: explained_variance(codes[:, [varying[place] for place in subset]], values)
        for size in range(count + 1)
        for subset in combinations(range(count), size)
    }
    shares = np.zeros(count)
    # The sum over subsets in place of orders: orders in which the same parameters are known alike add the same.
    for subset, before in explained.items():
        if len(subset) == count:
            continue
        # The share of orders in which exactly this subset is known when a given parameter becomes so.
        weight = factorial(len(subset)) * factorial(count - len(subset) - 1) / factorial(count)
        for place in set(range(count)) - set(subset):
            shares[place] += weight * (explained[tuple(sorted((*subset, place)))] - before)
    variance = float(values.var())
    # A figure that is the same everywhere has no effects, rather than undefined ones.
    scale = variance or 1.0
    order = np.argsort(-shares, kind="stable")
    alone = np.array([explained[place,] for place in range(count)])
    shown = tuple(names[varying[place]] for place in order)
    return ShapleyEffects(shown, shares[order] / scale, variance, alone[order] / scale)


def explained_variance(codes: Ints, values: Floats) -> float:
    """Return the variance of the mean of `values`, [points], over groups of points that agree in all columns of `codes`."""
    group, groups = np.zeros(len(values), np.int64), 1
    for column in codes.T:
        # One number for each combination of values, whether there is a point or not.
        size = int(column.max()) + 1
        group, groups = group * size + column, groups * size
    if groups > _MOST_EMPTY * len(values):
        group = np.unique(group, return_inverse=True)[1].reshape(-1)
    # The mean is taken off first: the difference of two large sums of squares would keep few digits.
    sizes, sums = np.bincount(group), np.bincount(group, values - values.mean())
    return float((sums[sizes > 0] ** 2 / sizes[sizes > 0]).sum() / len(values))


@dataclass(frozen=True)
class Interaction:
    """Dependence of a figure on two parameters together."""

    names: tuple[str, str]
    share: float
    """Share of the variance that the two explain together beyond what each does alone; negative where they tell the same."""
    means: Floats
    """[values of the first, values of the second]: mean of the figure; NaN where there is no point."""


def interactions(names: Sequence[str], codes: Ints, values: Floats, sizes: Sequence[int]) -> list[Interaction]:
    """Return all pairs of parameters, the strongest interaction first. sizes: number of values that each parameter has."""
    variance = float(values.var()) or 1.0
    alone = [explained_variance(codes[:, [place]], values) for place in range(len(names))]
    found = []
    for first, second in combinations(range(len(names)), 2):
        cell = codes[:, first] * sizes[second] + codes[:, second]
        cells = sizes[first] * sizes[second]
        # 0 / 0 where no point has both values.
        with np.errstate(invalid="ignore"):
            means = np.bincount(cell, values, cells) / np.bincount(cell, minlength=cells)
        together = explained_variance(codes[:, [first, second]], values)
        share = (together - alone[first] - alone[second]) / variance
        found.append(Interaction((names[first], names[second]), share, means.reshape(sizes[first], sizes[second])))
    return sorted(found, key=lambda one: -abs(one.share))
