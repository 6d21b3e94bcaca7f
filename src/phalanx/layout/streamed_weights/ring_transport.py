"""How the chunks of streamed pairs travel, and how their gradients come home: point to point, nobody waits for an owner.

Weights go round a ring. Every rank begins with its own chunk, so nothing has to arrive before the first product; while it
computes with chunk k it sends k to the rank behind it and receives k + 1 from the rank ahead, and holds no third. Gradients
go straight from where they were computed to the owners, in the format they were computed in, which is exact in the owners'
wider sums. In every step each rank sends as much as it receives, and no two ranks send to the same one.

On accelerators the backend runs all this on a stream of its own; `wait` lets the present stream wait, not the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.copy_stream import Copies, CopyStream
from phalanx.layout.data_parallel.peer_memory import BufferPool
from phalanx.layout.mesh import Axis
from phalanx.layout.streamed_weights.chunk_plan import ChunkPlan, Span


@dataclass
class Transfer:
    """Messages under way, and the memory they read and write."""

    works: list[dist.Work] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until all has arrived and all that was sent may be written again."""
        for work in self.works:
            work.wait()
        self.tensors.clear()


@dataclass
class Arrivals:
    """Gradients of this rank's piece that other ranks are sending."""

    transfer: Transfer | Copies
    received: list[Tensor]
    add: Callable[[Tensor], None]

    def wait(self) -> None:
        """Wait until they are here, and add them up."""
        self.transfer.wait()
        for piece in self.received:
            self.add(piece)


class WeightRing:
    """Exchanges among the ranks that share pairs."""

    def __init__(self, shards: Axis) -> None:
        self.shards = shards
        self.largest = 0
        """Elements of the largest chunk of any pair."""
        self._unfinished: Arrivals | None = None

    @property
    def bytes(self) -> int:
        """Bytes of buffers beside the allocator's memory."""
        return 0

    def expect(self, plan: ChunkPlan) -> None:
        """Make room for the chunks of one more pair."""
        self.largest = max(self.largest, plan.largest_chunk)

    def weights(self, count: int, like: Tensor) -> Tensor:
        """Return a buffer for `count` elements of weights, or more. Every gathered weight lies in one of these."""
        return torch.empty(count, dtype=like.dtype, device=like.device)

    def gradients(self, count: int, like: Tensor) -> Tensor:
        """Return a buffer for `count` elements of a chunk's gradients, or more."""
        return torch.empty(count, dtype=like.dtype, device=like.device)

    def chunks(self, plan: ChunkPlan, piece: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield all chunks of a pair from this rank's own on: step, number, and elements. `piece`, flat, is this rank's.

        What is yielded is this rank's until it asks for the next.
        """
        own, rank = self.shards.rank // plan.group, self.shards.rank
        present = self._own_chunk(plan, piece)
        # Copied into the chunk, or the chunk itself: this name must not keep its memory to the end of the tour.
        del piece
        for step in range(plan.chunks):
            number = (own + step) % plan.chunks
            transfer, following = Transfer(), None
            if step + 1 < plan.chunks:
                # It travels while the caller computes with the present one.
                following = self.weights(plan.chunk_size((number + 1) % plan.chunks), present)
                ahead, behind = (rank + plan.group) % plan.ranks, (rank - plan.group) % plan.ranks
                transfer = self._start([(behind, present)], [(ahead, following)])
            yield step, number, present
            transfer.wait()
            if following is not None:
                present = following

    def reduce(self, plan: ChunkPlan, step: int, number: int, gradients: Tensor, add: Callable[[Tensor], None]) -> None:
        """Send the gradients of chunk `number`, flat, to those who hold its pieces; add what comes for this rank's.

        add: takes gradients of this rank's piece, flat. What arrives is added by `finish`, to be called before the next.
        """
        assert self._unfinished is None
        rank, owners = self.shards.rank, range(number * plan.group, (number + 1) * plan.group)
        # Whoever computes with this rank's own chunk in this step has gradients of its piece.
        sources = self._computing(plan, step)
        sent = [
            (owner, part)
            for owner in owners
            if owner != rank
            for part in parts_of(gradients, plan.spans_in_chunk(owner))
        ]
        received = [(source, gradients.new_empty(plan.piece_size(rank))) for source in sources]
        spans = plan.spans_in_piece(rank)
        expected = [(source, part) for source, buffer in received for part in parts_of(buffer, spans)]
        # Waited for in `finish`: they travel while the next chunk is computed with.
        transfer = self._start(sent, expected)
        self._add_own(plan, number, gradients, add)
        self._unfinished = Arrivals(transfer, [buffer for _, buffer in received], add)

    def finish(self) -> None:
        """Wait for the gradients that are still under way."""
        if self._unfinished is not None:
            self._unfinished.wait()
            self._unfinished = None

    def _computing(self, plan: ChunkPlan, step: int) -> list[int]:
        """Return the other ranks that have this rank's own chunk in this step."""
        first = (self.shards.rank // plan.group - step) % plan.chunks * plan.group
        return [rank for rank in range(first, first + plan.group) if rank != self.shards.rank]

    def _add_own(self, plan: ChunkPlan, number: int, gradients: Tensor, add: Callable[[Tensor], None]) -> None:
        """Add what a chunk's gradients hold of this rank's piece."""
        rank = self.shards.rank
        if rank // plan.group == number:
            mine = parts_of(gradients, plan.spans_in_chunk(rank))
            add(mine[0] if len(mine) == 1 else torch.cat([*mine, gradients[:0]]))

    def _own_chunk(self, plan: ChunkPlan, piece: Tensor) -> Tensor:
        """Return the chunk that this rank holds a piece of, from all that do."""
        rank = self.shards.rank
        if plan.group == 1:
            return piece
        number = rank // plan.group
        chunk = self.weights(plan.chunk_size(number), piece)
        sent: list[tuple[int, Tensor]] = []
        received: list[tuple[int, Tensor]] = []
        mine = parts_of(piece, plan.spans_in_piece(rank))
        # Ranks that hold a chunk together each need all of it: every one sends its piece to every other.
        for other in range(number * plan.group, (number + 1) * plan.group):
            places = parts_of(chunk, plan.spans_in_chunk(other))
            if other == rank:
                for place, part in zip(places, mine, strict=True):
                    place.copy_(part)
            else:
                sent += [(other, part) for part in mine]
                received += [(other, place) for place in places]
        self._start(sent, received).wait()
        return chunk

    def _start(self, sent: list[tuple[int, Tensor]], received: list[tuple[int, Tensor]]) -> Transfer:
        """Start messages to and from ranks of the group, in an order that sender and receiver agree on."""
        group = self.shards.group
        operations = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for peer, x in sent]
        operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for peer, x in received]
        if not operations:
            return Transfer()
        return Transfer(dist.batch_isend_irecv(operations), [x for _, x in (*sent, *received)])


def parts_of(flat: Tensor, spans: list[Span]) -> list[Tensor]:
    """Return views of these spans."""
    return [flat[start : start + length] for start, length in spans]


class CopyEngineRing(WeightRing):
    """The ring as copies between devices, all in buffers as large as the largest chunk of any pair: ranks must ask alike."""

    def __init__(self, shards: Axis, device: torch.device) -> None:
        super().__init__(shards)
        assert shards.group is not None
        self._weights = BufferPool(shards.group, device)
        self._gradients = BufferPool(shards.group, device)
        self._copies = CopyStream(device)

    @property
    def bytes(self) -> int:
        """Bytes of the buffers on this rank, beside the allocator's memory."""
        return self._weights.bytes + self._gradients.bytes

    def weights(self, count: int, like: Tensor) -> Tensor:
        """Lend a buffer that peers can read."""
        return self._weights.take(self.largest, like.dtype)

    def gradients(self, count: int, like: Tensor) -> Tensor:
        """Lend a buffer that peers can read."""
        return self._gradients.take(self.largest, like.dtype)

    def chunks(self, plan: ChunkPlan, piece: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield all chunks of a pair, as `WeightRing` does; each is copied from the rank ahead while one computes."""
        own, rank = self.shards.rank // plan.group, self.shards.rank
        present = self._own_chunk(plan, piece)
        del piece
        for step in range(plan.chunks):
            number = (own + step) % plan.chunks
            following, arrived = None, None
            if step + 1 < plan.chunks:
                with self._copies.behind_present() as done:
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
        """Let the owners copy the gradients of chunk `number`; these lie in a buffer that `gradients` has lent."""
        assert self._unfinished is None
        rank = self.shards.rank
        size = plan.piece_size(rank)
        with self._copies.behind_present() as done:
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
        with self._copies.behind_present() as done:
            theirs = self._weights.exchange(piece)
            chunk = self._weights.take(self.largest, piece.dtype)
            for other in range(number * plan.group, (number + 1) * plan.group):
                places = parts_of(chunk, plan.spans_in_chunk(other))
                for place, part in zip(places, parts_of(theirs[other], plan.spans_in_piece(other)), strict=True):
                    place.copy_(part, non_blocking=True)
        done.wait()
        return chunk
