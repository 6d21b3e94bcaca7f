"""What is refused before a run directory is made."""

from pathlib import Path

import pytest

from phalanx.config.load import load_run
from phalanx.errors import ConfigError, DataError
from phalanx.train.start import train
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
