"""FSDP2's gathers and reductions inside one machine as plain copies between its devices.

Collective kernels take compute units from the matmuls they run beside. Here devices read each other's memory by copy
engines instead. Parameters arrive where they are used (`layout.peer.gather`), and gradients leave from where they are.
They travel in the format they were computed in: bfloat16 values are exact in float32, so the float32 sum of what arrives is
the sum that a float32 reduction would have sent twice the bytes for. Sums are in the order of the ranks, always the same.

Buffers form a pool. A buffer is read or written by the peers, so it may be used again only when all are done with it. Each
exchange has a barrier, and a rank reaches it after its own work on the exchange before; so a buffer is free one exchange
after its own.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.kernels.parts_sum import sum_parts
from phalanx.layout.mesh import Mesh
from phalanx.layout.peer.buffers import resting
from phalanx.layout.peer.gather import PeerGather, PublishedShards
from phalanx.layout.peer.memory import PeerBuffer, Small, aligned, from_the_next, peer_buffer_at_rest, reaches_peers
from phalanx.layout.spec import ResolvedLayout
from phalanx.precision import PRECISIONS
from phalanx.torch_compat import fsdp as compat_fsdp


@dataclass(eq=False)
class _Place:
    """One buffer of a pool and where it is in its round."""

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


class PeerPool:
    """Buffers that the ranks of a group exchange through, used again and again.

    All ranks ask for the same sizes in the same order, so they find the same buffers.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self._module = torch.get_device_module(device)
        self._places: list[_Place] = []
        self._lent: dict[int, _Place] = {}
        self._exchanges = 0

    @property
    def bytes(self) -> int:
        """Of all buffers on this rank."""
        return sum(place.size for place in self._places)

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """This rank's own buffer, [count], to be written on the current stream; it goes back when the tensor goes."""
        size = count * dtype.itemsize
        place = resting(self._places, size, self._exchanges) or self._grow(size)
        if place.read is not None:
            self._module.current_stream().wait_event(place.read)
        tensor = place.buffer.of(self.group.rank())[:size].view(dtype)
        place.lent = True
        self._lent[tensor.data_ptr()] = place
        weakref.finalize(tensor, self._give_back, place).atexit = False
        return tensor

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """What each rank has in the buffer that `tensor` is here; to be read on the current stream, which has waited."""
        place = self._lent[tensor.data_ptr()]
        place.buffer.barrier()
        self._exchanges += 1
        for other in self._places:
            if other.exchange == self._exchanges - 1:
                other.read = self._module.current_stream().record_event()
        place.exchange, place.read = self._exchanges, None
        return self.everywhere(tensor)

    def everywhere(self, tensor: Tensor) -> list[Tensor]:
        """The buffer that `tensor` is here, of each rank. Nobody else uses it from the barrier before last on."""
        place = self._lent[tensor.data_ptr()]
        size = tensor.numel() * tensor.itemsize
        return [place.buffer.of(rank)[:size].view(tensor.dtype) for rank in range(self.group.size())]

    def _grow(self, size: int) -> _Place:
        place = _Place(peer_buffer_at_rest(aligned(size), self.device, self.group))
        self._places.append(place)
        return place

    def _give_back(self, place: _Place) -> None:
        # Whoever held the tensor has let the stream of the next writer wait for its last reader, as for any memory.
        place.lent = False


class PeerReduce:
    """What `compat_fsdp.Reduce` asks for: each rank copies its gradients to the ranks they belong to, which add them up."""

    def __init__(self, pool: PeerPool) -> None:
        self._pool = pool

    def __call__(self, gradients: Sequence[Tensor], total: Tensor) -> None:
        """See `compat_fsdp.Reduce`."""
        ranks, rank, n = self._pool.group.size(), self._pool.group.rank(), total.numel()
        rows = [math.ceil(gradient.shape[0] / ranks) for gradient in gradients]
        sizes = [count * gradient[0].numel() for count, gradient in zip(rows, gradients, strict=True)]
        assert sum(sizes) == n
        arrived = self._pool.take(ranks * n, gradients[0].dtype)
        buffers = self._pool.everywhere(arrived)
        small = Small()
        for peer in from_the_next(rank, ranks):
            places = buffers[peer][rank * n : (rank + 1) * n].split(sizes)
            for place, gradient, count in zip(places, gradients, rows, strict=True):
                part = gradient[peer * count : (peer + 1) * count].flatten()
                if not small.has(place[: part.numel()], part):
                    place.copy_(part, non_blocking=True)
        small.copy()
        self._pool.exchange(arrived)
        sum_parts(arrived.view(ranks, n), total)


class PeerCopies:
    """Both exchanges for the modules of one rank, over one group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, computed: torch.dtype) -> None:
        """computed: format that parameters are gathered in."""
        self._group, self._device, self._computed = group, device, computed
        self._published: list[PublishedShards] = []
        self._pool = PeerPool(group, device)
        self._reduce = PeerReduce(self._pool)

    @property
    def bytes(self) -> int:
        """What the buffers take on this rank, beside the allocator's memory."""
        return self._pool.bytes + sum(shards.bytes for shards in self._published)

    def attach(self, modules: Iterable[FSDPModule]) -> None:
        """Let `modules` exchange their parameters and gradients so; all ranks of the group together."""
        compat_fsdp.exchange_in_place(modules, self._publish, self._reduce)

    def _publish(self, units: list[list[int]]) -> list[PeerGather]:
        self._published.append(PublishedShards(units, self._computed, self._device, self._group))
        return self._published[-1].gathers

    def renew(self) -> None:
        """Masters have changed."""
        for shards in self._published:
            shards.renew()


def choose_peer_copies(run: Run, layout: ResolvedLayout, mesh: Mesh, device: torch.device) -> PeerCopies | None:
    """What `layout.peer.copies` asks for, for the shards of `mesh`; None where collectives do the work.

    Raises ConfigError where copies are asked for and the ranks cannot read each other's memory.
    """
    wanted, group = run.layout.peer_copies, mesh.shards.group
    if group is None or wanted is False or (wanted == "auto" and device.type == "cpu"):
        return None
    if not reaches_peers(device, group):
        if wanted == "auto":
            return None
        raise ConfigError(
            f"layout.peer_copies=true, but the {group.size()} ranks that share parameters cannot read each other's "
            "memory: they are on several machines, or their devices are not linked\nnearest: layout.peer_copies=auto"
        )
    return PeerCopies(group, device, PRECISIONS[run.layout.precision].compute_dtype)
