"""What is believed of every point once some were measured: the planner's expectation, corrected by what was seen.

The logarithm of the measured over the expected time is taken to be normal, and a sum of

- an error of each of a few constants, which shifts a point by the share of its time that the constant governs (matmul rate,
  exposed collectives, bubble ...): a Bayesian update of the calibration, linear for errors of some percent;
- a function of the layout, for what the time model lacks: a Gaussian process over logarithms of degrees, in part smooth and
  in part another value for each combination, as kernels and protocols change abruptly;
- the effect of each knob's value, which the planner knows nothing of;
- an error of the point's own.

How large the parts are is chosen by the marginal likelihood among a few scales. The same is done for memory, where a trial
that ran out of memory says that more was needed than there is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import log_ndtr, ndtr

from phalanx.planner.rank.cost_models import Floats
from phalanx.study.layouts.prior import Prior
from phalanx.study.layouts.space import LAYOUT, Ints, Space
from phalanx.study.trials.trial import Trial

_SCALES = (0.5, 0.75, 1.0, 1.5, 2.5)
"""Sizes of the error, in units of the spread that the planner states."""
_OWN = (0.05, 0.15, 0.4)
"""Parts of the squared error that a point has alone."""
_CONSTANTS = (0.3, 0.7)
"""Of the squared error that points share, the part that is due to constants."""
_OFFSETS = (0.03, 1.0)
"""Standard deviation of what is common to all points and no constant explains: little, or all (another device's profile)."""
_PLAIN = (1.0, 0.1, 0.6, 0.03)
"""What is taken of these, in the same order, until there are trials enough to tell."""
_PLAIN_MEMORY = (1.0, 0.2, 0.2, 0.03)
"""The same of memory, of which less is common to all layouts: a trial that fits promises little for one of another kind."""
_ABRUPT = 0.5
"""Of the squared error that layouts alike share, the part that only those with the very same choices do."""
_ENOUGH = 7
_LEAST_SPREAD = 0.1
"""However well a profile fits the runs it was fitted to: calibrated ones are off by 10% (root mean square) over published
runs of models that ran in four layouts or more, and a search is about layouts that nobody ran."""
_SAME_PLACE = 1e-6
"""Squared distance below which two places are one."""
_KNOB = 0.05
"""Standard deviation of a knob's effect on the logarithm of time."""
_NOISE = 0.01
"""The same of one trial beside another of the same point."""
_MEMORY = 0.05
"""Standard deviation of the logarithm of needed over expected memory; the marginal likelihood scales it."""
_MEMORY_NOISE = 0.003
_AREAS = (
    ("tp", "cp", "context", "microbatch", "recompute"),
    ("pp", "schedule", "stages_per_rank", "microbatch"),
    ("dp_replicate", "zero", "reshard_after_forward"),
)
"""Fields on which errors of computing, of pipelines and of data parallelism depend."""
_NAMED = ("schedule", "context")
"""Fields without an order."""


@dataclass(frozen=True)
class Belief:
    """Arrays of [points]."""

    log_seconds: Floats
    """Mean of the logarithm of a step's seconds."""
    spread: Floats
    """Its standard deviation."""
    fits: Floats
    """Probability of fitting into memory."""

    def improvement(self, best_s: float) -> Floats:
        """Expected seconds by which each point, if it fits, would beat `best_s`: expected improvement of Jones et al. 1998,
        for a time whose logarithm is normal."""
        distance = (math.log(best_s) - self.log_seconds) / self.spread
        # Of the log-normal time below best_s: its mean there, times how likely that is.
        below = np.exp(self.log_seconds + self.spread**2 / 2 + log_ndtr(distance - self.spread))
        return np.asarray(self.fits * np.maximum(best_s * ndtr(distance) - below, 0.0))

    def expected_seconds(self) -> Floats:
        """Median of a step's seconds."""
        return np.asarray(np.exp(self.log_seconds))


@dataclass(frozen=True)
class Believer:
    """Turns trials into beliefs about one space."""

    space: Space
    prior: Prior

    def after(self, trials: Sequence[Trial]) -> Belief:
        """What is believed after these trials; those of points that the space does not have are left out."""
        found = [(point, trial) for trial in trials if (point := self.space.find(trial.values)) is not None]
        good = [(point, trial) for point, trial in found if trial.good]
        times = Errors(self._constants, self._areas, self._knobs, max(self.prior.spread, _LEAST_SPREAD), _NOISE, _PLAIN)
        points = np.array([point for point, _ in good], np.int64)
        seen = np.array([math.log(trial.value / self.prior.seconds[point]) for point, trial in good])
        error, spread = times.given(points, seen)
        need, uncertain = self._memory(found)
        margin = (self.prior.margin - need) / uncertain
        return Belief(np.log(self.prior.seconds) + error, spread, np.asarray(ndtr(margin)))

    def _memory(self, found: Sequence[tuple[int, Trial]]) -> tuple[Floats, Floats]:
        """(mean, standard deviation) of the logarithm of needed over expected memory, [points]."""
        common = np.ones((len(self.space), 1))
        errors = Errors(common, self._areas, self._knobs, _MEMORY, _MEMORY_NOISE, _PLAIN_MEMORY)
        known = [
            (point, math.log(trial.outcome.memory_bytes / self.prior.peak[point]))
            for point, trial in found
            if trial.outcome is not None and trial.good and trial.outcome.memory_bytes
        ]
        points = np.array([point for point, _ in known], np.int64)
        values = np.array([value for _, value in known])
        need, spread = errors.given(points, values)
        # A trial that ran out of memory needed more than there is: what is believed, cut off there, as one more figure.
        for point, trial in found:
            if trial.outcome is None or trial.outcome.cause != "out_of_memory":
                continue
            mean, variance = above(float(need[point]), float(spread[point]), float(self.prior.margin[point]))
            points, values = np.append(points, point), np.append(values, mean)
            errors = errors.with_noise(len(points) - 1, variance)
            need, spread = errors.given(points, values)
        return need, spread

    @cached_property
    def _constants(self) -> Floats:
        """Sensitivities scaled to a variance of 1, the mean over all points."""
        found = self.prior.sensitivity
        size = math.sqrt(float((found**2).sum(axis=1).mean()))
        return np.asarray(found / size) if size else found

    @cached_property
    def _areas(self) -> list[Floats]:
        """Where layouts lie in each area, [points, dims]: those 1 apart have errors of their own in good part."""
        codes = {one.name: self.space.codes[:, number] for number, one in enumerate(self.space.parameters)}
        values = {one.name: one.values for one in self.space.parameters}
        areas = []
        for names in _AREAS:
            columns: list[Any] = [np.zeros(len(self.space))]
            for name in names:
                if name in _NAMED:
                    columns += [math.sqrt(0.5) * (codes[name] == code) for code in range(len(values[name]))]
                elif name == "recompute":
                    columns.append(codes[name])
                else:
                    columns.append(np.log2(1.0 + np.asarray(values[name], np.float64))[codes[name]])
            areas.append(np.stack(columns, axis=1).astype(np.float64))
        return areas

    @cached_property
    def _knobs(self) -> Floats:
        """[points, values]: 1 where a knob has a value that is not what the planner took it to be."""
        columns = [np.zeros(len(self.space))]
        for number, one in enumerate(self.space.parameters):
            if one.name not in LAYOUT:
                columns += [
                    (self.space.codes[:, number] == code).astype(np.float64) for code in range(1, len(one.values))
                ]
        return np.stack(columns, axis=1)


@dataclass(frozen=True)
class Errors:
    """A Gaussian process over points: the sum of the parts that the head of this file names."""

    constants: Floats
    """[points, constants]: linear."""
    areas: list[Floats]
    """Places in each area: smooth, and one value for each place."""
    knobs: Floats
    """[points, values]: linear, of fixed size."""
    spread: float
    noise: float
    plain: tuple[float, float, float, float]
    """Sizes of the parts until there are trials enough to tell, as `_sum` takes them."""
    further_noise: tuple[tuple[int, float], ...] = ()
    """(position of an observation, its variance) where that is not `noise`."""

    def with_noise(self, position: int, variance: float) -> Errors:
        """With another variance of one observation."""
        return replace(self, further_noise=(*self.further_noise, (position, variance)))

    def given(self, points: Ints, values: Floats) -> tuple[Floats, Floats]:
        """(mean, standard deviation) at all points after `values` were seen at `points`."""
        if not len(points):
            return np.zeros(len(self.constants)), np.sqrt(self._variance(self.plain))
        noise = np.full(len(points), self.noise**2)
        for position, variance in self.further_noise:
            noise[position] = variance
        linear = self.constants @ self.constants[points].T
        alike = sum((_alike(area, area[points]) for area in self.areas), np.zeros(linear.shape)) / len(self.areas)
        knobs = self.knobs @ self.knobs[points].T
        same = (np.arange(len(linear))[:, None] == points[None, :]).astype(np.float64)
        parts = (linear, alike, knobs, same)
        seen = tuple(part[points] for part in parts)
        best, fitted = -math.inf, self.plain
        few = [(*self.plain[:3], offset) for offset in _OFFSETS]
        for chosen in itertools.product(_SCALES, _OWN, _CONSTANTS, _OFFSETS) if len(points) >= _ENOUGH else few:
            likelihood = _likelihood(self._sum(seen, chosen) + np.diag(noise), values)
            # Large sizes explain anything: they have to explain much better.
            likelihood -= 0.5 * math.log(chosen[0]) ** 2 + (2.0 if chosen[3] > _OFFSETS[0] else 0.0)
            if likelihood > best:
                best, fitted = likelihood, chosen
        across = self._sum(parts, fitted)
        inverse = np.linalg.inv(self._sum(seen, fitted) + np.diag(noise))
        weights = across @ inverse
        variance = self._variance(fitted) - np.einsum("nm,nm->n", weights, across)
        return np.asarray(weights @ values), np.sqrt(np.maximum(variance, 1e-8))

    def _sum(self, parts: tuple[Floats, ...], chosen: tuple[float, ...]) -> Floats:
        """Covariance of [constants, areas, knobs, same point] parts."""
        scale, own, constants, offset = chosen
        size = (scale * self.spread) ** 2
        linear, alike, knobs, same = parts
        shared = size * (1 - own)
        total = shared * (constants * linear + (1 - constants) * alike) + _KNOB**2 * knobs + own * size * same
        return np.asarray(total + offset**2)

    def _variance(self, chosen: tuple[float, ...]) -> Floats:
        ones = np.ones(len(self.constants))
        linear, knobs = (self.constants**2).sum(axis=1), (self.knobs**2).sum(axis=1)
        return self._sum((linear, ones, knobs, ones), chosen)


def _alike(left: Floats, right: Floats) -> Floats:
    """Correlation of errors at places of an area, [left, right]: 1 at one place, and falling off from less beside it."""
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :] - 2 * left @ right.T
    # Degrees that differ are 0.003 apart at the least; rounding leaves much less of those that do not.
    return np.asarray((1 - _ABRUPT) * np.exp(-0.5 * np.maximum(squares, 0.0)) + _ABRUPT * (squares < _SAME_PLACE))


def _likelihood(covariance: Floats, values: Floats) -> float:
    factor = np.linalg.cholesky(covariance)
    white = np.linalg.solve(factor, values)
    return float(-0.5 * white @ white - np.log(np.diag(factor)).sum())


def above(mean: float, spread: float, least: float) -> tuple[float, float]:
    """(value, variance) of a figure that, seen with that noise, leaves what a normal distribution is above `least`."""
    distance = (least - mean) / spread
    hazard = math.exp(-0.5 * distance**2 - 0.5 * math.log(2 * math.pi) - float(log_ndtr(-distance)))
    cut_mean = mean + spread * hazard
    cut_variance = max(spread**2 * (1 + distance * hazard - hazard**2), 1e-8)
    precision = 1 / cut_variance - 1 / spread**2
    if precision <= 1e-6:
        return cut_mean, 1e6
    variance = 1 / precision
    return variance * (cut_mean / cut_variance - mean / spread**2), variance
