"""Exchanges by copies between devices: the gradients of one rank, and the bits of a float32 reduction.

On the CPU the ranks' buffers are files that all of them map; everything above the buffers is what accelerators run.
"""

from __future__ import annotations

import time
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed_ranks import run_ranks
from layout_runs import run_with
from phalanx.errors import ConfigError
from phalanx.families.registry import bind
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.data_parallel import peer_memory
from phalanx.layout.data_parallel.copy_engine import (
    CopyEngineReduceScatter,
    PublishedShards,
    _place_shards,
    choose_copy_engine,
)
from phalanx.layout.data_parallel.peer_memory import BufferPool
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import Groups, build_mesh
from phalanx.layout.resolve import resolve_layout
from phalanx.torch_compat.fsdp import ShardSize
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier, full_run
from whole_model import CPU, backward, parts_of

LAYOUTS: list[dict[str, object]] = [
    {"dp_shard": 4, "reshard_after_forward": True, "global_batch": 8},
    {"dp_shard": 4, "zero": 1, "global_batch": 16},
    {"dp_shard": 4, "zero": 2, "global_batch": 16},
    {"dp_shard": 2, "dp_replicate": 2, "reshard_after_forward": True, "global_batch": 8},
    {"dp_shard": 2, "tp": 2, "global_batch": 8},
    {"dp_shard": 2, "cp": 2, "reshard_after_forward": True, "global_batch": 8},
    {"dp_shard": 2, "pp": 2, "schedule": "1f1b", "global_batch": 8},
]


def verify_all() -> list[Verdict]:
    """On one of four ranks: a verdict for each layout."""
    groups: Groups = {}
    verdicts = []
    for words in LAYOUTS:
        run = full_run(run_with(peer_copies=True, **words), "fp64", 3)
        verifier = Verifier(bind(run, VerifiableModel), CPU, steps=3, activations=False, groups=groups)
        verdicts.append(verifier.verify(resolve_layout(bind(run), 4)))
    return verdicts


def test_layouts_compute_what_one_rank_computes() -> None:
    verdicts = run_ranks(verify_all, 4, timeout_s=300.0)[0]
    assert not [f"{v.layout}: {v.first}" for v in verdicts if not v.passed]
    worst = [max(check.error for check in v.checks if check.what == "gradient") for v in verdicts]
    assert max(worst) < 1e-9


def gradients(words: dict[str, object]) -> dict[bool, dict[str, Tensor]]:
    """Gradients of this rank's shards after two backward passes, by collectives and by copies."""
    found = {}
    groups: Groups = {}
    for copies in (False, True):
        run = run_with({}, peer_copies=copies, dp_shard=2, reshard_after_forward=True, **words)
        layout = resolve_layout(bind(run), 2)
        applied = apply_layout(
            bind(run, LayoutModel), layout, build_mesh(layout, CPU, groups), CPU, AttentionChoice("sdpa")
        )
        for _ in range(2):
            backward(run, applied)
        parts = parts_of(((name, p.grad) for name, p in applied.parameters.items()), applied.splits)
        found[copies] = {name: part[2] for name, part in parts.items()}
        assert (applied.sharding.buffer_bytes > 0) == copies
    return found


@pytest.mark.parametrize(("precision", "accumulation"), [("bf16", 1), ("bf16", 2), ("fp8-block", 2)])
def test_bfloat16_gradients_are_those_of_a_float32_reduction_to_the_bit(precision: str, accumulation: int) -> None:
    words = {"precision": precision, "global_batch": 8, "microbatch": 4 // accumulation}
    for found in run_ranks(gradients, 2, words):
        assert found[True].keys() == found[False].keys()
        for name, grad in found[True].items():
            assert grad.dtype == torch.float32
            assert torch.equal(grad, found[False][name]), name
        assert any(grad.abs().max() > 0 for grad in found[True].values())


def exchanges() -> tuple[list[list[int]], int]:
    """Exchanges in which one rank reads late while the other goes on; what it read, and buffers made."""
    group = dist.group.WORLD
    assert group is not None
    pool = BufferPool(group, CPU)
    rank = group.rank()
    read = []
    for number in range(8):
        mine = pool.take(5, torch.int32).fill_(10 * number + rank)
        theirs = pool.exchange(mine)
        if rank == number % 2:
            time.sleep(0.05)
        read.append([int(x[-1]) for x in theirs])
        del mine, theirs
    return read, len(pool._buffers)


def test_a_buffer_is_not_written_while_anybody_may_read_it() -> None:
    for read, buffers in run_ranks(exchanges, 2):
        assert read == [[10 * number, 10 * number + 1] for number in range(8)]
        assert buffers == 2


def reductions() -> int:
    """Sums of gradients while one rank is late; buffers made."""
    group = dist.group.WORLD
    assert group is not None
    pool = BufferPool(group, CPU)
    reduce = CopyEngineReduceScatter(pool)
    rank, size = group.rank(), group.size()
    # Rows that do not divide, fewer rows than ranks, and one large enough for a copy of its own.
    shapes = [(7, 3), (2,), (size, 40_000)]
    for number in range(8):
        values = [number + 10 * torch.arange(shape[0]) for shape in shapes]
        gradients = [
            (100 * rank + v).to(torch.bfloat16).view(-1, *[1] * (len(shape) - 1)).expand(shape).contiguous()
            for v, shape in zip(values, shapes, strict=True)
        ]
        rows = [-(-shape[0] // size) for shape in shapes]
        counts = [count * g[0].numel() for count, g in zip(rows, gradients, strict=True)]
        total = torch.empty(sum(counts))
        if rank == number % size:
            time.sleep(0.05)
        reduce(gradients, total)
        for part, v, count, g in zip(total.split(counts), values, rows, gradients, strict=True):
            mine = v[rank * count : (rank + 1) * count]
            wanted = sum((100 * other + mine).to(torch.bfloat16).float() for other in range(size))
            found = part.view(count, -1)[: len(mine)]
            assert torch.equal(found, torch.as_tensor(wanted)[:, None].expand(len(mine), g[0].numel()))
    return len(pool._buffers)


def test_gradients_are_added_up_where_they_belong() -> None:
    assert run_ranks(reductions, 3) == [2, 2, 2]


def gathers() -> None:
    """Shards of two modules are gathered from where they were published, until they are renewed."""
    group = dist.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()
    narrow, wide = torch.uint8, torch.bfloat16
    units = [
        [ShardSize(5, narrow), ShardSize(40_000, wide), ShardSize(3, wide), ShardSize(70_000, narrow)],
        [ShardSize(5, wide)],
        [],
    ]
    published = PublishedShards(units, CPU, group)
    shards = [
        [torch.empty(one.elements, dtype=narrow if one.dtype == narrow else torch.float32) for one in unit]
        for unit in units
    ]
    wholes = [[torch.empty(size * one.elements, dtype=one.dtype) for one in unit] for unit in units]
    for number in range(6):
        if number % 2 == 0:
            for shard in chain(*shards):
                shard.fill_(10 * number + rank)
            published.renew()
        for gather, mine, whole in zip(published.gathers[:2], shards, wholes, strict=False):
            if rank == number % size:
                time.sleep(0.1)
            for tensor in whole:
                tensor.zero_()
            gather(mine, whole)
            expected = 10 * (number - number % 2) + torch.arange(size, dtype=torch.bfloat16)[:, None]
            # In little time: the others must be well ahead of the one that sleeps.
            assert all((tensor.view(size, -1) == expected).all() for tensor in whole)


def test_what_is_gathered_is_what_was_published_last() -> None:
    run_ranks(gathers, 3)


def test_large_shards_begin_on_even_boundaries() -> None:
    sizes = [ShardSize(count, torch.bfloat16) for count in (128, 3, 64, 70, 256)]
    assert _place_shards(sizes) == [0, 2 * 448, 2 * 128, 2 * 451, 2 * 192]
    # Numbers in 16 bits begin at even bytes, whatever lies between them.
    odd = [ShardSize(3, torch.uint8), ShardSize(3, torch.bfloat16), ShardSize(128, torch.uint8)]
    assert _place_shards(odd) == [134, 128, 0]


def chosen_without_memory(wanted: bool | str) -> str:
    """What is chosen where ranks cannot read each other's memory."""
    peer_memory.reaches_peers = lambda *_: False  # type: ignore[assignment]
    run = run_with({}, peer_copies=wanted, dp_shard=2, global_batch=8)
    layout = resolve_layout(bind(run), 2)
    try:
        group = build_mesh(layout, CPU).shards.group
        return str(choose_copy_engine(run.layout.peer_copies, group, torch.device("cuda")))
    except ConfigError as error:
        return str(error)


def test_unreachable_memory_is_an_error_only_where_copies_are_asked_for() -> None:
    assert run_ranks(chosen_without_memory, 2, "auto") == ["None", "None"]
    (said, _) = run_ranks(chosen_without_memory, 2, True)
    assert "layout.peer_copies=true, but the 2 ranks that share parameters cannot read each other's memory" in said
