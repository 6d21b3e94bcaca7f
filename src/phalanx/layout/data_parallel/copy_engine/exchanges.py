"""FSDP2's all-gather and reduce-scatter inside one machine, made by copy engines.

Collective kernels take compute units from the matmuls they run beside. Here devices read each other's memory by copy
engines instead. Parameters arrive where they are used (`all_gather`), and gradients leave from where they are
(`reduce_scatter`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from phalanx.errors import ConfigError
from phalanx.layout.data_parallel.copy_engine.all_gather import CopyEngineAllGather, PublishedShards
from phalanx.layout.data_parallel.copy_engine.buffer_pool import BufferPool
from phalanx.layout.data_parallel.copy_engine.peer_memory import reaches_peers
from phalanx.layout.data_parallel.copy_engine.reduce_scatter import CopyEngineReduceScatter
from phalanx.torch_compat import fsdp as compat_fsdp


class CopyEngine:
    """Both exchanges for the modules of one rank, over one group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: format that parameters are gathered in."""
        self._group, self._device, self._dtype = group, device, dtype
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

    def _publish(self, units: list[list[int]]) -> list[CopyEngineAllGather]:
        self._published.append(PublishedShards(units, self._dtype, self._device, self._group))
        return self._published[-1].gathers

    def renew(self) -> None:
        """Publish the main parameters anew before the next gather, because they have changed."""
        for shards in self._published:
            shards.renew()


def choose_copy_engine(
    wanted: bool | Literal["auto"], group: dist.ProcessGroup | None, device: torch.device, dtype: torch.dtype
) -> CopyEngine | None:
    """Return what `layout.peer_copies`, `wanted`, asks for among the shards of `group`; None: collectives do the work.

    dtype: format that parameters are gathered in. All ranks of the group call it together. Raises ConfigError where copies
    are asked for and the ranks cannot read each other's memory.
    """
    if group is None or wanted is False or (wanted == "auto" and device.type == "cpu"):
        return None
    if not reaches_peers(device, group):
        if wanted == "auto":
            return None
        raise ConfigError(
            f"layout.peer_copies=true, but the {group.size()} ranks that share parameters cannot read each other's "
            "memory: they are on several machines, or their devices are not linked\nnearest: layout.peer_copies=auto"
        )
    return CopyEngine(group, device, dtype)
