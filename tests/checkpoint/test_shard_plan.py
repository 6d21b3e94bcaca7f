"""Who writes what of a checkpoint, planned for all ranks of a large job."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from many_ranks import LAYOUT_OF_4096, meshes_of_all_ranks
from phalanx.checkpoint.rank_group import RankGroup
from phalanx.checkpoint.saver import data_file_name, group_by_file
from phalanx.checkpoint.shard_plan import SavePlanner
from phalanx.layout.mesh import Axis, Mesh
from phalanx.layout.place import Place

T = TypeVar("T")

SHAPES = {
    # A tied embedding on the first and the last stage, and a matrix and a vector on each.
    "embedding": (560, 2),
    **{f"blocks.{stage}.matrix": (560, 3) for stage in range(4)},
    **{f"blocks.{stage}.norm": (40,) for stage in range(4)},
}


def place_tensors(mesh: Mesh) -> dict[str, Place]:
    """The parts of SHAPES that a rank holds: rows over tp, and those over the shards as FSDP2 cuts them."""
    stage = mesh.pp.rank
    names = [f"blocks.{stage}.matrix", f"blocks.{stage}.norm", *(["embedding"] if stage in (0, 3) else [])]
    places = {}
    for name in names:
        shape = SHAPES[name]
        parts = Axis("tp") if len(shape) == 1 else mesh.tp
        rows = shape[0] // parts.size
        # As chunks of equal size, of which the last are smaller or empty.
        each = -(-rows // mesh.shards.size)
        first, last = (min(rows, each * number) for number in (mesh.shards.rank, mesh.shards.rank + 1))
        local = torch.zeros(last - first, *shape[1:])
        places[name] = Place(local, (parts.rank * rows + first, *(0 for _ in shape[1:])), shape)
    return places


class OneOfMany(RankGroup):
    """A rank that meets the others through a list: `told` holds what each said, or what each is told."""

    def __init__(self, rank: int, size: int, told: list[Any]) -> None:
        self.rank, self.size, self.first = rank, size, rank == 0
        self.told = told

    def agree(self, error: Exception | None) -> None:
        assert error is None

    def any(self, flags: Tensor) -> Tensor:
        return flags

    def on_first(self, work: Callable[[], T]) -> T | None:
        return work() if self.first else None


class Says(OneOfMany):
    """Says what it has to write, and gets no answer yet."""

    def gather(self, value: T) -> list[T]:
        self.told.append(value)
        return []

    def on_first(self, work: Callable[[], T]) -> T | None:
        return None

    def scatter(self, values: list[T]) -> T:
        mine: T = self.told[-1]
        return mine


class Hears(OneOfMany):
    """Hears what the first rank decides of all that was said."""

    def gather(self, value: T) -> list[T]:
        return list(self.told) if self.first else []

    def scatter(self, values: list[T]) -> T:
        if self.first:
            self.told[:] = values
        mine: T = self.told[self.rank]
        return mine


def test_4096_ranks_write_each_element_once_into_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    size = LAYOUT_OF_4096.world_size
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    held = [place_tensors(mesh) for _, mesh in meshes_of_all_ranks(LAYOUT_OF_4096, monkeypatch)]
    told: list[Any] = []
    for rank, tensors in enumerate(held):
        SavePlanner(Says(rank, size, told)).plan_save(tensors)
    written = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in SHAPES.items()}
    files, keys = Counter[str](), Counter[str]()
    for rank, tensors in enumerate(held):
        planner = SavePlanner(Hears(rank, size, told))
        for number, pieces in enumerate(group_by_file(planner.plan_save(tensors))):
            files[data_file_name(rank, number)] += 1
            for piece in pieces:
                where = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
                written[piece.name][where] += 1
                keys[piece.key] += 1
        if planner.shapes:
            assert {tensor.name: tuple(tensor.shape) for tensor in planner.shapes} == SHAPES
    seconds = time.process_time() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    print(f"planned for {size} ranks in {seconds:.1f} s of CPU, {grown:.2f} GiB more, {len(files)} files")
    assert all(bool((counts == 1).all()) for counts in written.values())
    assert set(files.values()) == {1} and set(keys.values()) == {1}
    # More than the replicas of one copy write: what several hold alike is divided among them.
    assert len(files) > size // LAYOUT_OF_4096.dp_replicate // 2
    assert seconds < 5.0 and grown < 1.0
