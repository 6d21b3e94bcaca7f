"""What a structure costs to compute: a * atoms + b * edges + c, and how a, b and c are learned from measured times.

Costs are whole numbers, so that every machine cuts and shares out batches alike. Knows nothing of ranks or batches.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.families.materials.data.structures.arrays import Int64Array

FloatArray = npt.NDArray[np.float64]

_SCALE = 2**16
"""The largest coefficient as a whole number. A million structures of a million edges each cost 10^17, below 2^63."""
_TERMS = 4
"""Atoms, edges, structures, and a constant for each micro-batch."""
SUMS = _TERMS * _TERMS + _TERMS + 1
"""Numbers that `measured` returns."""


@dataclass(frozen=True)
class CostModel:
    """Cost of a structure in any unit; only ratios decide how batches are cut and shared out."""

    node: float
    """Of an atom."""
    edge: float
    """Of a directed edge."""
    graph: float = 0.0
    """Of a structure whatever its size."""

    def __post_init__(self) -> None:
        assert min(self.node, self.edge, self.graph) >= 0.0, self
        assert max(self.node, self.edge) > 0.0, self

    @property
    def unit(self) -> float:
        """What one of `whole` is in the unit of the coefficients."""
        return max(self.node, self.edge, self.graph) / _SCALE

    def whole(self, atoms: Int64Array, edges: Int64Array) -> Int64Array:
        """Costs of structures as whole numbers, at least 1 each. atoms, edges: counts (any shape)."""
        node, edge, graph = (round(value / self.unit) for value in (self.node, self.edge, self.graph))
        costs: Int64Array = np.maximum(node * atoms + edge * edges + graph, 1)
        return costs


def measured(atoms: FloatArray, edges: FloatArray, graphs: FloatArray, seconds: FloatArray) -> FloatArray:
    """What `CostFit.update` needs of the micro-batches that one rank timed [n]: sums [SUMS], to be added over ranks."""
    terms = np.stack([atoms, edges, graphs, np.ones_like(atoms)], axis=1)
    return np.concatenate(((terms.T @ terms).ravel(), terms.T @ seconds, [seconds @ seconds]))


class CostFit:
    """Recursive least squares with forgetting: each update multiplies what came before by `memory`.

    Atoms and edges go together in most data, so that time alone may not tell their costs apart. What the measurements
    leave open is taken from the ratios of `prior`, which weigh as much as `trust` times the measurements. No cost is
    negative.
    """

    def __init__(self, prior: CostModel, *, memory: float = 0.99, trust: float = 1e-4) -> None:
        """Start without a measurement."""
        assert 0.0 < memory <= 1.0
        self._prior = np.array([prior.node, prior.edge, prior.graph, 0.0])
        self._fallback = prior
        self._memory = memory
        self._trust = trust
        self.state = np.zeros(SUMS)
        """Sums so far [SUMS]: all there is to save and restore."""

    def update(self, sums: FloatArray) -> None:
        """Take in `measured` of one step, added over ranks."""
        assert sums.shape == (SUMS,)
        self.state = self._memory * self.state + sums

    def seconds(self) -> FloatArray:
        """Seconds of an atom, an edge, a structure and a micro-batch [4]; zeros before the first measurement."""
        matrix = self.state[: _TERMS**2].reshape(_TERMS, _TERMS)
        right, squares = self.state[_TERMS**2 : -1], self.state[-1]
        if squares == 0.0:
            return np.zeros(_TERMS)
        # The prior knows ratios alone: its scale is the one that explains the times best.
        scale = (self._prior @ right) / (self._prior @ matrix @ self._prior)
        weight = self._trust * np.diag(matrix)
        weight[3] = 0.0 if matrix[3, 3] > 1.0 else self._trust
        return _non_negative(matrix + np.diag(weight), right + weight * scale * self._prior)

    def model(self) -> CostModel:
        """The costs as measured, in seconds; the prior before the first measurement."""
        node, edge, graph, _ = self.seconds().tolist()
        return CostModel(node, edge, graph) if max(node, edge) > 0.0 else self._fallback


def _non_negative(matrix: FloatArray, right: FloatArray) -> FloatArray:
    """The vector x >= 0 with least x' matrix x / 2 - right x, by trying which of its few entries are zero."""
    best, least = np.zeros(len(right)), 0.0
    # Scaled so that the diagonal is one: atoms and edges are many, structures few.
    size = np.sqrt(np.maximum(np.diag(matrix), 1e-300))
    scaled, target = matrix / np.outer(size, size), right / size
    for count in range(1, len(right) + 1):
        for chosen in itertools.combinations(range(len(right)), count):
            rows = list(chosen)
            part = np.linalg.lstsq(scaled[np.ix_(rows, rows)], target[rows], rcond=1e-13)[0]
            value = float(part @ scaled[np.ix_(rows, rows)] @ part / 2 - target[rows] @ part)
            if (part >= 0.0).all() and value < least:
                best, least = np.zeros(len(right)), value
                best[rows] = part / size[rows]
    return best
