"""Reading text: every kind of file, in a fixed order, and one line that says what is wrong with one that is damaged."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from phalanx.errors import DataError
from phalanx.families.language.data import documents as module
from phalanx.families.language.data.documents import (
    PYTHON_STDLIB,
    count_other_files,
    find_files,
    read_texts,
    sample_hash,
)

GET_AGAIN = "; it is damaged or cut short: get it again, or leave it out"


def documents(path: Path, text_field: str = "text") -> list[str]:
    (file,) = find_files([str(path)])
    return [text for text in read_texts(file, text_field) if text]


def complaint(path: Path, text_field: str = "text") -> str:
    """What is said about `path`, without its folder; one line."""
    with pytest.raises(DataError) as caught:
        documents(path, text_field)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message[len(str(path.parent)) + 1 :]


def test_a_folder_is_read_in_sorted_order_and_other_files_are_passed_over(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.jsonl.gz", "a.parquet", "c.py.zst", "notes.md", "t.json", "a/x.bin"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    found = find_files([str(tmp_path), str(tmp_path / "b.txt")])
    assert [(file.name, file.kind, file.compression) for file in found] == [
        ("a/z.jsonl.gz", ".jsonl", ".gz"),
        ("a.parquet", ".parquet", ""),
        ("b.txt", ".txt", ""),
        ("c.py.zst", ".py", ".zst"),
        ("b.txt", ".txt", ""),
    ]
    assert count_other_files([str(tmp_path), str(tmp_path / "b.txt"), PYTHON_STDLIB]) == 3


def test_the_standard_library_is_there_and_large() -> None:
    files = find_files([PYTHON_STDLIB])
    assert sum(file.size for file in files) > 5_000_000
    assert not [file for file in files if "site-packages" in file.name]
    this = next(file for file in files if file.name.endswith("/json/decoder.py"))
    (source,) = read_texts(this, "text")
    assert "class JSONDecoder" in source


def test_missing_inputs_empty_folders_and_unknown_endings_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist; give files, folders, or python-stdlib"):
        find_files([str(tmp_path / "nowhere")])
    with pytest.raises(
        DataError, match=r"no text files found; known endings: \.txt, \.jsonl, \.parquet, \.arrow, \.py, each also"
    ):
        find_files([str(tmp_path)])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("t.json", r"unknown ending \.json; known endings: .*; nearest: \.jsonl$"),
        ("t.json.gz", r"unknown ending \.json\.gz; .*; nearest: \.jsonl\.gz$"),
        ("t.jsonl.bz2", r"unknown ending \.bz2; known endings: "),
        ("README", r"unknown ending \(none\); known endings: "),
    ],
)
def test_the_whole_unknown_ending_is_named(name: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=expected):
        find_files([str(tmp_path / name)])


def test_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"text": "one"}\n\n  \n{"id": 3, "text": ""}\n{"text": null}\n{"text": "a\\ud83d b\\ud83d\\ude42"}'
    )
    assert documents(path) == ["one", "a\N{REPLACEMENT CHARACTER} b\N{SLIGHTLY SMILING FACE}"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"text": ', "character 9: not JSON: Expecting value; mend the line, or take it out"),
        (b'{"text": "a', "character 10: not JSON: Unterminated string starting at; mend the line, or take it out"),
        (b"[" * 100_000, "not JSON that can be read: maximum recursion depth exceeded"),
        (b'{"text": "\xff"}', "byte 10 is not UTF-8; convert the file to UTF-8"),
        (b"[1]", 'found list; every line must be an object, as in {"text": "..."}'),
        (b'{"body": "b"}', "field 'text' holds no text; found: body (str); name the field with --text-field"),
        (b'{"text": 7, "id": null}', "field 'text' holds no text; found: text (int), id (NoneType); name the field"),
        (b"{}", "field 'text' holds no text; found: nothing; name the field with --text-field"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_line_that_is_no_document_is_named(line: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    said = complaint(path)
    assert said.startswith((f"t.jsonl, line 2, {expected}", f"t.jsonl, line 2: {expected}"))


def test_lines_of_a_compressed_file_are_counted_too(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(zstandard.compress(b'{"text": "fine"}\n' * 5000 + b"{"))
    assert complaint(path).startswith("t.jsonl.zst, line 5001, character 2: not JSON: ")


def test_text_must_be_utf_8(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"ab\xff\xfe")
    assert complaint(tmp_path / "t.txt") == "t.txt: byte 2 is not UTF-8; convert the file to UTF-8"


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("text")
    (file,) = find_files([str(path)])
    path.unlink()
    for reading in (lambda: list(read_texts(file, "text")), lambda: sample_hash(file)):
        with pytest.raises(DataError, match=r"t\.txt: No such file or directory; make it readable, or leave it out$"):
            reading()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"# coding: latin-1\nname = '\xe9'\n", ["# coding: latin-1\nname = '\xe9'\n"]),
        (b"name = '\xe9'\n", []),
        (b"# coding: nonsense\n", []),
        (b"# coding: hex\n", []),
        (b"# coding: raw_unicode_escape\n\\ud800", ["# coding: raw_unicode_escape\n\N{REPLACEMENT CHARACTER}"]),
    ],
    ids=["declared", "undeclared", "unknown", "no text encoding", "half a character"],
)
def test_python_source_is_read_as_it_declares_or_left_out(content: bytes, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "t.py").write_bytes(content)
    assert documents(tmp_path / "t.py") == expected


INCOMPRESSIBLE = random.Random(1).randbytes(200_000).hex().encode()


@pytest.mark.parametrize("kind", ["txt", "py", "jsonl"])
@pytest.mark.parametrize("kept", [0.2, 0.999])
def test_compressed_files_that_are_cut_short_are_refused(kind: str, kept: float, tmp_path: Path) -> None:
    text = json.dumps({"text": INCOMPRESSIBLE.decode()}).encode() + b"\n"
    for ending, pack in (("gz", gzip.compress), ("zst", zstandard.compress)):
        packed = pack(text)
        path = tmp_path / f"t.{kind}.{ending}"
        path.write_bytes(packed[: int(kept * len(packed))])
        said = complaint(path)
        assert said.startswith(f"t.{kind}.{ending}: cannot be read: ")
        assert said.endswith(GET_AGAIN)


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_compressed_files_that_are_damaged_are_refused(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.txt.{ending}"
    path.write_bytes(b"neither of them")
    assert complaint(path).startswith(f"t.txt.{ending}: cannot be read: ")
    packed = bytearray((gzip.compress if ending == "gz" else zstandard.compress)(INCOMPRESSIBLE))
    packed[10:60] = bytes(50)
    path.write_bytes(packed)
    assert complaint(path).endswith(GET_AGAIN)


def test_zstandard_frames_one_after_the_other(tmp_path: Path) -> None:
    file = tmp_path / "a.txt.zst"
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    frames = [b"one ", b"two " * 100_000, b"", b"three"]
    file.write_bytes(skipped + b"".join(zstandard.compress(frame) for frame in frames) + skipped)
    assert documents(file) == ["one " + "two " * 100_000 + "three"]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_columns_of_parquet(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = pa.table({"text": ["one", None, "", "two"], "id": [1, 2, 3, 4]})
    pq.write_table(table, path)
    if ending:
        pack = gzip.compress if ending == ".gz" else zstandard.compress
        path = path.with_name(f"t.parquet{ending}")
        path.write_bytes(pack((tmp_path / "t.parquet").read_bytes()))
    assert documents(path) == ["one", "two"]
    missing = complaint(path, "body")
    assert missing == f"t.parquet{ending}: no column 'body'; found: text, id; name it with --text-field"
    assert complaint(path, "id") == f"t.parquet{ending}: column 'id' holds int64, not text; name one with --text-field"


@pytest.mark.parametrize("place", ["all", "end", "pages"])
def test_damaged_parquet_is_refused(place: str, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": [INCOMPRESSIBLE.decode()] * 3}), path)
    content = bytearray(path.read_bytes())
    if place == "all":
        content = bytearray(b"no parquet at all")
    elif place == "end":
        content = content[:-100]
    else:
        content[4:200] = bytes(196)
    path.write_bytes(content)
    said = complaint(path)
    assert said.startswith("t.parquet: cannot be read: ")
    assert said.endswith(GET_AGAIN)


def test_parquet_text_must_be_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    broken = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")])
    pq.write_table(pa.table({"text": broken}), path)
    assert complaint(path) == "t.parquet: byte 1 is not UTF-8; convert the file to UTF-8"


@pytest.mark.parametrize("kind", ["txt", "py", "jsonl"])
def test_a_byte_order_mark_is_no_text(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.{kind}"
    lines = ['{"text": "one"}', '{"text": "\ufefftwo"}'] if kind == "jsonl" else ["one = 1"]
    path.write_text("\n".join(lines), encoding="utf-8-sig")
    assert documents(path) == (["one", "\ufefftwo"] if kind == "jsonl" else ["one = 1"])


def test_rows_without_text_are_counted_alike(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["one", None, ""]}), tmp_path / "t.parquet")
    (tmp_path / "t.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"text": ""}\n')
    for name in ("t.parquet", "t.jsonl"):
        (file,) = find_files([str(tmp_path / name)])
        assert list(read_texts(file, "text")) == ["one", "", ""]


LIMIT = 2**20
BOMB = 2**28
"""Bytes that the bombs of these tests unpack to, or more; the real ones go to terabytes."""


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < BOMB // 4


def too_long(path: Path) -> str:
    (file,) = find_files([str(path)])
    with pytest.raises(DataError) as caught:
        for _ in read_texts(file, "text", LIMIT):
            pass
    return str(caught.value).removeprefix(f"{path}")


def packed_zeros(ending: str) -> bytes:
    """Zeros, a frame or member after the other, each of a kilobyte or less."""
    if ending == "gz":
        return gzip.compress(bytes(2**24)) * (BOMB // 2**24)
    return zstandard.ZstdCompressor().compress(bytes(BOMB))


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("kind", ["txt", "py", "jsonl"])
def test_bombs_are_read_up_to_one_document(kind: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.{kind}.{ending}"
    path.write_bytes(packed_zeros(ending))
    tracemalloc.start()
    try:
        said = too_long(path)
        assert tracemalloc.get_traced_memory()[1] < BOMB // 4
    finally:
        tracemalloc.stop()
    what = ", line 1: a line" if kind == "jsonl" else ": a document"
    assert said.startswith(f"{what} of more than 1,048,576 bytes; split it")


@pytest.mark.usefixtures("bounded_memory")
def test_a_line_without_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "fine"}\n')
        file.truncate(2**36)
    assert too_long(path).startswith(", line 2: a line of more than 1,048,576 bytes")


def test_parquet_rows_are_unpacked_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_BYTES", 2**24)
    path = tmp_path / "t.parquet"
    # Stored once, in a dictionary, and meant 300 times.
    pq.write_table(pa.table({"text": ["x" * 10**6] * 300}), path, compression="zstd")
    assert path.stat().st_size < 10_000
    (file,) = find_files([str(path)])
    held, count = 0, 0
    for _ in read_texts(file, "text", LIMIT):
        held, count = max(held, pa.total_allocated_bytes()), count + 1
    assert count == 300
    assert held < 2**26


def test_a_row_longer_than_allowed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": ["fine", "\u65e5" * (LIMIT // 2), *["fine"] * 10]}), path)
    assert too_long(path).startswith(", row 2: a document of more than 1,048,576 bytes")
    pq.write_table(pa.table({"text": ["x" * 10 * LIMIT]}), path, use_dictionary=False)
    assert too_long(path).startswith(", row group 0: a document of more than 1,048,576 bytes")


def test_parquet_compressed_as_a_whole_is_held_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PACKED_PARQUET_BYTES", 2**20)
    path = tmp_path / "t.parquet.gz"
    path.write_bytes(packed_zeros("gz"))
    assert complaint(path).startswith("t.parquet.gz: unpacks to more than 1,048,576 bytes")


@pytest.mark.parametrize("size", [10, 2**20, 3 * 2**20])
def test_the_hash_of_samples_covers_both_ends_and_small_files_whole(size: int, tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    content = bytearray(b"a" * size)
    hashes = set()
    changed = [None, 0, size - 1, *((size // 2, size // 3) if size <= 2**20 else ())]
    for place in changed:
        new = bytearray(content)
        if place is not None:
            new[place] = ord("b")
        path.write_bytes(new)
        hashes.add(sample_hash(find_files([str(path)])[0]))
    assert len(hashes) == len(changed)


def test_arrow_files_are_read_as_parquet_is(tmp_path: Path) -> None:
    """Both kinds of Arrow file, and the folder that `datasets` writes with save_to_disk."""
    texts = ["one", None, "", "zwei\u00e4", "x" * 3000]
    table = pa.table({"id": range(5), "text": pa.array(texts, pa.large_string())})
    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text("{}")
    with pa.ipc.new_stream(folder / "data-00000-of-00002.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    with pa.ipc.new_file(folder / "data-00001-of-00002.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    files = find_files([str(tmp_path / "set")])
    assert [file.name for file in files] == ["train/data-00000-of-00002.arrow", "train/data-00001-of-00002.arrow"]
    for file in files:
        assert list(read_texts(file, "text")) == [text or "" for text in texts]
    path = tmp_path / "t.arrow"
    path.write_bytes(files[0].path.read_bytes())
    assert complaint(path, "body") == "t.arrow: no column 'body'; found: id, text; name it with --text-field"
    assert complaint(path, "id") == "t.arrow: column 'id' holds int64, not text; name one with --text-field"
    path.write_bytes(path.read_bytes()[:300])
    assert complaint(path).startswith("t.arrow: cannot be read: ")
    path.write_bytes(b"no arrow at all")
    assert complaint(path).startswith("t.arrow: cannot be read: ")
