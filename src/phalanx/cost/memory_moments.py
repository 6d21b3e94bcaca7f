"""The moments of an optimizer step at which a rank may hold most, and what it holds then, cause by cause.

One arithmetic for a single layout and for a million: every number may be an array. A backward pass frees the activations of
one block after another while gradients take their place; all of that is even, so only its first and last blocks matter.
Where several blocks are gathered together, each of these stands for a unit of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from phalanx.cost.memory_alone import moments_alone
from phalanx.cost.memory_piped import moments_piped
from phalanx.cost.memory_situation import Amount, Held, Rank, Situation

MOMENTS = (
    "forward of the embedding",
    "forward of the last block",
    "forward of the head",
    "backward of the head",
    "gradients of the head reduced",
    "backward of the last block",
    "backward of all that is gathered with the last block",
    "gradients of the last block reduced",
    "backward of the last block but one",
    "backward of all that is gathered with the last block but one",
    "gradients of the last block but one reduced",
    "backward of the first block",
    "backward of all that is gathered with the first block",
    "gradients of the first block reduced",
    "next backward of the head",
    "next backward of the last block",
    "backward of the embedding",
    "gradients of the embedding reduced",
    "gradients of the first part reduced",
    "update",
)


def moments(situation: Situation) -> Iterator[tuple[str, Held]]:
    """Bytes by cause at each moment, for layouts of which either all have a pipeline or none."""
    rank = Rank(situation)
    yield from moments_piped(rank) if np.all(situation.piped) else moments_alone(rank)


def peer_buffer_bytes(situation: Situation) -> Amount:
    """Most bytes of the buffers of `layout.peer_copies`, which lie beside the allocator's memory; 0 without peer copies.

    Gathering takes turns between buffers of a unit's size, one that is read, one that peers may still read and one for each
    unit that is gathered ahead, and one for the ends of the model; what is reduced has one of each size. Streamed
    chunks and their gradients take turns between two each, all as large as the largest chunk.
    """
    r = Rank(situation)
    if not situation.peer_copies:
        return 0 * r.shard
    ends = r.embedding.gathered + r.head.gathered
    unit = r.unit * r.block.gathered
    count = 2 + situation.gathers_ahead
    gathering = situation.width * (count * unit + np.maximum(r.embedding.gathered, r.head.gathered))
    sent = np.where(r.whole, situation.master, situation.width)
    streaming = situation.width * situation.sizes.ring
    return (r.sharded_many) * (gathering + sent * (unit + ends) + streaming)
