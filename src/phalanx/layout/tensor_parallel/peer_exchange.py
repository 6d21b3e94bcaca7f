"""Exchanges among tensor-parallel ranks of one machine that run beside their products, made by copy engines.

Each rank writes into buffers of its peers, and reads its own. One exchange and the next use two buffers in turn: who has
passed the barrier of an exchange knows that all ranks have read what came with the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.copy_stream import Copies, CopyStream
from phalanx.layout.data_parallel.peer_memory import (
    PeerBuffer,
    align_size,
    can_copy_between,
    make_peer_buffer_at_rest,
    peers_from_next,
)
from phalanx.layout.mesh import Axis

SMALLEST_EXCHANGE = 16 << 20
"""Bytes of a sample's part of a sequence below which nothing travels beside products by itself: the host takes some half a
millisecond to issue such an exchange (benchmarks/README.md), longer than a device may take for small products."""


class PeerExchange:
    """The buffers of one group of ranks, and the stream on which copies run beside the products."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group, self._device = group, device
        self._buffers: list[PeerBuffer] = []
        self._present = 0
        self.copies = CopyStream(device)

    @property
    def bytes(self) -> int:
        """Bytes of the buffers on this rank, beside the allocator's memory."""
        return sum(buffer.size for buffer in self._buffers)

    @property
    def peers(self) -> list[int]:
        """The other ranks, in the order in which this one writes to them."""
        return peers_from_next(self.rank, self.size)[:-1]

    @property
    def sources(self) -> list[int]:
        """The other ranks in the order in which they write to this one."""
        return self.peers[::-1]

    def begin(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Begin an exchange of parts of this shape, contiguous. All ranks begin the same ones in the same order."""
        self._shape, self._dtype = tuple(shape), dtype
        self._part = torch.Size(self._shape).numel() * dtype.itemsize
        wanted = align_size(self.size * self._part)
        if not self._buffers or self._buffers[0].size < wanted:
            # At rest nobody reads the former ones any more.
            self._buffers = [make_peer_buffer_at_rest(wanted, self._device, self._group) for _ in range(2)]
        self._present = 1 - self._present

    def place(self, source: int, *, on: int | None = None) -> Tensor:
        """Return where the part that `source` sends arrives on this rank, or on rank `on`."""
        memory = self._buffers[self._present].of(self.rank if on is None else on)
        return memory[source * self._part : (source + 1) * self._part].view(self._dtype).view(self._shape)

    def send(self, part: Tensor, peer: int) -> Copies:
        """Copy `part`, which the present stream has written, to `peer`."""
        with self.copies.behind_present() as sent:
            self.place(self.rank, on=peer).copy_(part, non_blocking=True)
        return sent

    def meet(self, *sent: Copies) -> None:
        """Let the present stream wait until every rank has come here with what it has sent."""
        for copies in sent:
            copies.wait()
        self._buffers[self._present].barrier()


_EXCHANGES: dict[str, PeerExchange] = {}


def exchange_of(group: str) -> PeerExchange:
    """Return the exchange that `choose_exchange` made for the named group, as compiled code refers to it."""
    return _EXCHANGES[group]


def choose_exchange(wanted: bool | Literal["auto"], tp: Axis, device: torch.device) -> bool:
    """Return whether the ranks of `tp` exchange by copies, as `layout.peer_copies`, `wanted`, says.

    All ranks of the group call it together. Raises ConfigError where copies are asked for and the ranks cannot read each
    other's memory.
    """
    if tp.group is None or not can_copy_between(wanted, tp.group, device, "split matrices"):
        return False
    _EXCHANGES[tp.group_name] = PeerExchange(tp.group, device)
    return True
