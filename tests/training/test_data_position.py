"""Samples over interruptions: each once an epoch, in the order of a run that nothing interrupts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from phalanx.config.load import load_run
from phalanx.data.batch_stream import Batch
from phalanx.training.start import train
from phalanx.training.trainer import Trainer
from token_data import write_run_file, write_token_folder

STEPS, TOKENS, LENGTH = 25, 2_000, 32
"""Three epochs of 62 samples and a part of a fourth, in steps of 8."""


class Killed(BaseException):
    """Ends a run as nothing in it expects."""


def train_recording(
    run_file: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch, kills: dict[int, int]
) -> dict[int, list[tuple[int, ...]]]:
    """Train to the end; return the tokens of each step's samples, of a step that was done again those of the last time.

    kills: how often the run is ended once it has the samples of a step.
    """
    seen: dict[int, list[tuple[int, ...]]] = {}
    left = dict(kills)
    read = Trainer._next_batch

    def next_batch(trainer: Trainer, step: int) -> Batch:
        batch = read(trainer, step)
        seen[step] = [tuple(sample) for sample in batch.inputs()[0].tolist()]
        if left.get(step):
            left[step] -= 1
            raise Killed
        return batch

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_next_batch", next_batch)
        for _ in range(sum(kills.values())):
            with pytest.raises(Killed):
                train(load_run(run_file, [f"training.steps={STEPS}"]), run_dir)
        train(load_run(run_file, [f"training.steps={STEPS}"]), run_dir)
    assert not any(left.values()) and sorted(seen) == list(range(1, STEPS + 1))
    return seen


def test_kills_change_no_sample_and_each_comes_once_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_token_folder(tmp_path / "data", train_tokens=TOKENS, validation_tokens=2_000)
    run_file = write_run_file(tmp_path / "run.yaml", data)
    expected = train_recording(run_file, tmp_path / "straight", monkeypatch, {})
    draw = random.Random(4)
    # One of them in the very step after a checkpoint, and twice.
    kills = dict.fromkeys(draw.sample(range(2, STEPS), 3), 1) | {11: 2}
    assert train_recording(run_file, tmp_path / "killed", monkeypatch, kills) == expected
    samples = [sample for step in sorted(expected) for sample in expected[step]]
    epoch = TOKENS // LENGTH
    epochs = [samples[start : start + epoch] for start in range(0, len(samples) - epoch + 1, epoch)]
    assert len(epochs) == 3 and all(len(set(one)) == epoch for one in epochs)
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    # In another order each time.
    assert epochs[0] != epochs[1] != epochs[2]
