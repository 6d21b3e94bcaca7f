"""Altered, truncated, missing and exchanged files: found, named, and passed over for the checkpoint before."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from phalanx.checkpoint import CheckpointDamaged, CheckpointStore, open_checkpoints, read_state, read_tensors
from phalanx.errors import CheckpointError
from saved_states import assert_same_bits, every_dtype, saved_runs, small_state, zeros_like

DATA = "rank-00000-000.safetensors"


def damaged(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    """The message that loading the checkpoint at `path` is refused with."""
    source = open_checkpoints(path)
    with pytest.raises(CheckpointDamaged) as refusal:
        source.load(source._published()[0], zeros_like(tensors))
    return str(refusal.value)


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of every dtype, and the tensors in it."""
    tensors = every_dtype() | small_state(0)
    with CheckpointStore(tmp_path / "checkpoints", keep_last=1) as store:
        return store.save(5, tensors, {"step": 5}).path, tensors


def test_every_flipped_bit_is_found_and_named(checkpoint):
    path, tensors = checkpoint
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    rng = random.Random(20)
    places = [(DATA, rng.randrange(len(files[DATA]))) for _ in range(20)]
    places += [(name, rng.randrange(len(content))) for name, content in files.items() for _ in range(20)]
    places += [(name, end) for name, content in files.items() for end in (0, len(content) - 1)]
    for name, position in places:
        altered = bytearray(files[name])
        altered[position] ^= 1 << rng.randrange(8)
        (path / name).write_bytes(altered)
        message = damaged(path, tensors)
        (path / name).write_bytes(files[name])
        assert str(path / name) in message
        header = int.from_bytes(files[DATA][:8], "little") + 8
        if name == DATA and position < header:
            assert "header checksum expected" in message and "; it holds tensor 'model.float64' and 17 more" in message
        elif name == DATA:
            assert "checksum expected" in message and any(
                f"tensor '{tensor}', chunk at" in message for tensor in tensors
            )
    loaded = zeros_like(tensors)
    source = open_checkpoints(path)
    source.load(source.newest(), loaded)
    assert_same_bits(loaded, tensors)


def test_the_altered_tensor_is_named_with_both_checksums(checkpoint):
    path, tensors = checkpoint
    content = bytearray((path / DATA).read_bytes())
    needle = tensors["model.layer3.weight"].numpy().tobytes()
    content[content.index(needle) + 17] ^= 4
    (path / DATA).write_bytes(content)
    message = damaged(path, tensors)
    assert message.startswith(f"{path / DATA}: tensor 'model.layer3.weight', chunk at [0, 0]: checksum expected ")
    with pytest.raises(CheckpointDamaged, match=r"tensor 'model\.layer3\.weight'"):
        read_tensors(path)
    # What is not read is not judged: the other tensors are sound.
    assert_same_bits(read_tensors(path, "model.layer2"), {"model.layer2.weight": tensors["model.layer2.weight"]})


@pytest.mark.parametrize("length", [1, 4096])
def test_wiped_ranges_are_found(checkpoint, length):
    path, tensors = checkpoint
    content = bytearray((path / DATA).read_bytes())
    start = content.index(tensors["model.layer1.weight"].numpy().tobytes()) + 512
    content[start : start + length] = bytes(length)
    (path / DATA).write_bytes(content)
    assert "tensor 'model.layer1.weight'" in damaged(path, tensors)


def test_truncated_files_are_found(checkpoint):
    path, tensors = checkpoint
    for name in (DATA, "manifest.json", "state.json"):
        content = (path / name).read_bytes()
        for length in (0, 7, len(content) // 2, len(content) - 1):
            (path / name).write_bytes(content[:length])
            message = damaged(path, tensors)
            assert str(path / name) in message
            assert any(words in message for words in (f"found {length}", "does not end with its checksum"))
        (path / name).write_bytes(content)


def test_missing_files_are_found(checkpoint):
    path, tensors = checkpoint
    for name in (DATA, "manifest.json", "state.json"):
        (path / name).rename(path / "elsewhere")
        holds = "; it holds tensor 'model.float64' and 17 more" if name == DATA else ""
        assert damaged(path, tensors) == f"{path / name} is missing{holds}"
        (path / "elsewhere").rename(path / name)


def test_files_of_another_step_are_found(tmp_path):
    saved_runs(tmp_path, [1, 2]).close()
    one, two = (tmp_path / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    for name in (DATA, "manifest.json", "state.json"):
        original = (two / name).read_bytes()
        shutil.copy(one / name, two / name)
        # A manifest says of which step it is, before any checksum is compared.
        expected = "step=1; this is the checkpoint of another step" if name == "manifest.json" else "checksum expected"
        assert expected in damaged(two, small_state(2))
        (two / name).write_bytes(original)


def test_exchanged_and_duplicated_files_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.checkpoint.saver.MAX_FILE_BYTES", 100_000)
    tensors = {f"t{index}": torch.full((20_000,), float(index)) for index in range(4)}
    with CheckpointStore(tmp_path / "checkpoints", keep_last=1) as store:
        path = store.save(5, tensors, {}).path
    first, second = path / "rank-00000-000.safetensors", path / "rank-00000-001.safetensors"
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    assert f"{first}: header checksum expected" in damaged(path, tensors)
    second.write_bytes(contents[0])
    assert f"{first}: header checksum expected" in damaged(path, tensors)
    second.write_bytes(contents[1])
    # With the right header before another file's tensors, the tensors' own checksums tell.
    header = len(contents[0]) - 80_000
    first.write_bytes(contents[0][:header] + contents[1][header:])
    assert "tensor 't0', chunk at [0]: checksum expected" in damaged(path, tensors)


def test_damage_makes_the_run_fall_back_with_a_warning(tmp_path):
    saved_runs(tmp_path, [1, 2, 3, 4]).close()
    root, warnings = tmp_path / "checkpoints", []
    content = bytearray((root / "step-00000004" / DATA).read_bytes())
    content[-1] ^= 1
    (root / "step-00000004" / DATA).write_bytes(content)
    (root / "step-00000003" / DATA).unlink()
    with CheckpointStore(root, keep_last=4, warn=warnings.append) as store:
        tensors = zeros_like(small_state(0))
        checkpoint, state = store.load_newest_usable(tensors)
        assert checkpoint.step == 2 and state == {"step": 2}
        assert_same_bits(tensors, small_state(2))
        assert len(warnings) == 2
        assert warnings[0].startswith(
            f"checkpoint of step 4 is damaged, trying the one before: "
            f"{root}/step-00000004/{DATA}: tensor 'model.layer5.weight', chunk at [0, 0]: checksum expected"
        )
        assert warnings[1] == (
            f"checkpoint of step 3 is damaged, trying the one before: "
            f"{root}/step-00000003/{DATA} is missing; it holds tensor 'model.layer0.weight' and 5 more"
        )


def test_all_damaged_is_an_error_and_not_a_fresh_start(tmp_path):
    saved_runs(tmp_path, [1, 2]).close()
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-0000000{step}" / "state.json").unlink()
    source = open_checkpoints(tmp_path, warn=lambda _: None)
    with pytest.raises(
        CheckpointError, match=r"none of the 2 checkpoints in .* is usable; newest: .*state\.json is missing"
    ):
        source.load_newest_usable(zeros_like(small_state(0)))


def test_another_model_is_an_error_and_no_reason_to_fall_back(tmp_path):
    saved_runs(tmp_path, [1, 2]).close()
    warnings: list[str] = []
    source = open_checkpoints(tmp_path, warn=warnings.append)
    with pytest.raises(CheckpointError, match="step-00000002 does not fit this model") as refusal:
        source.load_newest_usable({"model.other": torch.zeros(1)})
    assert not isinstance(refusal.value, CheckpointDamaged) and warnings == []


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointDamaged, match="nothing is not a checkpoint folder that can be read: No such file"):
        read_tensors(tmp_path / "nothing")
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json is missing"):
        read_state(tmp_path)
