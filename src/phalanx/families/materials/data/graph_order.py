"""Which structures the global batch of step k holds: a pure function of (seed, k, global batch, cost model).

    step -> first and last global sample number -> (source, place in its reading) -> item of that source

Neither ranks nor micro-batches occur here: how a batch is shared out is `balance`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import numpy as np

from phalanx.data.sample_order import ORDER_VERSION, EpochShuffle, Mixture, stable_key
from phalanx.errors import ConfigError
from phalanx.families.materials.data.graph_shards import PreparedSource
from phalanx.families.materials.data.structure_cost import CostModel
from phalanx.families.materials.data.structures.arrays import Int64Array

_WINDOW = 2**13
"""Samples of a window, about: few enough to be cut in milliseconds."""
_STEPS_A_WINDOW = 16
"""Steps that a window has at least, so that a whole number of them fits well."""
_WINDOWS_KEPT = 4


@dataclass(frozen=True)
class Located:
    """Samples, and what is known of them without reading them."""

    numbers: Int64Array
    """Global sample numbers [n]."""
    source: Int64Array
    """[n]."""
    item: Int64Array
    """[n]: item of that source."""
    atoms: Int64Array
    """[n]."""
    edges: Int64Array
    """[n]."""


class GraphOrder:
    """The endless reading of a mixture of sources, and where each step's global batch begins and ends in it."""

    def __init__(
        self,
        sources: Sequence[PreparedSource],
        weights: Sequence[float | None],
        *,
        seed: int,
        global_batch: int,
        batch_by: Literal["cost", "graphs"],
        cost: CostModel,
    ) -> None:
        """weights: one a source, or None for all: then each source is read once an epoch.

        global_batch: structures of a step, on average where batches are cut by cost.

        Raises ConfigError for a source without structures.
        """
        empty = [source for source in sources if len(source) == 0]
        if empty:
            raise ConfigError(f"{empty[0].path} has no structures in its {empty[0].split} split")
        given = [weight for weight in weights if weight is not None]
        assert len(given) in (0, len(sources))
        self.sources = list(sources)
        self.global_batch = global_batch
        self.cost = cost
        self._by_cost = batch_by == "cost"
        self._mixture = Mixture(given or [float(len(source)) for source in sources])
        self._shuffles = [
            EpochShuffle(len(source), stable_key("graphs", seed, index)) for index, source in enumerate(sources)
        ]
        # The number of samples in which the source that takes longest is read once.
        self.epoch_samples = max(
            -(-len(source) * self._mixture.period // weight)
            for source, weight in zip(sources, self._mixture.weights, strict=True)
        )
        self._epochs, self._windows, self._steps = self._window_shape()
        self._cuts: OrderedDict[int, Int64Array] = OrderedDict()
        parts = [source.fingerprint for source in sources]
        content = [ORDER_VERSION, seed, global_batch, batch_by, astuple(cost), self._mixture.weights, parts]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def steps_per_epoch(self) -> float:
        """Steps in which the source that takes longest is read once; the same in every epoch."""
        return self._steps * self._windows / self._epochs

    def locate(self, numbers: Int64Array) -> Located:
        """Source, item and size of samples by their global numbers [n]."""
        source, place = self._mixture(numbers)
        item = np.empty_like(place)
        atoms, edges = np.empty_like(place), np.empty_like(place)
        for index, shuffle in enumerate(self._shuffles):
            mine = np.flatnonzero(source == index)
            if mine.size:
                item[mine] = shuffle(place[mine])
                atoms[mine], edges[mine] = self.sources[index].sizes(item[mine])
        return Located(np.asarray(numbers, dtype=np.int64), source, item, atoms, edges)

    def span(self, step: int) -> tuple[int, int]:
        """First global sample number of `step`, counted from 1, and the one after its last."""
        if not self._by_cost:
            return (step - 1) * self.global_batch, step * self.global_batch
        window, place = divmod(step - 1, self._steps)
        first, cuts = self._window_start(window), self._window_cuts(window)
        return first + int(cuts[place]), first + int(cuts[place + 1])

    def batch(self, step: int) -> Located:
        """The samples of `step`."""
        first, last = self.span(step)
        return self.locate(np.arange(first, last, dtype=np.int64))

    def _window_shape(self) -> tuple[int, int, int]:
        """Epochs that are cut together, the number of windows they make, and the steps of each window."""
        least = _STEPS_A_WINDOW * self.global_batch
        epochs = max(1, -(-least // self.epoch_samples))
        windows = max(1, self.epoch_samples // max(least, _WINDOW)) if epochs == 1 else 1
        samples = epochs * self.epoch_samples / windows
        # The smallest window has a sample for each of its steps, also where the number is rounded up.
        steps = min(math.floor(samples), math.floor(samples / self.global_batch + 0.5))
        return epochs, windows, max(1, steps)

    def _window_start(self, window: int) -> int:
        """Global number of the first sample of a window; windows of one size, but for one sample."""
        return window * self._epochs * self.epoch_samples // self._windows

    def _window_cuts(self, window: int) -> Int64Array:
        """Where the batches of a window begin, and where its last ends [steps + 1], in samples from its first."""
        if window not in self._cuts:
            first, last = self._window_start(window), self._window_start(window + 1)
            found = self.locate(np.arange(first, last, dtype=np.int64))
            self._cuts[window] = _equal_cuts(self.cost.whole(found.atoms, found.edges), self._steps)
            while len(self._cuts) > _WINDOWS_KEPT:
                self._cuts.popitem(last=False)
        return self._cuts[window]


def _equal_cuts(costs: Int64Array, runs: int) -> Int64Array:
    """Cut a sequence into `runs` runs of nearly equal cost, none empty: a sample belongs where its middle lies."""
    assert 1 <= runs <= len(costs)
    ends = np.cumsum(costs)
    middles = 2 * ends - costs
    total = 2 * int(ends[-1])
    targets = np.array([total * run // runs for run in range(1, runs)], dtype=np.int64)
    cuts = np.searchsorted(middles, targets)
    # A structure that outweighs a whole run would leave the next one empty.
    run = np.arange(1, runs)
    cuts = np.maximum.accumulate(np.maximum(cuts, 1) - run) + run
    cuts = np.minimum(cuts, len(costs) - runs + run)
    return np.concatenate(([0], cuts, [len(costs)])).astype(np.int64)
