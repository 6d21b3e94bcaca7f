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

    logged: tuple[tuple[int, float, float], ...] = ()
    """By number of ranks: the busiest one's rows over an equal part, mean and standard deviation over all layers and steps
    that were logged; empty where nothing was."""
    spread: float = 0.0
    """Standard deviation of an expert's load over the mean of all, where nothing was logged."""

    def busiest(self, experts: int, ranks: int) -> float:
        """Return the rows of the busiest of `ranks` ranks over an equal part, the mean over layers."""
        if ranks == 1:
            return 1.0
        if self.logged:
            return self._busiest_of(ranks)[0]
        # Most of so many normal numbers, on average (Blom 1958); a rank's load is the mean of its experts'.
        expected_maximum = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
        return min(float(ranks), 1.0 + self.spread * expected_maximum / math.sqrt(experts / ranks))

    def busiest_spread(self, experts: int, ranks: int) -> float:
        """Return one standard deviation of `busiest` from layer to layer."""
        if ranks == 1:
            return 0.0
        if self.logged:
            return self._busiest_of(ranks)[1]
        # The deviation of the most of several normal numbers is a little below that of one; one is on the safe side.
        return self.spread / math.sqrt(experts / ranks)

    def _busiest_of(self, ranks: int) -> tuple[float, float]:
        return next((mean, spread) for count, mean, spread in self.logged if count == ranks)


PRIOR = ExpertLoads(spread=0.3)
"""Where nothing was logged. An assumption, not a measurement: the busiest of 64 experts then gets 0.7 more than the mean,
as a balance loss of the usual weight may leave it. Loads that a run has logged say better."""
BALANCED = ExpertLoads()
"""Every expert gets as much."""


def whole_rows(load: float, rows: int) -> Fraction:
    """Return the load nearest to `load` that makes whole rows of `rows`."""
    return Fraction(max(1, round(rows * load)), rows)


def read_loads(rows: Sequence[Sequence[float]]) -> ExpertLoads:
    """Return logged loads. rows: of each layer in each step the share of each expert.

    Raises ValueError for ragged or empty ones.
    """
    widths = {len(row) for row in rows}
    if len(widths) != 1 or not all(sum(row) > 0 and min(row) >= 0 for row in rows):
        raise ValueError("loads of experts need one row a layer, all of as many experts, with shares of 0 or more")
    loads = np.asarray(rows, np.float64)
    found = []
    for ranks in (number for number in range(1, loads.shape[1] + 1) if loads.shape[1] % number == 0):
        # Neighbouring experts share a rank.
        by_rank = loads.reshape(len(loads), ranks, -1).sum(axis=2)
        busiest = by_rank.max(axis=1) / by_rank.mean(axis=1)
        found.append((ranks, float(busiest.mean()), float(busiest.std())))
    return ExpertLoads(tuple(found))
