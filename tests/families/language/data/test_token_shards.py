"""The native format: what is written is read back, and what was lost or altered is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.data.prepared_folder import MANIFEST
from phalanx.errors import DataError
from phalanx.families.language.data.token_shards import ShardSource, ShardWriter, read_token_manifest
from token_data import END, VOCABULARY, write_token_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_token_folder(tmp_path / "data", train_tokens=4000, validation_tokens=600)


def stream(folder: Path, split: str) -> np.ndarray:
    return np.concatenate([np.fromfile(path, "<u2") for path in sorted(folder.glob(f"{split}-*.bin"))])


def edit(folder: Path, *place: str | int, value: Any) -> None:
    """Set one field of the manifest."""
    manifest = json.loads((folder / MANIFEST).read_text())
    part = manifest
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_a_split_is_one_stream_over_its_shards(folder: Path) -> None:
    source, tokens = ShardSource(folder, "train"), stream(folder, "train")
    assert len(list(folder.glob("train-*.bin"))) == 2
    seam = len(np.fromfile(folder / "train-00000.bin", "<u2"))
    starts = np.array([0, 17, seam - 5, len(tokens) - 10])
    assert np.array_equal(source.read(starts, 10), np.stack([tokens[start : start + 10] for start in starts]))
    assert source.tokens == len(tokens)
    assert source.samples(10) == (len(tokens) - 1) // 10


def test_it_knows_what_the_manifest_says(folder: Path) -> None:
    source = ShardSource(folder, "validation")
    assert (source.vocab_size, source.end_of_document) == (VOCABULARY, END)
    assert source.documents == np.count_nonzero(stream(folder, "validation") == END)
    assert source.text_bytes == source.tokens - source.documents
    assert source.tokenizer == folder / "tokenizer.json"


def test_every_place_belongs_to_the_document_that_ends_after_it(folder: Path) -> None:
    source, tokens = ShardSource(folder, "train"), stream(folder, "train")
    expected = np.cumsum(np.concatenate(([0], tokens[:-1] == END)))
    assert np.array_equal(source.document_of(np.arange(len(tokens))), expected)
    assert source.documents == expected[-1] + 1


def test_the_fingerprint_tells_other_tokens_and_other_splits_apart(folder: Path, tmp_path: Path) -> None:
    same = write_token_folder(tmp_path / "same", train_tokens=4000, validation_tokens=600)
    other = write_token_folder(tmp_path / "other", train_tokens=4400, validation_tokens=600)
    train = ShardSource(folder, "train").fingerprint
    assert ShardSource(same, "train").fingerprint == train
    assert len({train, ShardSource(other, "train").fingerprint, ShardSource(folder, "validation").fingerprint}) == 3


@pytest.mark.parametrize("name", ["train-00001.bin", "tokenizer.json"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_length_is_refused_at_once(name: str, change: int, folder: Path) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:change] if change < 0 else content + b"a")
    with pytest.raises(DataError) as caught:
        ShardSource(folder, "train")
    assert str(caught.value) == (
        f"{folder}/{name}: {len(content) + change} bytes found, {len(content)} expected; the file is truncated or altered"
    )


def test_starts_are_checked_when_they_are_read(folder: Path) -> None:
    (folder / "train-00001.documents").write_bytes(b"12345678")
    source = ShardSource(folder, "train")
    with pytest.raises(DataError, match=r"train-00001\.documents: 8 bytes found"):
        source.document_of(np.array([0]))


def test_a_missing_file_is_named(folder: Path) -> None:
    size = (folder / "train-00000.bin").stat().st_size
    (folder / "train-00000.bin").unlink()
    with pytest.raises(
        DataError, match=rf"00\.bin: No such file or directory; the manifest lists it with {size} bytes"
    ):
        ShardSource(folder, "train")
    assert ShardSource(folder, "validation").tokens > 0


@pytest.mark.parametrize("name", ["train-00001.bin", "train-00000.documents", "tokenizer.json"])
def test_verify_names_the_file_that_was_altered(name: str, folder: Path) -> None:
    source = ShardSource(folder, "train")
    source.verify()
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(
        DataError, match=rf"{name}: sha256 [0-9a-f]{{64}} found, [0-9a-f]{{64}} expected; the file was alt"
    ):
        source.verify()


def test_counts_that_contradict_the_files_are_refused(folder: Path) -> None:
    found = ShardSource(folder, "train").tokens
    edit(folder, "splits", "train", "tokens", value=7)
    with pytest.raises(DataError, match=f"data: train shards hold {found} tokens, 7 expected"):
        ShardSource(folder, "train")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("version",), 2, "manifest.json: version: Input should be 1; prepare the data again"),
        (("format",), "other", "manifest.json: format: Input should be 'phalanx-tokens'; prepare the data again"),
        (("tokenizer", "file", "name"), "../secret", "manifest.json: tokenizer.file.name: String should match pattern"),
        (("splits", "train", "shards", 0, "data", "name"), "/etc/passwd", "data.name: String should match pattern"),
        (
            ("splits", "train", "tokens"),
            -1,
            "manifest.json: splits.train.tokens: Input should be greater than or equal",
        ),
        (("surprise",), 1, "manifest.json: surprise: Extra inputs are not permitted; prepare the data again"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_manifest_that_cannot_be_right_is_named(
    place: tuple[str | int, ...], value: Any, message: str, folder: Path
) -> None:
    edit(folder, *place, value=value)
    with pytest.raises(DataError) as caught:
        read_token_manifest(folder)
    assert message in str(caught.value)


def test_a_damaged_or_missing_manifest_is_named(folder: Path) -> None:
    (folder / MANIFEST).write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json: content: Invalid JSON: .*; prepare the data again"):
        ShardSource(folder, "train")
    (folder / MANIFEST).unlink()
    with pytest.raises(
        DataError, match=r"manifest\.json: No such file or directory; make it with: phalanx data prepare INP"
    ):
        ShardSource(folder, "train")


def test_a_split_that_is_not_there_is_named(folder: Path) -> None:
    splits = json.loads((folder / MANIFEST).read_text())["splits"]
    edit(folder, "splits", value={"validation": splits["validation"]})
    with pytest.raises(DataError, match="data has no train split; it has validation"):
        ShardSource(folder, "train")


def test_an_empty_split_can_be_opened(folder: Path) -> None:
    edit(folder, "splits", "validation", value={"tokens": 0, "documents": 0, "text_bytes": 0, "shards": []})
    source = ShardSource(folder, "validation")
    assert (source.tokens, source.documents, source.samples(8)) == (0, 0, 0)


def test_the_writer_keeps_documents_whole_and_shards_near_their_size(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", np.dtype("uint16"), 10)
    lengths = [4, 5, 3, 25, 1, 9]
    for number, length in enumerate(lengths):
        writer.add(np.full(length, number, dtype=np.uint32), text_bytes=100 + number)
    record = writer.close()
    assert [shard.tokens for shard in record.shards] == [9, 3, 25, 10]
    assert [shard.documents for shard in record.shards] == [2, 1, 1, 2]
    assert [shard.text_bytes for shard in record.shards] == [201, 102, 103, 209]
    assert (record.tokens, record.documents, record.text_bytes) == (47, 6, 615)
    assert stream(tmp_path, "train").tolist() == np.repeat(np.arange(6), lengths).tolist()
    assert np.fromfile(tmp_path / "train-00003.documents", "<i8").tolist() == [0, 1]
