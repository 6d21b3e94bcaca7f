"""Bytes of the buffers that shards, and parts of sequences, exchange through with `layout.peer_copies`.

Parameters are read from one buffer with all shards of a stage (`copy_engine.PublishedShards`). Gradients arrive in a pool of
buffers (`copy_engine`), acted out: it grows where nothing that rests is large enough, so what it comes to follows from the
order of the reductions: FSDP2's, as `fully_sharded` has it. A buffer rests one exchange after its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import groupby

import numpy as np
import numpy.typing as npt

from phalanx.layout.data_parallel.peer_memory import align_size, new_buffer_size, next_free_buffer
from phalanx.layout.spec import LayoutTable, ResolvedLayout
from phalanx.layout.tensor_parallel.peer_exchange import SMALLEST_EXCHANGE
from phalanx.planner.memory.ranks import RankParts
from phalanx.planner.memory.state import Amount, Exchanges, MemoryState
from phalanx.planner.trace.traced_model import TracedModel

_UNITS = 6
"""Units of blocks beyond which a pass repeats itself; an odd number leaves other buffers at rest than an even one."""
_STEPS = 3
"""After which nothing grows any more."""


def peer_buffer_bytes(state: MemoryState, parts: RankParts) -> Amount:
    """Return the most bytes of the buffers, which lie beside the allocator's memory; 0 without peer copies.

    parts: of each rank.
    """
    if not state.peer_copies:
        return 0 * parts.layers
    rank = _RankSizes(state, parts)
    # Streamed chunks and their gradients take turns between two buffers each, all as large as the largest chunk.
    streaming = state.width * state.sizes.ring
    published = np.vectorize(align_size, otypes=[np.float64])(rank.published)
    pool = rank.pool_of_pipelines() if np.all(state.piped) else rank.pool_of_one_stage()
    return rank.exchanges.sharded_many * (published + pool + streaming)


def sequence_buffer_bytes(model: TracedModel, candidates: LayoutTable) -> npt.NDArray[np.float64]:
    """Return the bytes of the two buffers through which ranks of `tp` exchange beside products, [layouts].

    As `layout.tensor_parallel.peer_exchange` makes them: each holds the sequences of a micro-batch.
    """
    setting = model.setting_of(ResolvedLayout(global_batch=1), attention="math", compiled=False)
    each = setting.model.d_model * model.precision.compute_dtype.itemsize
    part = setting.length // (candidates.cp * candidates.tp) * each
    beside = candidates.overlaps_products & (part >= SMALLEST_EXCHANGE) & model.precision.exchanges_in_products
    whole = candidates.tp * candidates.microbatch * part
    return np.where(beside, 2.0 * np.vectorize(align_size, otypes=[np.float64])(whole), 0.0)


class _RankSizes:
    """Sizes of what a rank of each layout exchanges, in parameters where nothing else is said."""

    def __init__(self, state: MemoryState, parts: RankParts) -> None:
        self.state, self.exchanges = state, Exchanges(state)
        sizes = state.sizes
        block, leading, embedding, head = sizes.block, sizes.leading, sizes.embedding, sizes.head
        self.layers, self.leading = parts.layers, parts.leading
        self.unit = np.minimum(state.gather_blocks, parts.stage_layers)
        """Blocks that are gathered together: in all units of a stage but the last, which may be smaller."""
        self.block, self.leading_block = block.trained_gathered, leading.trained_gathered
        self.ends = (parts.embedding * embedding.trained_gathered, parts.head * head.trained_gathered)
        each = (
            (parts.layers - parts.leading, block),
            (parts.leading, leading),
            (parts.embedding, embedding),
            (parts.head, head),
        )
        self.published = sum(count * self.exchanges.published_bytes(part) for count, part in each)
        """Bytes of the shards that peers read."""
        self.width_sent = np.where(self.exchanges.whole, state.master, state.width)

    def pool_of_pipelines(self) -> Amount:
        """Return a pool for stages that reduce in an order of their own: buffers as large as most of them need."""
        largest = np.where(self.leading > 0, np.maximum(self.block, self.leading_block), self.block)
        return self.width_sent * (self.unit * largest + sum(self.ends))

    def pool_of_one_stage(self) -> Amount:
        """Return the pool of a rank that holds all of the model, found by replaying its messages."""
        s, tied = self.state, self.state.tied
        # A shared table is exchanged by the root alone.
        first, last = (0 * end if tied else end for end in self.ends)
        columns = [
            first,
            self.block,
            self.leading_block,
            self.layers,
            self.leading,
            self.unit,
            last,
            sum(self.ends) if tied else 0 * first,
            # From ZeRO-2 on every micro-batch reduces, below only the last one.
            np.where(s.zero >= 2, np.minimum(s.accumulation, 2), 1),
            self.width_sent,
        ]
        table = np.stack(np.broadcast_arrays(*columns), axis=-1).astype(np.int64).reshape(-1, len(columns))
        # Many layouts exchange the same: the replay of each distinct row serves all of them.
        rows, which = np.unique(table, axis=0, return_inverse=True)
        found = []
        for embedding, block, leading_block, layers, leading, unit, head, root, passes, sent in rows.tolist():
            blocks = [leading_block] * leading + [block] * (layers - leading)
            units = tuple(sent * sum(blocks[start : start + unit]) for start in range(0, layers, unit))
            found.append(pool_bytes(units, passes, Sizes(*(sent * x for x in (embedding, head, root)))))
        return np.asarray(found, np.float64)[which.reshape(-1)]


@dataclass(frozen=True)
class Sizes:
    """Bytes of what is exchanged."""

    first: int
    """Bytes of the embedding; 0 where the root has it."""
    last: int
    """Bytes of the head; 0 where the root has it."""
    root: int
    """Bytes of what both ends of the model share."""


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
        """Exchange `size` bytes through a buffer that rests, or a new one."""
        found = next_free_buffer(self.buffers, size, self.exchanges)
        if found is None:
            found = _Buffer(new_buffer_size(self.buffers, size))
            self.buffers.append(found)
        self.exchanges += 1
        found.exchange = self.exchanges

    @property
    def bytes(self) -> int:
        return sum(x.size for x in self.buffers)


@cache
def pool_bytes(units: tuple[int, ...], passes: int, sizes: Sizes) -> int:
    """Return the bytes of the pool once it has grown.

    units: bytes of the blocks that are gathered together, from the first of the model on. passes: micro-batches that reduce,
    at most 2: others do as these.
    """
    pool = _Pool()
    blocks: list[int] = []
    for size, equal in groupby(reversed(units)):
        count = len(list(equal))
        # Of many equal units those that only repeat what others do are left out.
        blocks += [size] * (count if count <= _UNITS + 1 else _UNITS + 1 - (count + 1) % 2)
    for _ in range(_STEPS * passes):
        for size in (sizes.last, *blocks, sizes.first, sizes.root):
            if size:
                pool.exchange(size)
    return pool.bytes
