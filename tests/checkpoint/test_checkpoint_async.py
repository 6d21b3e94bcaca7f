"""Background saves: what is written is the state at the time of `save`, one at a time, and failures are heard of."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path

import pytest
import torch

from phalanx.checkpoint import CheckpointStore, folders, read_state, read_tensors, saver
from phalanx.errors import CheckpointError
from saved_states import assert_same_bits, every_dtype, small_state


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def hold(store: CheckpointStore) -> threading.Event:
    """Keep the writing thread from starting the next save until the event is set."""
    gate = threading.Event()
    store._thread.submit(gate.wait)
    return gate


def break_folder(store: CheckpointStore, step: int) -> None:
    """Make the data file of `step` impossible to write: its place is taken by a folder."""
    (folders.writing_folder(store.root, step) / "rank-00000-000.safetensors").mkdir()


def test_later_updates_are_not_written(root):
    with CheckpointStore(root, keep_last=3) as store:
        tensors, state = every_dtype(1) | small_state(1), {"losses": [1.0]}
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        gate = hold(store)
        handle = store.save(1, tensors, state, asynchronous=True)
        for tensor in tensors.values():
            tensor.view(torch.uint8).zero_()
        state["losses"].append(2.0)
        assert not handle.done and store.root.joinpath("step-00000001.writing").exists()
        gate.set()
        handle.wait()
        assert_same_bits(read_tensors(handle.path), expected)
        assert read_state(handle.path) == {"losses": [1.0]}


def test_staging_memory_is_reused_and_still_right(root):
    with CheckpointStore(root, keep_last=9) as store:
        tensors = small_state(0)
        store.save(0, tensors, {}, asynchronous=True)
        blocks = {number: block.data_ptr() for number, block in store._saver._staging._blocks.items()}
        for step in range(1, 5):
            for name, tensor in small_state(step).items():
                tensors[name].copy_(tensor)
            store.save(step, tensors, {}, asynchronous=True)
        store.wait()
        assert blocks == {number: block.data_ptr() for number, block in store._saver._staging._blocks.items()}
        assert [checkpoint.step for checkpoint in store.list()] == [4, 3, 2, 1, 0]
        for checkpoint in store.list():
            assert_same_bits(read_tensors(checkpoint.path), small_state(checkpoint.step))


def test_reserved_memory_is_what_the_first_save_uses(root):
    with CheckpointStore(root, keep_last=9) as store:
        tensors = small_state(0)
        store.reserve(tensors)
        handle = store.save(0, tensors, {}, asynchronous=True)
        (block,) = store._saver._staging._blocks.values()
        handle.wait()
        store.reserve(tensors)
        store.save(1, tensors, {}, asynchronous=True).wait()
        assert [kept.data_ptr() for kept in store._saver._staging._blocks.values()] == [block.data_ptr()]
        assert_same_bits(read_tensors(handle.path), tensors)


@pytest.fixture
def little_memory():
    """A process that may get 128 MiB more address space, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_memory_that_cannot_be_had_is_warned_of_and_fails_the_save(root, little_memory):
    warnings: list[str] = []
    with CheckpointStore(root, keep_last=9, on_failure="warn", warn=warnings.append) as store:
        tensors = {"x": torch.zeros(1).expand(256, 1 << 20)}
        store.reserve(tensors)
        handle = store.save(0, tensors, {}, asynchronous=True)
        with pytest.raises(CheckpointError, match="checkpoint of step 0 was not saved: Cannot allocate memory"):
            handle.wait()
        assert store.list() == []
    assert len(warnings) == 2
    assert warnings[0].startswith("1.0 GiB of host memory for background checkpoints cannot be had: ")


def test_a_slow_disk_keeps_training_waiting_for_a_fifth_of_a_save_at_most(root, monkeypatch):
    write = saver.write_file

    def write_slowly(*arguments):
        time.sleep(0.5)
        return write(*arguments)

    monkeypatch.setattr(saver, "write_file", write_slowly)
    with CheckpointStore(root, keep_last=3) as store:
        began = time.monotonic()
        store.save(1, small_state(1), {})
        synchronous_s = time.monotonic() - began
        handle = store.save(2, small_state(2), {}, asynchronous=True)
        assert handle.stall_seconds < 0.2 * synchronous_s and not handle.done
        handle.wait()
        assert [checkpoint.step for checkpoint in store.list()] == [2, 1]


def test_one_save_at_a_time(root):
    with CheckpointStore(root, keep_last=3) as store:
        gate = hold(store)
        first = store.save(1, small_state(1), {}, asynchronous=True)
        threading.Timer(1.0, gate.set).start()
        second = store.save(2, small_state(2), {}, asynchronous=True)
        assert first.done and second.stall_seconds > 0.2
        assert [checkpoint.step for checkpoint in store.list()] == [2, 1] and second.done


def test_reading_waits_for_the_save_under_way(root):
    with CheckpointStore(root, keep_last=3) as store:
        gate = hold(store)
        store.save(1, small_state(1), {}, asynchronous=True)
        threading.Timer(0.1, gate.set).start()
        assert store.newest().step == 1


def test_tensors_may_change_from_save_to_save(root):
    with CheckpointStore(root, keep_last=9) as store:
        for step, tensors in enumerate((small_state(0), every_dtype(), {"x": torch.ones(3)}, {"x": torch.ones(2, 2)})):
            handle = store.save(step, tensors, {}, asynchronous=True)
            handle.wait()
            assert_same_bits(read_tensors(handle.path), tensors)


def test_a_failed_background_save_is_warned_of_and_raised_at_the_next_save(root):
    warnings: list[str] = []
    store = CheckpointStore(root, keep_last=3, warn=warnings.append)
    store.save(1, small_state(1), {})
    gate = hold(store)
    handle = store.save(2, small_state(2), {}, asynchronous=True)
    break_folder(store, 2)
    gate.set()
    with pytest.raises(CheckpointError, match=r"checkpoint of step 2 was not saved: .*Is a directory"):
        store.save(3, small_state(3), {})
    assert len(warnings) == 1 and "checkpoint of step 2 was not saved" in warnings[0]
    with pytest.raises(CheckpointError, match="step 2"):
        handle.wait()
    # Heard of once, the failure is over: the next save works, and nothing of the failed one is left.
    store.save(3, small_state(3), {})
    store.close()
    assert sorted(path.name for path in root.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_warning_that_cannot_be_written_holds_nobody_up(root):
    """A checkpoint of a later step is set aside, of which there is a warning."""

    def warn(_words: str) -> None:
        raise OSError(28, "No space left on device")

    store = CheckpointStore(root, keep_last=1, warn=warn)
    store.save(2, {"w": torch.zeros(2)}, {})
    store.save(1, {"w": torch.zeros(2)}, {}, asynchronous=True).wait(30)
    assert (root / "step-00000001").is_dir()


def test_a_table_of_contents_that_nobody_would_read_is_not_published(root, monkeypatch):
    with CheckpointStore(root, keep_last=1) as store:
        store.save(1, {"w": torch.zeros(2)}, {})
        monkeypatch.setattr(saver, "MAX_MANIFEST_BYTES", 100)
        with pytest.raises(CheckpointError, match="table of contents"):
            store.save(2, {"w": torch.ones(2)}, {})
        assert store.newest().step == 1


@pytest.mark.parametrize("ending", ["wait", "close"])
def test_a_failed_background_save_is_raised_at_the_end(root, ending):
    store = CheckpointStore(root, keep_last=3, warn=lambda _: None)
    gate = hold(store)
    store.save(2, small_state(2), {}, asynchronous=True)
    break_folder(store, 2)
    gate.set()
    with pytest.raises(CheckpointError, match="checkpoint of step 2 was not saved"):
        getattr(store, ending)()
    store.close()


def test_a_failed_background_save_can_be_a_warning_only(root):
    warnings: list[str] = []
    with CheckpointStore(root, keep_last=3, on_failure="warn", warn=warnings.append) as store:
        gate = hold(store)
        handle = store.save(2, small_state(2), {}, asynchronous=True)
        break_folder(store, 2)
        gate.set()
        store.save(3, small_state(3), {}, asynchronous=True)
    assert len(warnings) == 1 and "step 2 was not saved" in warnings[0]
    assert isinstance(handle.error, CheckpointError)


def test_a_folder_that_cannot_be_made_fails_the_save_not_the_call(root):
    warnings: list[str] = []
    with CheckpointStore(root, keep_last=3, on_failure="warn", warn=warnings.append) as store:
        root.write_text("in the way")
        store.save(2, small_state(2), {}, asynchronous=True)
        with pytest.raises(CheckpointError, match="step 2 was not saved: File exists"):
            store.save(2, small_state(2), {})
        root.unlink()
        store.save(3, small_state(3), {})
        assert store.newest().step == 3
    assert len(warnings) == 1 and "step 2 was not saved: File exists" in warnings[0]


def test_waiting_can_be_limited(root):
    with CheckpointStore(root, keep_last=3) as store:
        gate = hold(store)
        handle = store.save(1, small_state(1), {}, asynchronous=True)
        with pytest.raises(TimeoutError, match=r"checkpoint of step 1 is still being written after 0\.01 s"):
            handle.wait(timeout_s=0.01)
        gate.set()
        handle.wait()


def test_a_closed_store_saves_nothing(root):
    store = CheckpointStore(root, keep_last=3)
    store.close()
    with pytest.raises(CheckpointError, match="the store is closed"):
        store.save(1, small_state(1), {})
