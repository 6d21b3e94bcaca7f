"""The gradient noise scale against its exact value, which the gradients of all samples give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.config.load import load_run
from phalanx.errors import ConfigError
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.data.open_tokens import open_training
from phalanx.families.language.inputs import open_reader
from phalanx.families.registry import bind
from phalanx.layout.execute import Executor
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.report.run_log import RunLog, summarise_run
from phalanx.training.start import train
from token_data import write_run_file, write_token_folder
from whole_model import laid_out

SAMPLES = 384
FROZEN = (
    f"training.steps={SAMPLES // 8}",
    "training.noise_scale_every=1",
    "layout.microbatch=2",
    "optimizer.lr=1e-12",
    "optimizer.warmup_steps=0",
    "model.n_layers=1",
    "checkpoint.every=24",
    "evaluation.samples=1",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LanguageRun:
    """A run that goes once over its samples without learning."""
    folder = tmp_path_factory.mktemp("noise")
    data = write_token_folder(folder / "data", train_tokens=SAMPLES * 32 + 2)
    loaded = load_run(write_run_file(folder / "run.yaml", data), FROZEN)
    assert isinstance(loaded, LanguageRun)
    return loaded


def exact_scale(run: LanguageRun) -> float:
    """Trace of the covariance of a sample's gradient over the squared norm of the mean, by all samples."""
    applied = laid_out(run, ResolvedLayout(1))
    reader = open_reader(run, open_training(run))
    executor, squares, mean = Executor(applied), 0.0, torch.zeros(())
    for number in range(SAMPLES):
        for parameter in applied.parameters.values():
            parameter.grad = None
        executor.forward_backward(1, reader.read(np.array([number])), 1.0 / 32)
        gradient = torch.cat([p.grad.flatten() for p in applied.parameters.values() if p.grad is not None]).double()
        squares, mean = squares + float(gradient.square().sum()) / SAMPLES, mean + gradient / SAMPLES
    square = float(mean.square().sum())
    return (squares - square) / square


def test_the_estimate_is_the_exact_value_and_goes_on_from_a_checkpoint(run: LanguageRun, tmp_path: Path) -> None:
    half = tmp_path / "half"
    train(run, half, until=24)
    train(run, half)
    lines: list[dict[str, Any]] = [json.loads(line) for line in (half / "metrics.jsonl").read_text().splitlines()]
    square, variance = (np.mean([line[name] for line in lines]) for name in ("gradient_square", "gradient_variance"))
    exact = exact_scale(run)
    assert variance / square == pytest.approx(exact, rel=0.1)
    # The moving average forgets, and has seen fewer.
    assert lines[-1]["critical_batch"] == pytest.approx(exact, rel=0.2)
    # Weights of a moving average over all steps, those before the checkpoint too.
    weights = 0.95 ** np.arange(len(lines))[::-1]
    averages = [
        np.average([line[name] for line in lines], weights=weights) for name in ("gradient_variance", "gradient_square")
    ]
    assert lines[-1]["critical_batch"] == pytest.approx(averages[0] / averages[1], rel=1e-6)
    assert summarise_run(RunLog.read(half)).critical_batch == lines[-1]["critical_batch"]


def test_steps_that_are_not_measured_say_nothing(run: LanguageRun, tmp_path: Path) -> None:
    changed = run.model_copy(update={"training": run.training.model_copy(update={"steps": 4, "noise_scale_every": 2})})
    train(changed, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert ["critical_batch" in line for line in lines] == [False, True, False, True]


def test_a_step_that_cannot_be_halved_is_refused_and_auto_gives_one_that_can(run: LanguageRun) -> None:
    odd = run.model_copy(update={"layout": run.layout.model_copy(update={"microbatch": 8})})
    with pytest.raises(ConfigError, match=r"noise_scale_every=1 runs a step in two halves") as caught:
        resolve_layout(bind(odd), 1)
    assert "nearest legal: microbatch=4, or training.noise_scale_every=null" in str(caught.value)
    auto = run.model_copy(update={"layout": run.layout.model_copy(update={"microbatch": "auto"})})
    assert resolve_layout(bind(auto), 1).microbatch == 4
