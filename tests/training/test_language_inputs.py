"""What the evaluations of a language run say, and what they leave unsaid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foreign_tokens import write_megatron
from phalanx.config.load import load_run
from phalanx.errors import ConfigError
from phalanx.families.registry import bind
from phalanx.training.inputs import TrainableModel
from phalanx.training.start import train
from token_data import write_run_file, write_token_folder

QUICK = ("training.steps=1", "optimizer.warmup_steps=0", "checkpoint.last=false")


@pytest.mark.parametrize("foreign", [False, True])
def test_bits_per_byte_is_not_guessed_for_text_without_a_tokenizer(tmp_path: Path, foreign: bool) -> None:
    prepared = write_token_folder(tmp_path / "prepared")
    documents = [list(range(100))] * 3
    for name in ("megatron", "megatron_validation"):
        write_megatron(tmp_path / name, documents)
    sources = [prepared, tmp_path / "megatron"] if foreign else [prepared]
    run = load_run(
        write_run_file(tmp_path / "run.yaml", prepared), [*QUICK, f"data.sources=[{', '.join(map(str, sources))}]"]
    )
    train(run, tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (evaluation,) = [event for event in events if event["kind"] == "evaluation"]
    assert (evaluation["bits_per_byte"] is None) == foreign
    expected = bind(run, TrainableModel).expected_evaluation()
    assert expected is not None
    assert (expected.fields["bits_per_byte"] is None) == foreign


def test_tasks_that_cannot_be_asked_are_refused_before_training(tmp_path: Path) -> None:
    prepared = write_token_folder(tmp_path / "prepared")
    write_megatron(tmp_path / "megatron", [list(range(100))] * 3)
    (tmp_path / "task.jsonl").write_text('{"context": "one", "continuation": "two"}\n')
    file = write_run_file(tmp_path / "run.yaml", prepared)
    words = [f"evaluation.tasks.files=[{tmp_path}/task.jsonl]", f"data.sources=[{tmp_path}/megatron]"]
    with pytest.raises(ConfigError, match=r"evaluation\.tasks needs a tokenizer, and .*megatron\.bin came without one"):
        bind(load_run(file, words), TrainableModel).check_inputs()
    absent = [f"evaluation.tasks.files=[{tmp_path}/absent.jsonl]"]
    with pytest.raises(ConfigError, match=r"evaluation\.tasks\.files .*absent\.jsonl: No such file"):
        bind(load_run(file, absent), TrainableModel).check_inputs()
