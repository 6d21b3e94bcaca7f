"""Memory that the ranks of one machine see of each other, each under its own process.

On accelerators it is PyTorch's symmetric memory: a copy out of a peer's buffer is then the work of the copy engines and
takes no compute unit. On the CPU it is files that all ranks map.
"""

from __future__ import annotations

import math
import socket
import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.hardware.device import synchronize
from phalanx.torch_compat import common as compat

_ALIGNED = 512
"""Buffers are whole multiples of this many bytes."""


def align_size(size: int) -> int:
    """Return the bytes of the buffer that is made for `size` bytes."""
    return max(1, math.ceil(size / _ALIGNED)) * _ALIGNED


class PeerBuffer(Protocol):
    """One buffer on every rank of a group."""

    size: int
    """Bytes on each rank."""

    def of(self, rank: int) -> Tensor:
        """Return the buffer of the group's rank `rank`, uint8 [size]."""

    def barrier(self) -> None:
        """Wait, on the current stream, until every rank of the group is here."""


class MappedBuffer:
    """Buffers of ranks on the CPU: one file for each, mapped by all."""

    def __init__(self, size: int, group: dist.ProcessGroup) -> None:
        self.size = size
        self._group = group
        with tempfile.NamedTemporaryFile(prefix="phalanx-peer-") as file:
            file.truncate(size)
            names: list[str] = [""] * group.size()
            dist.all_gather_object(names, file.name, group=group)
            # Shared from the start: each rank's own mapping is of the file as well.
            self._buffers = [torch.from_file(name, shared=True, size=size, dtype=torch.uint8) for name in names]
            # No file goes before all ranks have mapped it.
            self.barrier()

    def of(self, rank: int) -> Tensor:
        """Return the mapped file of the group's rank `rank`, uint8 [size]."""
        return self._buffers[rank]

    def barrier(self) -> None:
        """Wait until every rank of the group is here."""
        dist.barrier(self._group)


class SmallCopies:
    """Collect copies so small that one kernel makes them all: a copy engine would take longer to begin than to run."""

    def __init__(self) -> None:
        self._places: list[Tensor] = []
        self._parts: list[Tensor] = []

    def takes(self, place: Tensor, part: Tensor) -> bool:
        """Take the copy of `part` to `place` if it is small; returns whether it is."""
        small = part.numel() * part.itemsize < _SMALL_BYTES
        if small:
            self._places.append(place)
            self._parts.append(part)
        return small

    def run(self) -> None:
        """Make all copies taken so far, on the current stream. They stay, to be made again."""
        if self._places:
            torch._foreach_copy_(self._places, self._parts)


_SMALL_BYTES = 1 << 16


def peers_from_next(rank: int, size: int) -> list[int]:
    """Return all ranks from the next one on, this one last: no two ranks copy from or to the same one at the same time."""
    return [(rank + step) % size for step in range(1, size + 1)]


def make_peer_buffer(size: int, device: torch.device, group: dist.ProcessGroup) -> PeerBuffer:
    """Make a buffer of `size` bytes on every rank of `group`; all of them call it together.

    Raises RuntimeError where the device or this PyTorch has no such memory.
    """
    if device.type == "cpu":
        return MappedBuffer(size, group)
    return compat.SymmetricBuffer(size, device, group)


def make_peer_buffer_at_rest(size: int, device: torch.device, group: dist.ProcessGroup) -> PeerBuffer:
    """Make a buffer in the midst of training: wait first until no device waits for another.

    Mapping memory would wait for ever for a kernel that waits for a peer.
    """
    synchronize(device)
    dist.all_reduce(torch.zeros(1), group=group)
    buffer = make_peer_buffer(size, device, group)
    dist.all_reduce(torch.zeros(1), group=group)
    return buffer


def reaches_peers(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Return whether all ranks of `group` can read each other's memory: tried out, and the same answer on all of them."""
    machines: list[str] = [""] * group.size()
    # Containers may share a host name: the boot id tells machines apart.
    started = Path("/proc/sys/kernel/random/boot_id")
    dist.all_gather_object(
        machines, f"{socket.gethostname()} {started.read_text().strip() if started.exists() else ''}", group=group
    )
    if len(set(machines)) > 1:
        return False
    try:
        rank, following = group.rank(), (group.rank() + 1) % group.size()
        buffer = make_peer_buffer(_TRIED_BYTES, device, group)
        buffer.of(rank).fill_(rank % 251)
        # Behind the first barrier the neighbour has written; behind the second nobody reads any more.
        buffer.barrier()
        read = buffer.of(following).clone()
        buffer.barrier()
        works = bool((read == following % 251).all())
    except (RuntimeError, NotImplementedError):
        works = False
    verdicts: list[bool] = [False] * group.size()
    dist.all_gather_object(verdicts, works, group=group)
    return all(verdicts)


_TRIED_BYTES = 4096


def can_copy_between(wanted: bool | Literal["auto"], group: dist.ProcessGroup, device: torch.device, what: str) -> bool:
    """Return whether the ranks of `group` exchange by copies, as `layout.peer_copies`, `wanted`, says.

    what: they do together, for messages. All ranks of the group call it together. Raises ConfigError where copies are asked
    for and the ranks cannot read each other's memory.
    """
    if wanted is False or (wanted == "auto" and device.type == "cpu"):
        return False
    # Tried out, not looked up: what the links allow, containers and access rights may forbid.
    reached = reaches_peers(device, group)
    if not reached and wanted is True:
        raise ConfigError(
            f"layout.peer_copies=true, but the {group.size()} ranks that {what} cannot read each other's "
            "memory: they are on several machines, or their devices are not linked\nnearest: layout.peer_copies=auto"
        )
    return reached


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


def new_buffer_size(buffers: Iterable[Reusable], size: int) -> int:
    """Return the bytes of the buffer by which a pool grows for an exchange of `size` bytes.

    At least those of the pool's largest buffer: of large exchanges that follow each other, as those of both ends of a model
    do between two steps, each needs a buffer, and two of one size serve any order.
    """
    return max((align_size(size), *(x.size for x in buffers)))


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
            grown = new_buffer_size(self._buffers, size)
            pooled = _PooledBuffer(make_peer_buffer_at_rest(grown, self.device, self.group))
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
