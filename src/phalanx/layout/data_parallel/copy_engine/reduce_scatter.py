"""Reduce-scatter of gradients inside one machine: every rank copies its gradients to their owners, which add them up.

Gradients travel in the format they were computed in: bfloat16 values are exact in float32, so the float32 sum of what
arrives is the sum that a float32 reduction would have sent twice the bytes for. Sums are in the order of the ranks, always
the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from phalanx.kernels.parts_sum import sum_parts
from phalanx.layout.data_parallel.copy_engine.buffer_pool import BufferPool
from phalanx.layout.data_parallel.copy_engine.peer_memory import SmallCopies, peers_from_next


class CopyEngineReduceScatter:
    """A `compat_fsdp.Reduce`: each rank copies its gradients to the ranks that own them, which add them up."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def __call__(self, gradients: Sequence[Tensor], total: Tensor) -> None:
        """See `compat_fsdp.Reduce`."""
        # FSDP2 cuts rows into equal parts and pads the last ones; padding is neither sent nor looked at.
        ranks, rank, n = self._pool.group.size(), self._pool.group.rank(), total.numel()
        rows = [math.ceil(gradient.shape[0] / ranks) for gradient in gradients]
        sizes = [count * gradient[0].numel() for count, gradient in zip(rows, gradients, strict=True)]
        assert sum(sizes) == n
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
        self._pool.exchange(arrived)
        sum_parts(arrived.view(ranks, n), total)
