"""Runs with spikes, steps that are not finite, and replicas that differ."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import phalanx_processes
from fault_injection import fault_words, offer_callback
from phalanx.checkpoint import open_checkpoints, read_state, read_tensors
from phalanx.config.load import load_run
from phalanx.data.batch_stream import Batch
from phalanx.errors import PhalanxError
from phalanx.report.run_log import RunLog, split_wall_time, summarise_run
from phalanx.training.start import train
from phalanx.training.step import TrainStep, build_step
from token_data import write_run_file, write_token_folder

BATCH = 8


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["kind"] == kind]


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(run_dir: Path) -> dict[str, Tensor]:
    newest = open_checkpoints(run_dir).newest()
    assert newest is not None
    return read_tensors(newest.path, "")


def assert_equal(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], value) for name, value in expected.items())


class Disturbed(TrainStep):
    """Multiplies all gradients of a step by `factor(step, samples)`."""

    factor: Callable[[int, list[int]], float]
    changed: bool
    """Whether the last step changed any tensor of a checkpoint."""

    def enqueue(self, step: int, batch: Batch) -> Tensor:
        self.now = self.factor(step, batch.sample_indices.tolist())
        before = {name: place.local.clone() for name, place in self.saved_tensors().items()}
        figures = super().enqueue(step, batch)
        after = self.saved_tensors()
        type(self).changed = any(not torch.equal(value, after[name].local) for name, value in before.items())
        return figures

    def update_parameters(self, loss: Tensor) -> Tensor:
        for parameter in self.applied.parameters.values():
            assert parameter.grad is not None
            parameter.grad.mul_(self.now)
        return super().update_parameters(loss)


@pytest.fixture
def disturb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, list[int]], float]], None]:
    """Sets the factor of all steps."""

    def set_factor(factor: Callable[[int, list[int]], float]) -> None:
        def build(*arguments: Any) -> TrainStep:
            step = build_step(*arguments)
            step.__class__ = Disturbed
            step.factor = factor  # type: ignore[attr-defined]
            return step

        monkeypatch.setattr("phalanx.training.start.build_step", build)

    return set_factor


def once(step: int, factor: float) -> Callable[[int, list[int]], float]:
    left = [factor]
    return lambda number, _: left.pop() if number == step and left else 1.0


def test_a_spike_is_left_out_and_its_samples_are_kept(
    run_file: Path, tmp_path: Path, disturb: Callable[..., None]
) -> None:
    changes = {}

    def factor(step: int, _: list[int]) -> float:
        changes[step - 1] = getattr(Disturbed, "changed", True)
        return 1e4 if step == 15 else 1.0

    disturb(factor)
    train(load_run(run_file, ["training.steps=18", "safeguards.on_spike=skip"]), tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run") if not row["updated"]] == [15]
    assert not changes[15] and changes[14] and changes[16], "neither weights nor optimizer state of the spike"
    (spike,) = events(tmp_path / "run", "spike")
    assert spike["step"] == 15 and spike["figure"] == "grad_norm" and spike["left_out"]
    (kept,) = (tmp_path / "run" / "bad_batches").iterdir()
    record = json.loads(kept.read_text())
    assert record["step"] == 15 and record["samples"] == list(range(14 * BATCH, 15 * BATCH))


def test_a_rewound_run_passes_the_samples_over_and_resumes_with_the_same_bits(
    run_file: Path, tmp_path: Path, disturb: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[int, int] = {}
    words = ["optimizer.schedule=constant", "safeguards.on_spike=rewind"]

    def spike_once() -> Callable[[int, list[int]], float]:
        disturbance = once(15, 1e4)

        def factor(step: int, samples: list[int]) -> float:
            seen[step] = samples[0]
            return disturbance(step, samples)

        return factor

    disturb(spike_once())
    train(load_run(run_file, ["training.steps=20", *words]), tmp_path / "straight")
    assert "rewound from step 15 to the checkpoint of step 10, passing over 5 batches" in capsys.readouterr().err
    assert [row["step"] for row in rows(tmp_path / "straight")] == list(range(1, 21))
    # Step 11 reads what step 16 would have read.
    assert seen == {step: BATCH * (step - 1 + 5 * (step > 10)) for step in range(1, 21)}
    (event,) = events(tmp_path / "straight", "rewind")
    assert (event["step"], event["wrong_step"], event["passed_batches"]) == (10, 15, 5)
    disturb(spike_once())
    train(load_run(run_file, ["training.steps=20", *words]), tmp_path / "parted", until=17)
    newest = open_checkpoints(tmp_path / "parted").newest()
    assert newest is not None and read_state(newest.path)["safeguards"]["skipped_batches"] == 5
    disturb(lambda *_: 1.0)
    train(load_run(run_file, ["training.steps=20", *words]), tmp_path / "parted")
    assert_equal(weights(tmp_path / "parted"), weights(tmp_path / "straight"))


def test_samples_that_give_no_number_are_passed_over(
    run_file: Path, tmp_path: Path, disturb: Callable[..., None]
) -> None:
    poison = 12 * BATCH + 3
    disturb(lambda _, samples: torch.nan if poison in samples else 1.0)
    train(load_run(run_file, ["training.steps=18", "training.on_nonfinite=rewind"]), tmp_path / "run")
    assert all(row["updated"] for row in rows(tmp_path / "run"))
    assert [event["wrong_step"] for event in events(tmp_path / "run", "rewind")] == [13]


def test_a_run_that_rewinds_again_and_again_ends(run_file: Path, tmp_path: Path, disturb: Callable[..., None]) -> None:
    disturb(lambda step, _: torch.nan if step == 8 else 1.0)
    words = ["training.steps=18", "training.on_nonfinite=rewind", "safeguards.max_rewinds=2"]
    with pytest.raises(PhalanxError, match=r"rewound to step 5 2 times already \(safeguards.max_rewinds=2\)"):
        train(load_run(run_file, words), tmp_path / "run")
    assert len(events(tmp_path / "run", "rewind")) == 2
    disturb(lambda step, _: torch.nan if step == 3 else 1.0)
    with pytest.raises(PhalanxError, match="There is no checkpoint to rewind to; set a smaller"):
        train(load_run(run_file, words), tmp_path / "early")


@pytest.fixture(scope="module")
def offered(run_file: Path) -> Path:
    return offer_callback(run_file.parent / "package")


def train_replicas(run_file: Path, run_dir: Path, *words: str) -> tuple[int, str]:
    settings = ("training.steps=12", "layout.dp_replicate=2", "safeguards.compare_replicas=4", *words)
    return phalanx_processes.start(["train", str(run_file), "--run-dir", str(run_dir), *settings], 2).finish()


def test_a_bit_flipped_in_one_replica_is_found_named_and_undone(
    run_file: Path, tmp_path: Path, offered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(offered))
    code, errors = train_replicas(run_file, tmp_path / "straight")
    assert code == 0 and "differ" not in errors, errors[-3000:]
    fault = {"kind": "flip", "rank": 1, "seed": 3}
    once = fault_words(**fault, step=8, marker=tmp_path / "marker")
    code, errors = train_replicas(run_file, tmp_path / "flipped", once)
    assert code == 0, errors[-3000:]
    assert "step 8: 1 parameters that ranks hold alike differ" in errors
    assert "a transient fault of rank 1 (" in errors
    (cause,) = events(tmp_path / "flipped", "fault_class")
    assert cause["cause"] == "transient" and cause["ranks"] == [1] and cause["step"] == 8
    assert_equal(weights(tmp_path / "flipped"), weights(tmp_path / "straight"))
    # Two steps later gradients of both ranks are wrong; the fault is undone all the same.
    earlier = fault_words(**fault, step=6, marker=tmp_path / "earlier")
    code, errors = train_replicas(run_file, tmp_path / "spread", earlier)
    assert code == 0 and "a transient fault of one of rank 0 (" in errors, errors[-3000:]
    assert_equal(weights(tmp_path / "spread"), weights(tmp_path / "straight"))
    # Without a marker it happens each time that the steps are done, each time elsewhere.
    code, errors = train_replicas(run_file, tmp_path / "again", fault_words(**fault, step=8))
    assert code == 1 and "a persistent fault of rank 1 (" in errors and "Traceback" not in errors, errors[-3000:]


def test_steps_that_a_rewind_undoes_are_counted_as_time(
    run_file: Path, tmp_path: Path, disturb: Callable[..., None]
) -> None:
    def slow_at_13(step: int, _: list[int]) -> float:
        time.sleep(0.3 if step == 13 else 0.0)
        return spike(step, _)

    spike = once(15, 1e4)
    disturb(slow_at_13)
    train(load_run(run_file, ["training.steps=16", "safeguards.on_spike=rewind"]), tmp_path / "run")
    (event,) = events(tmp_path / "run", "rewind")
    # Steps 11 to 15 are done again, and step 13 was slow.
    assert 0.3 < event["redone_seconds"] < 20.0
    summary = summarise_run(RunLog.read(tmp_path / "run"))
    assert summary.redone_seconds == event["redone_seconds"]
    parts = split_wall_time(summary)
    assert parts["steps done again"] == event["redone_seconds"] and sum(parts.values()) >= summary.wall_seconds > 0.0
    assert parts["evaluation"] > 0.0 and parts["start and restart"] > 0.0 and parts["checkpoints"] > 0.0
