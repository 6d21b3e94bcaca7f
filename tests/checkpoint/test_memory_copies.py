"""Copies in the memory of nodes: a lost node gets its ranks' state from their peers, to the last bit, or storage serves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed_ranks import run_ranks
from phalanx.checkpoint import Checkpoint, MemoryCopies
from phalanx.checkpoint.memory_copies import Candidate, choose_peers, match_copies
from phalanx.errors import CheckpointDamaged, PhalanxError
from phalanx.layout.place import Place
from phalanx.node_memory import ROOT_VARIABLE, claim_identity, forget_node_memory, node_memory_folder

RANKS = 3


def part(rank: int, seed: int) -> dict[str, Place]:
    """A rank's rows of a matrix, and a vector that all ranks have whole."""
    rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(10 * seed + rank))
    return {"rows": Place(rows, (5 * rank, 0), (5 * RANKS, 7)), "step": Place(torch.tensor(float(seed)), (), ())}


def flip_byte(copy: Path) -> None:
    (file,) = copy.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def find(copies: MemoryCopies, stored: int, places: dict[str, Place] | None = None) -> tuple[Any, ...] | None:
    """Step, state, ranks that were sent theirs and whether every bit is right; None where nothing is found."""
    rank = dist.get_rank()
    found = places or part(rank, 99)
    before = {name: place.local.clone() for name, place in found.items()}
    loaded = copies.load_newest(found, stored=stored, check=lambda copy, state: None)
    if loaded is None:
        assert all(torch.equal(place.local, before[name]) for name, place in found.items())
        return None
    step = loaded.checkpoint.step
    same = all(torch.equal(place.local, part(rank, step)[name].local) for name, place in found.items())
    return step, loaded.state["told"], loaded.sent, same


def lose_and_find(root: Path) -> dict[str, Any]:
    """Three ranks, each on a node of its own, that lose copies in one way after another."""
    rank = dist.get_rank()
    node = root / f"node-{rank}"
    node.mkdir()
    warnings: list[str] = []

    def begin() -> MemoryCopies:
        return MemoryCopies(node, warn=warnings.append)

    copies, found = begin(), {}
    for step in (4, 6, 8):
        copies.save(step, part(rank, step), {"told": f"step {step} of rank {rank}"}, stored=3)
    copies.close()
    found["kept"] = sorted(str(path.relative_to(node)) for path in node.glob("*/*"))
    found["own"] = find(begin(), stored=3)
    found["storage is newer"] = find(begin(), stored=8)
    found["storage went back"] = find(begin(), stored=2)
    found["another layout"] = find(begin(), 3, {"rows": Place(torch.zeros(5, 7), (0, 5 * rank), (5, 7 * RANKS))})

    def refuse(copy: Checkpoint, state: dict[str, Any]) -> None:
        raise CheckpointDamaged(f"{copy.path} is refused")

    found["refused"] = begin().load_newest(part(rank, 99), stored=3, check=refuse)
    if rank == 1:
        shutil.rmtree(node)
        node.mkdir()
    found["node lost"] = find(begin(), stored=3)
    if rank == 1:
        flip_byte(node / "rank-00001/step-00000008")
    found["own damaged"] = find(begin(), stored=3)
    if rank in (1, 2):
        flip_byte(node / "rank-00001/step-00000008")
    found["damaged"] = find(begin(), stored=3)
    if rank in (1, 2):
        shutil.rmtree(node)
        node.mkdir()
    found["two nodes lost"] = find(begin(), stored=3)
    copies = begin()
    copies.save(10, part(rank, 10), {"told": "new"}, stored=8)
    copies.wait()
    found["again"] = find(copies, stored=8)
    copies.forget()
    found["forgotten"] = find(copies, stored=8)
    copies.close()
    return found | {"left": node.exists(), "warnings": warnings}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(lose_and_find, RANKS, tmp_path_factory.mktemp("nodes"))


def test_each_node_holds_the_newest_copies_of_its_rank_and_of_one_more(found: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(found):
        wards = sorted({rank, (rank - 1) % RANKS})
        assert seen["kept"] == [f"rank-{one:05d}/step-00000008" for one in wards]


def test_ranks_take_up_their_own_copies(found: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(found):
        assert seen["own"] == (8, f"step 8 of rank {rank}", (), True)


@pytest.mark.parametrize("how", ["node lost", "own damaged"])
def test_a_peer_sends_the_copy_that_is_lost_or_damaged(how: str, found: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(found):
        assert seen[how] == (8, f"step 8 of rank {rank}", (1,), True)
    assert "a copy in memory is damaged: " in "\n".join(found[0]["warnings"])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("storage is newer", ""),
        ("storage went back", "they go back to the checkpoint of step 3, which is not there any more"),
        ("another layout", "they were made in another layout"),
        ("refused", "is refused"),
        ("damaged", "checksum expected"),
        ("two nodes lost", ""),
        ("forgotten", ""),
    ],
)
def test_storage_serves_where_copies_do_not(how: str, words: str, found: list[dict[str, Any]]) -> None:
    assert [seen[how] for seen in found] == [None] * RANKS
    assert words in "\n".join(found[0]["warnings"])


def test_copies_are_made_again_and_leave_nothing(found: list[dict[str, Any]]) -> None:
    assert [seen["again"] for seen in found] == [(10, "new", (), True)] * RANKS
    assert not any(seen["left"] for seen in found)


def test_a_peer_is_on_the_next_node() -> None:
    assert choose_peers(["a"] * 4) == [None] * 4
    assert choose_peers(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    assert choose_peers(["a", "a", "a", "b", "c", "c"]) == [3, 3, 3, 4, 0, 1]


def test_the_newest_step_counts_that_all_ranks_have_a_copy_of() -> None:
    # Rank 0 has already the copy of step 8, which its peer has not; rank 1's node is new.
    holdings = [{(0, 8), (0, 6), (1, 6)}, set[tuple[int, int]]()]
    assert match_copies(holdings, 4) == [Candidate(6, ((0, 1),))]
    assert match_copies(holdings, 6) == []


def test_memory_belongs_to_one_run_and_one_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, run_dir = tmp_path / "memory", tmp_path / "run"
    memory.mkdir()
    run_dir.mkdir()
    monkeypatch.setenv(ROOT_VARIABLE, str(memory))
    identity = claim_identity(run_dir)
    folder = node_memory_folder(identity)
    assert claim_identity(run_dir) == identity and node_memory_folder(identity) == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "rank-00000").mkdir()
    forget_node_memory(run_dir)
    assert not folder.exists()
    # A run begun anew under the same name.
    (run_dir / "copies.id").unlink()
    assert claim_identity(run_dir) != identity
    os.symlink(run_dir, memory / f"phalanx-{os.getuid()}-{identity}")
    with pytest.raises(PhalanxError, match="another user or is no folder"):
        node_memory_folder(identity)
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(PhalanxError, match="memory_every=null"):
        node_memory_folder(identity)
