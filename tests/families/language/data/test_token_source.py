import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.prepared_folder import MANIFEST
from phalanx.errors import DataError
from phalanx.families.language.data.token_shards import ShardSource, read_token_manifest
from phalanx.families.language.data.token_source import SegmentedStream
from token_data import END, VOCABULARY, in_files, write_token_folder

DTYPES = ["uint8", "uint16", "uint32", "int64"]


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_reading_across_segments_equals_the_concatenation(lengths: list[int], dtype: str, data: st.DataObject) -> None:
    flat = np.arange(sum(lengths), dtype=dtype)
    stream = in_files(np.split(flat, np.cumsum(lengths)[:-1]))
    assert stream.length == len(flat)
    length = data.draw(st.integers(1, len(flat)))
    starts = data.draw(st.lists(st.integers(0, len(flat) - length), max_size=6))
    rows = stream.read(np.array(starts, dtype=np.int64), length)
    assert rows.dtype == np.int64
    assert rows.shape == (len(starts), length)
    assert rows.tolist() == [flat[start : start + length].tolist() for start in starts]


def test_ids_beyond_their_signed_half_stay_positive() -> None:
    stream = in_files([np.array([65_535], dtype=np.uint16), np.array([2**32 - 1], dtype=np.uint32)])
    assert stream.read(np.array([0]), 2).tolist() == [[65_535, 2**32 - 1]]


def test_a_stream_of_nothing_has_no_length() -> None:
    assert SegmentedStream([]).length == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_token_folder(tmp_path / "tokens", train_tokens=3000, validation_tokens=500)


def tokens_on_disk(folder: Path, split: str) -> np.ndarray:
    return np.concatenate([np.fromfile(path, "<u2") for path in sorted(folder.glob(f"{split}-*.bin"))])


def test_prepared_shards_are_one_stream(folder: Path) -> None:
    assert len(list(folder.glob("train-*.bin"))) > 1
    source = ShardSource(folder, "train")
    flat = tokens_on_disk(folder, "train")
    assert source.tokens == len(flat)
    assert source.read(np.array([0]), source.tokens).tolist() == [flat.tolist()]
    assert (source.vocab_size, source.end_of_document) == (VOCABULARY, END)
    assert source.tokenizer == folder / "tokenizer.json"
    assert source.text_bytes == int((flat != END).sum())
    source.verify()


def test_a_shard_that_is_cut_short_while_it_is_read_is_named(folder: Path) -> None:
    source = ShardSource(folder, "train")
    last = sorted(folder.glob("train-*.bin"))[-1]
    os.truncate(last, 100)
    with pytest.raises(
        DataError, match=f"{last}: 100 bytes found, 3000 expected; the file was cut short while it was read"
    ):
        source.read(np.array([source.tokens - 60]), 60)


def test_a_document_goes_up_to_the_end_token(folder: Path) -> None:
    source = ShardSource(folder, "train")
    flat = tokens_on_disk(folder, "train")
    found = source.document_of(np.arange(len(flat)))
    assert found.tolist() == np.concatenate([[0], np.cumsum(flat == END)[:-1]]).tolist()


def test_samples_do_not_overlap_and_have_their_last_target(folder: Path) -> None:
    source = ShardSource(folder, "train")
    length = 16
    assert source.samples(length) == (source.tokens - 1) // length
    assert source.samples(source.tokens) == 0
    assert source.samples(source.tokens - 1) == 1


def test_splits_have_fingerprints_of_their_own(folder: Path, tmp_path: Path) -> None:
    same = write_token_folder(tmp_path / "same", train_tokens=3000, validation_tokens=500)
    assert ShardSource(folder, "train").fingerprint == ShardSource(same, "train").fingerprint
    assert ShardSource(folder, "train").fingerprint != ShardSource(folder, "validation").fingerprint


def test_truncated_and_missing_shards_are_refused_by_name(folder: Path) -> None:
    shard = folder / "train-00001.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-2])
    with pytest.raises(DataError, match=rf"train-00001\.bin: {len(content) - 2} bytes found, {len(content)} expected"):
        ShardSource(folder, "train")
    shard.unlink()
    with pytest.raises(DataError, match=r"train-00001\.bin: No such file or directory; the manifest lists it with"):
        ShardSource(folder, "train")


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00001.documents", "tokenizer.json"])
def test_altered_files_are_refused_by_name_and_checksum(folder: Path, name: str) -> None:
    path = folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    source = ShardSource(folder, "train")
    with pytest.raises(DataError, match=rf"{name}: sha256 [0-9a-f]{{64}} found, [0-9a-f]{{64}} expected"):
        source.verify()


def test_a_missing_split_is_refused(folder: Path) -> None:
    manifest = read_token_manifest(folder)
    manifest.model_copy(update={"splits": {"train": manifest.splits["train"]}}).write(folder)
    with pytest.raises(DataError, match=r"tokens has no validation split; it has train"):
        ShardSource(folder, "validation")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"dtype": "uint16"', '"dtype": "uint64"', r"manifest\.json: dtype: Input should be 'uint16' or 'uint32'"),
        ('"version": 1', '"version": 2', r"manifest\.json: version: Input should be 1"),
        (
            '"train-00000.bin"',
            '"../train-00000.bin"',
            r"manifest\.json: splits\.train\.shards\.0\.data\.name: String sh",
        ),
        ("{", "", r"manifest\.json: .*; prepare the data again"),
    ],
)
def test_a_malformed_manifest_is_refused(folder: Path, old: str, new: str, message: str) -> None:
    path = folder / MANIFEST
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=message):
        ShardSource(folder, "train")
