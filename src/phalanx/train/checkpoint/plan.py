"""Which rank writes which part of which tensor: the planners of torch's distributed checkpoint (DCP) decide.

Only DCP's planners are used, not its `save` and `load`: those send the whole table of contents to every rank after a
save, gather every rank's reads on rank 0 although nothing is decided there, and raise errors that are no `Exception`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from phalanx.errors import CheckpointError
from phalanx.train.checkpoint.manifest import DTYPES, Chunk, TensorRecord, TensorShape, check_tensor_name, nbytes
from phalanx.train.checkpoint.rank_group import RankGroup

MAX_CHUNK_BYTES = 1 << 26
"""Larger shards are cut, so that a rank that needs a part of a shard reads and verifies little more than that part."""


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

    def plan(self, tensors: dict[str, Tensor]) -> list[Piece]:
        """What this rank writes. Replicated tensors are shared out among the ranks that hold them.

        Raises CheckpointError, on all ranks, when a tensor of any rank cannot be saved.
        """
        self._ranks.agree(_refusal(tensors))
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, is_coordinator=self._ranks.first)
        signature = tuple(_signature(name, tensor) for name, tensor in tensors.items())
        changed = torch.tensor([signature != self._signature], dtype=torch.uint8)
        if self._ranks.any(changed).item():
            self._signature = None
            self._make(planner)
            self._signature = signature
        return [piece for item in self._items for piece in _pieces(item, planner)]

    def _make(self, planner: DefaultSavePlanner) -> None:
        local_plans = self._ranks.gather(planner.create_local_plan())
        decided = self._ranks.on_first(lambda: planner.create_global_plan(local_plans))
        plans, metadata = decided if decided is not None else ([], Metadata({}))
        self._items = planner.finish_plan(self._ranks.scatter(plans)).items
        self.shapes = [
            TensorShape(name, _dtype_name(entry.properties.dtype), list(entry.size))
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        ]


def _refusal(tensors: dict[str, Tensor]) -> CheckpointError | None:
    for name, tensor in tensors.items():
        try:
            check_tensor_name(name)
        except ValueError as error:
            return CheckpointError(f"tensor {name!r} cannot be saved: {error}")
        reason = _unsaveable(tensor)
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


def _signature(name: str, tensor: Tensor) -> tuple[Any, ...]:
    placed = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return (name, tensor.dtype, tensor.shape, placed)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pieces(item: WriteItem, planner: DefaultSavePlanner) -> Iterator[Piece]:
    """Cut one shard along its first long dim into pieces of at most MAX_CHUNK_BYTES, or of one row."""
    source = planner.resolve_data(item)
    assert isinstance(source, Tensor) and item.tensor_data is not None
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


def plan_load(records: list[TensorRecord], tensors: dict[str, Tensor]) -> list[tuple[TensorRecord, Chunk, list[Copy]]]:
    """The chunks that this rank has to read to fill its part of `tensors`, each once, and what to copy out of each.

    Every name in `tensors` must have its record, of the same global shape and dtype.
    """
    filled = {record.name: record for record in records if math.prod(record.shape)}
    wanted = {name: tensor for name, tensor in tensors.items() if name in filled}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(wanted, Metadata({name: _storage(filled[name]) for name in wanted}))
    chunks = {(name, tuple(chunk.offsets)): chunk for name in wanted for chunk in filled[name].chunks}
    reads: dict[tuple[str, tuple[int, ...]], list[Copy]] = {}
    for item in planner.create_local_plan().items:
        assert item.storage_index.offset is not None
        place = (item.storage_index.fqn, tuple(item.storage_index.offset))
        copy = Copy(list(item.storage_offsets), list(item.lengths), planner.resolve_tensor(item))
        reads.setdefault(place, []).append(copy)
    return [(filled[name], chunks[name, offsets], copies) for (name, offsets), copies in reads.items()]


def _storage(record: TensorRecord) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in record.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=record.torch_dtype), torch.Size(record.shape), chunks)
