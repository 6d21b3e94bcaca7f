"""`phalanx data` as a person calls it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cli.terminal import run_in_terminal
from foreign_tokens import write_megatron, write_tokens
from token_data import write_token_folder

if TYPE_CHECKING:
    from command_line import Call

PREPARE = ("--vocab-size", "257", "--validation-fraction", "0.1", "--workers", "1")


def corpus(folder: Path, documents: int = 200) -> Path:
    """Texts of 20 bytes each, which 257 entries turn into 21 tokens each."""
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps({"text": f"document number {i:04d}"}) + "\n" for i in range(documents)))
    return path


def prepared(call: Call, folder: Path) -> Path:
    assert call("data", "prepare", str(corpus(folder)), "--out", str(folder / "out"), *PREPARE).code == 0
    return folder / "out"


def test_prepare_says_what_it_made_and_how_far_it_is(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = call("data", "prepare", str(corpus(tmp_path)), "--out", str(out), *PREPARE)
    assert done.code == 0
    assert done.err.splitlines() == ["training the tokenizer: 100%", "tokenizing: 100%", "writing shards: 100%"]
    title, train, validation, *rest = done.out.splitlines()
    assert title == str(out)
    held_out = len((out / "validation-00000.documents").read_bytes()) // 8
    assert 5 < held_out < 40
    for line, label, documents in ((train, "train", 200 - held_out), (validation, "validation", held_out)):
        tokens, text = _short(documents * 21), _short(documents * 20)
        assert line == f"  {label:10}  {tokens} tokens in {documents} documents, {text} bytes of text (0.95 a token)"
    assert rest == [
        "  vocabulary  257",
        f"  tokenizer   {out}/tokenizer.json",
        "  left out    0 documents without text, 0 files with other endings",
    ]


def test_prepare_counts_what_it_passes_over(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"text": ""}\n{"text": "two"}\n')
    (folder / "notes.md").write_text("notes")
    options = ("--validation-fraction", "0", "--vocab-size", "257", "--workers", "1")
    done = call("data", "prepare", str(folder), "--out", str(tmp_path / "out"), *options)
    assert done.code == 0
    assert done.out.splitlines()[-1] == "  left out    2 documents without text, 1 file with other endings"
    facts = json.loads(call("data", "show", str(tmp_path / "out"), "--json").out)
    assert facts["passed_over"] == {"documents": 2, "files": 1}


def test_a_document_longer_than_allowed_is_named(call: Call, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 101)
    arguments = ("data", "prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), *PREPARE)
    done = call(*arguments, "--max-document-bytes", "100")
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[-1] == (
        f"error: {tmp_path}/a.txt: a document of more than 100 bytes; split it, write .jsonl with a document a line, "
        "or allow more with --max-document-bytes"
    )
    assert call(*arguments, "--max-document-bytes", "101", "--validation-fraction", "0").code == 0


def _short(number: int) -> str:
    return str(number) if number < 1000 else f"{number / 1000:.2f}K"


def test_json_is_all_there_is_on_stdout(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = call("data", "prepare", str(corpus(tmp_path)), "--out", str(out), *PREPARE, "--json")
    facts = json.loads(done.out)
    assert done.code == 0
    train, validation = facts["train"], facts["validation"]
    assert train["documents"] + validation["documents"] == 200
    for split in (train, validation):
        assert split == {
            "tokens": 21 * split["documents"],
            "documents": split["documents"],
            "text_bytes": 20 * split["documents"],
        }
    assert facts == {
        "path": str(out),
        "train": train,
        "validation": validation,
        "vocab_size": 257,
        "tokenizer": f"{out}/tokenizer.json",
        "passed_over": {"documents": 0, "files": 0},
    }
    assert json.loads(call("data", "show", str(out), "--json").out) == facts


def test_prepared_again_it_says_the_same_and_does_nothing(call: Call, tmp_path: Path) -> None:
    out = prepared(call, tmp_path)
    again = call("data", "prepare", str(tmp_path / "t.jsonl"), "--out", str(out), *PREPARE)
    assert (again.code, again.err) == (0, "")
    assert again.out == call("data", "show", str(out)).out


def test_show_of_other_formats_says_what_they_do_not_state(call: Call, tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "text")
    assert call("data", "show", str(prefix)).out.splitlines() == [
        str(prefix),
        "  train       10 tokens in 4 documents",
        "  vocabulary  not stated by the format",
        "  tokenizer   none beside the data",
    ]
    write_tokens(tmp_path / "mds")
    assert call("data", "show", str(tmp_path / "mds")).out.splitlines()[1] == "  train       24 tokens"
    assert json.loads(call("data", "show", str(tmp_path / "mds"), "--json").out) == {
        "path": str(tmp_path / "mds"),
        "train": {"tokens": 24, "documents": None, "text_bytes": None},
        "vocab_size": None,
        "tokenizer": None,
    }


def test_one_document_and_no_validation(call: Call, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("one text")
    options = ("--vocab-size", "257", "--validation-fraction", "0")
    done = call("data", "prepare", str(tmp_path / "t.txt"), "--out", str(tmp_path / "out"), *options)
    assert done.out.splitlines()[1:3] == [
        "  train       9 tokens in 1 document, 8 bytes of text (0.89 a token)",
        "  validation  0 tokens in 0 documents",
    ]


def test_verify_says_what_a_format_cannot_tell(call: Call, tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "text")
    content = bytearray(prefix.with_suffix(".bin").read_bytes())
    content[0] ^= 1
    prefix.with_suffix(".bin").write_bytes(content)
    doubt = "Megatron files hold no checksums: an id changed in place is not noticed"
    done = call("data", "verify", str(prefix))
    assert (done.code, done.out) == (0, f"{prefix}: 10 tokens, lengths and structure are sound, but {doubt}\n")
    facts = json.loads(call("data", "verify", str(prefix), "--json").out)
    assert facts == {"path": str(prefix), "verified": False, "tokens": 10, "unchecked": [doubt]}


def test_verify_reads_everything(call: Call, tmp_path: Path) -> None:
    folder = write_token_folder(tmp_path / "data", train_tokens=2000, validation_tokens=500)
    facts = json.loads(call("data", "verify", str(folder), "--json").out)
    assert facts == {"path": str(folder), "verified": True, "tokens": facts["tokens"], "unchecked": []}
    done = call("data", "verify", str(folder))
    assert (done.code, done.out) == (0, f"{folder}: {facts['tokens']:,} tokens, nothing altered\n")
    content = bytearray((folder / "validation-00000.bin").read_bytes())
    content[10] ^= 1
    (folder / "validation-00000.bin").write_bytes(content)
    altered = call("data", "verify", str(folder), "--json")
    assert (altered.code, altered.out) == (1, "")
    assert re.fullmatch(
        rf"error: {folder}/validation-00000\.bin: sha256 \w+ found, \w+ expected; the file was altered\n", altered.err
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["prepare"], 2, "missing argument 'INPUT...'\n       phalanx data prepare --help shows what it takes"),
        (
            ["prepare", "DIR/t.jsonl"],
            2,
            "missing option '--out'\n       phalanx data prepare --help shows what it takes",
        ),
        (["prepare", "DIR/t.jsonl", "--out", "DIR/new", "--vocabsize", "300"], 2, "no such option: --vocabsize\n"),
        (
            ["prepare", "DIR/t.jsonl", "--out", "DIR/new", "--validation-fraction", "0.7"],
            2,
            "--validation-fraction=0.7 must be at most 0.5\n",
        ),
        (
            ["prepare", "DIR/t.jsonl", "--out", "DIR/new", "--vocab-size", "99"],
            2,
            "--vocab-size=99 is too small for a byte-level tokenizer; give at least 257\n",
        ),
        (
            ["prepare", "DIR/t.jsonl", "--out", "DIR/new", "--end-token", "</s>"],
            2,
            "--end-token=</s>: a tokenizer trained here ends documents with <|endoftext|>; leave --end-token out, or name "
            "a --tokenizer that has it\n",
        ),
        (
            ["prepare", "DIR/t.jsonl", "--out", "DIR/new", "--tokenizer", "DIR"],
            1,
            "DIR: no tokenizer there; give a tokenizer.json, or a folder with it or with vocab.json and merges.txt\n",
        ),
        (
            ["prepare", "DIR/nowhere", "--out", "DIR/new"],
            1,
            "DIR/nowhere does not exist; give files, folders, or python-stdlib\n",
        ),
        (
            ["prepare", "DIR/t.jsonl", "--out", "DIR/new", "--text-field", "body", "--vocab-size", "257"],
            1,
            "DIR/t.jsonl, line 1: field 'body' holds no text; found: text (str); name the field with --text-field\n",
        ),
        (
            ["prepare", "DIR/t.jsonl", "--out", "DIR/out"],
            1,
            "DIR/out holds data prepared from other text or options; delete it or choose another --out\n",
        ),
        (
            ["prepare", "DIR/t.jsonl", "--out", "DIR/others"],
            1,
            "DIR/others holds other files (a, b, c, ...); choose another --out, or an empty folder\n",
        ),
        (["prepare", "DIR/t.jsonl", "--out", "DIR/t.jsonl"], 1, "DIR/t.jsonl is a file; choose another --out\n"),
        (["show", "DIR/others"], 1, "DIR/others: no manifest.json (prepared text), no index.json (MDS) and no .idx"),
        (
            ["show", "DIR/ouT"],
            1,
            "DIR/ouT: nothing there, neither a folder nor a Megatron .bin/.idx pair; did you mean",
        ),
        (["shwo"], 2, "no such command 'shwo'\n       nearest: show"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_said_in_one_line(
    call: Call, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    prepared(call, tmp_path)
    (tmp_path / "others").mkdir()
    for name in "abcd":
        (tmp_path / "others" / name).touch()
    done = call("data", *(argument.replace("DIR", str(tmp_path)) for argument in arguments))
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith(f"error: {message.replace('DIR', str(tmp_path))}")
    if code == 2:
        assert not (tmp_path / "new").exists()


def test_data_that_is_not_whole_is_not_shown(call: Call, tmp_path: Path) -> None:
    out = prepared(call, tmp_path)
    size = (out / "train-00000.bin").stat().st_size
    (out / "train-00000.bin").write_bytes(b"")
    done = call("data", "show", str(out), "--json")
    assert (done.code, done.out, done.err) == (
        1,
        "",
        f"error: {out}/train-00000.bin: 0 bytes found, {size} expected; the file is truncated or altered\n",
    )


def test_what_was_mended_is_prepared(call: Call, tmp_path: Path) -> None:
    path, out = corpus(tmp_path), tmp_path / "out"
    whole = path.read_text()
    path.write_text(whole + "{\n")
    broken = call("data", "prepare", str(path), "--out", str(out), *PREPARE)
    assert broken.code == 1
    assert broken.err.splitlines()[-1] == (
        f"error: {path}, line 201, character 2: not JSON: Expecting property name enclosed in double quotes; "
        "mend the line, or take it out"
    )
    path.write_text(whole)
    assert call("data", "prepare", str(path), "--out", str(out), *PREPARE).code == 0
    assert not [name for name in out.iterdir() if name.name.startswith(".")]


def test_on_a_terminal_bars_tell_how_far_it_is(tmp_path: Path) -> None:
    code, shown = run_in_terminal(
        100, "data", "prepare", str(corpus(tmp_path)), "--out", str(tmp_path / "out"), *PREPARE, NO_COLOR="1"
    )
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    for stage in ("training the tokenizer", "tokenizing", "writing shards"):
        assert re.search(rf"{stage} +━+ 100%", plain)
    assert "200 documents" not in plain and re.search(r"train +\S+ tokens in 1\d\d documents", plain)
    shutil.rmtree(tmp_path / "out")
