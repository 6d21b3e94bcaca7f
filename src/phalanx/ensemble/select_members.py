"""Selection of members among candidates: those whose mean has the least error, found one by one.

Greedy forward selection (Caruana et al. 2004) on the squared error of the mean. That error is the mean squared error of the
members less their disagreement (the ambiguity decomposition of Krogh and Vedelsby 1995), so diversity is part of it and
needs no measure of its own; `diversity` weighs it: 1 is the error of the mean itself, 0 the best by score alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.ensemble.residuals import FloatArray, Residuals
from phalanx.errors import ConfigError, DataError

_ROUNDS = 200
"""Rounds with replacement from which fitted weights are counted: steps of half a percent."""


@dataclass(frozen=True)
class Chosen:
    """Members that were chosen, best first, and their errors."""

    members: tuple[int, ...]
    """Numbers of the candidates, in the order in which they were taken."""
    weights: tuple[float, ...]
    """Weight of each member; their sum is 1."""
    errors: tuple[float, ...]
    """Relative error of the mean of the first 1, 2, ... members; see `relative_products`."""

    @classmethod
    def from_products(cls, products: FloatArray, members: Sequence[int], weights: Sequence[float]) -> Chosen:
        """Return the choice with the error of the mean of its first 1, 2, ... members."""
        errors = []
        for count in range(1, len(members) + 1):
            share = np.asarray(weights[:count])
            share = share / share.sum() if share.sum() else np.full(count, 1.0 / count)
            rows = list(members[:count])
            errors.append(float(np.sqrt(max(share @ products[np.ix_(rows, rows)] @ share, 0.0))))
        return cls(tuple(members), tuple(weights), tuple(errors))


def relative_products(residuals: Sequence[Residuals]) -> FloatArray:
    """Return the mean products of the errors of any two candidates [M, M], over the kinds of numbers that they learned.

    Each kind weighs the same: its products are divided by the squared error of the candidate that is best at it, so that
    the diagonal is 1 for a candidate that is best at everything. Raises DataError where nothing that candidates learned has
    labels.
    """
    learned = [rows for rows in residuals if rows.learned]
    if not learned:
        raise DataError("the validation split has no label of anything that the members learned")
    total = np.zeros((len(learned[0].errors_Mn),) * 2)
    for rows in learned:
        products = rows.products()
        # A candidate without any error must not divide by 0.
        total += products / max(float(np.diag(products).min()), np.finfo(np.float64).tiny)
    return total / len(learned)


def choose_members(products: FloatArray, count: int, *, diversity: float = 1.0) -> Chosen:
    """Choose the best `count` candidates, equally weighed. products: see `relative_products`.

    Each round adds the candidate with which the mean squared error of the members, less `diversity` times their mean squared
    distance from their mean, is smallest. Raises ConfigError for more members than there are candidates.
    """
    candidates = len(products)

    def cost(members: list[int]) -> float:
        own = products[np.ix_(members, members)]
        each, mean = float(np.diag(own).mean()), float(own.mean())
        return each - diversity * (each - mean)

    if count > candidates:
        raise ConfigError(f"--top {count}: there are only {candidates} candidates; give at most {candidates}")
    taken: list[int] = []
    for _ in range(count):
        left = [number for number in range(candidates) if number not in taken]
        taken.append(min(left, key=lambda number: (cost([*taken, number]), number)))
    return Chosen.from_products(products, taken, [1.0 / count] * count)


def best_by_score(products: FloatArray, scores: Sequence[float | None], count: int) -> Chosen:
    """Choose the `count` candidates of the least score, or of the least validation error where one has no score."""
    own = np.diag(products) if any(score is None for score in scores) else np.asarray(scores, np.float64)
    taken = np.argsort(own, kind="stable")[:count].tolist()
    return Chosen.from_products(products, taken, [1.0 / count] * count)


def fit_weights(products: FloatArray, chosen: Chosen) -> Chosen:
    """Return the same members with weights: how often each is drawn by greedy selection with replacement.

    This is the choice of Caruana et al. 2004; with many rounds it approaches the non-negative weights whose mean has the
    least error. A member that is never drawn has a weight of 0.
    """
    members = list(chosen.members)
    own = products[np.ix_(members, members)]
    drawn = np.zeros(len(members))
    for _ in range(_ROUNDS):
        # The error of (drawn + one more) is a quadratic form; the factor 1 / rounds^2 is the same for all candidates.
        cost = drawn @ own @ drawn + 2.0 * (own @ drawn) + np.diag(own)
        drawn[int(cost.argmin())] += 1.0
    return Chosen.from_products(products, members, (drawn / drawn.sum()).tolist())
