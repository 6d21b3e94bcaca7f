"""Preparing text: restartable, the same whatever the workers, and clear about what it cannot read."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from phalanx.data.language.documents import PYTHON_STDLIB, find_files, read_documents
from phalanx.data.language.manifest import MANIFEST, read_manifest
from phalanx.data.language.prepare import Options, prepare
from phalanx.data.language.shards import ShardSource
from phalanx.data.language.tokenizer import end_of_document, load_tokenizer, vocabulary_size
from phalanx.errors import ConfigError, DataError

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


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def decoded(source: ShardSource) -> list[str]:
    tokenizer = load_tokenizer(source.path)
    stream = source.read(np.array([0]), source.tokens)[0]
    ends = np.flatnonzero(stream == source.end_of_document)
    return [tokenizer.decode(part[:-1].tolist()) for part in np.split(stream, ends + 1) if len(part)]


def test_every_document_comes_back_from_its_tokens_in_one_of_the_splits(corpus: Path, tmp_path: Path) -> None:
    manifest = prepare([str(corpus)], tmp_path / "out", OPTIONS, workers=1)
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
    prepare([str(corpus)], tmp_path / "out", OPTIONS, workers=1)
    source = ShardSource(tmp_path / "out", "train")
    stream = source.read(np.array([0]), source.tokens)[0]
    expected = np.cumsum(np.concatenate(([0], stream[:-1] == source.end_of_document)))
    assert np.array_equal(source.document_of(np.arange(source.tokens)), expected)


def test_the_number_of_workers_changes_nothing(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.data.language.prepare.PIECE_BYTES", 4000)
    prepare([str(corpus)], tmp_path / "one", OPTIONS, workers=1)
    prepare([str(corpus)], tmp_path / "two", OPTIONS, workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_killed_in_the_middle_it_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    text = tmp_path / "big.jsonl"
    lines = [json.dumps({"text": " ".join(f"w{(i * j) % 997}" for j in range(9000))}) for i in range(240)]
    text.write_text("\n".join(lines))
    command = [sys.executable, "-m", "phalanx", "data", "prepare", str(text), "--vocab-size", "300", "--workers", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.Popen(
        [*command, "--out", str(tmp_path / "killed")],
        env=environment,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 100
    while not list((tmp_path / "killed" / ".work").glob("piece-*.npz")):
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "killed" / MANIFEST).exists()
    done = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "killed" / ".work").glob("piece-*.npz")}
    assert done
    for name in ("killed", "straight"):
        subprocess.run([*command, "--out", str(tmp_path / name)], env=environment, check=True, capture_output=True)
    assert contents(tmp_path / "killed") == contents(tmp_path / "straight")


def test_prepared_again_nothing_is_done_and_other_options_are_refused(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = prepare([str(corpus)], out, OPTIONS, workers=1)
    before = {p: p.stat().st_mtime_ns for p in out.iterdir()}
    assert prepare([str(corpus)], out, OPTIONS, workers=1) == first
    assert {p: p.stat().st_mtime_ns for p in out.iterdir()} == before
    with pytest.raises(DataError, match="holds data prepared from other text or options; delete it or choose another"):
        prepare([str(corpus)], out, Options(vocab_size=401), workers=1)


def test_equal_texts_land_on_one_side_of_the_split(tmp_path: Path) -> None:
    text = tmp_path / "t.jsonl"
    text.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts(100) * 3))
    prepare([str(text)], tmp_path / "out", OPTIONS, workers=1)
    train, held_out = (set(decoded(ShardSource(tmp_path / "out", s))) for s in ("train", "validation"))
    assert held_out
    assert not train & held_out


def test_a_given_tokenizer_is_used_and_a_wide_one_gets_wide_tokens(corpus: Path, tmp_path: Path) -> None:
    prepare([str(corpus)], tmp_path / "first", OPTIONS, workers=1)
    options = Options(tokenizer=str(tmp_path / "first"), validation_fraction=0.0)
    manifest = prepare([str(corpus / "a.jsonl")], tmp_path / "second", options, workers=1)
    first = read_manifest(tmp_path / "first").tokenizer
    assert (manifest.tokenizer.vocab_size, manifest.tokenizer.end_of_document) == (
        first.vocab_size,
        first.end_of_document,
    )
    assert manifest.dtype == "uint16"
    assert manifest.splits["validation"].documents == 0


def test_the_standard_library_is_there_and_large() -> None:
    files = find_files([PYTHON_STDLIB])
    assert sum(file.size for file in files) > 5_000_000
    assert not [file for file in files if "site-packages" in file.name]
    this = next(file for file in files if file.name.endswith("/json/decoder.py"))
    (source,) = read_documents(this, "text")
    assert "class JSONDecoder" in source


def test_text_that_spells_special_tokens_or_half_characters_is_only_text(tmp_path: Path) -> None:
    text = tmp_path / "t.jsonl"
    rows = ["one <|endoftext|> document", "half \ud800 a character"]
    text.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    prepare([str(text)], tmp_path / "out", Options(vocab_size=300, validation_fraction=0.0), workers=1)
    assert decoded(ShardSource(tmp_path / "out", "train")) == ["one <|endoftext|> document", "half \ufffd a character"]


def test_a_tokenizer_that_asks_for_cuts_does_not_get_them(tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("word " * 500)
    prepare([str(text)], tmp_path / "first", Options(vocab_size=300, validation_fraction=0.0), workers=1)
    cutting = load_tokenizer(tmp_path / "first")
    cutting.enable_truncation(16)
    cutting.save(str(tmp_path / "cutting.json"))
    options = Options(tokenizer=str(tmp_path / "cutting.json"), validation_fraction=0.0)
    prepare([str(text)], tmp_path / "second", options, workers=1)
    assert decoded(ShardSource(tmp_path / "second", "train")) == ["word " * 500]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "t.jsonl",
            '{"text": "a"}\n{"body": "b"}\n',
            r"t\.jsonl, line 2: field 'text' holds no text; found: body \(str\)",
        ),
        ("t.jsonl", '{"text": "a"}\n{"text": \n', r"t\.jsonl, line 2: not JSON"),
        ("t.jsonl", "[1]\n", r"t\.jsonl, line 1: a JSON object is expected, found list"),
        ("t.json", "{}", r"t\.json: unknown ending \.json; known endings: .*; nearest: \.jsonl"),
        ("t.txt", b"\xff\xfe", r"t\.txt: byte 0 is not UTF-8; convert the file"),
        ("t.jsonl.gz", b"no gzip", r"t\.jsonl\.gz: cannot be read"),
        ("t.txt", "", "the inputs hold no text at all"),
    ],
)
def test_text_that_cannot_be_read_is_named(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        prepare([str(path)], tmp_path / "out", OPTIONS, workers=1)


def test_a_missing_input_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist; give files, folders, or python-stdlib"):
        find_files([str(tmp_path / "nowhere")])
    with pytest.raises(DataError, match="no text files found"):
        find_files([str(tmp_path)])


def test_a_wrong_parquet_column_is_named(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"d\.parquet: no column 'body'; found: text, id; name it with --text-field"):
        list(read_documents(find_files([str(corpus / "d.parquet")])[0], "body"))


def test_tokenizers_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="--vocab-size=100 is too small for a byte-level tokenizer; give at least 257"
    ):
        prepare([PYTHON_STDLIB], tmp_path / "out", Options(vocab_size=100), workers=1)
    with pytest.raises(DataError, match="no tokenizer there"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizer that can be read"):
        load_tokenizer(tmp_path)


SHARED = Path(__file__).parents[4] / "shared" / "data"


@pytest.mark.skipif(
    not SHARED.exists(), reason="the reference data lies beside the checkout only where it was handed out"
)
def test_real_tokenizers_load_and_know_how_documents_end() -> None:
    gpt2 = load_tokenizer(SHARED / "tokenizers" / "gpt2")
    assert gpt2.encode("Hello world, Frontier!").ids[:2] == [15496, 995]
    assert (vocabulary_size(gpt2), end_of_document(gpt2)) == (50257, 50256)
    olmo = load_tokenizer(SHARED / "tokenizers" / "olmo" / "allenai_gpt-neox-olmo-dolma-v1_5.json")
    assert end_of_document(olmo) == olmo.token_to_id("<|endoftext|>")


@pytest.mark.skipif(
    not SHARED.exists(), reason="the reference data lies beside the checkout only where it was handed out"
)
def test_real_text_survives_the_round_trip(tmp_path: Path) -> None:
    path = SHARED / "text" / "us_speeches.jsonl.gz"
    prepare([str(path)], tmp_path / "out", Options(vocab_size=1000, validation_fraction=0.0), workers=2)
    expected = list(read_documents(find_files([str(path)])[0], "text"))
    assert decoded(ShardSource(tmp_path / "out", "train")) == expected
