"""Errors of members on held-out data, number by number: all that choosing, calibrating and scoring an ensemble needs.

The error of the members' mean is the mean of their errors, and the spread of their predictions is the spread of their
errors, as all have the same truth: neither predictions nor labels have to be kept. Plain arrays; knows no model, no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from phalanx.counter_random import stream_key, uniform_values

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]

_CHUNK = 2**20
"""Numbers widened to float64 at a time."""


@dataclass(frozen=True)
class Residuals:
    """Errors of M members in n numbers of one kind, ordered by structure."""

    source: str
    """Data set."""
    quantity: str
    unit: str
    """Unit of the numbers; energies count per atom. Empty for properties, whose units are made of eV, A and e."""
    learned: bool
    """Whether members were trained on it; forces of a model that learned energies alone are predicted all the same."""
    errors_Mn: Float32Array
    """Prediction minus truth."""
    structures_n: Int64Array
    """Structure that each number belongs to, ascending."""

    @property
    def count(self) -> int:
        """Return the number of numbers n."""
        return len(self.structures_n)

    @property
    def structures(self) -> int:
        """Return the number of structures that the numbers belong to."""
        return len(np.unique(self.structures_n))

    @property
    def name(self) -> str:
        """Return data set and quantity, for messages."""
        return f"{self.source} {self.quantity}"

    def of_members(self, members: Sequence[int]) -> Residuals:
        """Return the errors of some members, in this order."""
        return replace(self, errors_Mn=self.errors_Mn[list(members)])

    def where(self, chosen_n: npt.NDArray[np.bool_]) -> Residuals:
        """Return the errors in the chosen numbers."""
        return replace(self, errors_Mn=self.errors_Mn[:, chosen_n], structures_n=self.structures_n[chosen_n])

    def combined(self, weights: Sequence[float]) -> tuple[FloatArray, FloatArray]:
        """Return the error of the weighted mean [n] and the spread, the standard deviation among members [n].

        weights: one a member, with a sum of 1. The variance is divided by 1 - sum of squared weights, which for equal
        weights gives the unbiased estimate with M - 1; of a single member it is 0.
        """
        weights_M1 = np.asarray(weights, np.float64)[:, None]
        # In chunks: all members' force components in float64 may not fit in memory.
        errors, spreads = np.empty(self.count), np.empty(self.count)
        for start in range(0, self.count, _CHUNK):
            rows = slice(start, start + _CHUNK)
            errors_Mn = self.errors_Mn[:, rows].astype(np.float64)
            errors[rows], spreads[rows] = weighted_moments(errors_Mn, weights_M1)
        return errors, spreads

    def products(self) -> FloatArray:
        """Return the mean products of the errors of any two members [M, M]; the diagonal has mean squared errors."""
        total = np.zeros((len(self.errors_Mn), len(self.errors_Mn)))
        for start in range(0, self.count, _CHUNK):
            errors_Mn = self.errors_Mn[:, start : start + _CHUNK].astype(np.float64)
            total += errors_Mn @ errors_Mn.T
        return total / max(self.count, 1)


def weighted_moments(values_Mn: FloatArray, weights_M1: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the weighted mean [n] and the standard deviation among members [n]; see `Residuals.combined`."""
    mean = (weights_M1 * values_Mn).sum(axis=0)
    rest = 1.0 - float(np.square(weights_M1).sum())
    if rest < 1e-12:
        return mean, np.zeros_like(mean)
    return mean, np.sqrt((weights_M1 * np.square(values_Mn - mean)).sum(axis=0) / rest)


def assign_parts(structures: Int64Array, count: int, name: str) -> Int64Array:
    """Return which of `count` parts each structure belongs to; the shape is that of `structures`.

    name: names the division; those of different names are independent.
    """
    # A function of the structure's number: a part then does not depend on what other structures there are.
    drawn = uniform_values(stream_key("ensemble", name), torch.from_numpy(structures)).numpy()
    return np.minimum((drawn * count).astype(np.int64), count - 1)
