"""Checkpoints of several ranks: any sharding is saved, and loads into any other; ranks succeed and fail together."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distributed_ranks import run_ranks
from phalanx.checkpoint import (
    CheckpointDamaged,
    CheckpointStore,
    RunLock,
    collect_tensors,
    folders,
    materialise_optimizer_state,
    open_checkpoints,
    read_state,
    read_tensors,
)
from phalanx.errors import CheckpointError
from phalanx.launch.fork_server import RanksFailed
from saved_states import assert_same_bits, damaged_when_published, small_state, zeros_like


class Block(nn.Module):
    """Two linear layers whose sizes no rank count divides, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 10)
        self.down = nn.Linear(10, 7, bias=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def build(mesh_shape: tuple[int, int], seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    """The model on a mesh [data, tensor]: FSDP over the first axis, tensor parallel over the second; (1, 1) is plain."""
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), Block(), nn.Linear(7, 3))
    if mesh_shape != (1, 1):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("data", "tensor"))
        for block in (model[0], model[1]):
            if mesh_shape[1] > 1:
                parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """A few steps on the same samples on every rank."""
    x = torch.linspace(-1, 1, 28).view(4, 7)
    for _ in range(steps):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model[0].count += 1


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor in full, on every rank."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }


def train_and_save(root: Path, mesh_shape: tuple[int, int], asynchronous: bool) -> dict[str, Tensor]:
    model, optimizer = build(mesh_shape, seed=0)
    train(model, optimizer)
    tensors = collect_tensors(model, optimizer)
    expected = whole(tensors)
    with CheckpointStore(root, keep_last=2) as store:
        store.save(2, tensors, {"rank": dist.get_rank()}, asynchronous=asynchronous)
        if asynchronous:
            train(model, optimizer)
    return expected


def load_and_save(root: Path, mesh_shape: tuple[int, int], step: int) -> dict[str, Tensor]:
    """Load the newest checkpoint into a model of other weights, and save it again from there as `step`."""
    model, optimizer = build(mesh_shape, seed=1)
    materialise_optimizer_state(optimizer)
    tensors = collect_tensors(model, optimizer)
    with CheckpointStore(root, keep_last=9) as store:
        loaded = store.load_newest_usable(tensors)
        assert loaded is not None and loaded[1] == {"rank": 0}
        store.save(step, tensors, {"rank": 0})
    return whole(tensors)


@pytest.mark.parametrize(
    ("meshes", "asynchronous"),
    [
        ([(4, 1), (2, 1), (1, 1)], False),
        ([(2, 2), (1, 1), (1, 2), (3, 1)], True),
    ],
)
def test_any_sharding_loads_into_any_other_to_the_bit(tmp_path, meshes, asynchronous):
    root = tmp_path / "checkpoints"
    expected, *others = run_ranks(train_and_save, meshes[0][0] * meshes[0][1], root, meshes[0], asynchronous)
    for other in others:
        assert_same_bits(other, expected)
    for step, mesh in enumerate(meshes[1:], start=3):
        for loaded in run_ranks(load_and_save, mesh[0] * mesh[1], root, mesh, step):
            assert_same_bits(loaded, expected)
        assert_same_bits(read_tensors(root / f"step-0000000{step}"), expected)


def save_replicas(root: Path) -> int:
    with CheckpointStore(root, keep_last=1) as store:
        return store.save(1, small_state(0), {"rank": dist.get_rank()}).bytes_written


def test_replicas_are_written_once_and_shared_out(tmp_path):
    written = run_ranks(save_replicas, 4, tmp_path)
    assert sum(written) == sum(tensor.nbytes for tensor in small_state(0).values())
    assert max(written) < sum(written) / 2
    assert_same_bits(read_tensors(tmp_path / "step-00000001"), small_state(0))
    assert read_state(tmp_path / "step-00000001") == {"rank": 0}


def save_hybrid(root: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    full = torch.arange(35.0).view(7, 5)
    with CheckpointStore(root, keep_last=1) as store:
        tensors = {
            "hybrid": DTensor.from_local(
                full.chunk(2)[mesh.get_local_rank("shard")], mesh, [Replicate(), Shard(0)], shape=(7, 5), stride=(5, 1)
            ),
            "empty_on_some": DTensor.from_local(
                torch.ones(1) if mesh.get_local_rank("shard") == 0 else torch.ones(0),
                mesh,
                [Replicate(), Shard(0)],
                shape=(1,),
                stride=(1,),
            ),
        }
        store.save(1, tensors, {})


def test_replicated_shards_are_written_once(tmp_path):
    run_ranks(save_hybrid, 4, tmp_path)
    found = read_tensors(tmp_path / "step-00000001")
    assert_same_bits(found, {"hybrid": torch.arange(35.0).view(7, 5), "empty_on_some": torch.ones(1)})
    manifest = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())
    assert manifest["world_size"] == 4
    assert [len(tensor["chunks"]) for tensor in manifest["tensors"]] == [2, 1]


def save_stages(root: Path) -> dict[str, Tensor]:
    """Each rank holds other tensors, as pipeline stages do; then one rank alone changes what it holds."""
    rank = dist.get_rank()
    mine = {f"stage{rank}.weight": torch.full((3, rank + 2), float(rank)), "shared": torch.arange(5)}
    with CheckpointStore(root, keep_last=9) as store:
        for step in range(3):
            store.save(step, mine, {}, asynchronous=True)
            mine[f"stage{rank}.weight"] += 1
        if rank == 1:
            mine["stage1.bias"] = torch.ones(4)
        store.save(3, mine, {})
        loaded = zeros_like(mine)
        assert store.load(store.newest(), loaded) == {}
        del loaded["shared"]
        store.load(store.newest(), loaded, prefix="stage")
        if rank == 0:
            del loaded["stage0.weight"]
        with pytest.raises(CheckpointError, match=r"1 in the checkpoint but not in this model: stage0\.weight"):
            store.load(store.newest(), loaded, prefix="stage")
    return mine


def test_ranks_may_hold_different_tensors(tmp_path):
    parts = run_ranks(save_stages, 2, tmp_path)
    assert_same_bits(read_tensors(tmp_path / "step-00000003"), parts[0] | parts[1])
    for step in range(3):
        found = read_tensors(tmp_path / f"step-0000000{step}", "stage1")
        assert_same_bits(found, {"stage1.weight": torch.full((3, 3), 1.0 + step)})


def message_of(call: Any, *arguments: Any, **options: Any) -> tuple[str, str]:
    """Type and text of the error that a call raises."""
    with pytest.raises(CheckpointError) as refusal:
        call(*arguments, **options)
    return type(refusal.value).__name__, str(refusal.value)


def fail_on_one_rank(root: Path) -> list[tuple[str, str]]:
    rank, tensors = dist.get_rank(), small_state(0)
    with CheckpointStore(root, keep_last=9, warn=lambda _: None) as store:
        store.save(1, tensors, {})
        gate = threading.Event()
        store._thread.submit(gate.wait)
        store.save(2, tensors, {}, asynchronous=True)
        if rank == 2:
            (folders.writing_folder(root, 2) / "rank-00002-000.safetensors").mkdir()
        gate.set()
        found = [message_of(store.wait)]
        assert [checkpoint.step for checkpoint in store.list()] == [1]
        strange = tensors | ({"odd": torch.eye(2).to_sparse()} if rank == 1 else {})
        found.append(message_of(store.save, 3, strange, {}))
        found.append(message_of(store.save, 3, tensors, {"x": {1}} if rank == 0 else {}))
        mesh = init_device_mesh("cpu", (4,))
        partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        found.append(message_of(store.save, 3, {"sum": partial}, {}))
        store.save(3, tensors, {})
        assert store.newest().step == 3
    return found


def test_a_failure_of_one_rank_is_a_failure_of_all(tmp_path):
    found = run_ranks(fail_on_one_rank, 4, tmp_path)
    assert all(entry == found[0] for entry in found)
    texts = [text for _, text in found[0]]
    assert texts[0].startswith("checkpoint of step 2 was not saved: rank 2: ") and "Is a directory" in texts[0]
    assert texts[1].startswith("rank 1: tensor 'odd' cannot be saved: its layout is torch.sparse_coo")
    assert texts[2] == "state.x is a set; use dict, list, str, int, float, bool or None"
    assert (
        texts[3].startswith("rank 0: tensor 'sum' cannot be saved: its placements")
        and "(3 more ranks failed)" in texts[3]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def shard_of(full: Tensor) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = full.chunk(dist.get_world_size())[dist.get_rank()].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], shape=full.shape, stride=full.stride())


def load_damaged(root: Path) -> tuple[int, list[str], tuple[str, str]]:
    warnings: list[str] = []
    source = open_checkpoints(root, warn=warnings.append)
    tensors = {"x": shard_of(torch.zeros(8, 4))}
    loaded = source.load_newest_usable(tensors)
    assert loaded is not None
    assert torch.equal(tensors["x"].to_local(), torch.full((2, 4), float(loaded[0].step)))
    return loaded[0].step, warnings, message_of(source.load, source.newest(), tensors)


def save_two_steps(root: Path) -> None:
    with CheckpointStore(root, keep_last=9) as store:
        for step in (1, 2):
            store.save(step, {"x": shard_of(torch.full((8, 4), float(step)))}, {"step": step})


def test_damage_that_one_rank_meets_makes_all_fall_back(tmp_path):
    run_ranks(save_two_steps, 4, tmp_path)
    path = tmp_path / "step-00000002" / "rank-00002-000.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    found = run_ranks(load_damaged, 4, tmp_path)
    assert [step for step, _, _ in found] == [1, 1, 1, 1]
    assert len({text for _, _, (_, text) in found}) == 1
    kind, text = found[3][2]
    assert kind == CheckpointDamaged.__name__
    assert text.startswith(f"rank 2: {path}: tensor 'x', chunk at [4, 0]: checksum expected ")
    assert [len(warnings) for _, warnings, _ in found] == [1, 0, 0, 0] and text in found[0][1][0]


def save_while_training_communicates(root: Path) -> None:
    with CheckpointStore(root, keep_last=9) as store:
        for step in range(4):
            x = shard_of(torch.full((64, 64), float(step)))
            store.save(step, {"x": x}, {}, asynchronous=True)
            for _ in range(20):
                ones = torch.ones(1000)
                dist.all_reduce(ones)
                assert ones[0] == dist.get_world_size()


def test_background_saves_and_training_do_not_disturb_each_other(tmp_path):
    run_ranks(save_while_training_communicates, 2, tmp_path)
    for step in range(4):
        assert_same_bits(read_tensors(tmp_path / f"step-0000000{step}"), {"x": torch.full((64, 64), float(step))})


def lose_a_rank(run_dir: Path) -> None:
    store = CheckpointStore(run_dir / "checkpoints", keep_last=9)
    store.save(1, small_state(1), {})
    gate = threading.Event()
    store._thread.submit(gate.wait)
    handle = store.save(2, small_state(2), {}, asynchronous=True)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gate.set()
    (run_dir / "said").write_text(message_of(handle.wait)[1])


def test_a_rank_that_dies_fails_the_save(tmp_path):
    with pytest.raises(RanksFailed, match="rank 1 failed: ended without a word, exit code -9"):
        run_ranks(lose_a_rank, 2, tmp_path)
    assert "checkpoint of step 2 was not saved: contact with another rank was lost" in (tmp_path / "said").read_text()
    with CheckpointStore(tmp_path / "checkpoints", keep_last=9) as store:
        assert [path.name for path in store.root.iterdir()] == ["step-00000001"] and store.newest().step == 1


def enter_lock(run_dir: Path) -> str:
    return message_of(RunLock(run_dir).__enter__)[1]


def lock_and_save(run_dir: Path) -> list[str]:
    with RunLock(run_dir), CheckpointStore(run_dir / "checkpoints", keep_last=1) as store:
        store.save(1, small_state(0), {})
        dist.barrier()
        names = sorted(path.name for path in run_dir.iterdir())
        dist.barrier()
        with damaged_when_published("rank-00001-000.safetensors"):
            store.save(2, small_state(0), {})
        names += [checkpoint.path.name for checkpoint in store.list()]
        store.save(3, small_state(0), {})
        return names + [checkpoint.path.name for checkpoint in store.list()]


def test_the_run_lock_is_one_for_all_ranks_and_what_does_not_read_back_pushes_nothing_out(tmp_path):
    kept = ["step-00000002", "step-00000001", "step-00000003"]
    assert run_ranks(lock_and_save, 2, tmp_path) == [["checkpoints", "run.lock", *kept]] * 2
    with RunLock(tmp_path):
        texts = run_ranks(enter_lock, 2, tmp_path)
    assert texts[0] == texts[1] and f"in use by process {os.getpid()} on host" in texts[0]
