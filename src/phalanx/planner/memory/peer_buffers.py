"""Bytes of the buffers that shards exchange through with `layout.peer_copies`.

Parameters are read from one buffer with all shards of a stage (`copy_engine.all_gather`). Gradients arrive in a pool of
buffers (`copy_engine`), acted out: it grows where nothing that rests is large enough, so what it comes to follows from the
order of the reductions: FSDP2's, as `fully_sharded` has it. A buffer rests one exchange after its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np

from phalanx.layout.data_parallel.copy_engine.buffer_pool import next_free_buffer
from phalanx.layout.data_parallel.copy_engine.peer_memory import align_size
from phalanx.planner.memory.state import Amount, Rank

_UNITS = 6
"""Units of blocks beyond which a pass repeats itself; an odd number leaves other buffers at rest than an even one."""
_STEPS = 3
"""After which nothing grows any more."""


def peer_buffer_bytes(r: Rank) -> Amount:
    """Most bytes of the buffers, which lie beside the allocator's memory; 0 without peer copies."""
    situation = r.s
    if not situation.peer_copies:
        return 0 * r.shard
    # Streamed chunks and their gradients take turns between two buffers each, all as large as the largest chunk.
    streaming = situation.width * situation.sizes.ring
    published = _aligned(situation.width * (r.shard - r.streamed))
    pool = _of_pipelines(r) if np.all(situation.piped) else _alone(r)
    return r.sharded_many * (published + pool + streaming)


def _of_pipelines(r: Rank) -> Amount:
    """Stages reduce among one another in an order of their own: as many buffers as most of them need."""
    parts = r.unit * r.block.gathered + r.embedding.gathered + r.head.gathered
    return np.where(r.whole, r.s.master, r.s.width) * parts


def _alone(r: Rank) -> Amount:
    s, tied = r.s, r.s.tied
    ends = (r.embedding.gathered, r.head.gathered)
    first, last = (0 * end if tied else end for end in ends)
    columns = [
        first,
        r.unit * r.block.gathered,
        r.tail * r.block.gathered,
        np.ceil(r.layers / r.unit),
        last,
        sum(ends) if tied else 0 * first,
        np.where(s.zero >= 2, np.minimum(s.accumulation, 2), 1),
        np.where(r.whole, s.master, s.width),
    ]
    table = np.stack(np.broadcast_arrays(*columns), axis=-1).astype(np.int64).reshape(-1, len(columns))
    rows, which = np.unique(table, axis=0, return_inverse=True)
    found = [_pool(row) for row in rows.tolist()]
    return np.asarray(found, np.float64)[which.reshape(np.shape(r.shard))]


def _pool(row: list[int]) -> int:
    first, unit, tail, units, last, root, passes, sent = row
    return pool_bytes(units, passes, Sizes(*(sent * x for x in (first, unit, tail, last, root))))


def _aligned(size: Amount) -> Amount:
    return np.vectorize(align_size, otypes=[np.float64])(size)


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


@dataclass
class _Buffer:
    size: int
    exchange: int = 0
    lent: bool = False
    """Never: it is free when its sum is formed."""


@dataclass
class _Pool:
    buffers: list[_Buffer] = field(default_factory=list)
    exchanges: int = 0

    def exchange(self, size: int) -> None:
        """Through a buffer that rests."""
        found = next_free_buffer(self.buffers, size, self.exchanges)
        if found is None:
            found = _Buffer(align_size(size))
            self.buffers.append(found)
        self.exchanges += 1
        found.exchange = self.exchanges

    @property
    def bytes(self) -> int:
        return sum(x.size for x in self.buffers)


@cache
def pool_bytes(units: int, passes: int, sizes: Sizes) -> int:
    """The pool, once it has grown. units: of blocks. passes: micro-batches that reduce, at most 2: others do as these."""
    pool = _Pool()
    count = units if units <= _UNITS + 2 else _UNITS + 2 - units % 2
    blocks = [sizes.tail, *[sizes.unit] * (count - 1)]
    for _ in range(_STEPS * passes):
        for size in (sizes.last, *blocks, sizes.first, sizes.root):
            if size:
                pool.exchange(size)
    return pool.bytes
