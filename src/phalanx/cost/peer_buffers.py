"""Bytes of the buffers that shards exchange through with `layout.peer_copies`: the pools of `layout.peer_copies`, acted out.

A pool grows where nothing that rests is large enough, so what it comes to follows from the order of the exchanges: FSDP2's,
as `layout.shard` has it. What is gathered is lent until it has been copied to the parameters, what is reduced until the next
reduction; and a buffer rests one exchange after its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from phalanx.cost.memory_situation import Amount, Rank, Situation
from phalanx.layout.peer_copies import aligned, resting

_UNITS = 6
"""Units of blocks beyond which a pass repeats itself; an odd number leaves other buffers at rest than an even one."""
_FIRST_BLOCK = 2
"""Place of the first unit of blocks, after the root and the embedding."""
_STEPS = 3
"""After which nothing grows any more."""


def peer_buffer_bytes(situation: Situation) -> Amount:
    """Most bytes of the buffers, which lie beside the allocator's memory; 0 without peer copies."""
    r = Rank(situation)
    if not situation.peer_copies:
        return 0 * r.shard
    # Streamed chunks and their gradients take turns between two buffers each, all as large as the largest chunk.
    streaming = situation.width * situation.sizes.ring
    pools = _of_pipelines(r) if np.all(situation.piped) else _alone(r)
    return r.sharded_many * (pools + streaming)


def _of_pipelines(r: Rank) -> Amount:
    """Stages gather and reduce among one another in an order of their own: as many buffers as most of them need."""
    unit = r.unit * r.block.gathered
    ends = r.embedding.gathered + r.head.gathered
    gathering = (2 + r.s.gathers_ahead) * unit + np.maximum(r.embedding.gathered, r.head.gathered)
    return r.s.width * gathering + np.where(r.whole, r.s.master, r.s.width) * (unit + ends)


def _alone(r: Rank) -> Amount:
    s, tied = r.s, r.s.tied
    ends = (r.embedding.gathered, r.head.gathered)
    first, last = (0 * end if tied else end for end in ends)
    several = np.minimum(s.accumulation, 2)
    columns = [
        first,
        r.unit * r.block.gathered,
        r.tail * r.block.gathered,
        np.ceil(r.layers / r.unit),
        last,
        sum(ends) if tied else 0 * first,
        np.where(s.zero == 3, several, 1),
        (s.zero == 3) & s.reshard,
        np.where(s.zero >= 2, several, 1),
        np.where(r.whole, s.master, s.width),
    ]
    table = np.stack(np.broadcast_arrays(*columns), axis=-1).astype(np.int64).reshape(-1, len(columns))
    rows, which = np.unique(table, axis=0, return_inverse=True)
    found = [_pools(row, s.width, s.gathers_ahead) for row in rows.tolist()]
    return np.asarray(found, np.float64)[which.reshape(np.shape(r.shard))]


def _pools(row: list[int], width: int, ahead: int) -> int:
    *elements, gathers, again, reductions, sent = row
    first, unit, tail, units, last, root = elements
    passes = Passes(units, ahead, gathers, bool(again), reductions)
    gathered, reduced = (Sizes(*(each * x for x in (first, unit, tail, last, root))) for each in (width, sent))
    return pool_bytes(passes, gathered, reduced)


@dataclass(frozen=True)
class Sizes:
    """Bytes of what is exchanged."""

    first: int
    """Of the embedding; 0 where the root has it."""
    unit: int
    """Of the blocks that are gathered together."""
    tail: int
    """Of the last of them."""
    last: int
    """Of the head; 0 where the root has it."""
    root: int
    """Of what both ends of the model share."""


@dataclass(frozen=True)
class Passes:
    """How often, and in which order."""

    units: int
    """Of blocks."""
    ahead: int
    """Units that are gathered while one computes."""
    gathers: int
    """Micro-batches that gather anew, at most 2: further ones do as the second."""
    again: bool
    """Whether the backward pass gathers blocks again."""
    reductions: int
    """Micro-batches that reduce, at most 2."""

    def blocks(self, sizes: Sizes) -> list[int]:
        """Bytes of each unit, of many only as many as matter."""
        most = _UNITS + 2 * self.ahead
        count = self.units if self.units <= most else most - (self.units - most) % 2
        return [*[sizes.unit] * (count - 1), sizes.tail]


@dataclass
class _Buffer:
    size: int
    exchange: int = 0
    lent: bool = False


@dataclass
class _Pool:
    buffers: list[_Buffer] = field(default_factory=list)
    exchanges: int = 0

    def exchange(self, size: int) -> _Buffer:
        """Take a buffer and exchange through it; it stays lent."""
        found = resting(self.buffers, size, self.exchanges)
        if found is None:
            found = _Buffer(aligned(size))
            self.buffers.append(found)
        self.exchanges += 1
        found.exchange, found.lent = self.exchanges, True
        return found

    @property
    def bytes(self) -> int:
        return sum(x.size for x in self.buffers)


@cache
def pool_bytes(passes: Passes, gathered: Sizes, reduced: Sizes) -> int:
    """Both pools together, once they have grown."""
    gathers, reductions = _Pool(), _Pool()
    for _ in range(_STEPS):
        for _ in range(passes.gathers):
            _Gathers(gathers, passes, gathered).pass_by()
        for _ in range(passes.reductions):
            for size in (reduced.last, *reversed(passes.blocks(reduced)), reduced.first, reduced.root):
                _reduce(reductions, size)
    return gathers.bytes + reductions.bytes


def _reduce(pool: _Pool, size: int) -> None:
    if size:
        for other in pool.buffers:
            other.lent = False
        pool.exchange(size)


class _Gathers:
    """One micro-batch."""

    def __init__(self, pool: _Pool, passes: Passes, sizes: Sizes) -> None:
        self._pool, self._passes = pool, passes
        self._sizes = [sizes.root, sizes.first, *passes.blocks(sizes), sizes.last]
        self._flying: dict[int, _Buffer] = {}
        self._kept: _Buffer | None = None
        """What was copied last in the forward pass, whose buffer goes with the next one."""

    def pass_by(self) -> None:
        """Forward and backward."""
        last, ahead = len(self._sizes) - 1, self._passes.ahead
        for place in range(last + 1):
            self._gather([place])
            self._copied(place, forward=True)
            if _FIRST_BLOCK <= place < last:
                self._gather(range(place + 1, min(last, place + 1 + ahead)))
        if self._kept is not None:
            self._kept.lent = False
        if not self._passes.again:
            return
        for place in range(last - 1, 0, -1):
            self._gather([place])
            self._copied(place, forward=False)
            if place > _FIRST_BLOCK:
                self._gather(range(place - 1, max(_FIRST_BLOCK - 1, place - 1 - ahead), -1))
            elif place == _FIRST_BLOCK:
                self._gather([place - 1])

    def _gather(self, places: Sequence[int]) -> None:
        for place in places:
            if self._sizes[place] and place not in self._flying:
                self._flying[place] = self._pool.exchange(self._sizes[place])

    def _copied(self, place: int, *, forward: bool) -> None:
        buffer = self._flying.pop(place, None)
        if buffer is None:
            return
        if not forward:
            buffer.lent = False
            return
        if self._kept is not None:
            self._kept.lent = False
        self._kept = buffer
