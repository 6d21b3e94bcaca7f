"""Structures in the memory of ranks: batches equal to the bit those from files, whoever holds what, and nobody hangs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distributed_ranks import run_ranks
from graph_files import prepared_sources
from phalanx.errors import ConfigError
from phalanx.families.materials.config import GraphData
from phalanx.families.materials.data.graph_batches import Collator, GraphBatch, graph_columns
from phalanx.families.materials.data.graph_shards import PreparedSource, open_prepared, spread_evenly
from phalanx.families.materials.data.graph_stream import GraphBatchStream, graph_order
from phalanx.families.materials.data.in_memory import structure_store
from phalanx.families.materials.data.in_memory.held_structures import Fields, held_rows, join_fields
from phalanx.families.materials.data.in_memory.structure_store import StructureStore
from phalanx.hardware.host import available_memory
from phalanx.launch.fork_server import RanksFailed

STEPS = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> GraphData:
    """Molecules without images and crystals with them, in shards of 16 structures."""
    return prepared_sources(tmp_path_factory.mktemp("graphs"))


def stream_of(data: GraphData, sources: Sequence[PreparedSource], **how: Any) -> GraphBatchStream:
    return GraphBatchStream(graph_order(sources, data, seed=5, global_batch=12), graph_columns(sources), parts=2, **how)


def content(batch: GraphBatch) -> dict[str, Any]:
    """All of a batch, tensors by their bytes: 0 and -0 are not the same."""
    return {
        name: (value.dtype, value.shape, value.numpy().tobytes()) if isinstance(value, torch.Tensor) else repr(value)
        for name, value in vars(batch).items()
    }


def refuse_files(sources: Sequence[PreparedSource]) -> None:
    """Make every further read of a shard fail."""

    def refuse(number: int) -> NoReturn:
        raise AssertionError(f"shard {number} is read")

    for source in sources:
        source.shard = refuse  # type: ignore[method-assign]


def differences(data: GraphData, reader: int, readers: int, copy_ranks: int | None = None) -> list[str]:
    """Say where batches from memory differ from those of files: from the first step on, from a later, from an earlier."""
    sources = open_prepared(data, "train")
    store = StructureStore(sources, reader=reader, ranks=copy_ranks)
    refuse_files(sources)
    read = stream_of(data, open_prepared(data, "train"), rank=reader, ranks=readers, prefetch=0)
    found = []
    with closing(stream_of(data, sources, rank=reader, ranks=readers, store=store)) as held:
        for begin in (0, 40, 2):
            held.seek(begin)
            read.seek(begin)
            for step in range(begin, begin + STEPS):
                first, second = content(held.next()), content(read.next())
                found += [f"step {step}: {name}" for name in first if first[name] != second[name]]
    return found


def use_store(data: GraphData) -> dict[str, Any]:
    """Return all that is asked of four ranks, which so start once."""
    rank = dist.get_rank()
    weighted = [
        source.model_copy(update={"weight": weight}) for source, weight in zip(data.sources, (1.0, 3.0), strict=True)
    ]
    store = StructureStore(open_prepared(data, "train"), reader=rank)
    return {
        "differences": {
            "one copy": differences(data, rank, 4),
            "two copies": differences(data, rank, 4, copy_ranks=2),
            "weights": differences(data.model_copy(update={"sources": weighted}), rank, 4),
            # As ranks of `cp` do.
            "read by two ranks": differences(data, rank // 2, 2),
            # Twelve of a batch among nine: shares of one or two.
            "few structures a rank": differences(data.model_copy(update={"batch_by": "graphs"}), rank, 9),
        },
        "parts": [held.items.tolist() for held in store._held],
        "bytes": sum(array.nbytes for held in store._held for array in held.arrays.values()),
        "told": store.bytes,
    }


@pytest.fixture(scope="module")
def on_four_ranks(data: GraphData) -> list[dict[str, Any]]:
    return run_ranks(use_store, 4, data)


@pytest.mark.parametrize("case", ["one copy", "two copies", "weights", "read by two ranks", "few structures a rank"])
def test_batches_are_those_from_files(on_four_ranks: list[dict[str, Any]], case: str) -> None:
    assert [found["differences"][case] for found in on_four_ranks] == [[]] * 4


def test_ranks_hold_every_structure_once_in_equal_parts(data: GraphData, on_four_ranks: list[dict[str, Any]]) -> None:
    for number, source in enumerate(open_prepared(data, "train")):
        items = [item for found in on_four_ranks for item in found["parts"][number]]
        assert items == list(range(len(source)))
    # By bytes, not by number: a part is off by the largest structure of each source at most.
    sizes = [found["bytes"] for found in on_four_ranks]
    assert max(sizes) < 1.5 * min(sizes)
    assert len({len(found["parts"][0]) for found in on_four_ranks}) > 1


def test_the_memory_that_is_told_is_what_is_taken(data: GraphData, on_four_ranks: list[dict[str, Any]]) -> None:
    index = sum(source.index_bytes for source in open_prepared(data, "train"))
    for found in on_four_ranks:
        # Items have numbers beside; of starts there is one more than structures.
        items = 8 * sum(map(len, found["parts"]))
        assert found["told"] == found["bytes"] + items - 2 * 2 * 8 + index


def test_a_rank_alone_holds_all(data: GraphData) -> None:
    assert differences(data, 0, 1) == []


def test_held_out_structures_are_held_whole(data: GraphData) -> None:
    training, sources = open_prepared(data, "train"), open_prepared(data, "validation")
    found = spread_evenly(sources, None)
    items = [np.sort(found.item[found.source == number]) for number in range(len(sources))]
    store = StructureStore(training, reader=0, held_out=list(zip(sources, items, strict=True)))
    collate = Collator(sources, graph_columns(training))
    backwards = found.take(np.arange(len(found.numbers))[::-1])
    read = content(collate(backwards, (len(items),)))
    refuse_files(sources)
    rows = held_rows(store.held_out, backwards, np.arange(len(found.numbers)))
    assert content(collate(backwards, (len(items),), rows)) == read


def test_fields_hold_the_structures_of_all_shards() -> None:
    small: Fields = {"target": ("|u1", ()), "species": ("|u1", ())}
    large: Fields = {"target": ("<u2", ()), "images": ("|i1", (3,)), "species": ("|u1", ())}
    both = {"images": ("|i1", (3,)), "species": ("|u1", ()), "target": ("<u2", ())}
    for several in ([small, large], [large, {}, small]):
        assert join_fields(several) == both and list(join_fields(several)) == list(both)


def lose_a_rank(data: GraphData) -> None:
    rank = dist.get_rank()
    sources = open_prepared(data, "train")
    store = StructureStore(sources, reader=rank)
    with closing(stream_of(data, sources, rank=rank, ranks=2, store=store)) as stream:
        for step in range(50):
            stream.next()
            if rank == 1 and step == 3:
                raise RuntimeError("rank 1 has had enough")


def test_ranks_do_not_wait_for_one_that_failed(data: GraphData) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(lose_a_rank, 2, data)
    assert "rank 1 has had enough" in str(failed.value)
    assert "PhalanxError: contact with another rank was lost while structures were exchanged" in str(failed.value)


def close_early(data: GraphData) -> int:
    rank = dist.get_rank()
    sources = open_prepared(data, "train")
    stream = stream_of(data, sources, rank=rank, ranks=2, store=StructureStore(sources, reader=rank))
    steps = []
    batch = stream.batch

    def counted(step: int) -> GraphBatch:
        steps.append(step)
        return batch(step)

    stream.batch = counted  # type: ignore[method-assign]
    for _ in range(3):
        stream.next()
    # Rank 0 is long done when rank 1 begins to close, or the other way round.
    if rank == 1:
        dist.barrier()
    stream.close()
    if rank == 0:
        dist.barrier()
    return len(steps)


def test_ranks_that_close_at_different_times_read_equally_far(data: GraphData) -> None:
    # Three taken, two kept and one in hand.
    assert run_ranks(close_early, 2, data) == [6, 6]


@pytest.mark.parametrize(
    ("free", "message"),
    [(10_000, r"data\.store=memory takes 0\.00 GiB for 1 ranks of .*set data\.store=files"), (None, None)],
)
def test_a_host_without_the_memory_is_refused(
    data: GraphData, monkeypatch: pytest.MonkeyPatch, free: int | None, message: str | None
) -> None:
    sources = open_prepared(data, "train")
    monkeypatch.setattr(structure_store, "available_memory", lambda: free)
    if message is None:
        StructureStore(sources, reader=0)
        return
    monkeypatch.setattr(structure_store, "HeldStructures", None)
    with pytest.raises(ConfigError, match=message):
        StructureStore(sources, reader=0)


def test_copies_over_ranks_that_do_not_divide_them_are_refused(data: GraphData) -> None:
    with pytest.raises(ConfigError, match=r"data\.store_ranks=2 does not divide the 1 ranks"):
        StructureStore(open_prepared(data, "train"), reader=0, ranks=2)
    with pytest.raises(ValueError, match="store_ranks=2 ranks hold nothing with store=files"):
        GraphData.model_validate(data.model_dump() | {"store_ranks": 2})


def test_memory_is_counted_within_control_groups(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    files = {
        "proc/meminfo": "MemTotal: 4000 kB\nMemAvailable: 3000 kB\n",
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/memory.max": "2000000\n",
        "sys/fs/cgroup/job/memory.current": "1500000\n",
        "sys/fs/cgroup/job/memory.stat": "anon 900000\ninactive_file 300000\nactive_file 100000\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory(tmp_path) == 900_000
    (tmp_path / "sys/fs/cgroup/job/memory.max").unlink()
    assert available_memory(tmp_path) == 3000 * 1024
