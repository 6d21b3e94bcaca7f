"""Which checkpoints are listed, kept, replaced and set aside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from phalanx.checkpoint import CheckpointStore, RunLock, open_checkpoints, read_state, read_tensors
from phalanx.errors import CheckpointError
from saved_states import assert_same_bits, damaged_when_published, saved_runs, small_state, zeros_like

X = {"x": torch.ones(2)}


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.list()]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(1, None, [12]), (3, None, [12, 11, 10]), (2, 4, [12, 11, 8, 4, 0]), (1, 1, list(range(12, -1, -1)))],
)
def test_the_newest_and_every_nth_are_kept(tmp_path, keep_last, keep_every, kept):
    with CheckpointStore(tmp_path / "checkpoints", keep_last=keep_last, keep_every=keep_every) as store:
        for step in range(13):
            store.save(step, X, {}, asynchronous=step % 2 == 0)
        assert steps(store) == kept
        assert len(names(store.root)) == len(kept)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_whole_checkpoint_is_never_deleted(tmp_path, asynchronous):
    warnings: list[str] = []
    with CheckpointStore(tmp_path / "checkpoints", keep_last=1, warn=warnings.append) as store:
        store.save(1, small_state(1), {"step": 1})
        with damaged_when_published("rank-00000-000.safetensors"):
            for step in (2, 3):
                store.save(step, small_state(step), {"step": step}, asynchronous=asynchronous)
            store.wait()
        # The two newest look whole and are not; what they would have replaced is still there, and what a run resumes from.
        assert steps(store) == [3, 2, 1]
        assert len(warnings) == 2 and "checkpoint of step 3 does not read back as written" in warnings[1]
        loaded = zeros_like(small_state(0))
        found = store.load_newest_usable(loaded)
        assert found is not None and found[0].step == 1
        assert_same_bits(loaded, small_state(1))
        assert [text.partition(":")[0] for text in warnings[2:]] == [
            f"checkpoint of step {step} is damaged, trying the one before" for step in (3, 2)
        ]
        store.save(4, small_state(4), {"step": 4})
        assert steps(store) == [4]


def test_a_checkpoint_cut_short_does_not_count_among_those_to_keep(tmp_path):
    saved_runs(tmp_path, [1, 2]).close()
    data = tmp_path / "checkpoints" / "step-00000002" / "rank-00000-000.safetensors"
    data.write_bytes(data.read_bytes()[:-1])
    with CheckpointStore(tmp_path / "checkpoints", keep_last=2) as store:
        store.save(3, small_state(3), {})
        assert steps(store) == [3, 1]
        store.save(4, small_state(4), {})
        assert steps(store) == [4, 3] and len(names(store.root)) == 2


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="keep_last=0, keep_every=None: each is at least 1; the newest is kept"):
        CheckpointStore(tmp_path / "checkpoints", keep_last=0)


def test_listing_is_by_step_and_never_by_time_stamp(tmp_path):
    with saved_runs(tmp_path, [1, 2, 100_000_000]) as store:
        os.utime(store.root / "step-00000001", (2**32, 2**32))
        os.utime(store.root / "step-100000000", (0, 0))
        assert steps(store) == [100_000_000, 2, 1] and store.newest().step == 100_000_000


def test_only_whole_checkpoints_are_listed(tmp_path):
    with saved_runs(tmp_path, [1, 2, 3, 4]) as store:
        (store.root / "step-00000004" / "rank-00000-000.safetensors").unlink()
        with (store.root / "step-00000003" / "rank-00000-000.safetensors").open("ab") as file:
            file.write(b"x")
        (store.root / "step-00000002" / "manifest.json").unlink()
        for name in ("step-5", "step-000000006", "step-00000007.writing", "latest"):
            (store.root / name).mkdir()
        (store.root / "step-00000008").symlink_to(store.root / "step-00000001")
        (store.root / "step-00000009").write_text("a file")
        assert steps(store) == [1] and store.newest().step == 1


def test_an_empty_or_absent_folder_holds_none(tmp_path):
    with CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=1) as store:
        assert store.newest() is None and store.list() == [] and store.load_newest_usable({}) is None


def test_saving_a_step_again_replaces_it(tmp_path):
    with saved_runs(tmp_path, [1, 2]) as store:
        store.save(2, small_state(7), {"again": True})
        assert steps(store) == [2, 1] and names(store.root) == ["step-00000001", "step-00000002"]
        assert_same_bits(read_tensors(store.newest().path), small_state(7))
        assert read_state(store.newest().path) == {"again": True}


def test_going_on_from_an_earlier_step_sets_the_later_ones_aside(tmp_path):
    warnings: list[str] = []
    saved_runs(tmp_path, [10, 20, 30]).close()
    with CheckpointStore(tmp_path / "checkpoints", keep_last=2, warn=warnings.append) as store:
        store.save(15, small_state(15), {})
        # The checkpoint just written is the newest, though two later steps were there and keep_last is 2.
        assert steps(store) == [15, 10]
        aside = ["step-00000020.superseded", "step-00000030.superseded"]
        assert names(store.root) == ["step-00000010", "step-00000015", *aside]
        assert len(warnings) == 2 and "step-00000030 is of a later step than the one just saved, 15" in warnings[0]
        store.save(20, small_state(20), {})
        store.save(16, small_state(16), {})
        assert steps(store) == [16, 15] and "step-00000020.superseded-2" in names(store.root)


def test_what_a_dead_process_left_is_cleared_up(tmp_path):
    saved_runs(tmp_path, [1, 2, 3]).close()
    root = tmp_path / "checkpoints"
    (root / "step-00000004.writing").mkdir()
    (root / "step-00000004.writing" / "rank-00000-000.safetensors").write_bytes(b"half")
    (root / "step-00000000.deleting").mkdir()
    (root / "step-00000003").rename(root / "step-00000003.replaced")
    (root / "step-00000002.replaced").mkdir()
    (root / "notes.writing").mkdir()
    with CheckpointStore(root, keep_last=9) as store:
        assert names(root) == ["notes.writing", "step-00000001", "step-00000002", "step-00000003"]
        assert steps(store) == [3, 2, 1]


def test_the_folders_of_a_living_process_are_left_alone(tmp_path):
    root = tmp_path / "checkpoints"
    with CheckpointStore(root, keep_last=1):
        (root / "step-00000004.writing").mkdir(parents=True)
        open_checkpoints(tmp_path).list()
        assert names(root) == ["step-00000004.writing"]


def test_a_store_uses_the_callers_lock_or_its_own(tmp_path):
    with RunLock(tmp_path):
        CheckpointStore(tmp_path / "checkpoints", keep_last=1).close()
        assert RunLock.held(tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    assert RunLock.held(tmp_path)
    store.close()
    assert not RunLock.held(tmp_path)


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path):
    warnings: list[str] = []
    with CheckpointStore(tmp_path / "checkpoints", keep_last=1, warn=warnings.append) as store:
        store.save(1, X, {})
        # Its name while being deleted is taken by a file, which no folder can replace.
        (store.root / "step-00000001.deleting").write_text("in the way")
        store.save(2, X, {})
        assert store.newest().step == 2
        assert len(warnings) == 1 and "an old checkpoint could not be removed: Not a directory" in warnings[0]


def test_reading_a_run_a_folder_or_one_checkpoint(tmp_path):
    saved_runs(tmp_path, [1, 2, 3]).close()
    root = tmp_path / "checkpoints"
    link = tmp_path / "chosen"
    link.symlink_to(root / "step-00000002")
    for path, found in ((tmp_path, [3, 2, 1]), (root, [3, 2, 1]), (root / "step-00000002", [2]), (link, [2])):
        assert [checkpoint.step for checkpoint in open_checkpoints(path).list()] == found
    tensors = zeros_like(small_state(0))
    checkpoint, state = open_checkpoints(root / "step-00000001").load_newest_usable(tensors)
    assert checkpoint.step == 1 and state == {"step": 1}
    assert_same_bits(tensors, small_state(1))
    assert open_checkpoints(root / "step-00000009").newest() is None
    assert not (tmp_path / "run.lock").exists()
