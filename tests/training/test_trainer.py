"""What the training loop does about steps that go wrong."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from phalanx.checkpoint import CheckpointStore, open_checkpoints, read_state, read_tensors
from phalanx.config.load import load_run
from phalanx.errors import PhalanxError
from phalanx.layout.place import as_place
from phalanx.training.safeguards.divergence import all_finite
from phalanx.training.start import train
from phalanx.training.step import TrainStep, build_step
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
    monkeypatch.setattr("phalanx.training.step.GradScaler", too_large)
    train(load_run(run_file, ["layout.precision=fp16", "training.steps=5"]), tmp_path / "run")
    updated = ['"updated": true' in line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert updated == [False, True, True, True, True]


CPU = torch.device("cpu")
SKIPS = "training.on_nonfinite=skip"


def steps_kept(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in open_checkpoints(run_dir).list()]


def train_until_stopped(run_file: Path, run_dir: Path, *words: str) -> str:
    with pytest.raises(PhalanxError) as caught:
        train(load_run(run_file, list(words)), run_dir)
    return str(caught.value)


class Poisoned(TrainStep):
    """A training step that leaves NaN in a weight after one step, as a faulty device does."""

    at = 7

    def enqueue(self, step: int, batch: object) -> torch.Tensor:
        found = super().enqueue(step, batch)  # type: ignore[arg-type]
        if step == self.at:
            weight = next(iter(self.applied.parameters.values()))
            with torch.no_grad():
                weight[0, 0] = torch.nan
        return found


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("every", [1, 5, 7])
def test_weights_that_are_no_numbers_are_never_a_checkpoint(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, every: int
) -> None:
    run_dir = tmp_path / "run"
    words = ["training.steps=60", f"checkpoint.every={every}", f"training.on_nonfinite={policy}"]
    with monkeypatch.context() as patch:
        patch.setattr("phalanx.training.start.build_step", poisoned_step)
        said = train_until_stopped(run_file, run_dir, *words)
    expected = {1: 6, 5: 5, 7: 0}[every]
    assert f"The run resumes from step {expected}" in said
    assert max(steps_kept(run_dir), default=0) == expected
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert said == events[-1]["text"]
    train(load_run(run_file, ["training.steps=12", "optimizer.lr=1e-3"]), run_dir)
    assert steps_kept(run_dir)[0] == 12


def poisoned_step(*arguments: object) -> TrainStep:
    step = build_step(*arguments)  # type: ignore[arg-type]
    step.__class__ = Poisoned
    return step


@pytest.mark.parametrize("every", [1, 3])
def test_a_checkpoint_that_only_leads_to_the_same_step_is_set_aside(run_file: Path, tmp_path: Path, every: int) -> None:
    run_dir = tmp_path / "run"
    said = train_until_stopped(run_file, run_dir, *DIVERGES, f"checkpoint.every={every}")
    assert "The run resumes from step 0" in said and steps_kept(run_dir) == []
    assert ("step-00000001.nonfinite holds these very weights" in said) == (every == 1)
    train(load_run(run_file, ["training.steps=8", "optimizer.lr=1e-3"]), run_dir)
    assert steps_kept(run_dir) == [8, 5]


def test_the_last_checkpoint_is_not_taken_away(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.training.start.build_step", spoilt_step(range(8, 9)))
    said = train_until_stopped(run_file, tmp_path / "run", "checkpoint.every=1", "checkpoint.keep_last=1")
    assert "Only the checkpoint of step 7 is left" in said and steps_kept(tmp_path / "run") == [7]


def test_skipping_ends_after_so_many_steps_in_a_row(run_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [*DIVERGES[:-1], "training.steps=60", SKIPS, "checkpoint.every=1"]
    said = train_until_stopped(run_file, run_dir, *words)
    assert "step 21: loss=" in said and "20 steps in a row" in said and "training.max_skipped_steps=20" in said
    assert steps_kept(run_dir) == []
    said = train_until_stopped(run_file, tmp_path / "few", *words, "training.max_skipped_steps=3")
    assert "step 4: loss=" in said and "training.max_skipped_steps=3" in said


def spoilt_step(steps: range) -> object:
    """What builds training steps that find a NaN loss in these steps and make no update there, as bad samples do."""

    class Spoilt(TrainStep):
        def enqueue(self, step: int, batch: object) -> torch.Tensor:
            if step in steps:
                return torch.full((3,), torch.nan, dtype=torch.float64)
            return super().enqueue(step, batch)  # type: ignore[arg-type]

    def build(*arguments: object) -> TrainStep:
        step = build_step(*arguments)  # type: ignore[arg-type]
        step.__class__ = Spoilt
        return step

    return build


def test_a_checkpoint_waits_for_a_step_that_is_finite(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.training.start.build_step", spoilt_step(range(10, 13)))
    train(load_run(run_file, [SKIPS, "training.steps=18", "checkpoint.keep_last=9"]), tmp_path / "run")
    assert steps_kept(tmp_path / "run") == [18, 15, 13, 5]


def test_a_loss_scale_that_falls_for_ever_ends_the_run(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopeless = partial(GradScaler, init_scale=2.0**100, backoff_factor=0.99)
    monkeypatch.setattr("phalanx.training.step.GradScaler", hopeless)
    said = train_until_stopped(run_file, tmp_path / "run", "layout.precision=fp16")
    assert "step 20: loss=" in said and "20 steps in a row left the weights alone" in said


def test_a_checkpoint_of_weights_that_are_no_numbers_is_not_gone_on_from(run_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(load_run(run_file, ["training.steps=6"]), run_dir)
    newest = open_checkpoints(run_dir).newest()
    assert newest is not None
    tensors = read_tensors(newest.path)
    next(tensor for name, tensor in tensors.items() if "norm" in name)[3] = torch.inf
    with CheckpointStore(run_dir / "checkpoints", keep_last=5) as store:
        store.save(6, tensors, read_state(newest.path))
    train(load_run(run_file, ["training.steps=7"]), run_dir)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    resumed = [event["step"] for event in events if event["kind"] == "resume"]
    assert resumed == [5]
    assert any("not finite" in event.get("text", "") for event in events)


def test_finite_tensors_are_told_from_others() -> None:
    places = [as_place(torch.ones(3, 4)), as_place(torch.zeros(0)), as_place(torch.tensor(5))]
    assert all_finite(places, CPU)
    assert all_finite([as_place(torch.full((2,), 3e38)), as_place(torch.full((2,), 1e300, dtype=torch.float64))], CPU)
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not all_finite([*places, as_place(torch.tensor([1.0, bad, 2.0]))], CPU)


def test_a_spike_is_an_event_and_a_line(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Spiking(TrainStep):
        def enqueue(self, step: int, batch: object) -> torch.Tensor:
            found = super().enqueue(step, batch)  # type: ignore[arg-type]
            return found * torch.tensor([1.0, 1e4 if step == 15 else 1.0, 1.0])

    def build(*arguments: object) -> TrainStep:
        step = build_step(*arguments)  # type: ignore[arg-type]
        step.__class__ = Spiking
        return step

    monkeypatch.setattr("phalanx.training.start.build_step", build)
    train(load_run(run_file, ["training.steps=20"]), tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (spike,) = [event for event in events if event["kind"] == "spike"]
    assert spike["figure"] == "grad_norm" and not spike["left_out"]
    assert spike["step"] == 15 and 1_000 < spike["value"] / spike["median"] < 100_000
    assert "warning: step 15: gradient norm" in capsys.readouterr().err
