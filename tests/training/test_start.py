"""What is refused before a run directory is made."""

import json
from pathlib import Path

import pytest

from phalanx.config.load import load_run
from phalanx.errors import ConfigError, DataError
from phalanx.training.start import train
from token_data import write_run_file, write_token_folder


def test_missing_data_leaves_no_run_directory(tmp_path: Path) -> None:
    run = load_run(write_run_file(tmp_path / "run.yaml", tmp_path / "nowhere"), [])
    with pytest.raises(DataError, match="nowhere"):
        train(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_attention_without_a_backward_pass_is_refused(tmp_path: Path) -> None:
    data = write_token_folder(tmp_path / "data")
    run = load_run(write_run_file(tmp_path / "run.yaml", data), ["training.attention=flex"])
    with pytest.raises(ConfigError) as caught:
        train(run, tmp_path / "run")
    assert str(caught.value) == (
        "training.attention=flex cannot train on the CPU: FlexAttention has no backward pass there\n"
        "nearest: training.attention=auto"
    )
    assert not (tmp_path / "run").exists()


def test_a_prompt_that_leaves_no_position_is_refused(tmp_path: Path) -> None:
    data = write_token_folder(tmp_path / "data")
    run = load_run(
        write_run_file(tmp_path / "run.yaml", data), [f"evaluation.prompt={'ab ' * 11}", "evaluation.prompt_tokens=8"]
    )
    with pytest.raises(ConfigError, match=r"evaluation.prompt has \d+ tokens, and model.max_positions=\d+ leaves none"):
        train(run, tmp_path / "run")


def test_what_is_trained_is_said_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_token_folder(tmp_path / "data")
    words = ["layout.microbatch=auto", "training.steps=6", "training.log_every=20"]
    train(load_run(write_run_file(tmp_path / "run.yaml", data), words), tmp_path / "run")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "model   2 layers x 32, 4 heads (2 kv), vocabulary 264; 27,040 parameters"
    assert lines[1] == "layout  one rank microbatch=8 x 1 (auto); fp32, attention sdpa"
    assert lines[2] == "device  1 x cpu"
    assert lines[3].endswith(" tokens; steps 1 to 6 of 8 samples = 256 tok each")
    assert lines[4].startswith("step 1/6  loss ") and lines[5].startswith("step 6/6  loss ")


def test_a_device_bounds_the_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an accelerator would, of whose memory the driver reports so much; a step takes 1 MiB of it."""
    data = write_token_folder(tmp_path / "data")
    run = load_run(write_run_file(tmp_path / "run.yaml", data), ["layout.microbatch=auto", "training.steps=5"])
    monkeypatch.setattr("phalanx.training.safeguards.memory_probe.reset_peak_bytes", lambda _: None)
    monkeypatch.setattr("phalanx.training.safeguards.memory_probe.peak_bytes", lambda _: 2**20)
    monkeypatch.setattr("phalanx.training.start.memory_bytes", lambda _: 2**40)
    train(run, tmp_path / "large")
    monkeypatch.setattr("phalanx.training.start.memory_bytes", lambda _: 2**20)
    train(run, tmp_path / "small")
    chosen = ['microbatch=8 x 1 (auto)"', 'microbatch=1 x 8 (auto)"']
    losses = []
    for folder, words in zip(("large", "small"), chosen, strict=True):
        assert words in (tmp_path / folder / "events.jsonl").read_text()
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
