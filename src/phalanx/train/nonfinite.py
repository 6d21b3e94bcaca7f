"""What tells that training goes wrong: weights that are no numbers, and gradients far larger than those before."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

import torch
import torch.distributed as dist

from phalanx.layout.place import Place

SPIKE_FACTOR = 30.0
"""A gradient norm above this many times the median of those before is a spike. Norms of healthy runs stay within a few
times their median; those of batches with hard samples reach ten."""
_WINDOW = 64
"""Gradient norms that the median is taken over."""
_LEAST = 8
"""Norms that make a median worth comparing with."""


def all_finite(places: Iterable[Place], device: torch.device) -> bool:
    """Whether every floating-point tensor on every rank holds finite numbers only. Reads each once, on its device; every
    rank calls it and gets the same answer."""
    tensors = [place.local.detach() for place in places]
    floats = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    # The largest magnitude is finite only where all are: a maximum hands NaN on.
    finite = [torch.isfinite(torch.linalg.vector_norm(tensor, math.inf)).to(device) for tensor in floats]
    bad = (~torch.stack(finite).all()).float() if finite else torch.zeros((), device=device)
    if dist.is_initialized():
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return not bool(bad)


class GradientSpikes:
    """Tells gradient norms that stand out from those of the steps before."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._rising = False

    def median_exceeded(self, norm: float) -> float | None:
        """Take a step's gradient norm; return the median of those before if `norm` is the first of a spike, else None."""
        if not math.isfinite(norm):
            return None
        median = statistics.median(self._norms) if len(self._norms) >= _LEAST else math.inf
        # A higher level that stays becomes the median, and is no spike any more.
        self._norms.append(norm)
        before, self._rising = self._rising, norm > SPIKE_FACTOR * median > 0.0
        return median if self._rising and not before else None
