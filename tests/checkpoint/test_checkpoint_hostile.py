"""Checkpoints made by someone who means harm: refused with a message, at once, without running or reading anything else."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.checkpoint import CheckpointDamaged, CheckpointStore, open_checkpoints, read_state, read_tensors
from phalanx.checkpoint import manifest as checkpoint_manifest
from phalanx.checkpoint.manifest import Chunk, TensorRecord, compute_checksum
from phalanx.errors import CheckpointError

DATA = "rank-00000-000.safetensors"
MAX_GROWTH = 100 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with CheckpointStore(tmp_path / "checkpoints", keep_last=1) as store:
        tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4)}
        return store.save(5, tensors, {"step": 5}).path


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def reset_peak_memory() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def refusal_of(path: Path, read: Callable[[Path], Any] = read_tensors) -> str:
    """The message that reading is refused with; fails if that takes much memory."""
    reset_peak_memory()
    memory = peak_memory()
    with pytest.raises(CheckpointDamaged) as refusal:
        read(path)
    assert peak_memory() - memory < MAX_GROWTH
    return str(refusal.value)


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest and give it a checksum that is right again."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["crc32"]
    change(manifest)
    write_manifest(path, json.dumps(manifest).encode())


def write_manifest(path: Path, text: bytes) -> None:
    """Write JSON `text`, an object, as a manifest with a right checksum."""
    body = text.rstrip()[:-1] + b",\n"
    (path / "manifest.json").write_bytes(body + f'"crc32": "{compute_checksum(body)}"\n}}\n'.encode())


def chunk(manifest: dict[str, Any], tensor: int = 0) -> dict[str, Any]:
    return manifest["tensors"][tensor]["chunks"][0]


def test_the_tools_of_these_tests_make_readable_checkpoints(path):
    rewrite(path, lambda manifest: None)
    assert set(read_tensors(path)) == {"a", "b"}


class Payload:
    """Leaves a mark when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("name", [DATA, "manifest.json", "state.json"])
@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_a_pickle_in_place_of_any_file_is_never_run(path, tmp_path, name, form):
    mark = tmp_path / "mark"
    original = (path / name).stat().st_size
    if form == "pickle":
        (path / name).write_bytes(pickle.dumps(Payload(mark)).ljust(original, b"."))
    else:
        torch.save({"x": Payload(mark)}, path / name)
    message = refusal_of(path, read_state if name == "state.json" else read_tensors)
    assert str(path / name) in message and not mark.exists()


def test_a_pickle_beside_the_files_is_never_opened(path, tmp_path):
    (path / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "mark")))
    os.mkfifo(path / "extra.safetensors")
    assert set(read_tensors(path)) == {"a", "b"} and not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "name",
    ["../secret.bin", "/etc/passwd", "..", ".", "a/b", "", ".hidden", "a\x00b", "a b", "ä", "x" * 129, "a\n", 7, None],
)
def test_a_file_name_that_leaves_the_folder_is_refused(path, tmp_path, name):
    (tmp_path / "checkpoints" / "secret.bin").write_bytes((path / DATA).read_bytes())

    def point_elsewhere(manifest: dict[str, Any]) -> None:
        manifest["files"][0]["name"] = chunk(manifest)["file"] = chunk(manifest, 1)["file"] = name

    rewrite(path, point_elsewhere)
    message = refusal_of(path)
    assert message.startswith(f"{path}/manifest.json: files.0.name=")
    assert "stays in its own folder" in message or "should be a valid string" in message


@pytest.mark.parametrize("name", [DATA, "manifest.json", "state.json"])
def test_links_and_things_that_are_no_files_are_refused(path, tmp_path, name):
    secret = tmp_path / "secret"
    (path / name).rename(secret)
    read = read_state if name == "state.json" else read_tensors
    (path / name).symlink_to(secret)
    assert f"{path / name} is a symbolic link; refused" in refusal_of(path, read)
    (path / name).unlink()
    os.mkfifo(path / name)
    assert "is not a regular file" in refusal_of(path, read)
    (path / name).unlink()
    (path / name).mkdir()
    assert "is not a regular file" in refusal_of(path, read)
    (path / name).rmdir()
    (path / name).symlink_to("/dev/zero")
    assert f"{path / name} is a symbolic link; refused" in refusal_of(path, read)


def edit_chunk(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: chunk(manifest).update(fields)


def edit_tensor(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["tensors"][0].update(fields)


def huge(manifest: dict[str, Any]) -> None:
    manifest["tensors"][0]["shape"] = chunk(manifest)["sizes"] = [10**9]
    chunk(manifest)["offsets"] = [0]


def huge_and_consistent(manifest: dict[str, Any]) -> None:
    huge(manifest)
    manifest["files"][0]["bytes"] += 4 * 10**9 - 24


def overlapping(manifest: dict[str, Any]) -> None:
    one = chunk(manifest)
    parts = [one | {"offsets": offsets, "sizes": [1, 2], "key": str(offsets)} for offsets in ([0, 0], [0, 1], [1, 0])]
    manifest["tensors"][0]["chunks"] = parts


def twice(manifest: dict[str, Any]) -> None:
    manifest["tensors"].append(manifest["tensors"][0])


def same_key(manifest: dict[str, Any]) -> None:
    chunk(manifest, 1)["key"] = chunk(manifest)["key"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (huge, f"{DATA} is "),
        (huge_and_consistent, "bytes expected, found"),
        (edit_tensor(shape=[10**18, 10**18]), "tensor 'a': chunks hold 6 of 10"),
        (edit_tensor(shape=[1 << 63]), "tensors.0.shape.0="),
        (edit_tensor(shape=[1] * 33), "at most 32 items"),
        (edit_tensor(shape=[2.0, 3]), "tensors.0.shape.0='2.0': Input should be a valid integer"),
        (edit_tensor(shape=[2, -3]), "tensors.0.shape.1='-3'"),
        (edit_tensor(shape=[2, True]), "tensors.0.shape.1='True'"),
        (edit_tensor(dtype="object"), "tensors.0.dtype='object': Value error, not a dtype that a checkpoint holds"),
        (edit_tensor(dtype="float64"), "but header and chunks make"),
        (edit_tensor(name="a\nb"), "a tensor's name is 1 to 1024 printable characters"),
        (edit_tensor(requires_grad=True), "tensors.0.requires_grad='True': Extra inputs are not permitted"),
        (edit_chunk(offsets=[0, 1]), "tensor 'a': chunk [2, 3] at [0, 1] is not in [2, 3]"),
        (edit_chunk(offsets=[-1, 0]), "tensors.0.chunks.0.offsets.0='-1'"),
        (edit_chunk(offsets=[0]), "tensor 'a' has 2 dims, its chunk at [0] does not"),
        (edit_chunk(sizes=[0, 3]), "chunk [0, 3] at [0, 0] is not in [2, 3]"),
        (edit_chunk(sizes=[1, 3]), "tensor 'a': chunks hold 3 of 6 elements"),
        (edit_chunk(crc32="xyz"), "tensors.0.chunks.0.crc32='xyz'"),
        (edit_chunk(key="b"), "tensor 'b': key 'b' of rank-00000-000.safetensors is used twice"),
        (edit_chunk(key="c"), "24 bytes under key 'c' expected, found 0"),
        (edit_chunk(file="other.safetensors"), "but header and chunks make"),
        (overlapping, "tensor 'a': chunks at [0, 0] and [0, 1] overlap"),
        (twice, "tensor 'a' appears twice"),
        (same_key, "key 'a' of rank-00000-000.safetensors is used twice"),
        (lambda manifest: manifest["files"].append(manifest["files"][0]), f"file '{DATA}' appears twice"),
        (lambda manifest: manifest["files"].clear(), f"chunks lie in {DATA}, which is not listed under files"),
        (lambda manifest: manifest["files"][0].update(header_bytes=1 << 30), "files.0.header_bytes='1073741824'"),
        (lambda manifest: manifest["files"][0].update(header_bytes=7), "files.0.header_bytes='7'"),
        (lambda manifest: manifest["state"].update(bytes=1 << 40), "state.bytes="),
        (lambda manifest: manifest.update(version=2), "format version 2 is unknown; this program reads version 1"),
        (lambda manifest: manifest.update(format="zip"), "format='zip'"),
        (lambda manifest: manifest.update(step="5"), "step='5': Input should be a valid integer"),
        (lambda manifest: manifest.pop("tensors"), "tensors="),
    ],
)
def test_a_manifest_that_claims_the_impossible_is_refused(path, change, message):
    rewrite(path, change)
    found = refusal_of(path)
    assert message in found and str(path) in found


def test_chunks_of_nothing_are_refused(path):
    """Chunks without elements cost nothing to claim; a tensor may not be made of them."""
    rewrite(path, edit_chunk(sizes=[0, 0], offsets=[2, 3]))
    assert "is not in [2, 3]" in refusal_of(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"format": "phalanx-checkpoint", "format": "phalanx-checkpoint"}', "key 'format' appears twice"),
        (b'{"a": ' + b"[" * 100_000 + b"}", "nested too deeply"),
        (b'{"step": NaN}', "NaN is not JSON"),
        (b'{"step": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b'{"step": 1', "Expecting"),
        (b'{"\xff": 1}', "not UTF-8 text"),
        (b"[1, 2]", "Expecting"),
    ],
)
def test_text_that_is_not_plain_json_is_refused(path, text, message):
    write_manifest(path, text)
    found = refusal_of(path)
    assert found.startswith(f"{path}/manifest.json: ") and message in found


def test_a_strange_state_is_refused(path):
    for text, message in ((b"[1]", "a JSON object is expected, found a list"), (b'{"a": NaN}', "NaN is not JSON")):
        (path / "state.json").write_bytes(text)
        rewrite(
            path, lambda manifest, text=text: manifest["state"].update(bytes=len(text), crc32=compute_checksum(text))
        )
        assert message in refusal_of(path, read_state)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", DATA])
def test_a_file_of_a_terabyte_is_refused_unread(path, name):
    os.truncate(path / name, 1 << 40)
    message = refusal_of(path, read_state if name != DATA else read_tensors)
    assert str(path / name) in message and str(1 << 40) in message


def write_data(path: Path, header: bytes, length: int | None = None) -> None:
    """Replace the header of the data file, with every checksum right."""
    old = (path / DATA).read_bytes()
    data = old[8 + int.from_bytes(old[:8], "little") :]
    start = struct.pack("<Q", len(header) if length is None else length) + header
    (path / DATA).write_bytes(start + data)

    def adopt(manifest: dict[str, Any]) -> None:
        crc32 = compute_checksum(start)
        manifest["files"][0].update(bytes=len(start) + len(data), header_bytes=len(start), header_crc32=crc32)

    rewrite(path, adopt)


@pytest.mark.parametrize(
    ("header", "length", "message"),
    [
        (b"{}", 1 << 30, "header of 2 bytes expected, the file claims 1073741824"),
        (b"{}", None, "24 bytes under key 'a' expected, found 0"),
        (b"[]", None, "the header is not that of a safetensors file"),
        (b"nonsense", None, "the header is not that of a safetensors file"),
        (b'{"a": {"data_offsets": [0, 24]}, "a": {"data_offsets": [0, 24]}}', None, "key 'a' appears twice"),
        (b'{"a": {"data_offsets": [-8, 16]}}', None, "data at -8 to 16"),
        (b'{"a": {"data_offsets": [40, 64]}}', None, "data at 40 to 64"),
        (b'{"a": {"data_offsets": [9, 3]}}', None, "data at 9 to 3"),
        (b'{"a": {"data_offsets": [0]}}', None, "the header is not that of a safetensors file"),
        (b'{"a": {"data_offsets": [0.0, 24.0]}}', None, "the header is not that of a safetensors file"),
        (b'{"a": {}}', None, "the header is not that of a safetensors file"),
        (b'{"a": {"data_offsets": [0, 16]}}', None, "24 bytes under key 'a' expected, found 16"),
    ],
)
def test_a_data_file_with_a_made_up_header_is_refused(path, header, length, message):
    write_data(path, header, length)
    found = refusal_of(path)
    assert message in found and found.startswith(f"{path / DATA}: ")


def test_many_chunks_are_judged_with_few_comparisons(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand honest chunks are accepted, and one overlap among them is found, without comparing all pairs."""
    count, compared = 10_000, 0

    def split(manifest: dict[str, Any], shift: int) -> None:
        record, one = manifest["tensors"][0], chunk(manifest)
        manifest["tensors"][0] = record | {
            "shape": [count],
            "chunks": [one | {"offsets": [index], "sizes": [1], "key": f"a@{index}"} for index in range(count)],
        }
        manifest["tensors"][0]["chunks"][-1]["offsets"] = [count - 1 - shift]
        manifest["files"][0]["bytes"] += 4 * count - 24

    def overlap(one: Chunk, other: Chunk) -> bool:
        nonlocal compared
        compared += 1
        return compare(one, other)

    compare = checkpoint_manifest._boxes_overlap
    monkeypatch.setattr(checkpoint_manifest, "_boxes_overlap", overlap)
    original = (path / "manifest.json").read_bytes()
    rewrite(path, lambda manifest: split(manifest, 0))
    assert "bytes expected, found" in refusal_of(path)
    (path / "manifest.json").write_bytes(original)
    rewrite(path, lambda manifest: split(manifest, 4000))
    assert "tensor 'a': chunks at [5999] and [5999] overlap" in refusal_of(path)
    assert 1 <= compared <= 2 * count


def staircase(count: int, shift: int) -> tuple[list[int], list[list[list[int]]]]:
    """Shape of a tensor, and offsets and sizes of two chunks for each of its columns, all with one row in common; with a
    shift the last chunk but one overlaps another one."""
    shape = [count + 1, count]
    boxes = []
    for column in range(count):
        boxes += [[[0, column], [column + 1, 1]], [[column + 1, column], [count - column, 1]]]
    boxes[-2][0][1] -= shift
    return shape, boxes


@pytest.mark.parametrize("shift", [0, 1])
def test_chunks_that_all_meet_in_one_row_are_judged_in_linear_time(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    shape, boxes = staircase(1500, shift)
    # Elements above the diagonal first, so that a sweep over the rows holds all of them open.
    chunks = [
        Chunk(offsets=offsets, sizes=sizes, file="a", key=str(number), crc32="00000000")
        for number, (offsets, sizes) in enumerate(boxes)
    ]
    compared = 0

    def overlap(one: Chunk, other: Chunk) -> bool:
        nonlocal compared
        compared += 1
        return compare(one, other)

    compare = checkpoint_manifest._boxes_overlap
    monkeypatch.setattr(checkpoint_manifest, "_boxes_overlap", overlap)
    monkeypatch.setattr(checkpoint_manifest, "MAX_COMPARED_PAIRS", 10_000)
    record = TensorRecord(name="a", dtype="uint8", shape=shape, chunks=chunks)
    if shift:
        with pytest.raises(ValueError, match="overlap"):
            checkpoint_manifest._check_chunks(record)
    else:
        checkpoint_manifest._check_chunks(record)
    assert compared <= 10_000 + len(chunks) if shift else compared == 0


def test_chunks_make_up_a_tensor_exactly_or_not() -> None:
    """Against counting every element, over all pairs of boxes in a small tensor that hold as many elements as it."""
    sides = [(begin, end) for begin in range(3) for end in range(begin + 1, 4)]
    boxes = [((a, c), (b - a, d - c)) for a, b in sides for c, d in sides]
    judged = {True: 0, False: 0}
    for one, other in itertools.product(boxes, boxes):
        if math.prod(one[1]) + math.prod(other[1]) != 9:
            continue
        held = torch.zeros(3, 3, dtype=torch.int64)
        for (row, column), (rows, columns) in (one, other):
            held[row : row + rows, column : column + columns] += 1
        chunks = [Chunk(offsets=[*o], sizes=[*s], file="a", key="a", crc32="00000000") for o, s in (one, other)]
        record = TensorRecord(name="a", dtype="uint8", shape=[3, 3], chunks=chunks)
        exact = bool((held == 1).all())
        assert checkpoint_manifest._holds_each_element_once(record) == exact, (one, other)
        judged[exact] += 1
    assert min(judged.values()) > 5


@pytest.mark.parametrize("shape", [[1 << 62, 1 << 62, 0], [0, 1 << 61], [1 << 40, 0, 1 << 40]])
def test_strides_beyond_all_memory_are_refused(path: Path, shape: list[int]) -> None:
    rewrite(path, edit_tensor(shape=shape, chunks=[]))
    assert "larger than any memory" in refusal_of(path)


@pytest.mark.parametrize("content", [b"{},", b"[],"])
def test_text_of_nothing_but_brackets_is_refused_unread(path: Path, content: bytes) -> None:
    text = b'{"a": [' + content * 5_000_000 + b"0]}"
    (path / "state.json").write_bytes(text)
    rewrite(path, lambda manifest: manifest["state"].update(bytes=len(text), crc32=compute_checksum(text)))
    assert "5,000,002 objects and lists, more than the 200,000 it may have" in refusal_of(path, read_state)
    write_data(path, text)
    assert "objects and lists, more than the" in refusal_of(path)
    write_manifest(path, text)
    assert "objects and lists, more than the" in refusal_of(path)


def test_a_state_that_nobody_could_read_back_is_not_written(path: Path) -> None:
    with CheckpointStore(path.parent, keep_last=1) as store, pytest.raises(CheckpointError, match="objects and lists"):
        store.save(6, {"a": torch.zeros(2)}, {"step": 6, "much": [[]] * 200_000})


def test_a_whole_older_checkpoint_under_the_newest_name_is_refused(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path / "checkpoints", keep_last=3) as store:
        for step in (5, 10, 15):
            newest = store.save(step, {"a": torch.full((2,), float(step))}, {"step": step}).path
    shutil.rmtree(newest)
    shutil.copytree(newest.with_name("step-00000005"), newest)
    for read in (read_tensors, read_state):
        assert "step=5; this is the checkpoint of another step" in refusal_of(newest, read)
    source, target = open_checkpoints(tmp_path), {"a": torch.zeros(2)}
    assert [one.step for one in source.list()] == [10, 5]
    loaded = source.load_newest_usable(target)
    assert loaded is not None and loaded[0].step == 10 and target["a"].tolist() == [10.0, 10.0]
    # Under a name of no meaning it is as good as ever.
    newest.rename(tmp_path / "copy")
    assert read_tensors(tmp_path / "copy")["a"].tolist() == [5.0, 5.0]
