"""FSDP2's all-gather and reduce-scatter inside one machine, made by copy engines.

Collective kernels take compute units from the matmuls they run beside. Here devices read each other's memory by copy
engines instead. Parameters arrive where they are used (`all_gather`), and gradients leave from where they are
(`reduce_scatter`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from phalanx.kernels.parts_sum import sum_parts
from phalanx.layout.data_parallel.peer_memory import (
    BufferPool,
    SmallCopies,
    align_size,
    can_copy_between,
    make_peer_buffer_at_rest,
    peers_from_next,
)
from phalanx.torch_compat import fsdp as compat_fsdp
from phalanx.torch_compat.fsdp import ShardSize


class CopyEngine:
    """Both exchanges for the modules of one rank, over one group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Make the buffers of gradients."""
        self._group, self._device = group, device
        self._published: list[PublishedShards] = []
        self._pool = BufferPool(group, device)
        self._reduce_scatter = CopyEngineReduceScatter(self._pool)

    @property
    def bytes(self) -> int:
        """Bytes of the buffers on this rank, beside the allocator's memory."""
        return self._pool.bytes + sum(shards.bytes for shards in self._published)

    def attach(self, modules: Iterable[FSDPModule]) -> None:
        """Let `modules` exchange their parameters and gradients so; all ranks of the group call it together."""
        compat_fsdp.exchange_in_place(modules, self._publish, self._reduce_scatter)

    def _publish(self, units: list[list[ShardSize]]) -> list[CopyEngineAllGather]:
        self._published.append(PublishedShards(units, self._device, self._group))
        return self._published[-1].gathers

    def renew(self) -> None:
        """Publish the main parameters anew before the next gather, because they have changed."""
        for shards in self._published:
            shards.renew()


def choose_copy_engine(
    wanted: bool | Literal["auto"], group: dist.ProcessGroup | None, device: torch.device
) -> CopyEngine | None:
    """Return what `layout.peer_copies`, `wanted`, asks for among the shards of `group`; None: collectives do the work.

    All ranks of the group call it together. Raises ConfigError where copies are asked for and the ranks cannot read each
    other's memory.
    """
    if group is None or not can_copy_between(wanted, group, device, "share parameters"):
        return None
    return CopyEngine(group, device)


_EVEN = 128
"""Bytes that shards on even boundaries are multiples of."""


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
        """Fill `wholes` from all ranks' shards; see `compat_fsdp.Gather`."""
        if not self._found:
            # FSDP2 frees and allocates the memory behind `wholes` again and again; views of them stay valid.
            group = self._published.group
            for peer in peers_from_next(group.rank(), group.size()):
                for whole, parts in zip(wholes, self._theirs, strict=True):
                    whole_place, part = whole.view(group.size(), -1)[peer], parts[peer]
                    if not self._small.takes(whole_place, part):
                        self._large.append((whole_place, part))
            self._found = True
        if self._written != self._published.renewed:
            self._published.begin_to_write()
            # One kernel copies many tensors where all are cast between the same formats.
            for dtype in {own.dtype for own in self._own}:
                pairs = [(own, shard) for own, shard in zip(self._own, shards, strict=True) if own.dtype == dtype]
                torch._foreach_copy_([own for own, _ in pairs], [shard for _, shard in pairs])
            self._published.barrier()
            self._written = self._published.renewed
        for place, shard in self._large:
            place.copy_(shard, non_blocking=True)
        self._small.run()


class PublishedShards:
    """The shards of one rank's modules, in one buffer that its peers read."""

    def __init__(self, units: Sequence[Sequence[ShardSize]], device: torch.device, group: dist.ProcessGroup) -> None:
        """Make the buffer. units: sizes of each parameter's shard, by unit; the same on every rank of `group`."""
        self.group = group
        self.renewed = 1
        """How often the main parameters have changed; the first time they were filled."""
        self._writing = 0
        sizes = [size for unit in units for size in unit]
        total = sum(map(_bytes_of, sizes))
        self._buffer = make_peer_buffer_at_rest(align_size(total), device, group)
        of_ranks = [self._buffer.of(rank) for rank in range(group.size())]
        starts = iter(_place_shards(sizes))
        self.gathers: list[CopyEngineAllGather] = []
        """What gathers each of the units."""
        for unit in units:
            theirs = [
                [of_rank[start : start + _bytes_of(size)].view(size.dtype) for of_rank in of_ranks]
                for size, start in zip(unit, starts, strict=False)
            ]
            self.gathers.append(CopyEngineAllGather(self, [shards[group.rank()] for shards in theirs], theirs))

    @property
    def bytes(self) -> int:
        """Bytes of the buffer on this rank."""
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


def _bytes_of(size: ShardSize) -> int:
    return size.elements * size.dtype.itemsize


def _place_shards(sizes: Sequence[ShardSize]) -> list[int]:
    """Return the bytes at which shards of such sizes begin in a buffer without gaps.

    Those that would shift others off the boundaries that copies run fast between come last, and of these the narrow formats,
    whose elements begin at any byte.
    """
    counts = list(map(_bytes_of, sizes))
    order = sorted(range(len(counts)), key=lambda place: (counts[place] % _EVEN != 0, -sizes[place].dtype.itemsize))
    ends = accumulate((counts[place] for place in order), initial=0)
    starts = dict(zip(order, ends, strict=False))
    return [starts[place] for place in range(len(counts))]


class CopyEngineReduceScatter:
    """A `compat_fsdp.Reduce`: each rank copies its gradients to the ranks that own them, which add them up."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def __call__(self, gradients: Sequence[Tensor], total: Tensor) -> None:
        """Fill `total` with this rank's part of the sum over ranks; see `compat_fsdp.Reduce`."""
        # FSDP2 cuts rows into equal parts and pads the last ones; padding is neither sent nor looked at.
        ranks, rank, n = self._pool.group.size(), self._pool.group.rank(), total.numel()
        rows = [math.ceil(gradient.shape[0] / ranks) for gradient in gradients]
        sizes = [count * gradient[0].numel() for count, gradient in zip(rows, gradients, strict=True)]
        assert sum(sizes) == n
        # On all ranks the same buffer, since all ask for the same sizes in the same order.
        arrived = self._pool.take(ranks * n, gradients[0].dtype)
        buffers = self._pool.everywhere(arrived)
        small = SmallCopies()
        for peer in peers_from_next(rank, ranks):
            places = buffers[peer][rank * n : (rank + 1) * n].split(sizes)
            for place, gradient, count in zip(places, gradients, rows, strict=True):
                part = gradient[peer * count : (peer + 1) * count].flatten()
                if not small.takes(place[: part.numel()], part):
                    place.copy_(part, non_blocking=True)
        small.run()
        # The barrier in here: all peers have written their parts.
        self._pool.exchange(arrived)
        sum_parts(arrived.view(ranks, n), total)
