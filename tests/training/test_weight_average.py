"""Moving averages of weights: what their definition says, in every layout, saved, resumed elsewhere and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from phalanx.checkpoint import open_checkpoints, read_tensors
from phalanx.config.schema import AverageOfWeights
from phalanx.errors import CheckpointError
from phalanx.families.language.evaluation.load_weights import load_for_inference, open_weights
from phalanx.training.weight_average import WeightAverage
from phalanx_processes import train
from small_models import LLAMA, random_decoder, save_run
from token_data import write_run_file, write_token_folder

COMMON = (
    "layout.precision=fp64",
    "layout.microbatch=1",
    "layout.global_batch=8",
    "optimizer.name=muon",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "optimizer.eps=1e-3",
    "evaluation.samples=2",
    "checkpoint.every=1",
    "checkpoint.keep_last=9",
)
EMA = ("training.ema.decay=0.75", "training.ema.every=2")
STEPS = 6


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("average")
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


@pytest.fixture(scope="module")
def straight(run_file: Path) -> Path:
    """A run on one rank."""
    train(run_file, run_file.parent / "straight", STEPS, 1, *COMMON, *EMA)
    return run_file.parent / "straight" / "checkpoints"


def saved(checkpoints: Path, step: int, prefix: str = "") -> dict[str, Tensor]:
    return read_tensors(checkpoints / f"step-{step:08d}", prefix)


def test_average_follows_from_the_weights_of_steps(straight: Path) -> None:
    weights = {step: saved(straight, step, "model.") for step in range(1, STEPS + 1)}
    # What it was after the second step, from which on every second step counts a quarter.
    expected = {name: tensor.clone() for name, tensor in saved(straight, 2, "ema.").items()}
    assert {name.removeprefix("ema.") for name in expected} == {name.removeprefix("model.") for name in weights[1]}
    for step in range(3, STEPS + 1):
        for name, average in expected.items():
            if step % 2 == 0:
                average.lerp_(weights[step][name.replace("ema.", "model.")], 0.25)
        found = saved(straight, step, "ema.")
        for name, average in expected.items():
            torch.testing.assert_close(found[name], average, rtol=1e-12, atol=1e-14, msg=name)
            assert not torch.equal(average, weights[step][name.replace("ema.", "model.")])


def test_state_moves_between_layouts(run_file: Path, straight: Path) -> None:
    run_dir = run_file.parent / "moved"
    for steps, ranks, words in (
        (2, 4, ("layout.tp=2", "layout.dp_shard=2")),
        (4, 2, ("layout.pp=2", "layout.dp_shard=1")),
        (STEPS, 2, ("layout.dp_shard=2", "layout.zero=1")),
    ):
        train(run_file, run_dir, steps, ranks, *COMMON, *EMA, *words)
    found, expected = saved(run_dir / "checkpoints", STEPS), saved(straight, STEPS)
    assert found.keys() == expected.keys()
    assert {name.split(".")[0] for name in found} == {"model", "ema", "optimizer"}
    assert any(name.endswith(".momentum") for name in found)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-10, msg=name)


def test_a_run_may_begin_and_end_to_average(run_file: Path) -> None:
    run_dir = run_file.parent / "changed"
    train(run_file, run_dir, 1, 1, *COMMON)
    train(run_file, run_dir, 2, 1, *COMMON, "training.ema.decay=0.5")
    before, after = (saved(run_dir / "checkpoints", step) for step in (1, 2))
    assert not any(name.startswith("ema.") for name in before)
    for name in (name for name in after if name.startswith("ema.")):
        model = name.replace("ema.", "model.")
        torch.testing.assert_close(after[name], (before[model] + after[model]) / 2, rtol=1e-12, atol=1e-14)
    train(run_file, run_dir, 3, 1, *COMMON)
    assert not any(name.startswith("ema.") for name in saved(run_dir / "checkpoints", 3))


def test_averages_are_what_ema_evaluates(straight: Path) -> None:
    averages = saved(straight, STEPS, "ema.")
    model = load_for_inference(straight, torch.device("cpu"), ema=True).model
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, averages[f"ema.{name}"])
    other = load_for_inference(straight, torch.device("cpu")).model
    assert not torch.equal(other.embedding.weight, model.embedding.weight)


def test_a_run_without_averages_says_so(tmp_path: Path) -> None:
    save_run(tmp_path, random_decoder(LLAMA))
    newest = open_checkpoints(tmp_path).newest()
    assert newest is not None
    with pytest.raises(CheckpointError, match=r"holds no moving averages of its weights; train with training\.ema"):
        open_weights(tmp_path, ema=True)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="Hugging Face folder, which holds no moving averages"):
        open_weights(tmp_path / "hf", ema=True)


def test_skipped_steps_and_steps_between_add_nothing() -> None:
    weight = nn.Parameter(torch.zeros(3))
    average = WeightAverage({"w": weight}, AverageOfWeights(decay=0.5, every=2))
    weight.data.fill_(8.0)
    average.add_step(1, torch.tensor(True))
    average.add_step(2, torch.tensor(False))
    assert not average.tensors["w"].any()
    average.add_step(4, torch.tensor(True))
    assert average.tensors["w"].tolist() == [4.0, 4.0, 4.0]
