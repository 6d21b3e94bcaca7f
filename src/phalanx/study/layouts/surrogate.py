"""The planner's expectation of every point, corrected by trials: a Gaussian process, and the sampler that searches with it.

The logarithm of the measured over the expected time is taken to be normal, and a sum of

- an error of each of a few constants of the device (matmul rate, exposed collectives, ...), which shifts a point by the
  share of its time that the constant governs: a Bayesian update of the calibration, linear for errors of some percent;
- a function of the layout, for what the time model lacks: over logarithms of degrees, in part smooth and in part another
  value for each combination, as kernels and protocols change abruptly;
- the effect of each tunable's value, of which the planner knows nothing;
- an error of the point's own.

The marginal likelihood chooses how large the parts are. Memory is treated alike; a trial that ran out of memory says that
more was needed than there is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist
from scipy.special import log_ndtr, ndtr
from scipy.stats import truncnorm
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Hyperparameter, Kernel

from phalanx.planner.rank.cost_models import Floats
from phalanx.study.layouts.layout_space import LAYOUT, LayoutSpace
from phalanx.study.layouts.prior import Prior
from phalanx.study.samplers import Observation, Proposal

_OFFSETS = (0.03, 1.0)
"""Standard deviation of the error that all points share: small, or anything (the profile is of another device)."""
_SCALES = (0.5, 0.75, 1.0, 1.5, 2.5)
"""Sizes of all other errors, in units of the spread that the planner states."""
_CONSTANTS = (0.3, 0.7)
"""Parts of the squared error that points share, due to constants."""
_OWN = (0.05, 0.15, 0.4)
"""Parts of the squared error that a point has alone."""
_ENOUGH = 7
"""Least observations that choose the sizes of the parts among those above; fewer choose the offset's alone."""
_FEW = {"time": (1.0, 0.6, 0.1), "memory": (1.0, 0.2, 0.2)}
"""Scale, constants' and own part while observations are fewer. Of memory less is common to all layouts: that one layout
fits promises little for another kind."""
_ABRUPT = 0.5
"""Part of the squared error of similar layouts that only those with the very same choices share."""
_SAME_PLACE = 1e-6
"""Squared distance below which two places of an area are one."""
_LEAST_SPREAD = 0.1
"""However well a profile fits the runs it was fitted to: calibrated ones are off by 10% (root mean square) over published
runs of models that ran in four layouts or more, and a search is about layouts that nobody ran."""
_TUNABLE = 0.05
"""Standard deviation of a tunable's effect on the logarithm of time."""
_MEMORY_SPREAD = 0.05
"""Standard deviation of the logarithm of needed over expected memory."""
_NOISE = {"time": 0.01, "memory": 0.003}
"""Standard deviation of the logarithm of one trial's figure over that of another trial of the same point."""
_AREAS = (
    ("tp", "cp", "context", "microbatch", "recompute"),
    ("pp", "schedule", "stages_per_rank", "microbatch"),
    ("dp_replicate", "zero", "reshard_after_forward"),
)
"""Parameters on which errors of computing, of pipelines and of data parallelism depend."""
_UNORDERED = ("schedule", "context")
_LEAST_TRIALS = 3
"""Trials before the search may stop: fewer do not tell how far the planner is off."""


@dataclass(frozen=True)
class Posterior:
    """Time and memory of every point after some trials. Arrays of [points]."""

    log_seconds: Floats
    """Mean of the logarithm of a step's seconds."""
    spread: Floats
    """Standard deviation of that logarithm."""
    fits: Floats
    """Probability that the point fits into memory."""

    def improvement(self, best_s: float) -> Floats:
        """Return the expected seconds by which each point would beat `best_s`, 0 where it does not fit.

        It is the expected improvement of Jones et al., J. Global Optimization 13 (1998), for a log-normal time.
        """
        distance = (math.log(best_s) - self.log_seconds) / self.spread
        # The mean of the log-normal time where it is below best_s, times the probability of that.
        below = np.exp(self.log_seconds + self.spread**2 / 2 + log_ndtr(distance - self.spread))
        return np.asarray(self.fits * np.maximum(best_s * ndtr(distance) - below, 0.0))


@dataclass(frozen=True)
class Surrogate:
    """A model of time and memory at every point of a space, which trials correct."""

    space: LayoutSpace
    prior: Prior

    def posterior(self, history: Sequence[Observation]) -> Posterior:
        """Return the posterior after these observations; those of points that the space does not have are left out."""
        found = [(point, one) for one in history if (point := self.space.find(one.values)) is not None]
        good = [(point, one.score) for point, one in found if one.score is not None]
        shifts = [math.log(score / self.prior.seconds[point]) for point, score in good]
        error, spread = self._errors("time").posterior([point for point, _ in good], shifts)
        errors = self._errors("memory")
        known = [
            (point, math.log(one.memory_bytes / self.prior.peak[point]))
            for point, one in found
            if one.score is not None and one.memory_bytes
        ]
        points, values = [point for point, _ in known], [value for _, value in known]
        noise = [errors.noise**2] * len(points)
        # mean and standard deviation of the logarithm of needed over expected memory
        need, uncertain = errors.posterior(points, values, noise)
        # One by one: how much is missing at a point depends on what the failures before it taught.
        for point in (point for point, one in found if one.cause == "out_of_memory" and one.score is None):
            # The trial needed more than there is: an observation that leaves the normal distribution cut off there.
            value, variance = censored_observation(
                float(need[point]), float(uncertain[point]), float(self.prior.margin[point])
            )
            points, values, noise = [*points, point], [*values, value], [*noise, variance]
            need, uncertain = errors.posterior(points, values, noise)
        fits = np.asarray(ndtr((self.prior.margin - need) / uncertain))
        return Posterior(np.log(self.prior.seconds) + error, spread, fits)

    def _errors(self, figure: str) -> ErrorProcess:
        # No constant of the profile governs memory: what is common to all layouts takes the constants' place.
        if figure == "memory":
            common = np.ones((len(self.space), 1))
            return ErrorProcess(common, self._areas, self._tunables, _MEMORY_SPREAD, _NOISE[figure], _FEW[figure])
        # Scaled to a variance of 1, the mean over all points.
        size = math.sqrt(float((self.prior.sensitivity**2).sum(axis=1).mean()))
        spread = max(self.prior.spread, _LEAST_SPREAD)
        constants = self.prior.sensitivity / (size or 1.0)
        return ErrorProcess(constants, self._areas, self._tunables, spread, _NOISE[figure], _FEW[figure])

    @cached_property
    def _areas(self) -> list[Floats]:
        """Coordinates of the points in each area, [points, dims]: a distance of 1 is where errors begin to differ."""
        codes = {one.name: self.space.codes[:, number] for number, one in enumerate(self.space.parameters)}
        values = {one.name: one.values for one in self.space.parameters}
        areas = []
        for names in _AREAS:
            columns: list[Any] = []
            for name in names:
                if name in _UNORDERED:
                    columns += [math.sqrt(0.5) * (codes[name] == code) for code in range(len(values[name]))]
                elif name == "recompute":
                    columns.append(codes[name])
                else:
                    columns.append(np.log2(1.0 + np.asarray(values[name], np.float64))[codes[name]])
            areas.append(np.stack(columns, axis=1).astype(np.float64))
        return areas

    @cached_property
    def _tunables(self) -> Floats:
        """[points, values]: 1 where a tunable has a value other than its first, which is what the planner takes it to be."""
        columns = [np.zeros(len(self.space))]
        for number, one in enumerate(self.space.parameters):
            if one.name not in LAYOUT:
                columns += [self.space.codes[:, number] == code for code in range(1, len(one.values))]
        return np.stack(columns, axis=1).astype(np.float64)


class ErrorKernel(Kernel):
    """The covariance of errors at two points: the sum of the parts that the head of this file names.

    scikit-learn's own kernels, joined by operators, give the same covariance in ten times the time.
    """

    def __init__(self, variances: Floats, blocks: Sequence[slice]) -> None:
        """variances: of the offset, the constants, the areas and the points' own errors.

        blocks: columns of the features: constants, each area, tunables, number of the point.
        """
        self.variances, self.blocks = variances, blocks

    @property
    def hyperparameter_variances(self) -> Hyperparameter:
        """Hyperparameters that scikit-learn may vary; it finds them by this prefix."""
        return Hyperparameter("variances", "numeric", (1e-8, 1e4), len(self.variances))

    def __call__(self, X: Floats, Y: Floats | None = None, eval_gradient: bool = False) -> Floats:
        """Return the covariance of rows of X with rows of Y, by default of X."""
        assert not eval_gradient
        constants, *areas, tunables, number = [(X[:, b], (X if Y is None else Y)[:, b]) for b in self.blocks]
        similar = np.zeros((len(X), len(X if Y is None else Y)))
        for left, right in areas:
            squares = cdist(left, right, "sqeuclidean")
            # Degrees that differ are much farther apart.
            same = squares < _SAME_PLACE
            similar += ((1 - _ABRUPT) * np.exp(-0.5 * squares) + _ABRUPT * same) / len(areas)
        offset, linear, smooth, own = self.variances
        total = offset + linear * _inner_products(*constants) + smooth * similar
        return np.asarray(total + own * (number[0] == number[1].T) + _TUNABLE**2 * _inner_products(*tunables))

    def diag(self, X: Floats) -> Floats:
        """Return the variance at each row."""
        constants, tunables = X[:, self.blocks[0]], X[:, self.blocks[-2]]
        offset, linear, smooth, own = self.variances
        squares = linear * (constants**2).sum(axis=1) + _TUNABLE**2 * (tunables**2).sum(axis=1)
        return np.asarray(offset + smooth + own + squares)

    def is_stationary(self) -> bool:
        """Return that the covariance does not depend on differences alone."""
        return False


def _inner_products(left: Floats, right: Floats) -> Floats:
    return np.asarray(left @ right.T)


@dataclass(frozen=True)
class ErrorProcess:
    """A Gaussian process over all points of a space: the sum of the parts that the head of this file names."""

    constants: Floats
    """[points, constants]: linear."""
    areas: list[Floats]
    """Coordinates in each area, each [points, dims]."""
    tunables: Floats
    """[points, values]: linear, of fixed size."""
    spread: float
    """Standard deviation of the error."""
    noise: float
    """Standard deviation of an observation."""
    few: tuple[float, float, float]
    """Scale, constants' and own part while observations are too few to choose them."""

    def posterior(
        self, points: Sequence[int], values: Sequence[float], noise: Sequence[float] | None = None
    ) -> tuple[Floats, Floats]:
        """Return (mean, standard deviation) at all points after `values` were seen at `points`.

        noise: variance of each observation; by default that of a trial.
        """
        alpha = np.asarray(noise if noise else [self.noise**2] * max(len(points), 1))
        choose = self._choose_sizes(len(points))
        ends = [0, *itertools.accumulate(part.shape[1] for part in self._parts)]
        blocks = [slice(first, last) for first, last in itertools.pairwise(ends)]
        kernel = ErrorKernel(self._variances(_OFFSETS[0], *self.few), blocks)
        process = GaussianProcessRegressor(kernel, alpha=alpha, optimizer=choose)
        # One matrix for scikit-learn; the kernel finds the parts again by their columns.
        features = np.concatenate(self._parts, axis=1)
        if len(points):
            process.fit(features[list(points)], np.asarray(values))
        # Unfitted it predicts its prior.
        mean, deviation = process.predict(features, return_std=True)
        # Rounding can make the variance at a measured point zero or less, by which others divide.
        return mean, np.maximum(deviation, 1e-4)

    def _choose_sizes(self, count: int) -> Callable[..., tuple[Floats, float]]:
        """Return the optimizer of the parts' sizes: scikit-learn's interface, over a few combinations."""
        shapes = itertools.product(_SCALES, _CONSTANTS, _OWN) if count >= _ENOUGH else [self.few]
        candidates = [(offset, *shape) for shape in shapes for offset in _OFFSETS]

        def optimize(objective: Callable[..., float], initial: Floats, bounds: Floats) -> tuple[Floats, float]:
            scored = []
            for candidate in candidates:
                theta = np.log(self._variances(*candidate))
                offset, scale, *_ = candidate
                # Large sizes explain anything: they have to explain much better.
                penalty = 0.5 * math.log(scale) ** 2 + (2.0 if offset > _OFFSETS[0] else 0.0)
                scored.append((objective(theta, eval_gradient=False) + penalty, tuple(theta)))
            least, best = min(scored)
            return np.array(best), least

        return optimize

    def _variances(self, offset: float, scale: float, constants: float, own: float) -> Floats:
        """Return the variances of the offset, the constants, the areas and the points' own errors."""
        size = (scale * self.spread) ** 2
        shared = size * (1 - own)
        return np.array([offset**2, shared * constants, shared * (1 - constants), own * size])

    @cached_property
    def _parts(self) -> list[Floats]:
        # Each point's own error needs to know only whether two points are the same one.
        number = np.arange(len(self.constants), dtype=np.float64)[:, None]
        return [self.constants, *self.areas, self.tunables, number]


def censored_observation(mean: float, spread: float, least: float) -> tuple[float, float]:
    """Return (value, variance) of an observation that says that a normal figure is above `least`.

    Seen with that variance it leaves the mean and variance of the normal distribution cut off at `least`.
    """
    cut = truncnorm((least - mean) / spread, np.inf, loc=mean, scale=spread)
    cut_mean, cut_variance = float(cut.mean()), max(float(cut.var()), 1e-8)
    # A product of normal densities adds precisions: what is missing to the cut distribution is the observation's.
    precision = 1 / cut_variance - 1 / spread**2
    if precision <= 1e-6:
        return cut_mean, 1e6
    return (cut_mean / cut_variance - mean / spread**2) / precision, 1 / precision


@dataclass(frozen=True)
class PlannerSampler:
    """Proposes the point of largest expected improvement by the planner's expectation, corrected by what was measured.

    The first trial is the point of least expected time, weighed with the probability that it fits.
    """

    space: LayoutSpace
    prior: Prior
    stop_gain: float = 0.0
    """Expected improvement, as a share of the best time, below which nothing is proposed any more."""

    def propose(self, history: Sequence[Observation], taken: set[str]) -> Proposal | None:
        """Return the point of largest expected improvement over the best trial; None where no gain is left."""
        free = self.space.free_points(taken)
        if not free.any():
            return None
        posterior = Surrogate(self.space, self.prior).posterior(history)
        # Observed and not expected times: the surrogate is surest where it was measured.
        best = min((one.score for one in history if one.score is not None), default=None)
        gain = None
        if best is None:
            # A first trial that fails says little: a risk of a tenth has to be worth a tenth of the time.
            risk = np.log(np.maximum(posterior.fits, 1e-12))
            point = int(np.argmin(np.where(free, posterior.log_seconds - risk, np.inf)))
        else:
            gains = np.where(free, posterior.improvement(best), -1.0)
            point = int(np.argmax(gains))
            gain = float(gains[point]) / best
            if gain < self.stop_gain and len(history) >= _LEAST_TRIALS:
                return None
        note = {
            "expected_s": float(np.exp(posterior.log_seconds[point])),
            "spread": float(posterior.spread[point]),
            "p_fits": float(posterior.fits[point]),
            "expected_gain": gain,
        }
        return Proposal(self.space.values(point), note)
