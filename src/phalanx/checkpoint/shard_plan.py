"""Which rank writes which part of which tensor, and which stored chunks a rank reads to fill its part.

The planners of torch's distributed checkpoint (DCP) decide. Its `save` and `load` are not used: they send the whole table of
contents to every rank after a save, gather every rank's reads on rank 0 although nothing is decided there, and raise errors
that are no `Exception`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from phalanx.checkpoint.manifest import DTYPES, Chunk, TensorRecord, TensorShape, check_tensor_name, count_bytes
from phalanx.checkpoint.rank_group import RankGroup
from phalanx.errors import CheckpointError
from phalanx.layout.place import Place, as_place

MAX_CHUNK_BYTES = 1 << 26
"""Larger shards are cut, so that a rank that needs a part of a shard reads and verifies little more than that part."""

SavedTensors = Mapping[str, Tensor | Place]
"""What to save or to load into, by name: a plain tensor (alike on all ranks that have it), a DTensor, or a part."""


@dataclass(frozen=True)
class Piece:
    """Part of a tensor that this rank writes: `sizes` elements a dim, the first at `offsets` of the whole tensor."""

    name: str
    key: str
    """Name of the piece within its safetensors file."""
    offsets: list[int]
    sizes: list[int]
    source: Tensor
    """The elements, on any device, perhaps strided; still the caller's memory."""

    @property
    def bytes(self) -> int:
        """Bytes to write."""
        return count_bytes(self.sizes, self.source.dtype)


class SavePlanner:
    """Plans saves, and keeps the plan for as long as no rank's tensors change name, dtype, shape or sharding.

    Planning costs rank 0 time and memory for each tensor of each rank; a kept plan costs one small exchange a save.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._planned_for: list[tuple[Any, ...]] | None = None
        self._items: list[WriteItem] = []
        self.shapes: list[TensorShape] = []
        """Every tensor of the checkpoint; on rank 0 only."""

    def plan_save(self, tensors: SavedTensors) -> list[Piece]:
        """Return what this rank writes. Parts that several ranks hold alike are divided among them.

        Raises CheckpointError, on all ranks, when a tensor of any rank cannot be saved.
        """
        refusals = ((name, _why_unsaveable(name, tensor)) for name, tensor in tensors.items())
        refusal = next((f"tensor {name!r} cannot be saved: {why}" for name, why in refusals if why), None)
        self._ranks.agree(CheckpointError(refusal) if refusal else None)
        places = {name: as_place(tensor) for name, tensor in tensors.items()}
        # Names, formats, shapes and places: all that a plan depends on. Values change every step.
        layout = [(name, p.local.dtype, p.shape, p.offsets, p.local.shape) for name, p in places.items()]
        changed = torch.tensor([layout != self._planned_for], dtype=torch.uint8)
        if self._ranks.any(changed).item():
            # Forgotten first, so that a plan that fails half-way is made anew by all ranks.
            self._planned_for = None
            # An empty shard begins where the next part of the tensor does, and DCP takes shards that begin alike for copies.
            self._agree_on_plan(
                [
                    _write_item(name, place)
                    for name, place in places.items()
                    if place.local.numel() > 0 or math.prod(place.shape) == 0
                ]
            )
            self._planned_for = layout
        return [piece for item in self._items for piece in _cut_pieces(item, places)]

    def _agree_on_plan(self, items: list[WriteItem]) -> None:
        # Names here are flat already, and tensors are plain: none of DCP's flattening is wanted.
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        # Rank 0 alone sees every rank's shards: it decides who writes what several ranks hold alike.
        local_plans = self._ranks.gather(SavePlan(items))
        decided = self._ranks.on_first(lambda: planner.create_global_plan(local_plans))
        plans, metadata = decided if decided is not None else ([], Metadata({}))
        self._items = planner.finish_plan(self._ranks.scatter(plans)).items
        self.shapes = [
            TensorShape(name, describe_dtype(entry.properties.dtype), list(entry.size))
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        ]


def describe_dtype(dtype: torch.dtype) -> str:
    """Return the name that a manifest has for `dtype`."""
    return str(dtype).removeprefix("torch.")


def _why_unsaveable(name: str, saved: Tensor | Place) -> str | None:
    """Return why a tensor cannot be saved, or None."""
    try:
        check_tensor_name(name)
    except ValueError as error:
        return str(error)
    tensor: object = saved.local if isinstance(saved, Place) else saved
    if not isinstance(tensor, Tensor):
        return f"it is a {type(tensor).__name__}; put what is not a tensor into the state"
    if tensor.dtype not in DTYPES.values():
        return f"dtype {tensor.dtype} has no place in a safetensors file"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; make it dense"
    if tensor.device.type == "meta":
        return "it is on the meta device and has no values"
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        return f"its placements {tensor.placements} hold a sum not yet made; redistribute it first"
    return None


def _write_item(name: str, place: Place) -> WriteItem:
    offsets = torch.Size(place.offsets)
    chunk = ChunkStorageMetadata(offsets, place.local.size())
    properties = TensorProperties.create_from_tensor(place.local)
    data = TensorWriteData(chunk, properties, torch.Size(place.shape))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def _cut_pieces(item: WriteItem, places: dict[str, Place]) -> Iterator[Piece]:
    """Cut one shard along its first long dim into pieces of at most MAX_CHUNK_BYTES, or of one row."""
    source = places[item.index.fqn].local.detach()
    assert item.tensor_data is not None
    offsets, sizes = list(item.tensor_data.chunk.offsets), list(item.tensor_data.chunk.sizes)
    if 0 in sizes:
        return
    name, whole = item.index.fqn, sizes == list(item.tensor_data.size)
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    total = count_bytes(sizes, source.dtype)
    if dim is None or total <= MAX_CHUNK_BYTES:
        # A tensor in one piece keeps its plain name, so that any safetensors reader finds it.
        yield Piece(name, name if whole else _piece_key(name, offsets), offsets, sizes, source)
        return
    # Rows of the first long dim lie together in the file: each piece is one contiguous chunk.
    rows = max(1, MAX_CHUNK_BYTES // (total // sizes[dim]))
    for first in range(0, sizes[dim], rows):
        count = min(rows, sizes[dim] - first)
        piece_offsets = [*offsets[:dim], offsets[dim] + first, *offsets[dim + 1 :]]
        piece_sizes = [*sizes[:dim], count, *sizes[dim + 1 :]]
        yield Piece(name, _piece_key(name, piece_offsets), piece_offsets, piece_sizes, source.narrow(dim, first, count))


def _piece_key(name: str, offsets: list[int]) -> str:
    return f"{name}@{','.join(map(str, offsets))}"


@dataclass(frozen=True)
class Copy:
    """Elements to copy from a stored chunk into a tensor of the caller, once the chunk is read."""

    starts: list[int]
    """First element a dim, within the chunk."""
    sizes: list[int]
    target: Tensor
    """Where the elements go: a view of the caller's local memory."""


@dataclass(frozen=True)
class ChunkRead:
    """A stored chunk to read, and what to copy out of it."""

    tensor: TensorRecord
    chunk: Chunk
    copies: list[Copy]


def plan_load(records: Sequence[TensorRecord], tensors: SavedTensors) -> list[ChunkRead]:
    """Return the chunks that this rank has to read to fill its part of `tensors`, each once.

    Every name in `tensors` must have its record, of the same global shape and dtype.
    """
    filled = {record.name: record for record in records if math.prod(record.shape)}
    reads: dict[tuple[str, tuple[int, ...]], ChunkRead] = {}
    for name, tensor in tensors.items():
        if name not in filled:
            continue
        place, record = as_place(tensor), filled[name]
        # DCP names a stored chunk by where it begins, which is unique: chunks do not overlap.
        chunks = {tuple(chunk.offsets): chunk for chunk in record.chunks}
        stored = TensorStorageMetadata(
            TensorProperties(dtype=record.torch_dtype),
            torch.Size(record.shape),
            [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in record.chunks],
        )
        own = ChunkStorageMetadata(torch.Size(place.offsets), place.local.size())
        for item in create_read_items_for_chunk_list(name, stored, [own]):
            assert item.storage_index.offset is not None
            target = place.local.detach()
            for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                target = target.narrow(dim, start, length)
            offsets = tuple(item.storage_index.offset)
            read = reads.setdefault((name, offsets), ChunkRead(record, chunks[offsets], []))
            read.copies.append(Copy(list(item.storage_offsets), list(item.lengths), target))
    return list(reads.values())
