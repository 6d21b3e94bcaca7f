"""All-gather of parameters inside one machine: every rank copies its peers' shards to where they belong.

A rank keeps its shards once more, in the format of the arithmetic and where its peers can read them. They are written anew
when the main parameters have changed, once an optimizer step, and read in every gather of the step by copy engines: no
kernel casts, no buffer is in between, and after the first gather of a step no rank waits for another.

A shard is written between two barriers. Before the first one of a step every rank has read all it wanted of the step before;
after the one that follows a unit's shards, every rank has written them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.layout.data_parallel.copy_engine.peer_memory import (
    SmallCopies,
    align_size,
    make_peer_buffer_at_rest,
    peers_from_next,
)

_EVEN = 64
"""Elements that shards on even boundaries are multiples of."""


class CopyEngineAllGather:
    """A `compat_fsdp.Gather` of the parameters of one unit.

    own, theirs: for each parameter this rank's published shard, and that of every rank.
    """

    def __init__(self, published: PublishedShards, own: list[Tensor], theirs: list[list[Tensor]]) -> None:
        self._published = published
        self._own, self._theirs = own, theirs
        self._written = 0
        """Time at which the shards were last written, see `PublishedShards.renewed`."""
        self._large: list[tuple[Tensor, Tensor]] = []
        """Places and what is copied there, from all ranks."""
        self._small = SmallCopies()
        self._found = False

    def __call__(self, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        """See `compat_fsdp.Gather`."""
        if not self._found:
            self._find_places(wholes)
        if self._written != self._published.renewed:
            self._write(shards)
        for place, shard in self._large:
            place.copy_(shard, non_blocking=True)
        self._small.run()

    def _write(self, shards: Sequence[Tensor]) -> None:
        self._published.begin_to_write()
        torch._foreach_copy_(self._own, list(shards))
        self._published.barrier()
        self._written = self._published.renewed

    def _find_places(self, wholes: Sequence[Tensor]) -> None:
        """Note where each shard goes, once."""
        # FSDP2 frees and allocates the memory behind `wholes` again and again; views of them stay valid.
        group = self._published.group
        for peer in peers_from_next(group.rank(), group.size()):
            for whole, shards in zip(wholes, self._theirs, strict=True):
                place, shard = whole.view(group.size(), -1)[peer], shards[peer]
                if not self._small.takes(place, shard):
                    self._large.append((place, shard))
        self._found = True


class PublishedShards:
    """The shards of one rank's modules, in one buffer that its peers read."""

    def __init__(
        self, units: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        """units: elements of the shard of each parameter of each, the same on every rank of `group`."""
        self.group = group
        self.renewed = 1
        """How often the main parameters have changed; the first time they were filled."""
        self._writing = 0
        counts = [count for unit in units for count in unit]
        self._buffer = make_peer_buffer_at_rest(align_size(sum(counts) * dtype.itemsize), device, group)
        of_ranks = [self._buffer.of(rank).view(dtype) for rank in range(group.size())]
        starts = iter(_place_shards(counts))
        self.gathers: list[CopyEngineAllGather] = []
        """For each of the units."""
        for unit in units:
            places = [slice(start, start + count) for count, start in zip(unit, starts, strict=False)]
            theirs = [[of_rank[place] for of_rank in of_ranks] for place in places]
            self.gathers.append(CopyEngineAllGather(self, [shards[group.rank()] for shards in theirs], theirs))

    @property
    def bytes(self) -> int:
        """Of the buffer, on this rank."""
        return self._buffer.size

    def renew(self) -> None:
        """Write the shards anew before they are next gathered, because the main parameters have changed."""
        self.renewed += 1

    def begin_to_write(self) -> None:
        """Wait, on the current stream and before the first shard of this time, until every rank has read those before."""
        if self._writing != self.renewed:
            self._writing = self.renewed
            self.barrier()

    def barrier(self) -> None:
        """Wait, on the current stream, until every rank is here."""
        self._buffer.barrier()


def _place_shards(counts: Sequence[int]) -> list[int]:
    """Return where shards of so many elements begin in a buffer without gaps.

    Those that would shift others off the boundaries that copies run fast between come last.
    """
    order = sorted(range(len(counts)), key=lambda place: counts[place] % _EVEN != 0)
    ends = accumulate((counts[place] for place in order), initial=0)
    starts = dict(zip(order, ends, strict=False))
    return [starts[place] for place in range(len(counts))]
