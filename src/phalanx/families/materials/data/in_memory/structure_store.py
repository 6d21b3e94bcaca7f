"""All structures of a run in the memory of its ranks: each holds a part, and gets from the others what its batches need.

Which structures a step holds, and which rank gets which of them, every rank knows in advance. So nobody asks for anything:
in each step every rank sends each other one what that one needs of its part, in one all-to-all exchange of a group of its
own, in the thread that reads ahead.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from phalanx.errors import ConfigError, PhalanxError
from phalanx.families.materials.data.array_files import Int64Array
from phalanx.families.materials.data.graph_batches import ShardRows
from phalanx.families.materials.data.graph_shards import Located, PreparedSource
from phalanx.families.materials.data.in_memory.held_structures import (
    Bytes,
    Fields,
    HeldStructures,
    held_rows,
    join_fields,
    packed_bytes,
    shard_fields,
    structure_bytes,
    unpack,
)
from phalanx.formatting import format_gibibytes
from phalanx.hardware.host import available_memory
from phalanx.printable import write_stderr
from phalanx.torch_compat.process_groups import new_group

_USABLE = 0.9
"""Share of the memory that a host has free which structures may take: batches and training need some too."""
T = TypeVar("T")


class StructureStore:
    """One copy of several sources over the ranks of a group."""

    def __init__(
        self,
        sources: Sequence[PreparedSource],
        *,
        reader: int,
        ranks: int | None = None,
        held_out: Sequence[tuple[PreparedSource, Int64Array]] = (),
    ) -> None:
        """Read this rank's part; every rank of the run calls it.

        reader: number of the share of each global batch that this rank reads; several ranks may read the same. ranks: of
        the default group, neighbours, that hold one copy together; None takes all. held_out: items of another split of each
        source, ascending, that this rank reads again and again: they are held here, whole.

        Raises ConfigError where the ranks of a host would need more memory than it has, or `ranks` does not divide them.
        """
        self._sources = list(sources)
        world = dist.get_world_size() if dist.is_initialized() else 1
        width = ranks or world
        if world % width:
            raise ConfigError(
                f"data.store_ranks={width} does not divide the {world} ranks of this run; set it to a divisor, or to null "
                "for one copy over all of them"
            )
        first = dist.get_rank() // width * width if world > 1 else 0
        self._group = new_group(list(range(first, first + width)), "structure store") if width > 1 else None
        self._rank = dist.get_rank() - first if width > 1 else 0
        self._width = width
        self.readers = self._gather(reader)
        """The share of each global batch that each rank of the group reads."""
        self._fields = self._agree_on_fields()
        for source in sources:
            source.hold_index()
        self._bounds, sizes = zip(*(self._divide(number) for number in range(len(sources))), strict=True)
        beside = sum(
            int(structure_bytes(fields, *source.sizes(items)).sum())
            for fields, (source, items) in zip(self._fields, held_out, strict=False)
        )
        self.bytes = sum(sizes) + beside + sum(source.index_bytes for source in sources)
        """Memory that this rank's structures and the index take."""
        self._require_memory(world)
        self._held = [
            HeldStructures(source, np.arange(*bounds[self._rank : self._rank + 2], dtype=np.int64), fields)
            for source, bounds, fields in zip(sources, self._bounds, self._fields, strict=True)
        ]
        self.held_out = [
            HeldStructures(source, items, fields)
            for fields, (source, items) in zip(self._fields, held_out, strict=False)
        ]
        """By source."""

    def fetch(self, found: Located, wanted: Sequence[Int64Array]) -> Iterator[ShardRows]:
        """Yield where the structures of this rank's batch are once the exchange is done. Every rank of the group calls it.

        found: the global batch. wanted: places in it of what each rank of the group needs, in the order of its batch.
        Raises PhalanxError where a rank is gone or silent.
        """
        owner = np.empty(len(found.numbers), dtype=np.int64)
        for number, bounds in enumerate(self._bounds):
            mine = found.source == number
            owner[mine] = np.searchsorted(bounds, found.item[mine], side="right") - 1
        batch = wanted[self._rank]
        located, owner_G = found.take(batch), owner[batch]
        received = self._exchange(found, owner, wanted)
        yield from held_rows(self._held, located, np.flatnonzero(owner_G == self._rank))
        for rank, content in received:
            start = 0
            for number, fields in enumerate(self._fields):
                graphs = np.flatnonzero((owner_G == rank) & (located.source == number))
                if graphs.size:
                    atoms, edges = located.atoms[graphs], located.edges[graphs]
                    stop = start + packed_bytes(fields, atoms, edges)
                    arrays = unpack(content[start:stop], fields, atoms, edges)
                    yield ShardRows(number, arrays, np.arange(len(graphs)), graphs)
                    start = stop

    def _exchange(self, found: Located, owner: Int64Array, wanted: Sequence[Int64Array]) -> Iterator[tuple[int, Bytes]]:
        """Return what each other rank of the group sends this one."""
        if self._group is None:
            return iter(())
        parts: list[Bytes] = []
        send, receive = [0] * self._width, [0] * self._width
        for rank, rows in enumerate(wanted):
            # What a rank holds itself needs no way.
            if rank == self._rank:
                continue
            before = len(parts)
            for number, fields in enumerate(self._fields):
                given = rows[(owner[rows] == self._rank) & (found.source[rows] == number)]
                if given.size:
                    parts += self._held[number].pack(found.item[given], fields)
                batch = wanted[self._rank]
                taken = batch[(owner[batch] == rank) & (found.source[batch] == number)]
                if taken.size:
                    receive[rank] += packed_bytes(fields, found.atoms[taken], found.edges[taken])
            send[rank] = sum(len(part) for part in parts[before:])
        sent = torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.uint8))
        received = torch.empty(sum(receive), dtype=torch.uint8)
        try:
            dist.all_to_all_single(received, sent, receive, send, group=self._group)
        except RuntimeError as error:
            raise PhalanxError(
                f"contact with another rank was lost while structures were exchanged (data.store=memory): {error}"
            ) from error
        contents = np.split(received.numpy(), np.cumsum(receive)[:-1])
        return ((rank, content) for rank, content in enumerate(contents) if rank != self._rank)

    def _agree_on_fields(self) -> list[Fields]:
        """Return the fields of each source; every rank looks at some of the shards, of which it reads the header alone."""
        mine = []
        for source in self._sources:
            numbers = range(self._rank, len(source.manifest.shards), self._width)
            mine.append(join_fields([shard_fields(source.shard(number)) for number in numbers]))
            source.close_shards()
        return [join_fields(fields) for fields in zip(*self._gather(mine), strict=True)]

    def _divide(self, number: int) -> tuple[Int64Array, int]:
        """Return where each rank's items of a source begin and the last one's end [R+1], and the bytes of this rank's.

        Parts are runs of items of equal size in memory, so that files are read from end to end.
        """
        source = self._sources[number]
        ends = np.cumsum(structure_bytes(self._fields[number], *source.sizes(np.arange(len(source), dtype=np.int64))))
        targets = [int(ends[-1]) * rank // self._width for rank in range(1, self._width)]
        bounds = np.concatenate(([0], np.searchsorted(ends, targets), [len(source)])).astype(np.int64)
        before, until = np.concatenate(([0], ends))[bounds[self._rank : self._rank + 2]].tolist()
        return bounds, until - before

    def _require_memory(self, world: int) -> None:
        """Say what memory structures take, or raise ConfigError, on all ranks, where a host has less."""
        needs: list[tuple[str, int, int | None]] = [(socket.gethostname(), self.bytes, available_memory())]
        if world > 1:
            # Other groups may have ranks on this host.
            gathered: list[tuple[str, int, int | None]] = [needs[0]] * world
            dist.all_gather_object(gathered, needs[0])
            needs = gathered
        if world == 1 or dist.get_rank() == 0:
            write_stderr(
                f"data.store=memory: structures take up to {format_gibibytes(max(need for _, need, _ in needs), 2)} GiB in "
                f"each of {world} ranks"
            )
        for host in dict.fromkeys(name for name, _, _ in needs):
            needed = [need for name, need, _ in needs if name == host]
            there = [free for name, _, free in needs if name == host and free is not None]
            if there and sum(needed) > _USABLE * min(there):
                raise ConfigError(
                    f"data.store=memory takes {format_gibibytes(sum(needed), 2)} GiB for {len(needed)} ranks of {host}, "
                    f"which has {format_gibibytes(min(there), 2)} GiB free; set data.store=files, or hold a copy over more "
                    f"ranks of more hosts (data.store_ranks={self._width})"
                )

    def _gather(self, value: T) -> list[T]:
        """Return the value of each rank of the group."""
        values = [value] * self._width
        if self._group is not None:
            dist.all_gather_object(values, value, group=self._group)
        return values
