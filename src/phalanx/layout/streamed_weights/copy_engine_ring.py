"""The exchanges of streamed pairs as copies between the devices of one machine: no compute unit is taken from the matmuls.

The same ring as `ring_transport`, through buffers that the ranks can read of each other (`data_parallel.copy_engine`). All
of it runs on a stream of its own, in which barriers wait for the slowest rank while this rank's matmuls go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx.layout.data_parallel.copy_engine.buffer_pool import BufferPool
from phalanx.layout.mesh import Axis
from phalanx.layout.streamed_weights.chunk_plan import ChunkPlan
from phalanx.layout.streamed_weights.ring_transport import Arrivals, Transfer, WeightRing, parts_of


class CopyEngineRing(WeightRing):
    """See `WeightRing`. Ranks must ask for buffers of the same size: all are as large as the largest chunk of any pair."""

    def __init__(self, shards: Axis, device: torch.device) -> None:
        super().__init__(shards)
        assert shards.group is not None
        self._weights = BufferPool(shards.group, device)
        self._gradients = BufferPool(shards.group, device)
        self._beside = None if device.type == "cpu" else torch.Stream(device)

    @property
    def bytes(self) -> int:
        """Bytes of the buffers on this rank, beside the allocator's memory."""
        return self._weights.bytes + self._gradients.bytes

    def weights(self, count: int, like: Tensor) -> Tensor:
        """See `WeightRing`."""
        return self._weights.take(self.largest, like.dtype)

    def gradients(self, count: int, like: Tensor) -> Tensor:
        """See `WeightRing`."""
        return self._gradients.take(self.largest, like.dtype)

    def chunks(self, plan: ChunkPlan, piece: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """See `WeightRing`."""
        own, rank = self.shards.rank // plan.group, self.shards.rank
        present = self._own_chunk(plan, piece)
        del piece
        for step in range(plan.chunks):
            number = (own + step) % plan.chunks
            following, arrived = None, None
            if step + 1 < plan.chunks:
                with self._on_its_stream() as done:
                    # Asked for after the barrier: by then nobody reads the chunk before this one any more.
                    theirs = self._weights.exchange(present)[(rank + plan.group) % plan.ranks]
                    following = self._weights.take(self.largest, present.dtype)
                    size = plan.chunk_size((number + 1) % plan.chunks)
                    following[:size].copy_(theirs[:size], non_blocking=True)
                arrived = done
            yield step, number, present
            if following is not None and arrived is not None:
                arrived.wait()
                present = following

    def reduce(self, plan: ChunkPlan, step: int, number: int, gradients: Tensor, add: Callable[[Tensor], None]) -> None:
        """See `WeightRing`. `gradients` come from `gradients`."""
        assert self._unfinished is None
        rank = self.shards.rank
        size = plan.piece_size(rank)
        with self._on_its_stream() as done:
            theirs = self._gradients.exchange(gradients)
            received = []
            for source in self._computing(plan, step):
                buffer = torch.empty(size, dtype=gradients.dtype, device=gradients.device)
                places = parts_of(buffer, plan.spans_in_piece(rank))
                for place, part in zip(places, parts_of(theirs[source], plan.spans_in_chunk(rank)), strict=True):
                    place.copy_(part, non_blocking=True)
                received.append(buffer)
        self._add_own(plan, number, gradients, add)
        self._unfinished = Arrivals(done, received, add)

    def _own_chunk(self, plan: ChunkPlan, piece: Tensor) -> Tensor:
        if plan.group == 1:
            return piece
        number = self.shards.rank // plan.group
        with self._on_its_stream() as done:
            theirs = self._weights.exchange(piece)
            chunk = self._weights.take(self.largest, piece.dtype)
            for other in range(number * plan.group, (number + 1) * plan.group):
                places = parts_of(chunk, plan.spans_in_chunk(other))
                for place, part in zip(places, parts_of(theirs[other], plan.spans_in_piece(other)), strict=True):
                    place.copy_(part, non_blocking=True)
        done.wait()
        return chunk

    @contextmanager
    def _on_its_stream(self) -> Iterator[Transfer]:
        """Run what is inside on the side stream, behind all that was begun so far; the result waits for it."""
        done = _Copies()
        if self._beside is None:
            yield done
            return
        self._beside.wait_stream(torch.accelerator.current_stream())
        with self._beside:
            yield done
            done.event = self._beside.record_event()


class _Copies(Transfer):
    """Copies on the side stream."""

    event: torch.Event | None = None

    def wait(self) -> None:
        """Let the present stream wait for them."""
        if self.event is not None:
            torch.accelerator.current_stream().wait_event(self.event)
