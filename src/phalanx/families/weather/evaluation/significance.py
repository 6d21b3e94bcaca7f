"""Whether two models' forecasts from the same times differ by more than chance.

The paired t-test of Geer (2016, Tellus A 68, 30229): of the differences of two scores, forecast by forecast, whose standard
error is inflated for their correlation in time as of an AR(2) process. WeatherBench-X (`GeerAR2Corrected`) and GraphCast
(Lam et al. 2023) test so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from scipy.special import stdtr, stdtrit

from phalanx.data.sample_order import Int64Array
from phalanx.errors import ConfigError
from phalanx.families.weather.data.coordinates import Float64Array

CONFIDENCE = 0.95
"""Probability of the intervals."""
LEAST_STARTS = 10
"""Fewest forecasts that are tested: of fewer two correlations in time say nothing."""
SCORES = ("rmse", "crps")
"""Scores that are tested."""


@dataclass(frozen=True)
class StartScores:
    """Scores of N single forecasts of V variables."""

    variables: tuple[str, ...]
    sources_N: Int64Array
    """Numbers of the sources."""
    seconds_N: Int64Array
    """Times of the inputs, seconds since 1970."""
    lead_hours_N: Int64Array
    scores_SNV: Float64Array
    """Scores in the order of `SCORES`, by variable; NaN where there is no truth."""

    @classmethod
    def join(cls, parts: Sequence[StartScores]) -> StartScores:
        """Return the forecasts of all parts in order of source, lead time and time of the input."""
        sources, seconds, leads = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("sources_N", "seconds_N", "lead_hours_N")
        )
        order = np.lexsort((seconds, leads, sources))
        scores = np.concatenate([part.scores_SNV for part in parts], axis=1)
        return cls(parts[0].variables, sources[order], seconds[order], leads[order], scores[:, order])

    def gather(self) -> StartScores:
        """Return the forecasts of all ranks, each of which scored some; every rank gets them."""
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return self
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self)
        return StartScores.join(parts)

    def common_with(self, other: StartScores) -> tuple[StartScores, StartScores]:
        """Return of both what both have: variables, lead times and times of the input, in one order."""
        variables = tuple(name for name in self.variables if name in other.variables)
        own, others = (
            list(zip(*(part.tolist() for part in (one.sources_N, one.lead_hours_N, one.seconds_N)), strict=True))
            for one in (self, other)
        )
        places = {key: place for place, key in enumerate(others)}
        pairs = [(place, places[key]) for place, key in enumerate(own) if key in places]
        mine, theirs = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return self._take(mine, variables), other._take(theirs, variables)

    def _take(self, chosen: Int64Array, variables: tuple[str, ...]) -> StartScores:
        columns = [self.variables.index(name) for name in variables]
        scores = self.scores_SNV[:, chosen][:, :, columns]
        return StartScores(variables, self.sources_N[chosen], self.seconds_N[chosen], self.lead_hours_N[chosen], scores)


@dataclass(frozen=True)
class Difference:
    """By how much the score of one variable at one lead time differs between two models, in the variable's own unit."""

    variable: str
    lead_hours: int
    score: str
    starts: int
    """Forecasts that both models made."""
    mean: float
    """Mean over forecasts of this model's score less the other's; negative where this one is better."""
    relative: float
    """That mean over the other's mean score."""
    low: float
    """Lower end of the 95% interval of the mean."""
    high: float
    """Upper end of that interval."""
    p_value: float
    """Chance of a mean as far from 0 where the models are alike; NaN of fewer than 10 forecasts."""
    inflation: float
    """Factor of the standard error for the correlation in time."""

    @property
    def significant(self) -> bool:
        """Return whether the interval leaves 0 out."""
        return self.p_value < 1.0 - CONFIDENCE

    def as_dict(self) -> dict[str, Any]:
        """Return plain values ready for JSON; what is not a number becomes None."""
        values = {**asdict(self), "significant": self.significant}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def compare_scores(mine: StartScores, other: StartScores) -> list[Difference]:
    """Return the differences of two models' scores by lead time, variable and score, of the cases that both forecast.

    Raises ConfigError where there are none.
    """
    mine, other = mine.common_with(other)
    if not (len(mine.seconds_N) and mine.variables):
        raise ConfigError(
            "--against: the two models have no variable, lead time and time of the input in common; name a run on the same "
            "data"
        )
    return [
        _compare_one(mine, other, number, column, lead)
        for lead in np.unique(mine.lead_hours_N).tolist()
        for column in range(len(mine.variables))
        for number in range(len(SCORES))
    ]


def _compare_one(mine: StartScores, other: StartScores, number: int, column: int, lead: int) -> Difference:
    """Return the difference of one score of one variable at one lead time."""
    at = mine.lead_hours_N == lead
    first, second = (one.scores_SNV[number, at, column] for one in (mine, other))
    known = np.isfinite(first) & np.isfinite(second)
    found = mean_test((first - second)[known], mine.seconds_N[at][known], mine.sources_N[at][known])
    return Difference(
        variable=mine.variables[column],
        lead_hours=lead,
        score=SCORES[number],
        starts=int(known.sum()),
        mean=found.mean,
        relative=found.mean / float(second[known].mean()) if known.any() else math.nan,
        low=found.mean - found.half_width,
        high=found.mean + found.half_width,
        p_value=found.p_value,
        inflation=found.inflation,
    )


@dataclass(frozen=True)
class MeanTest:
    """A mean, and what speaks against its being 0."""

    mean: float
    half_width: float
    """Half of the 95% interval."""
    p_value: float
    inflation: float


def mean_test(values_N: Float64Array, seconds_N: Int64Array, series_N: Int64Array) -> MeanTest:
    """Test whether the mean of a series, or of several, is 0, two-sided.

    seconds: times of the values. series: numbers of the series, which are not correlated with one another. Correlations are
    those of values that lie one and two of the series' usual steps apart, so that a gap shifts nothing. Without enough
    values only the mean is known.
    """
    count = len(values_N)
    if count < LEAST_STARTS:
        mean = float(values_N.mean()) if count else math.nan
        return MeanTest(mean, math.nan, math.nan, math.nan)
    mean = float(values_N.mean())
    deviations_N = values_N - mean
    variance = float((deviations_N**2).sum() / (count - 1))
    if variance == 0.0:
        return MeanTest(mean, 0.0, 1.0 if mean == 0.0 else 0.0, 1.0)
    step = _usual_step(seconds_N, series_N)
    first, second = (_autocovariance(deviations_N, seconds_N, series_N, lag * step) / variance for lag in (1, 2))
    inflation = inflation_factor(first, second)
    error = math.sqrt(variance / count) * inflation
    # The degrees of freedom stay those of independent values, as in the source.
    width = float(stdtrit(count - 1, 0.5 + CONFIDENCE / 2)) * error
    return MeanTest(mean, width, float(2.0 * stdtr(count - 1, -abs(mean) / error)), inflation)


def inflation_factor(first: float, second: float) -> float:
    """Return the factor of the standard error of an AR(2) process's mean, by its correlations at lags 1 and 2 (Geer 2016).

    At least 1: negative correlations of a short series are mostly chance, and would make it say more than independent
    values.
    """
    if abs(first) >= 1.0:
        return math.inf
    one = first * (1.0 - second) / (1.0 - first**2)
    two = (second - first**2) / (1.0 - first**2)
    squared = (1.0 - first * one - second * two) / (1.0 - one - two) ** 2 if one + two < 1.0 else math.inf
    return math.sqrt(max(1.0, squared))


def _usual_step(seconds_N: Int64Array, series_N: Int64Array) -> int:
    """Return the most common distance of two neighbours of a series, in seconds; values are in order of series and time."""
    steps = np.diff(seconds_N)[np.diff(series_N) == 0]
    found, counts = np.unique(steps, return_counts=True)
    return int(found[counts.argmax()]) if found.size else 1


def _autocovariance(deviations_N: Float64Array, seconds_N: Int64Array, series_N: Int64Array, apart: int) -> float:
    """Return the mean product of deviations that lie `apart` seconds apart in one series; 0 where none do."""
    products = []
    for series in np.unique(series_N):
        mine = series_N == series
        _, before, behind = np.intersect1d(seconds_N[mine] + apart, seconds_N[mine], return_indices=True)
        products.append(deviations_N[mine][before] * deviations_N[mine][behind])
    every = np.concatenate(products)
    return float(every.mean()) if every.size else 0.0
