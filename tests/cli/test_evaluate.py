"""`phalanx evaluate` as a person calls it, on a run that was really trained."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import phalanx_processes
from phalanx.cli.main import run_command_line
from phalanx.families.language.data.token_shards import read_token_manifest
from small_models import LLAMA, random_decoder, save_run
from small_transformers import huggingface_config, save_huggingface
from token_data import write_run_file, write_token_folder

if TYPE_CHECKING:
    from command_line import Call


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps; its data lies beside it."""
    folder = tmp_path_factory.mktemp("evaluate")
    run_file = write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))
    assert run_command_line(["train", str(run_file), "--run-dir", str(folder / "run"), "training.steps=12"]) == 0
    return folder / "run"


def scores(call: Call, *arguments: str) -> dict[str, Any]:
    done = call("evaluate", *arguments, "--json", "--device", "cpu")
    assert done.code == 0, done.err
    facts: dict[str, Any] = json.loads(done.out)
    return facts


def test_every_token_of_the_validation_split_is_scored(call: Call, trained: Path) -> None:
    facts = scores(call, str(trained))
    split = read_token_manifest(trained.parent / "data").splits["validation"]
    assert facts["tokens"] == split.tokens - 1
    assert facts["samples"] == facts["samples_in_all"] == math.ceil((split.tokens - 1) / 32)
    # One token a byte, ends of documents none; the first byte of the split is nobody's target.
    assert facts["bytes"] == split.text_bytes - 1
    assert facts["perplexity"] == pytest.approx(math.exp(facts["loss"]))
    assert facts["bits_per_byte"] == pytest.approx(facts["loss"] * facts["tokens"] / math.log(2) / facts["bytes"])
    assert facts["step"] == 12
    assert 2.0 < facts["loss"] < math.log(257)
    assert list(facts["sources"]) == [str(trained.parent / "data")]


def test_it_agrees_with_the_evaluation_in_training(call: Call, trained: Path) -> None:
    events = [json.loads(line) for line in (trained / "events.jsonl").read_text().splitlines()]
    (during,) = [event for event in events if event["kind"] == "evaluation"]
    facts = scores(call, str(trained), "--samples", "16")
    assert facts["samples"] == 16
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert facts[name] == pytest.approx(during[name], rel=1e-6)
    assert (facts["tokens"], facts["bytes"]) == (during["tokens"], during["bytes"])


def test_two_ranks_share_the_samples_and_the_first_speaks(call: Call, trained: Path) -> None:
    both = phalanx_processes.start(["evaluate", str(trained), "--json", "--device", "cpu"], ranks=2)
    code, errors = both.finish()
    assert code == 0, errors
    said = [Path(both.folder.name, f"out-{rank}").read_text() for rank in range(2)]
    assert said[1] == ""
    shared, alone = json.loads(said[0]), scores(call, str(trained))
    for name in ("tokens", "bytes", "samples", "samples_in_all", "sequence_length"):
        assert shared[name] == alone[name]
    assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-6)


def test_training_data_and_shorter_samples(call: Call, trained: Path) -> None:
    train = scores(call, str(trained), "--split", "train", "--samples", "20")
    assert (train["split"], train["tokens"]) == ("train", 640)
    short = scores(call, str(trained), "--length", "8")
    assert short["sequence_length"] == 8
    assert short["tokens"] == scores(call, str(trained))["tokens"]


def test_what_a_person_reads(call: Call, trained: Path) -> None:
    done = call("evaluate", str(trained), "--device", "cpu")
    facts = scores(call, str(trained))
    assert done.err == ""
    assert done.out.splitlines() == [
        f"{trained}/checkpoints/step-00000012 on the validation split: every token, 32 tokens a sample",
        f"  loss           {facts['loss']:.4f} nats a token",
        f"  perplexity     {facts['perplexity']:.3f}",
        f"  bits per byte  {facts['bits_per_byte']:.4f} ({facts['bytes']:,} bytes of text)",
        f"  tokens         {facts['tokens']:,}",
    ]
    some = call("evaluate", str(trained), "--device", "cpu", "--samples", "5").out.splitlines()
    assert some[0].endswith(f"on the validation split: 5 of {facts['samples']} samples, 32 tokens a sample")


def test_an_exported_model_scores_the_same(call: Call, trained: Path, tmp_path: Path) -> None:
    assert call("convert", str(trained), str(tmp_path / "hf")).code == 0
    ours = scores(call, str(trained))
    theirs = scores(call, str(tmp_path / "hf"), "--data", str(trained.parent / "data"))
    assert theirs["sequence_length"] == 32
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-6)
    assert theirs["bytes"] == ours["bytes"]


def refusal(call: Call, *arguments: str) -> tuple[int, str]:
    done = call("evaluate", *arguments, "--device", "cpu")
    assert done.out == ""
    return done.code, done.err.removeprefix("error: ").rstrip()


def test_what_cannot_be_scored(call: Call, trained: Path, tmp_path: Path) -> None:
    data = str(trained.parent / "data")
    assert refusal(call, str(trained), "--length", "33") == (
        2,
        "--length=33 must be from 1 to 32, the positions that the model has",
    )
    save_huggingface(tmp_path / "hf", huggingface_config("llama"))
    assert refusal(call, str(tmp_path / "hf")) == (
        2,
        f"{tmp_path}/hf names no data; give a folder that `phalanx data prepare` wrote with --data",
    )
    assert refusal(call, str(tmp_path / "hf"), "--data", data) == (
        1,
        f"{data} has tokens up to 256, but the model has 97 rows: it was prepared with another tokenizer than the model's",
    )
    save_run(tmp_path / "other", random_decoder(LLAMA.model_copy(update={"vocab_size": 300})))
    code, message = refusal(call, str(tmp_path / "other"), "--data", data)
    assert code == 1
    assert message.startswith(f"{data} was prepared with another tokenizer than that of {tmp_path}/other/checkpoints")


def test_tasks_are_scored_in_one_way(call: Call, tmp_path: Path) -> None:
    assert refusal(call, str(tmp_path), "--harness-tasks", str(tmp_path)) == (
        2,
        "--harness-tasks is for --harness; name a task of that folder with it",
    )
    assert refusal(call, str(tmp_path), "--harness", "piqa", "--tasks", "piqa.jsonl") == (
        2,
        "--tasks and --harness score in different ways; give one of them",
    )


def test_an_empty_split_is_named(call: Call, trained: Path, tmp_path: Path) -> None:
    data = write_token_folder(tmp_path / "data")
    manifest = read_token_manifest(data)
    manifest.model_copy(update={"splits": {"train": manifest.splits["train"]}}).write(data)
    assert refusal(call, str(trained), "--data", str(data)) == (
        1,
        f"{data}: the validation split is empty; prepare more text, or name another split",
    )


def test_questions_are_scored_in_a_table_and_as_json(call: Call, tmp_path: Path) -> None:
    save_run(tmp_path / "run", random_decoder(LLAMA.model_copy(update={"vocab_size": 300})))
    rows = [{"query": f"{n} is", "choices": ["odd", "even"], "gold": (n + 1) % 2} for n in range(5)]
    questions = tmp_path / "parity.jsonl"
    questions.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    arguments = (str(tmp_path / "run"), "--tasks", str(questions), "--shots", "1", "--questions", "4")
    facts = scores(call, *arguments)
    (task,) = facts["tasks"]
    assert (task["task"], task["kind"], task["shots"], task["questions"]) == ("parity", "multiple_choice", 1, 4)
    assert task["accuracy"] in {0.0, 0.25, 0.5, 0.75, 1.0}
    lines = call("evaluate", *arguments, "--device", "cpu").out.splitlines()
    assert lines[0] == f"{tmp_path}/run/checkpoints/step-00000010 on 1 tasks"
    assert lines[2].split()[:4] == ["parity", "1", "4", f"{100 * task['accuracy']:.2f}%"]
    assert refusal(call, str(tmp_path / "run"), "--questions", "3") == (
        2,
        "--questions is for --tasks and --harness; leave it out to score held-out text",
    )
