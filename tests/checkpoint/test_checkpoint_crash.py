"""A save that is killed or runs out of disk: every checkpoint is whole or absent, and the one before is still there."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from distributed_ranks import fork_server
from phalanx.checkpoint import CheckpointStore
from phalanx.errors import CheckpointError
from saved_states import assert_same_bits, small_state, zeros_like

SAVES = [(1, 1), (2, 2), (3, 3), (3, 33)]
"""Steps saved in turn, with the seed of what is in them: the first, one more, one that retires the first, one again."""
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod"}


def save_all(run_dir: Path, asynchronous: bool, told: Connection, kill_at: int | None) -> None:
    """Save all of SAVES and say so after each; kill this process before change number `kill_at` to the folder.

    Says at the end which changes there were.
    """
    changes: list[str] = []

    def before_change(event: str, arguments: tuple) -> None:
        if event in CHANGES and str(run_dir / "checkpoints") in str(arguments[0]):
            if len(changes) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            changes.append(event)

    torch.set_num_threads(1)
    store = CheckpointStore(run_dir / "checkpoints", keep_last=2)
    sys.addaudithook(before_change)
    for step, seed in SAVES:
        store.save(step, small_state(seed), {"seed": seed}, asynchronous=asynchronous).wait()
        told.send((step, seed))
    store.close()
    told.send(changes)


def save_for_ever(run_dir: Path, asynchronous: bool, told: Connection) -> None:
    """Save step after step, until killed."""
    torch.set_num_threads(1)
    store = CheckpointStore(run_dir / "checkpoints", keep_last=2)
    for step in itertools.count():
        handle = store.save(step, small_state(step), {"seed": step}, asynchronous=asynchronous)
        if not asynchronous:
            told.send((step, step))
        elif step:
            told.send((step - 1, step - 1))  # a save begins when the one before has ended
    handle.wait()


def run_until_dead(work, *arguments, kill_after_s: float | None = None) -> tuple[list, int]:
    """What the process said before it ended or was killed, and its exit code."""
    here, there = fork_server().Pipe(duplex=False)
    process = fork_server().Process(target=work, args=(*arguments[:2], there, *arguments[2:]))
    process.start()
    there.close()
    if kill_after_s is not None:
        here.poll(30)  # the start does not count
        time.sleep(kill_after_s)
        process.kill()
    said = []
    try:
        while True:
            said.append(here.recv())
    except EOFError:
        process.join()
        return said, process.exitcode


def check_what_is_left(run_dir: Path, acknowledged: tuple[int, int] | None) -> int | None:
    """Everything listed is whole, the newest is at least the last acknowledged one, nothing else is left over."""
    with CheckpointStore(run_dir / "checkpoints", keep_last=2) as store:
        for checkpoint in store.list():
            tensors = zeros_like(small_state(0))
            seed = store.load(checkpoint, tensors)["seed"]
            assert_same_bits(tensors, small_state(seed))
        newest = store.newest()
        assert acknowledged is None or (newest is not None and newest.step >= acknowledged[0])
        if newest is not None:
            usable = store.load_newest_usable(zeros_like(small_state(0)))
            assert usable is not None and usable[0] == newest
        names = {path.name for path in store.root.iterdir()} if store.root.exists() else set()
        assert names == {checkpoint.path.name for checkpoint in store.list()}
        # The run goes on from there.
        store.save(9, small_state(9), {"seed": 9})
        assert store.newest().step == 9
        return None if newest is None else newest.step


@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_before_any_change_to_the_folder(tmp_path, asynchronous):
    said, code = run_until_dead(save_all, tmp_path / "undisturbed", asynchronous, None)
    assert code == 0 and said[:-1] == SAVES
    changes = said[-1]
    # Where folders change their names and where they go, and some moments between. Four folders are published, the first
    # one is retired, and the third put aside for its replacement.
    assert changes.count("os.rename") == 6
    moments = {index for index, change in enumerate(changes) if change in ("os.rename", "os.rmdir")}
    moments |= set(range(0, len(changes), 8))
    outcomes = set()
    for moment in sorted(moments):
        run_dir = tmp_path / str(moment)
        said, code = run_until_dead(save_all, run_dir, asynchronous, moment)
        assert code == -signal.SIGKILL
        outcomes.add(check_what_is_left(run_dir, said[-1] if said else None))
    assert outcomes == {None, 1, 2, 3}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_at_a_random_moment(tmp_path, asynchronous):
    rng = random.Random(int(asynchronous))
    for trial in range(5):
        run_dir = tmp_path / str(trial)
        arguments = (save_for_ever, run_dir, asynchronous)
        said, code = run_until_dead(*arguments, kill_after_s=rng.uniform(0, 0.1))
        assert code == -signal.SIGKILL
        with CheckpointStore(run_dir / "checkpoints", keep_last=2) as store:
            tensors = zeros_like(small_state(0))
            checkpoint, state = store.load_newest_usable(tensors)
            assert checkpoint.step >= said[-1][0] and state == {"seed": checkpoint.step}
            assert_same_bits(tensors, small_state(checkpoint.step))
            assert all(path.suffix == "" for path in store.root.iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 1 MiB where mounting one is permitted; else one in which no file may be larger than 300 kB.

    Yields the folder, what a failed write is told, and a function that lifts the limit.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode == 0:
        yield folder, errno.ENOSPC, lambda: subprocess.run(["mount", "-o", "remount,size=4m", folder], check=True)
        subprocess.run(["umount", "--lazy", folder], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    yield folder, errno.EFBIG, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nobody write to `folder` meanwhile: by a mount for root, whom no mode keeps out, else by its mode."""
    if os.geteuid():
        folder.chmod(0o500)
        yield
        folder.chmod(0o700)
        return
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_folder_that_becomes_read_only_fails_the_save_and_harms_nothing(tmp_path, asynchronous):
    warnings: list[str] = []
    with CheckpointStore(tmp_path / "checkpoints", keep_last=1, on_failure="warn", warn=warnings.append) as store:
        store.save(1, small_state(1), {"seed": 1})
        try:
            with (
                read_only(store.root),
                pytest.raises(CheckpointError, match=r"checkpoint of step 2 was not saved: (Read-only|Permission)"),
            ):
                store.save(2, small_state(2), {"seed": 2}, asynchronous=asynchronous).wait()
        except subprocess.CalledProcessError:
            pytest.skip("root may not mount here")
        assert bool(warnings) == asynchronous
        loaded = zeros_like(small_state(1))
        checkpoint, state = store.load_newest_usable(loaded)
        assert checkpoint.step == 1 and state == {"seed": 1}
        assert_same_bits(loaded, small_state(1))
        store.save(3, small_state(3), {"seed": 3}, asynchronous=asynchronous).wait()
        assert [path.name for path in store.root.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_fails_the_save_and_harms_nothing(small_disk, asynchronous):
    folder, number, free = small_disk
    warnings: list[str] = []
    store = CheckpointStore(folder / "checkpoints", keep_last=3, on_failure="warn", warn=warnings.append)
    half = dict(itertools.islice(small_state(1).items(), 3))
    store.save(1, half, {"seed": 1})
    too_much = {name: tensor.repeat(4, 1) for name, tensor in small_state(2).items()}
    with pytest.raises(CheckpointError, match=f"checkpoint of step 2 was not saved: .*{os.strerror(number)}"):
        store.save(2, too_much, {"seed": 2}, asynchronous=asynchronous).wait()
    assert bool(warnings) == asynchronous
    # The older checkpoint is intact, what was half written is gone, and with room again the next save works.
    loaded = zeros_like(half)
    checkpoint, state = store.load_newest_usable(loaded)
    assert checkpoint.step == 1 and state == {"seed": 1}
    assert_same_bits(loaded, half)
    assert [path.name for path in store.root.iterdir()] == ["step-00000001"]
    free()
    store.save(3, too_much, {"seed": 3}, asynchronous=asynchronous).wait()
    assert [checkpoint.step for checkpoint in store.list()] == [3, 1]
    store.close()


def test_a_disk_that_fills_up_with_the_last_small_file(tmp_path):
    """The data files fit and the manifest does not: nothing is published either."""
    tensors = {f"layer{index}": torch.ones(1) for index in range(2000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with CheckpointStore(tmp_path / "checkpoints", keep_last=3) as store:
        store.save(1, tensors, {})
        sizes = {path.name: path.stat().st_size for path in store.newest().path.iterdir()}
        assert sizes["manifest.json"] > sizes["rank-00000-000.safetensors"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (sizes["manifest.json"] - 1, hard))
        try:
            with pytest.raises(CheckpointError, match="step 2 was not saved: File too large"):
                store.save(2, tensors, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [path.name for path in store.root.iterdir()] == ["step-00000001"]
        store.save(2, tensors, {})
        assert store.newest().step == 2
