"""Only one trainer to a run directory: who holds it is named, and a dead owner does not block."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from distributed_ranks import fork_server
from phalanx.checkpoint import CheckpointStore, RunLock
from phalanx.errors import CheckpointError


def hold_forever(run_dir: Path, heartbeat_s: float = 10.0) -> None:
    """Take the lock and keep it; a file says when."""
    with RunLock(run_dir, heartbeat_s=heartbeat_s):
        (run_dir / "held").touch()
        time.sleep(600)


def hold_with_a_forked_child(run_dir: Path) -> None:
    """Take the lock, and leave it to a child that outlives us unless it lets go."""
    with RunLock(run_dir):
        if os.fork() == 0:
            (run_dir / "child").write_text(str(os.getpid()))
            (run_dir / "child").rename(run_dir / "held")
            time.sleep(600)
        time.sleep(600)


@pytest.fixture
def owner(tmp_path):
    """Starts a process that holds the lock of tmp_path; it is killed at the end at the latest."""
    started = []

    def start(work=hold_forever, *arguments):
        process = fork_server().Process(target=work, args=(tmp_path, *arguments))
        process.start()
        started.append(process)
        deadline = time.monotonic() + 30
        while not (tmp_path / "held").exists():
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


def test_a_second_trainer_is_refused_with_the_first_ones_host_and_pid(tmp_path, owner):
    process = owner()
    with pytest.raises(CheckpointError) as refusal, RunLock(tmp_path):
        pass
    assert f"{tmp_path} is in use by process {process.pid} on host {socket.gethostname()} (since 20" in str(
        refusal.value
    )
    assert "end it first, or choose another --run-dir" in str(refusal.value)
    with pytest.raises(CheckpointError, match=f"in use by process {process.pid}"):
        CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == process.pid


def test_the_lock_of_a_killed_trainer_is_taken_over(tmp_path, owner):
    process = owner()
    process.kill()
    process.join()
    assert (tmp_path / "run.lock").exists()
    with RunLock(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "run.lock").exists()


def test_a_worker_that_outlives_its_trainer_does_not_keep_the_lock(tmp_path, owner):
    process = owner(hold_with_a_forked_child)
    child = int((tmp_path / "held").read_text())
    try:
        process.kill()
        process.join()
        os.kill(child, 0)
        with RunLock(tmp_path):
            pass
    finally:
        os.kill(child, 9)


def test_the_same_process_cannot_take_it_twice(tmp_path):
    with RunLock(tmp_path):
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} .*in this very process"):
            RunLock(tmp_path).acquire()
        assert RunLock.held(tmp_path)
    assert not RunLock.held(tmp_path)


def test_it_can_be_taken_again_after_release(tmp_path):
    lock = RunLock(tmp_path / "new" / "run")
    for _ in range(2):
        with lock:
            assert lock.path.exists()
        assert not lock.path.exists()


def test_a_living_owner_on_another_host_is_known_by_its_heartbeat(tmp_path, owner, monkeypatch, caplog):
    """Two hosts are played by changing this one's name; the file lock is taken out of the way as on a disk without."""
    process = owner(hold_forever, 0.05)
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    monkeypatch.setattr("fcntl.flock", no_file_locks)
    with pytest.raises(CheckpointError, match=f"in use by process {process.pid} on host"):
        RunLock(tmp_path, heartbeat_s=0.1).acquire()
    assert "watching 1 s for a sign of life" in caplog.text
    process.kill()
    process.join()
    with RunLock(tmp_path, heartbeat_s=0.02):
        assert json.loads((tmp_path / "run.lock").read_text())["host"] == "another-host"


def test_without_file_locks_the_process_number_decides(tmp_path, owner, monkeypatch):
    process = owner()
    monkeypatch.setattr("fcntl.flock", no_file_locks)
    with pytest.raises(CheckpointError, match=f"in use by process {process.pid} on host"):
        RunLock(tmp_path).acquire()
    process.kill()
    process.join()
    with RunLock(tmp_path):
        pass


def no_file_locks(descriptor, operation):
    raise OSError(38, "Function not implemented")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}', "\x00" * 100])
def test_a_lock_file_that_names_nobody_is_taken_over(tmp_path, text):
    (tmp_path / "run.lock").write_text(text)
    with RunLock(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/run\.lock cannot be written: .*; choose another --run-dir"):
        RunLock(tmp_path / "file").acquire()
