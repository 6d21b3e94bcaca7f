"""How unevenly routers use experts, as a distribution: what the busiest rank of `layout.ep` gets over an equal part.

From the loads that routers of a run have logged, or from a prior.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ExpertLoads:
    """Loads of the experts of a mixture's layers."""

    logged: tuple[tuple[float, ...], ...] = ()
    """Share of the choices that each expert got, [layers][experts]; empty where nothing was logged."""
    spread: float = 0.0
    """Standard deviation of an expert's load over the mean of all, where nothing was logged."""

    def busiest(self, experts: int, ranks: int) -> float:
        """Return the rows of the busiest of `ranks` ranks over an equal part, the mean over layers."""
        if ranks == 1:
            return 1.0
        if self.logged:
            return float(self._rank_loads(ranks).max(axis=1).mean())
        # Most of so many normal numbers, on average (Blom 1958); a rank's load is the mean of its experts'.
        return min(float(ranks), 1.0 + self.spread * _expected_maximum(ranks) / math.sqrt(experts / ranks))

    def busiest_spread(self, experts: int, ranks: int) -> float:
        """Return one standard deviation of `busiest` from layer to layer."""
        if ranks == 1:
            return 0.0
        if self.logged:
            return float(self._rank_loads(ranks).max(axis=1).std())
        # The deviation of the most of several normal numbers is a little below that of one; one is on the safe side.
        return self.spread / math.sqrt(experts / ranks)

    def _rank_loads(self, ranks: int) -> Floats:
        """Loads of ranks over an equal part, [layers, ranks]: neighbouring experts share a rank."""
        loads = np.asarray(self.logged, np.float64)
        by_rank = loads.reshape(len(loads), ranks, -1).sum(axis=2)
        return np.asarray(by_rank / by_rank.mean(axis=1, keepdims=True))


def _expected_maximum(count: int) -> float:
    """Mean of the largest of `count` standard normal numbers, by Blom's approximation."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


PRIOR = ExpertLoads(spread=0.3)
"""Where nothing was logged. An assumption, not a measurement: the busiest of 64 experts then gets 0.7 more than the mean,
as a balance loss of the usual weight may leave it. Loads that a run has logged say better."""
BALANCED = ExpertLoads()
"""Every expert gets as much."""


def whole_rows(load: float, rows: int) -> Fraction:
    """Return the load nearest to `load` that makes whole rows of `rows`."""
    return Fraction(max(1, round(rows * load)), rows)


def read_loads(rows: Sequence[Sequence[float]]) -> ExpertLoads:
    """Return logged loads. rows: of each layer the share of each expert. Raises ValueError for ragged or empty ones."""
    widths = {len(row) for row in rows}
    if len(widths) != 1 or not all(sum(row) > 0 and min(row) >= 0 for row in rows):
        raise ValueError("loads of experts need one row a layer, all of as many experts, with shares of 0 or more")
    return ExpertLoads(tuple(tuple(float(share) for share in row) for row in rows))
