"""`phalanx generate` as a person calls it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from terminal import run_in_terminal

from small_models import READER, random_decoder, save_run
from small_transformers import huggingface_config, save_huggingface

if TYPE_CHECKING:
    from command_line import Call


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    save_run(tmp_path / "run", random_decoder(READER))
    return tmp_path / "run"


def test_text_begins_with_the_prompt_and_the_seed_decides_it(call: Call, run_dir: Path) -> None:
    first = call("generate", str(run_dir), "--prompt", "def f", "--tokens", "20", "--seed", "1")
    assert first.code == 0
    assert first.err == ""
    assert first.out.startswith("def f")
    assert len(first.out) > 20
    assert call("generate", str(run_dir), "--prompt", "def f", "--tokens", "20", "--seed", "1").out == first.out
    assert call("generate", str(run_dir), "--prompt", "def f", "--tokens", "20", "--seed", "2").out != first.out


def test_json_says_what_was_written_and_how(call: Call, run_dir: Path) -> None:
    plain = call("generate", str(run_dir), "--prompt", "def f", "--tokens", "20", "--seed", "1").out
    done = call(
        "generate", str(run_dir), "--prompt", "def f", "--tokens", "20", "--seed", "1", "--count", "2", "--json"
    )
    facts = json.loads(done.out)
    assert facts["checkpoint"].endswith("run/checkpoints/step-00000010")
    assert facts["step"] == 10
    assert (facts["temperature"], facts["top_k"], facts["top_p"]) == (0.8, None, None)
    assert [sample["seed"] for sample in facts["samples"]] == [1, 2]
    assert "def f" + facts["samples"][0]["text"] + "\n" == plain
    assert facts["samples"][0]["tokens"] == len(facts["samples"][0]["token_ids"]) == 20
    assert facts["samples"][0]["ended"] is False
    assert facts["tokens_per_second"] > 0


def test_several_continuations_are_told_apart(call: Call, run_dir: Path) -> None:
    lines = call("generate", str(run_dir), "--prompt", "x", "--tokens", "3", "--count", "2").out.splitlines()
    assert lines[0] == "--- 1 of 2, seed 0"
    assert "--- 2 of 2, seed 1" in lines
    assert lines[1].startswith("x")


def test_the_prompt_can_come_from_stdin(call: Call, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = call("generate", str(run_dir), "--prompt", "def f", "--tokens", "5").out

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"def f")))
    assert call("generate", str(run_dir), "--prompt", "-", "--tokens", "5").out == plain


def test_a_prompt_that_is_no_text_is_refused(call: Call, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"import os\n\xff\xfe")))
    done = call("generate", str(run_dir), "--prompt", "-")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: standard input is not UTF-8 text (byte 10); convert it, for example with iconv\n"
    done = call("generate", str(run_dir), "--prompt", "a\udcff")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: --prompt 'a\\udcff' is not valid text in this terminal's encoding\n"


def test_a_hugging_face_folder_is_used_as_it_is(call: Call, run_dir: Path, tmp_path: Path) -> None:
    save_huggingface(tmp_path / "hf", huggingface_config("gpt2", vocab_size=300, bos_token_id=0, eos_token_id=0))
    no_tokenizer = call("generate", str(tmp_path / "hf"), "--prompt", "a")
    assert no_tokenizer.code == 2
    assert no_tokenizer.err == f"error: {tmp_path}/hf came without a tokenizer; give one with --tokenizer\n"
    tokenizer = str(run_dir / "tokenizer" / "tokenizer.json")
    done = call("generate", str(tmp_path / "hf"), "--prompt", "a", "--tokens", "4", "--tokenizer", tokenizer)
    assert done.code == 0
    assert done.out.startswith("a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--tokens", "200"],
            "a prompt of 3 tokens and 200 more need 203 positions, but the model has 128; ask for at most 125",
        ),
        (["--temperature", "-1"], "temperature=-1.0 must be a finite number of at least 0"),
        (["--top-k", "0"], "top-k=0 must be at least 1; leave it out to draw from all tokens"),
        (["--precision", "fp8"], "--precision=fp8 must be fp64, fp32, bf16, fp16"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(call: Call, run_dir: Path, arguments: list[str], message: str) -> None:
    done = call("generate", str(run_dir), "--prompt", "abc", *arguments)
    assert (done.code, done.err) == (2, f"error: {message}\n")
    assert done.out == ""


def test_a_folder_without_a_checkpoint(call: Call, tmp_path: Path) -> None:
    done = call("generate", str(tmp_path), "--prompt", "a")
    assert done.code == 1
    assert done.err == (
        f"error: {tmp_path} holds neither a whole checkpoint of Phalanx nor the config.json of a Hugging Face folder\n"
    )


def test_on_a_terminal_only_the_text_appears(run_dir: Path) -> None:
    code, shown = run_in_terminal(80, "generate", str(run_dir), "--prompt", "def f", "--tokens", "5", "--device", "cpu")
    assert code == 0
    assert shown.startswith("def f")
    assert "\x1b" not in shown
