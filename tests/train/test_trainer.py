"""What the training loop does about steps that go wrong."""

from functools import partial
from pathlib import Path

import pytest
from torch.amp.grad_scaler import GradScaler

from phalanx.config.load import load_run
from phalanx.errors import PhalanxError
from phalanx.train.start import train
from token_data import write_run_file, write_token_folder

DIVERGES = ["optimizer.lr=1e30", "optimizer.warmup_steps=0", "optimizer.grad_clip=null", "training.steps=8"]
"""Weights beyond all numbers after the first update."""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainer")
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loss_that_is_not_finite_ends_the_run(run_file: Path, tmp_path: Path, precision: str) -> None:
    run = load_run(run_file, [*DIVERGES, f"layout.precision={precision}"])
    with pytest.raises(PhalanxError, match=r"step 2: loss=.* is not finite; stopped before"):
        train(run, tmp_path / "run")


def test_gradients_that_overflow_are_how_a_loss_scale_is_found(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_large = partial(GradScaler, init_scale=2.0**24, backoff_factor=2.0**-12)
    monkeypatch.setattr("phalanx.train.step.GradScaler", too_large)
    train(load_run(run_file, ["layout.precision=fp16", "training.steps=5"]), tmp_path / "run")
    updated = ['"updated": true' in line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert updated == [False, True, True, True, True]
