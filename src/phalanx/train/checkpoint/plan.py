"""Which rank writes which part of which tensor: the planners of torch's distributed checkpoint (DCP) decide.

Only DCP's planners are used, not its `save` and `load`: those send the whole table of contents to every rank after a
save, gather every rank's reads on rank 0 although nothing is decided there, and raise errors that are no `Exception`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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

from phalanx.errors import CheckpointError
from phalanx.layout.place import Place, as_place
from phalanx.train.checkpoint.manifest import DTYPES, Chunk, TensorRecord, TensorShape, check_tensor_name, nbytes
from phalanx.train.checkpoint.rank_group import RankGroup

MAX_CHUNK_BYTES = 1 << 26
"""Larger shards are cut, so that a rank that needs a part of a shard reads and verifies little more than that part."""


SavedTensors = Mapping[str, Tensor | Place]
"""What to save or to load into, by name: tensors plain (alike on all ranks that have them) or DTensor, or parts of any."""


@dataclass(frozen=True)
class Piece:
    """Part of a tensor that this rank writes: `sizes` elements a dim, the first at `offsets` of the whole tensor."""

    name: str
    key: str
    offsets: list[int]
    sizes: list[int]
    source: Tensor
    """The elements, on any device, maybe strided; still the caller's memory."""

    @property
    def bytes(self) -> int:
        """Bytes to write."""
        return nbytes(self.sizes, self.source.dtype)


class SavePlanning:
    """Plans saves, and keeps the plan for as long as no rank's tensors change name, dtype, shape or sharding.

    Planning costs rank 0 time and memory for each tensor of each rank; keeping the plan leaves one small exchange a save.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._signature: tuple[Any, ...] | None = None
        self._items: list[WriteItem] = []
        self.shapes: list[TensorShape] = []
        """Every tensor of the checkpoint; on rank 0 only."""

    def plan(self, tensors: SavedTensors) -> list[Piece]:
        """What this rank writes. Parts that several ranks hold alike are shared out among them.

        Raises CheckpointError, on all ranks, when a tensor of any rank cannot be saved.
        """
        self._ranks.agree(_refusal(tensors))
        places = {name: as_place(tensor) for name, tensor in tensors.items()}
        signature = tuple(_signature(name, place) for name, place in places.items())
        changed = torch.tensor([signature != self._signature], dtype=torch.uint8)
        if self._ranks.any(changed).item():
            self._signature = None
            self._make([_write_item(name, place) for name, place in places.items() if _has_part(place)])
            self._signature = signature
        return [piece for item in self._items for piece in _pieces(item, places)]

    def _make(self, items: list[WriteItem]) -> None:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        local_plans = self._ranks.gather(SavePlan(items))
        decided = self._ranks.on_first(lambda: planner.create_global_plan(local_plans))
        plans, metadata = decided if decided is not None else ([], Metadata({}))
        self._items = planner.finish_plan(self._ranks.scatter(plans)).items
        self.shapes = [
            TensorShape(name, _dtype_name(entry.properties.dtype), list(entry.size))
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        ]


def _refusal(tensors: SavedTensors) -> CheckpointError | None:
    for name, tensor in tensors.items():
        try:
            check_tensor_name(name)
        except ValueError as error:
            return CheckpointError(f"tensor {name!r} cannot be saved: {error}")
        reason = _unsaveable(tensor.local if isinstance(tensor, Place) else tensor)
        if reason:
            return CheckpointError(f"tensor {name!r} cannot be saved: {reason}")
    return None


def _unsaveable(tensor: object) -> str | None:
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


def _signature(name: str, place: Place) -> tuple[Any, ...]:
    return (name, place.local.dtype, place.shape, place.offsets, place.local.shape)


def _has_part(place: Place) -> bool:
    """Whether this rank has elements of the tensor, or the tensor has none at all.

    An empty shard begins where the next part of the tensor does, and DCP takes shards that begin alike for copies.
    """
    return place.local.numel() > 0 or math.prod(place.shape) == 0


def _write_item(name: str, place: Place) -> WriteItem:
    offsets = torch.Size(place.offsets)
    chunk = ChunkStorageMetadata(offsets, place.local.size())
    properties = TensorProperties.create_from_tensor(place.local)
    data = TensorWriteData(chunk, properties, torch.Size(place.shape))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pieces(item: WriteItem, places: dict[str, Place]) -> Iterator[Piece]:
    """Cut one shard along its first long dim into pieces of at most MAX_CHUNK_BYTES, or of one row."""
    source = places[item.index.fqn].local.detach()
    assert item.tensor_data is not None
    offsets, sizes = list(item.tensor_data.chunk.offsets), list(item.tensor_data.chunk.sizes)
    if 0 in sizes:
        return
    name, whole = item.index.fqn, sizes == list(item.tensor_data.size)
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    total = nbytes(sizes, source.dtype)
    if dim is None or total <= MAX_CHUNK_BYTES:
        yield Piece(name, name if whole else _key(name, offsets), offsets, sizes, source)
        return
    rows = max(1, MAX_CHUNK_BYTES // (total // sizes[dim]))
    for first in range(0, sizes[dim], rows):
        count = min(rows, sizes[dim] - first)
        piece_offsets = [*offsets[:dim], offsets[dim] + first, *offsets[dim + 1 :]]
        piece_sizes = [*sizes[:dim], count, *sizes[dim + 1 :]]
        yield Piece(name, _key(name, piece_offsets), piece_offsets, piece_sizes, source.narrow(dim, first, count))


def _key(name: str, offsets: list[int]) -> str:
    return f"{name}@{','.join(map(str, offsets))}"


@dataclass(frozen=True)
class Copy:
    """Elements to copy from a stored chunk into a tensor of the caller, once the chunk is read."""

    starts: list[int]
    """First element a dim, within the chunk."""
    sizes: list[int]
    target: Tensor
    """Where the elements go: a view of the caller's local memory."""


def plan_load(records: list[TensorRecord], tensors: SavedTensors) -> list[tuple[TensorRecord, Chunk, list[Copy]]]:
    """The chunks that this rank has to read to fill its part of `tensors`, each once, and what to copy out of each.

    Every name in `tensors` must have its record, of the same global shape and dtype.
    """
    filled = {record.name: record for record in records if math.prod(record.shape)}
    wanted = {name: as_place(tensor) for name, tensor in tensors.items() if name in filled}
    chunks = {(name, tuple(chunk.offsets)): chunk for name in wanted for chunk in filled[name].chunks}
    reads: dict[tuple[str, tuple[int, ...]], list[Copy]] = {}
    for name, place in wanted.items():
        own = ChunkStorageMetadata(torch.Size(place.offsets), place.local.size())
        for item in create_read_items_for_chunk_list(name, _storage(filled[name]), [own]):
            assert item.storage_index.offset is not None
            target = place.local.detach()
            for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                target = target.narrow(dim, start, length)
            copy = Copy(list(item.storage_offsets), list(item.lengths), target)
            reads.setdefault((name, tuple(item.storage_index.offset)), []).append(copy)
    return [(filled[name], chunks[name, offsets], copies) for (name, offsets), copies in reads.items()]


def _storage(record: TensorRecord) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in record.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=record.torch_dtype), torch.Size(record.shape), chunks)
