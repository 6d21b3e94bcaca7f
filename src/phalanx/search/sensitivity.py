"""Which parameter matters most, exactly, over all points of a space.

A parameter's effect is its Shapley share of the variance of the figure (Owen, SIAM/ASA J. Uncertainty
Quantification 2, 2014; Song, Nelson and Staum, ibid. 4, 2016): what knowing it adds to the variance that is explained, the
mean over all orders in which parameters become known. It needs no independence. Nothing is sampled: all points are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial

import numpy as np

from phalanx.plan.models import Floats
from phalanx.search.space import Ints

MOST_PARAMETERS = 16
"""Parameters of an enumerated space: 65,536 subsets."""


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


def shapley_effects(names: Sequence[str], codes: Ints, values: Floats) -> Effects:
    """Exact effects of parameters on a figure, over points that all count the same.

    codes: [points, parameters]; values: [points]. Parameters that are the same everywhere are left out.
    """
    varying = np.flatnonzero(np.ptp(codes, axis=0) > 0)
    assert 0 < len(varying) <= MOST_PARAMETERS, f"{len(varying)} parameters"
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


def _explained(columns: Sequence[Ints], values: Floats) -> Floats:
    """Variance of the mean of `values` given the parameters of each subset, [subsets]; bit p of a subset is parameter p."""
    count, mean = len(columns), float(values.mean())
    found = np.zeros(1 << count)
    groups: list[Ints] = [np.zeros(len(values), np.int64)]
    for subset in range(1, 1 << count):
        # Of subsets in order the one without its highest parameter is known: only that one has to be told apart further.
        highest = subset.bit_length() - 1
        below = groups[subset & ~(1 << highest)]
        joined = below * (int(columns[highest].max()) + 1) + columns[highest]
        code = np.unique(joined, return_inverse=True)[1].reshape(-1)
        groups.append(code.astype(np.int32) if len(values) < 2**31 else code)
        sums, sizes = np.bincount(code, values), np.bincount(code)
        found[subset] = float(((sums / sizes - mean) ** 2 * sizes).sum() / len(values))
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
