"""Errors of members on held-out data, number by number: all that choosing, calibrating and scoring an ensemble needs.

Members err about the same truth, so the error of their mean is the mean of their errors, and they disagree as their
errors do: neither predictions nor labels have to be kept. Plain arrays; knows no model and no device.
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
    """The data set."""
    quantity: str
    unit: str
    """Energies count per atom; empty for properties, which are in eV, A and e, whatever they are."""
    learned: bool
    """Whether members were trained on it; forces of a model that learned energies alone are predicted all the same."""
    errors_Mn: Float32Array
    """Prediction minus truth."""
    structures_n: Int64Array
    """The structure that each number belongs to, ascending."""

    @property
    def count(self) -> int:
        """How many numbers there are."""
        return len(self.structures_n)

    @property
    def structures(self) -> int:
        """How many structures they belong to."""
        return len(np.unique(self.structures_n))

    @property
    def name(self) -> str:
        """Data set and quantity."""
        return f"{self.source} {self.quantity}"

    def of_members(self, members: Sequence[int]) -> Residuals:
        """Those of some members alone, in this order."""
        return replace(self, errors_Mn=self.errors_Mn[list(members)])

    def where(self, chosen_n: npt.NDArray[np.bool_]) -> Residuals:
        """Some of the numbers alone."""
        return replace(self, errors_Mn=self.errors_Mn[:, chosen_n], structures_n=self.structures_n[chosen_n])

    def combined(self, weights: Sequence[float]) -> tuple[FloatArray, FloatArray]:
        """Error of the weighted mean [n], and how far members lie apart [n]: their standard deviation.

        weights: one a member, with a sum of 1. The variance is divided by 1 - sum of squared weights, which for equal ones
        makes it the unbiased one with M - 1; of a single member it is 0.
        """
        weights_M1 = np.asarray(weights, np.float64)[:, None]
        errors, spreads = np.empty(self.count), np.empty(self.count)
        for start in range(0, self.count, _CHUNK):
            rows = slice(start, start + _CHUNK)
            errors_Mn = self.errors_Mn[:, rows].astype(np.float64)
            errors[rows], spreads[rows] = weighted_moments(errors_Mn, weights_M1)
        return errors, spreads

    def products(self) -> FloatArray:
        """Mean products of the errors of any two members [M, M]; the diagonal has their mean squared errors."""
        total = np.zeros((len(self.errors_Mn), len(self.errors_Mn)))
        for start in range(0, self.count, _CHUNK):
            errors_Mn = self.errors_Mn[:, start : start + _CHUNK].astype(np.float64)
            total += errors_Mn @ errors_Mn.T
        return total / max(self.count, 1)


def weighted_moments(values_Mn: FloatArray, weights_M1: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Weighted mean [n] and standard deviation among members [n]; see `Residuals.combined`."""
    mean = (weights_M1 * values_Mn).sum(axis=0)
    rest = 1.0 - float(np.square(weights_M1).sum())
    if rest < 1e-12:
        return mean, np.zeros_like(mean)
    return mean, np.sqrt((weights_M1 * np.square(values_Mn - mean)).sum(axis=0) / rest)


def parts(structures: Int64Array, count: int, name: str) -> Int64Array:
    """Which of `count` parts each structure falls into: always the same, whatever else there is. Shape kept.

    name: divisions of different names have nothing to do with one another.
    """
    drawn = uniform_values(stream_key("ensemble", name), torch.from_numpy(structures)).numpy()
    return np.minimum((drawn * count).astype(np.int64), count - 1)
