"""Buffers that the ranks of one machine exchange through, used again and again.

A buffer is read or written by the peers, so it may be used again only when all are done with it. Each exchange has a
barrier, and a rank reaches it after its own work on the exchange before; so a buffer is free one exchange after its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.layout.data_parallel.copy_engine.peer_memory import PeerBuffer, align_size, make_peer_buffer_at_rest


class Reusable(Protocol):
    """A buffer of a pool, or one that a plan imagines, and when it was last used."""

    exchange: int
    """The last exchange it was used in; exchanges count from 1."""
    lent: bool
    """Whether this rank is writing or reading it."""

    @property
    def size(self) -> int:
        """Bytes."""


AnyReusable = TypeVar("AnyReusable", bound=Reusable)


def next_free_buffer(buffers: Iterable[AnyReusable], size: int, exchanges: int) -> AnyReusable | None:
    """Pick the next free buffer of a pool: large enough, not lent, and no longer read by a peer after so many exchanges.

    Of several, the smallest; of equal ones, that which was used longest ago. None where the pool has to grow.
    """
    fitting = [x for x in buffers if x.size >= size and not x.lent and not 0 < x.exchange == exchanges]
    return min(fitting, key=lambda x: (x.size, x.exchange), default=None)


@dataclass(eq=False)
class _PooledBuffer:
    """One buffer of a pool and when it was last used."""

    buffer: PeerBuffer
    exchange: int = 0
    """The last exchange it was used in; exchanges count from 1."""
    read: Any = None
    """Event (on devices with streams) after the barrier of the exchange that followed: by then all peers have read it."""
    lent: bool = False

    @property
    def size(self) -> int:
        """Bytes on each rank."""
        return self.buffer.size


class BufferPool:
    """The buffers of one group of ranks.

    All ranks ask for the same sizes in the same order, so they find the same buffers.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self._module = torch.get_device_module(device)
        self._buffers: list[_PooledBuffer] = []
        self._lent: dict[int, _PooledBuffer] = {}
        self._exchanges = 0

    @property
    def bytes(self) -> int:
        """Bytes of all buffers on this rank."""
        return sum(buffer.size for buffer in self._buffers)

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Lend this rank's part of a buffer, [count], to be written on the current stream, until the tensor is deleted."""
        size = count * dtype.itemsize
        pooled = next_free_buffer(self._buffers, size, self._exchanges)
        if pooled is None:
            pooled = _PooledBuffer(make_peer_buffer_at_rest(align_size(size), self.device, self.group))
            self._buffers.append(pooled)
        if pooled.read is not None:
            self._module.current_stream().wait_event(pooled.read)
        tensor = pooled.buffer.of(self.group.rank())[:size].view(dtype)
        pooled.lent = True
        self._lent[tensor.data_ptr()] = pooled
        # Not at exit, when the interpreter has taken apart what the callback would need.
        weakref.finalize(tensor, self._give_back, pooled).atexit = False
        return tensor

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """Return what each rank has in the buffer that `tensor` is here, to be read on the current stream, which waits."""
        pooled = self._lent[tensor.data_ptr()]
        pooled.buffer.barrier()
        self._exchanges += 1
        for other in self._buffers:
            if other.exchange == self._exchanges - 1:
                other.read = self._module.current_stream().record_event()
        pooled.exchange, pooled.read = self._exchanges, None
        return self.everywhere(tensor)

    def everywhere(self, tensor: Tensor) -> list[Tensor]:
        """Return the buffer that `tensor` is here, of each rank. Nobody else uses it from the barrier before last on."""
        pooled = self._lent[tensor.data_ptr()]
        size = tensor.numel() * tensor.itemsize
        return [pooled.buffer.of(rank)[:size].view(tensor.dtype) for rank in range(self.group.size())]

    def _give_back(self, pooled: _PooledBuffer) -> None:
        # Whoever held the tensor has let the stream of the next writer wait for its last reader, as for any memory.
        pooled.lent = False
