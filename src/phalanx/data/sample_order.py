"""Which sample is read when, as a pure function of a sample number: nothing is stored, nothing is replayed.

    Mixture        global sample number       ->  (source, how many samples of that source came before)
    EpochShuffle   place in a source's reading ->  (epoch, item), every item once an epoch

Both are closed forms over numpy arrays of sample numbers, so sample 10**15 costs what sample 0 costs. This module knows
neither files nor tokens nor ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

ORDER_VERSION = 1
"""Raised whenever the same seed would give another order; part of every data fingerprint."""

_ROUNDS = 6
_LARGEST_PERIOD = 2**31
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _scramble_bits(x: UInt64Array) -> UInt64Array:
    """Mix 64 bits into 64 well-spread bits: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class EpochShuffle:
    """A fresh permutation of `items` things for every epoch, computed item by item.

    A Feistel network over the rectangle rows x columns, the smallest near-square with room for all items, permutes the
    rectangle; the few values that land outside 0..items-1 are sent through again until they land inside ("cycle
    walking"; Black and Rogaway, 2002). That is a permutation of the items whatever the round function is.
    """

    def __init__(self, items: int, key: int) -> None:
        """Take `items` >= 1 things to shuffle and a 64-bit `key`, see `counter_random.stable_key`."""
        assert 1 <= items < 2**62, items
        self.items = items
        self.key = key
        rows = math.isqrt(items - 1) + 1
        # Near-square: each half of the network then mixes about half of the bits.
        self._rows = np.uint64(rows)
        self._columns = np.uint64(-(-items // rows))

    def __call__(self, place: Int64Array) -> Int64Array:
        """Return the items read at each `place` (n, any shape) of an endless reading; place // items is the epoch."""
        epoch, item = np.divmod(np.atleast_1d(place), self.items)
        # One key a round and element (rounds, n), from the key of this shuffle and each element's epoch.
        epoch_key = _scramble_bits(np.uint64(self.key) ^ _scramble_bits(epoch.astype(np.uint64) * _GOLDEN))
        rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, None]
        keys = _scramble_bits(epoch_key[None, :] + rounds * _GOLDEN)
        shuffled = self._network(item.astype(np.uint64), keys)
        # Fewer than one value in sqrt(items) lands outside, so this ends after a few rounds.
        outside = np.flatnonzero(shuffled >= np.uint64(self.items))
        while outside.size:
            shuffled[outside] = self._network(shuffled[outside], keys[:, outside])
            outside = outside[shuffled[outside] >= np.uint64(self.items)]
        return shuffled.astype(np.int64)

    def _network(self, x: UInt64Array, keys: UInt64Array) -> UInt64Array:
        """Permute values below rows * columns."""
        # Each round adds to one coordinate a function of the other alone, so it can be undone: a permutation.
        column, row = np.divmod(x, self._rows)
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            row = (row + _scramble_bits(column + even) % self._rows) % self._rows
            column = (column + _scramble_bits(row + odd) % self._columns) % self._columns
        return column * self._rows + row


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return `weights` as the smallest whole numbers in the same ratio; their sum is the period of the mixture.

    Weights are taken as the decimals they print as. Where that would need a period beyond 2**31 samples they are
    rounded to parts of 2**30, so no share is off by more than one in a thousand million.

    Raises:
        ValueError: no weights, or one that is not a positive finite number.
    """
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ValueError(f"weights must be positive finite numbers, found {list(weights)}")
    # Through their text: 0.1 then means a tenth, not the nearest binary fraction with its long period.
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    # Shares are computed as products of two such numbers, which must fit 64 bits.
    if sum(whole) > _LARGEST_PERIOD:
        total = sum(exact)
        whole = [max(1, round(weight / total * 2**30)) for weight in exact]
    return whole


class Mixture:
    """Assigns the numbers 0, 1, 2, ... to sources so that every stretch honours the weights.

    The sources are the leaves of a balanced binary tree. A node that has assigned k numbers has given
    floor(k * left / (left + right)) of them to its left child, an exact integer formula that needs no history. Over one
    period (the sum of the whole weights) every source gets exactly its weight, and at any time no source is further
    from its share than the depth of the tree.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Take one positive weight a source; only their ratios matter."""
        self.weights = whole_weights(weights)
        self.period = sum(self.weights)
        self._nodes: list[tuple[int, int, int, int]] = []  # left weight, total weight, left child, right child
        self._depth = 0
        self._root = self._grow(0, len(self.weights), 0)
        table = np.array(self._nodes, dtype=np.int64).reshape(-1, 4)
        self._left_weight, self._total, self._left_child, self._right_child = table.T

    def _grow(self, first: int, last: int, depth: int) -> int:
        """Build the tree over sources first..last-1; a node is its index, source i is the leaf -1 - i."""
        self._depth = max(self._depth, depth)
        if last - first == 1:
            return -1 - first
        middle = (first + last) // 2
        left, right = self._grow(first, middle, depth + 1), self._grow(middle, last, depth + 1)
        self._nodes.append((sum(self.weights[first:middle]), sum(self.weights[first:last]), left, right))
        return len(self._nodes) - 1

    def __call__(self, number: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return for each global sample `number` (n,) its source (n,) and its place in that source's own reading (n,)."""
        place = np.array(number, dtype=np.int64, ndmin=1)
        node = np.full_like(place, self._root)
        # All numbers go down the tree together, one level at a time, so the loop is as short as the tree is deep.
        for _ in range(self._depth):
            inner = np.flatnonzero(node >= 0)
            at, k = node[inner], place[inner]
            before = _floor_share(k, self._left_weight[at], self._total[at])
            goes_left = _floor_share(k + 1, self._left_weight[at], self._total[at]) > before
            place[inner] = np.where(goes_left, before, k - before)
            node[inner] = np.where(goes_left, self._left_child[at], self._right_child[at])
        return -1 - node, place

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` global samples came from each source."""
        counts = [0] * len(self.weights)
        waiting = [(self._root, samples)]
        while waiting:
            node, k = waiting.pop()
            if node < 0:
                counts[-1 - node] = k
                continue
            left_weight, total, left_child, right_child = self._nodes[node]
            left = k * left_weight // total
            waiting += [(left_child, left), (right_child, k - left)]
        return counts


class MixtureSchedule:
    """A mixture whose weights change at given sample numbers; a source is read on from where it was left."""

    def __init__(self, phases: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Take phases: the first sample number of each, the first of all 0, and one weight a source, which may be 0."""
        assert phases[0][0] == 0
        self._starts = np.array([start for start, _ in phases], dtype=np.int64)
        self._sources = [np.flatnonzero(np.array(weights) > 0.0) for _, weights in phases]
        self._mixtures = [Mixture([weight for weight in weights if weight > 0.0]) for _, weights in phases]
        # Samples of each source before each phase (phases, sources).
        self._before = np.zeros((len(phases), len(phases[0][1])), dtype=np.int64)
        for phase, length in enumerate(np.diff(self._starts).tolist()):
            self._before[phase + 1] = self._before[phase]
            self._before[phase + 1, self._sources[phase]] += self._mixtures[phase].counts(length)

    @property
    def description(self) -> list[object]:
        """Return what decides the order, as JSON values; of a single phase the whole weights of its sources alone."""
        if len(self._mixtures) == 1 and len(self._sources[0]) == self._before.shape[1]:
            return list(self._mixtures[0].weights)
        return [
            [start, sources.tolist(), mixture.weights]
            for start, sources, mixture in zip(self._starts.tolist(), self._sources, self._mixtures, strict=True)
        ]

    def __call__(self, number: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return for each global sample `number` (n,) its source (n,) and its place in that source's own reading (n,)."""
        number = np.array(number, dtype=np.int64, ndmin=1)
        phase_of = np.searchsorted(self._starts, number, side="right") - 1
        source, place = np.empty_like(number), np.empty_like(number)
        for phase in np.unique(phase_of).tolist():
            mine = np.flatnonzero(phase_of == phase)
            local, place[mine] = self._mixtures[phase](number[mine] - self._starts[phase])
            source[mine] = self._sources[phase][local]
            place[mine] += self._before[phase, source[mine]]
        return source, place


def _floor_share(k: Int64Array, weight: Int64Array, total: Int64Array) -> Int64Array:
    """Return floor(k * weight / total) without overflow: weight and total stay below 2**31, k below 2**62."""
    periods, rest = np.divmod(k, total)
    return periods * weight + rest * weight // total
