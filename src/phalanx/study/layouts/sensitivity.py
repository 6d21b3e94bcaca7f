"""Which parameter matters most, exactly, over all points of a space.

A parameter's effect is its Shapley share of the variance of the figure (Owen, SIAM/ASA J. Uncertainty
Quantification 2, 2014; Song, Nelson and Staum, ibid. 4, 2016): what knowing it adds to the variance that is explained, the
mean over all orders in which parameters become known. It needs no independence. Nothing is sampled: all points are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial, prod

import numpy as np

from phalanx.planner.rank.cost_models import Floats
from phalanx.study.layouts.space import Ints

MOST_PARAMETERS = 16
"""Parameters of an enumerated space: 65,536 subsets."""
_MOST_WORK = 2**34
"""Points times subsets: a minute or two where hardly any points agree in anything, seconds where they fill the space."""
_MOST_CELLS = 2**62
"""Combinations of values, whether there is a point or not: each has a number of 64 bits."""


@dataclass(frozen=True)
class Effects:
    """Effects over an enumerated space, the largest first."""

    names: tuple[str, ...]
    shares: Floats
    """Of the variance; they add up to 1."""
    variance: float
    alone: Floats
    """Part of the variance that each explains on its own; where parameters depend on each other the parts may be more
    than 1 together."""


def can_be_told_apart(codes: Ints) -> bool:
    """Whether `shapley_effects` takes these points, [points, parameters]: some parameter varies, and not too many do for so
    many points."""
    if not len(codes):
        return False
    ranges = [len(np.unique(column)) for column in codes.T]
    varying = sum(count > 1 for count in ranges)
    few = varying <= MOST_PARAMETERS and len(codes) << varying <= _MOST_WORK
    return varying > 0 and few and prod(ranges) <= _MOST_CELLS


def shapley_effects(names: Sequence[str], codes: Ints, values: Floats) -> Effects:
    """Exact effects of parameters on a figure, over points that all count the same.

    codes: [points, parameters]; values: [points]. Parameters that are the same everywhere are left out.
    """
    assert can_be_told_apart(codes), f"{codes.shape} points and parameters"
    varying = np.flatnonzero(np.ptp(codes, axis=0) > 0)
    columns = [np.unique(codes[:, number], return_inverse=True)[1].reshape(-1) for number in varying]
    explained = _explained(columns, values)
    count = len(columns)
    weights = [factorial(size) * factorial(count - size - 1) / factorial(count) for size in range(count)]
    shares = np.zeros(count)
    for subset in range(1 << count):
        for place in range(count):
            if not subset >> place & 1:
                shares[place] += weights[subset.bit_count()] * (explained[subset | 1 << place] - explained[subset])
    variance = float(values.var())
    scale = variance or 1.0
    order = np.argsort(-shares, kind="stable")
    alone = np.array([explained[1 << place] for place in range(count)])
    return Effects(
        tuple(names[varying[place]] for place in order), shares[order] / scale, variance, alone[order] / scale
    )


@dataclass(frozen=True)
class _Groups:
    """Points that agree in the parameters of a subset, a row for each group."""

    keys: Ints
    """Values of the parameters of the subset, as digits of one number."""
    sums: Floats
    """Of the figure, less its mean."""
    sizes: Ints
    """Points."""

    def without(self, place: int, size: int) -> _Groups:
        """Groups that agree in all but the parameter whose digit counts `place`, and has `size` values."""
        keys, which = np.unique(self.keys - self.keys // place % size * place, return_inverse=True)
        if len(keys) == len(self.keys):
            order = np.argsort(which)
            return _Groups(keys, self.sums[order], self.sizes[order])
        which = which.reshape(-1)
        # Sums of counts are exact: they stay far below 2^53.
        sizes = np.bincount(which, self.sizes, len(keys)).astype(np.int64)
        return _Groups(keys, np.asarray(np.bincount(which, self.sums, len(keys)), np.float64), sizes)


def _explained(columns: Sequence[Ints], values: Floats) -> Floats:
    """Variance of the mean of `values` given the parameters of each subset, [subsets]; bit p of a subset is parameter p.

    From all parameters down: the groups of a subset are joined from those of one with one parameter more, so that each
    subset costs its groups, not the points. Depth first: no more is held than the groups of as many subsets
    as there are parameters.
    """
    sizes = [int(column.max()) + 1 for column in columns]
    places = [prod(sizes[:number]) for number in range(len(sizes))]
    count, found = len(values), np.zeros(1 << len(columns))
    keys = sum((column * place for column, place in zip(columns, places, strict=True)), np.zeros(count, np.int64))
    start = _Groups(keys, values - values.mean(), np.ones(count, np.int64)).without(1, 1)

    def fill(subset: int, groups: _Groups, below: int) -> None:
        found[subset] = float((groups.sums**2 / groups.sizes).sum() / count)
        for number in range(below):
            fill(subset & ~(1 << number), groups.without(places[number], sizes[number]), number)

    fill((1 << len(columns)) - 1, start, len(columns))
    return found


@dataclass(frozen=True)
class Interaction:
    """How a figure depends on two parameters together."""

    names: tuple[str, str]
    share: float
    """Of the variance: what the two explain together beyond what each does alone; negative where they tell the same."""
    means: Floats
    """[values of the first, values of the second]: mean of the figure; NaN where there is no point."""


def interactions(names: Sequence[str], codes: Ints, values: Floats, sizes: Sequence[int]) -> list[Interaction]:
    """All pairs of parameters, the strongest first. sizes: values that each parameter has."""
    mean, variance = float(values.mean()), float(values.var()) or 1.0

    def explained(code: Ints, count: int) -> float:
        number = np.maximum(np.bincount(code, minlength=count), 1)
        means = np.bincount(code, values, minlength=count) / number
        return float(((means[code] - mean) ** 2).mean()) / variance

    alone = [explained(codes[:, place], sizes[place]) for place in range(len(names))]
    found = []
    for first in range(len(names)):
        for second in range(first + 1, len(names)):
            count = sizes[first] * sizes[second]
            code = codes[:, first] * sizes[second] + codes[:, second]
            number = np.bincount(code, minlength=count)
            with np.errstate(invalid="ignore"):
                means = np.where(number > 0, np.bincount(code, values, minlength=count) / number, np.nan)
            share = explained(code, count) - alone[first] - alone[second]
            pair = (names[first], names[second])
            found.append(Interaction(pair, share, means.reshape(sizes[first], sizes[second])))
    return sorted(found, key=lambda one: -abs(one.share))
