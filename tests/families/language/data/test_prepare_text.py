"""Preparing text: the same whatever the workers, kept apart from all else, and clear about what it cannot do."""

from __future__ import annotations

import gzip
import json
import resource
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import zstandard

from phalanx.data.prepared_folder import MANIFEST
from phalanx.errors import ConfigError, DataError
from phalanx.families.language.data import prepare_text as preparing
from phalanx.families.language.data.documents import PYTHON_STDLIB, find_files, read_texts
from phalanx.families.language.data.prepare_text import Options, prepare_text
from phalanx.families.language.data.token_shards import ShardSource, read_token_manifest
from phalanx.families.language.data.tokenizer import load_tokenizer, text_share
from phalanx.locks import FolderLock

OPTIONS = Options(vocab_size=400, validation_fraction=0.1, shard_tokens=20_000)


def texts(count: int = 300) -> list[str]:
    return [f"Document {i}: " + " ".join(f"word{(i * j) % 97}" for j in range(40)) + "\n" for i in range(count)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The same kind of text in every form that is read."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    parts = [texts()[i::5] for i in range(5)]
    lines = ["".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(part)) for part in parts]
    (folder / "a.jsonl").write_text(lines[0])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[1].encode()))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(lines[2].encode()))
    pq.write_table(pa.table({"text": parts[3], "id": list(range(len(parts[3])))}), folder / "d.parquet")
    (folder / "e").mkdir()
    for i, text in enumerate(parts[4]):
        (folder / "e" / f"{i:03d}.txt").write_text(text)
    (folder / "notes.md").write_text("no text of a known ending")
    return folder


def lines(path: Path, texts: Iterable[str]) -> str:
    """Write `texts` as a .jsonl; returns its path as the command line takes it."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def decoded(source: ShardSource) -> list[str]:
    tokenizer = load_tokenizer(source.path)
    stream = source.read(np.array([0]), source.tokens)[0]
    ends = np.flatnonzero(stream == source.end_of_document)
    return [tokenizer.decode(part[:-1].tolist()) for part in np.split(stream, ends + 1) if len(part)]


def test_every_document_comes_back_from_its_tokens_in_one_of_the_splits(corpus: Path, tmp_path: Path) -> None:
    manifest = prepare_text([str(corpus)], tmp_path / "out", OPTIONS, workers=1)
    train, held_out = (decoded(ShardSource(tmp_path / "out", split)) for split in ("train", "validation"))
    assert sorted(train + held_out) == sorted(texts())
    assert 10 < len(held_out) < 60
    for split, documents in (("train", train), ("validation", held_out)):
        record = manifest.splits[split]
        assert record.documents == len(documents)
        assert record.text_bytes == sum(len(text.encode()) for text in documents)
    assert len(manifest.splits["train"].shards) > 1
    ShardSource(tmp_path / "out", "train").verify()


def test_document_starts_agree_with_the_tokens_that_end_documents(corpus: Path, tmp_path: Path) -> None:
    prepare_text([str(corpus)], tmp_path / "out", OPTIONS, workers=1)
    source = ShardSource(tmp_path / "out", "train")
    stream = source.read(np.array([0]), source.tokens)[0]
    expected = np.cumsum(np.concatenate(([0], stream[:-1] == source.end_of_document)))
    assert np.array_equal(source.document_of(np.arange(source.tokens)), expected)


def test_the_number_of_workers_changes_nothing(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.families.language.data.prepare_text.PIECE_BYTES", 4000)
    prepare_text([str(corpus)], tmp_path / "one", OPTIONS, workers=1)
    prepare_text([str(corpus)], tmp_path / "two", OPTIONS, workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_prepared_again_nothing_is_done_and_other_options_are_refused(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = prepare_text([str(corpus)], out, OPTIONS, workers=1)
    before = {p: p.stat().st_mtime_ns for p in out.iterdir()}
    assert prepare_text([str(corpus)], out, OPTIONS, workers=1) == first
    assert {p: p.stat().st_mtime_ns for p in out.iterdir()} == before
    with pytest.raises(DataError, match="holds data prepared from other text or options; delete it or choose another"):
        prepare_text([str(corpus)], out, Options(vocab_size=401), workers=1)


def test_equal_texts_land_on_one_side_of_the_split(tmp_path: Path) -> None:
    prepare_text([lines(tmp_path / "t.jsonl", texts(100) * 3)], tmp_path / "out", OPTIONS, workers=1)
    train, held_out = (set(decoded(ShardSource(tmp_path / "out", s))) for s in ("train", "validation"))
    assert held_out
    assert not train & held_out


def test_a_given_tokenizer_is_used(corpus: Path, tmp_path: Path) -> None:
    prepare_text([str(corpus)], tmp_path / "first", OPTIONS, workers=1)
    options = Options(tokenizer=str(tmp_path / "first"), validation_fraction=0.0)
    manifest = prepare_text([str(corpus / "a.jsonl")], tmp_path / "second", options, workers=1)
    first = read_token_manifest(tmp_path / "first").tokenizer
    assert (manifest.tokenizer.vocab_size, manifest.tokenizer.end_of_document) == (
        first.vocab_size,
        first.end_of_document,
    )
    assert manifest.dtype == "uint16"
    assert manifest.splits["validation"].documents == 0


def test_text_that_spells_special_tokens_or_half_characters_is_only_text(tmp_path: Path) -> None:
    corpus = lines(tmp_path / "t.jsonl", ["one <|endoftext|> document", "half \ud800 a character"])
    prepare_text([corpus], tmp_path / "out", Options(vocab_size=300, validation_fraction=0.0), workers=1)
    assert decoded(ShardSource(tmp_path / "out", "train")) == ["one <|endoftext|> document", "half \ufffd a character"]


def test_a_tokenizer_that_asks_for_cuts_and_padding_does_not_get_them(tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("word " * 500)
    prepare_text([str(text)], tmp_path / "first", Options(vocab_size=300, validation_fraction=0.0), workers=1)
    cutting = load_tokenizer(tmp_path / "first")
    cutting.enable_truncation(16)
    cutting.enable_padding(length=3000)
    cutting.save(str(tmp_path / "cutting.json"))
    options = Options(tokenizer=str(tmp_path / "cutting.json"), validation_fraction=0.0)
    prepare_text([str(text)], tmp_path / "second", options, workers=1)
    assert decoded(ShardSource(tmp_path / "second", "train")) == ["word " * 500]


def test_a_wide_vocabulary_gets_wide_tokens(tmp_path: Path) -> None:
    entries = ["<|endoftext|>", *(f"w{i}" for i in range(70_000))]
    wide = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(entries)}, "w0"))
    wide.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    wide.save(str(tmp_path / "wide.json"))
    options = Options(tokenizer=str(tmp_path / "wide.json"), validation_fraction=0.0)
    manifest = prepare_text([lines(tmp_path / "t.jsonl", ["w7 w69999"])], tmp_path / "out", options, workers=1)
    assert (manifest.dtype, manifest.tokenizer.vocab_size) == ("uint32", 70_001)
    source = ShardSource(tmp_path / "out", "train")
    assert source.read(np.array([0]), 3).tolist() == [[8, 70_000, 0]]


def test_changed_text_of_the_same_size_is_noticed(tmp_path: Path) -> None:
    prepare_text([lines(tmp_path / "a.jsonl", ["aaaa"] * 9)], tmp_path / "out", OPTIONS, workers=1)
    with pytest.raises(DataError, match="prepared from other text or options"):
        prepare_text([lines(tmp_path / "a.jsonl", ["aaaa"] * 8 + ["bbbb"])], tmp_path / "out", OPTIONS, workers=1)


def test_the_same_tokenizer_may_lie_elsewhere_another_one_not(tmp_path: Path) -> None:
    corpus = lines(tmp_path / "a.jsonl", ["some words " * 50])
    prepare_text([corpus], tmp_path / "first", Options(vocab_size=300, validation_fraction=0.0), workers=1)
    tokenizer = (tmp_path / "first" / "tokenizer.json").read_text()
    (tmp_path / "copy.json").write_text(tokenizer)

    def again(path: str) -> object:
        return prepare_text([corpus], tmp_path / "out", Options(tokenizer=path, validation_fraction=0.0), workers=1)

    assert again(str(tmp_path / "first")) == again(str(tmp_path / "copy.json"))
    (tmp_path / "copy.json").write_text(tokenizer.replace('"add_prefix_space":false', '"add_prefix_space":true'))
    with pytest.raises(DataError, match="prepared from other text or options"):
        again(str(tmp_path / "copy.json"))


def test_the_tokenizer_never_sees_held_out_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [f"text number {i}" for i in range(2000)]
    seen: list[str] = []
    train = preparing.train_in_process

    def listening(sample: list[str], size: int) -> str:
        seen.extend(sample)
        return train(sample, size)

    monkeypatch.setattr(preparing, "train_in_process", listening)
    options = Options(vocab_size=300, validation_fraction=0.2)
    prepare_text([lines(tmp_path / "a.jsonl", documents)], tmp_path / "out", options, workers=1)
    held_out = decoded(ShardSource(tmp_path / "out", "validation"))
    assert 300 < len(held_out) < 500
    assert sorted(seen) == sorted(set(documents) - set(held_out))
    assert all(text_share(text) >= 0.2 for text in seen)


def test_files_of_others_are_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "train-00000.bin").write_bytes(b"precious")
    corpus = lines(tmp_path / "a.jsonl", ["text"])
    with pytest.raises(
        DataError, match=r"out holds other files \(train-00000\.bin\); choose another --out, or an empty folder$"
    ):
        prepare_text([corpus], out, OPTIONS, workers=1)
    assert contents(out) == {"train-00000.bin": b"precious"}
    with pytest.raises(DataError, match=r"a\.jsonl is a file; choose another --out"):
        prepare_text([corpus], Path(corpus), OPTIONS, workers=1)


def test_a_folder_with_hidden_files_only_is_free(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".gitkeep").touch()
    prepare_text(
        [lines(tmp_path / "a.jsonl", ["text"])], tmp_path / "out", Options(vocab_size=257, validation_fraction=0)
    )
    assert sorted(contents(tmp_path / "out"))[0] == ".gitkeep"


def test_work_left_under_other_options_is_cleared(tmp_path: Path) -> None:
    corpus = lines(tmp_path / "a.jsonl", texts(50))
    (tmp_path / "a.jsonl.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        prepare_text([corpus, f"{corpus}.txt"], tmp_path / "out", OPTIONS, workers=1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".work"]
    prepare_text([corpus], tmp_path / "out", OPTIONS, workers=1)
    prepare_text([corpus], tmp_path / "straight", OPTIONS, workers=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    corpus, out = lines(tmp_path / "a.jsonl", ["text"] * 9), tmp_path / "out"
    with (
        FolderLock(out / ".prepare.lock", DataError, "--out"),
        pytest.raises(DataError, match=r"out is in use by process \d+ .*; end it first, or choose another --out$"),
    ):
        prepare_text([corpus], out, Options(vocab_size=257, validation_fraction=0.0), workers=1)
    prepare_text([corpus], out, Options(vocab_size=257, validation_fraction=0.0), workers=1)
    assert not (out / ".prepare.lock").exists()


def test_no_room_for_the_shards(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the size of files stands in for a disk that fills up: the pieces fit, the shards do not."""
    monkeypatch.setattr(preparing, "PIECE_BYTES", 2000)
    options = Options(vocab_size=300, validation_fraction=0.1)
    out, limits = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(DataError) as full:
            prepare_text([str(corpus)], out, options, workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(full.value) == (
        f"{out}: File too large; make room and run the same command again, which goes on with what is done, "
        "or choose another --out"
    )
    assert [path.name for path in out.iterdir()] == [".work"]
    assert len(list((out / ".work").glob("piece-*.npz"))) > 10
    prepare_text([str(corpus)], out, options, workers=1)
    prepare_text([str(corpus)], tmp_path / "straight", options, workers=1)
    assert contents(out) == contents(tmp_path / "straight")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(vocab_size=100), "--vocab-size=100 is too small for a byte-level tokenizer; give at least 257"),
        (Options(end_token="</s>"), r"--end-token=</s>: a tokenizer trained here ends documents with <\|endoftext\|>"),
        (Options(tokenizer="GIVEN", end_token="<stop>"), "the tokenizer has no token <stop> to end documents with"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_made(
    options: Options, message: str, tmp_path: Path
) -> None:
    if options.tokenizer:
        prepare_text(
            [lines(tmp_path / "a.jsonl", ["a"])], tmp_path / "given", Options(vocab_size=257, validation_fraction=0)
        )
        options = Options(tokenizer=str(tmp_path / "given"), end_token=options.end_token)
    with pytest.raises(ConfigError, match=message):
        prepare_text([PYTHON_STDLIB], tmp_path / "out", options, workers=1)
    assert not (tmp_path / "out").exists()


def test_text_that_leaves_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="the inputs hold no text at all: every document is empty"):
        prepare_text([str(tmp_path / "empty.txt")], tmp_path / "out", OPTIONS, workers=1)
    text = next(f"text {i}" for i in range(100) if text_share(f"text {i}") < 0.5)
    with pytest.raises(DataError, match="every document fell into the validation split; lower --validation-fraction"):
        prepare_text(
            [lines(tmp_path / "a.jsonl", [text])],
            tmp_path / "other",
            Options(vocab_size=257, validation_fraction=0.5),
            workers=1,
        )
    assert not (tmp_path / "other" / MANIFEST).exists()


SHARED = Path(__file__).parents[5] / "shared" / "data"


@pytest.mark.skipif(
    not SHARED.exists(), reason="the reference data lies beside the checkout only where it was handed out"
)
def test_real_text_survives_the_round_trip(tmp_path: Path) -> None:
    path = SHARED / "text" / "us_speeches.jsonl.gz"
    prepare_text([str(path)], tmp_path / "out", Options(vocab_size=1000, validation_fraction=0.0), workers=2)
    expected = [text for text in read_texts(find_files([str(path)])[0], "text") if text]
    assert decoded(ShardSource(tmp_path / "out", "train")) == expected
