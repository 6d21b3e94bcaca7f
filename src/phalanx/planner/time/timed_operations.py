"""Single operations as they were timed on a device, and what they say of operations of nearly the same sizes.

The curves of a profile are smooth; libraries choose among kernels, and are a little faster or slower from one shape to the
next. A Gaussian process over the logarithms of the sizes carries what was measured over to its neighbourhood, and leaves
the curve alone far from any measured shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Kind = Literal[
    "matmul",
    "matmul32",
    "matmul64",
    "matmul8",
    "attention",
    "attention_backward",
    "whole_attention",
    "whole_attention_backward",
]
"""Attention is causal; that of all positions with all is whole."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class TimedOperation:
    """One matrix product or attention call."""

    kind: Kind
    batch: int
    """Products in it; of attention, samples times heads."""
    m: int
    """Rows of a product; queries of attention."""
    n: int
    """Columns of a product; keys of attention."""
    k: int
    """Depth of a product; head size of attention."""
    seconds: float
    ratio: float = 1.0
    """What was measured over what the curves of the profile say."""


_SIGNAL = 0.08
"""Standard deviation of the logarithm of measured time around the curves, and _NOISE what of it is not of the shape."""
_NOISE = 0.02
_NEAR = np.array([2.0, 1.0, 1.0, 1.0])
"""Distances in doublings of batch, m, n and k over which shapes have much in common."""
_AT_ONCE = 4096
"""Operations whose distances to all measured ones are held at a time."""


def correction(measured: tuple[TimedOperation, ...], kind: Kind, sizes: npt.NDArray[np.int64]) -> Floats:
    """Return the factors of the curves' times, [operations]. sizes: [operations, 4], batch, m, n and k."""
    places, weights = _fitted(measured, kind)
    if not len(places):
        return np.ones(len(sizes))
    # Layouts ask for the same few sizes again and again.
    distinct, which = np.unique(sizes, axis=0, return_inverse=True)
    wanted = np.log2(np.maximum(distinct, 1)) / _NEAR
    parts = [_alike(wanted[start : start + _AT_ONCE], places) @ weights for start in range(0, len(wanted), _AT_ONCE)]
    return np.asarray(np.exp(np.concatenate(parts))[which.ravel()])


@cache
def _fitted(measured: tuple[TimedOperation, ...], kind: Kind) -> tuple[Floats, Floats]:
    """Return the places of the measured operations, [points, 4], and their weights, [points]."""
    points = [point for point in measured if point.kind == kind]
    sizes = np.asarray([(point.batch, point.m, point.n, point.k) for point in points], np.float64).reshape(-1, 4)
    places: Floats = np.log2(sizes) / _NEAR
    # The noise of a measurement on the diagonal, in units of the signal.
    covariance = _alike(places, places) + np.eye(len(points)) * (_NOISE / _SIGNAL) ** 2
    weights = np.linalg.solve(covariance, np.log([point.ratio for point in points]))
    return places, np.asarray(weights, np.float64)


def _alike(some: Floats, others: Floats) -> Floats:
    """Return how much each of `some` has in common with each of `others`, 0 to 1: [some, others]."""
    squares = (some**2).sum(axis=1)[:, None] + (others**2).sum(axis=1)[None] - 2 * some @ others.T
    return np.asarray(np.exp(-0.5 * np.maximum(squares, 0.0)))
