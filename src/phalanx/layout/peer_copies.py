"""FSDP2's gathers and reductions inside one machine as plain copies between its devices.

Collective kernels take compute units from the matmuls they run beside. Here devices read each other's memory by copy
engines instead, and gradients travel in the format they were computed in: bfloat16 values are exact in float32, so the
float32 sum of what arrives is the sum that a float32 reduction would have sent twice the bytes for. Sums are in the order
of the ranks, the same every time.

A buffer is read by the peers, so it may be written again only when all of them have read it. Each exchange begins with a
barrier, and a rank reaches it after its own reads of the exchange before; so a buffer is free one exchange after its own.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from phalanx.cluster.device import synchronize
from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.layout.mesh import Mesh
from phalanx.layout.peer_memory import PeerBuffer, peer_buffer, reaches_peers
from phalanx.layout.precision import PRECISIONS
from phalanx.layout.spec import ResolvedLayout

_ALIGNED = 512
"""Buffers are whole multiples of this many bytes."""


class Turn(Protocol):
    """A buffer of a pool, or one that is only thought of, and where it is in its round."""

    exchange: int
    """The last exchange it was used in; exchanges count from 1."""
    lent: bool

    @property
    def size(self) -> int:
        """Bytes."""


AnyTurn = TypeVar("AnyTurn", bound=Turn)


def resting(turns: Iterable[AnyTurn], size: int, exchanges: int) -> AnyTurn | None:
    """The smallest of `turns` that is large enough, not lent out, and not one the peers may still be reading after so many
    exchanges; of equal ones that which rests longest."""
    fitting = [x for x in turns if x.size >= size and not x.lent and not 0 < x.exchange == exchanges]
    return min(fitting, key=lambda x: (x.size, x.exchange), default=None)


def aligned(size: int) -> int:
    """Bytes of the buffer that is made for `size` bytes."""
    return max(1, math.ceil(size / _ALIGNED)) * _ALIGNED


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
        size = tensor.numel() * tensor.itemsize
        return [place.buffer.of(rank)[:size].view(tensor.dtype) for rank in range(self.group.size())]

    def _grow(self, size: int) -> _Place:
        # Memory is mapped while no device waits for another: mapping waits for the devices, and they would for ever.
        synchronize(self.device)
        dist.all_reduce(torch.zeros(1), group=self.group)
        place = _Place(peer_buffer(aligned(size), self.device, self.group))
        dist.all_reduce(torch.zeros(1), group=self.group)
        self._places.append(place)
        return place

    def _give_back(self, place: _Place) -> None:
        # Whoever held the tensor has let the stream of the next writer wait for its last reader, as for any memory.
        place.lent = False


class PeerAllGather:
    """FSDP2's all-gather: each rank reads the others' shards out of their memory."""

    def __init__(self, pool: PeerPool) -> None:
        self._pool = pool

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The gathered tensor, of which FSDP2 fills this rank's part."""
        assert device.type == self._pool.device.type
        return self._pool.take(math.prod(size), dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill the other ranks' parts of `output_tensor`, [world size * n], on the current stream."""
        assert not async_op
        assert group.size() == self._pool.group.size()
        n, rank = input_tensor.numel(), group.rank()
        theirs = self._pool.exchange(output_tensor)
        for peer in _others(rank, group.size()):
            part = slice(peer * n, (peer + 1) * n)
            output_tensor[part].copy_(theirs[peer][part], non_blocking=True)


class PeerReduceScatter:
    """FSDP2's reduce-scatter: each rank reads its part of the others' gradients, then adds them up."""

    def __init__(self, pool: PeerPool, sent: torch.dtype) -> None:
        self._pool = pool
        self._sent = sent
        self._inputs_asked = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks for the input, all gradients in `dtype`, then for the output: the input is made in what is sent."""
        self._inputs_asked ^= 1
        if self._inputs_asked:
            return self._pool.take(math.prod(size), self._sent)
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum of all ranks' parts of `input_tensor`, [world size * n], that are this rank's, in the output's format."""
        assert op == dist.ReduceOp.SUM and not async_op
        n, rank = output_tensor.numel(), group.rank()
        part = slice(rank * n, (rank + 1) * n)
        theirs = self._pool.exchange(input_tensor)
        received = torch.empty((group.size(), n), dtype=input_tensor.dtype, device=input_tensor.device)
        for peer in [*_others(rank, group.size()), rank]:
            received[peer].copy_(theirs[peer][part], non_blocking=True)
        torch.sum(received, 0, dtype=output_tensor.dtype, out=output_tensor)


class PeerCopies:
    """Both exchanges for the modules of one rank, over one group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, sent: torch.dtype) -> None:
        self._pools = [PeerPool(group, device), PeerPool(group, device)]
        self._all_gather = PeerAllGather(self._pools[0])
        self._reduce_scatter = PeerReduceScatter(self._pools[1], sent)

    @property
    def bytes(self) -> int:
        """What the buffers take on this rank, beside the allocator's memory."""
        return sum(pool.bytes for pool in self._pools)

    def attach(self, module: FSDPModule) -> None:
        """Let `module` exchange its parameters and gradients so."""
        module.set_custom_all_gather(self._all_gather)  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(self._reduce_scatter)  # type: ignore[arg-type]


def choose_peer_copies(run: Run, layout: ResolvedLayout, mesh: Mesh, device: torch.device) -> PeerCopies | None:
    """What `layout.peer_copies` asks for, for the shards of `mesh`; None where collectives do the work.

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
    computed = PRECISIONS[run.layout.precision]
    # Gradients that were added up over micro-batches before they are sent are in the wider format.
    summed = layout.accumulation > 1 and (layout.zero < 2 or layout.pp > 1)
    return PeerCopies(group, device, torch.promote_types(computed, torch.float32) if summed else computed)


def _others(rank: int, size: int) -> list[int]:
    """All ranks but this one, from the next one on: no two ranks read from the same one at the same time."""
    return [(rank + step) % size for step in range(1, size)]
