"""Wrong steps are done again: transient, persistent and reproducible ones are told apart; a transient leaves no trace."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import phalanx_processes
from fault_injection import fault_words, offer_callback
from phalanx.checkpoint import open_checkpoints, read_tensors
from phalanx.config.load import load_run
from phalanx.data.batch_stream import Batch
from phalanx.errors import ConfigError, PhalanxError
from phalanx.training.safeguards.step_replay import classify_replay
from phalanx.training.start import train
from phalanx.training.step import StepResult, TrainStep, build_step
from token_data import write_run_file, write_token_folder

BATCH = 8
GOOD, BAD = StepResult(1.0, 2.0, True), StepResult(1.0, 9e4, False)
NAN = StepResult(math.nan, math.nan, False)


@pytest.mark.parametrize(
    ("before", "after", "shares", "cause", "ranks"),
    [
        (BAD, GOOD, [(False, 0), (True, 1)], "transient", (1,)),
        # Ranks 2 and 3 split the layers of one model: it may be either of them.
        (NAN, GOOD, [(False, 0), (False, 0), (True, 1), (True, 1)], "transient", (2, 3)),
        # In a pipeline the last stage alone has a loss, and the first may be at fault.
        (NAN, GOOD, [(False, 0), (True, 0), (False, 1), (False, 1)], "transient", (0, 1)),
        (NAN, GOOD, [(True, None), (False, None)], "transient", ()),
        (NAN, GOOD, [(True, 0)], "transient", (0,)),
        (BAD, StepResult(1.0, 8e4, False), [(True, 0), (False, 1)], "persistent", (0,)),
        (BAD, StepResult(1.0, 8e4, False), [(False, 0), (False, 1)], "persistent", ()),
        (BAD, BAD, [(False, 0), (False, 1)], "samples or software", ()),
        (NAN, NAN, [(False, 0), (False, 1)], "samples or software", ()),
    ],
)
def test_causes_are_told_apart(
    before: StepResult, after: StepResult, shares: list[tuple[bool, object]], cause: str, ranks: tuple[int, ...]
) -> None:
    found = classify_replay(before, after, shares)
    assert (found.cause, found.ranks) == (cause, ranks)
    assert {"samples or software": "not of a device"}.get(cause, f"a {cause} fault") in found.in_words()


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    offer_callback(folder / "package")
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def causes(run_dir: Path) -> list[tuple[int, str, list[int]]]:
    found = [row for row in rows(run_dir / "events.jsonl") if row["kind"] == "fault_class"]
    return [(row["step"], row["cause"], row["ranks"]) for row in found]


def weights(run_dir: Path) -> dict[str, Tensor]:
    newest = open_checkpoints(run_dir).newest()
    assert newest is not None
    return read_tensors(newest.path, "")


def assert_equal(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], value) for name, value in expected.items())


@pytest.fixture
def disturb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, list[int]], float]], None]:
    """Has all gradients of a pass multiplied by `factor(step, samples)`."""

    def set_factor(factor: Callable[[int, list[int]], float]) -> None:
        class Disturbed(TrainStep):
            def enqueue(self, step: int, batch: Batch) -> Tensor:
                self.now = factor(step, batch.sample_indices.tolist())
                return super().enqueue(step, batch)

            def update_parameters(self, loss: Tensor) -> Tensor:
                for parameter in self.applied.parameters.values():
                    assert parameter.grad is not None
                    parameter.grad.mul_(self.now)
                return super().update_parameters(loss)

        def build(*arguments: Any) -> TrainStep:
            step = build_step(*arguments)
            step.__class__ = Disturbed
            return step

        monkeypatch.setattr("phalanx.training.start.build_step", build)

    return set_factor


@pytest.fixture(scope="module")
def straight(run_file: Path) -> dict[str, Tensor]:
    train(load_run(run_file, ["training.steps=16"]), run_file.parent / "straight")
    return weights(run_file.parent / "straight")


@pytest.mark.parametrize("factor", [1e4, math.nan])
@pytest.mark.parametrize("policy", ["warn", "skip", "rewind"])
def test_a_transient_fault_costs_one_step(
    factor: float,
    policy: str,
    run_file: Path,
    straight: dict[str, Tensor],
    tmp_path: Path,
    disturb: Callable[..., None],
) -> None:
    left = [factor]
    disturb(lambda step, _: left.pop() if step == 15 and left else 1.0)
    words = ["training.steps=16", "safeguards.replay=true", f"safeguards.on_spike={policy}"]
    train(load_run(run_file, words), tmp_path / "run")
    assert not left and causes(tmp_path / "run") == [(15, "transient", [])]
    assert all(row["updated"] for row in rows(tmp_path / "run" / "metrics.jsonl"))
    assert_equal(weights(tmp_path / "run"), straight)


@pytest.mark.parametrize(("policy", "updated"), [("warn", True), ("skip", False)])
def test_what_samples_bring_about_is_left_to_the_policy(
    policy: str, updated: bool, run_file: Path, tmp_path: Path, disturb: Callable[..., None]
) -> None:
    poison = 14 * BATCH + 3
    words = ["training.steps=16", f"safeguards.on_spike={policy}"]
    disturb(lambda _, samples: 1e4 if poison in samples else 1.0)
    train(load_run(run_file, words), tmp_path / "once")
    train(load_run(run_file, [*words, "safeguards.replay=true"]), tmp_path / "again")
    assert causes(tmp_path / "again") == [(15, "samples or software", [])] and not causes(tmp_path / "once")
    left_out = [row["step"] for row in rows(tmp_path / "again" / "metrics.jsonl") if not row["updated"]]
    assert left_out == ([] if updated else [15])
    assert_equal(weights(tmp_path / "again"), weights(tmp_path / "once"))


def test_a_fault_that_changes_and_stays_is_persistent(
    run_file: Path, tmp_path: Path, disturb: Callable[..., None]
) -> None:
    count = iter(range(100))
    disturb(lambda step, _: math.nan if step == 15 and next(count) else 1e4 if step == 15 else 1.0)
    with pytest.raises(PhalanxError, match="stopped before the update"):
        train(load_run(run_file, ["training.steps=16", "safeguards.replay=true"]), tmp_path / "run")
    assert causes(tmp_path / "run") == [(15, "persistent", [])]


@pytest.mark.parametrize(
    ("layout", "ranks"), [("layout.dp_shard=2", [1]), ("layout.tp=2", []), ("layout.pp=2", [])], ids=["dp", "tp", "pp"]
)
def test_ranks_do_a_step_again_together(
    layout: str, ranks: list[int], run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(run_file.parent / "package"))
    words = ["training.steps=8", layout, "safeguards.replay=true"]

    def run(name: str, *more: str) -> str:
        command = ["train", str(run_file), "--run-dir", str(tmp_path / name), *words, *more]
        code, errors = phalanx_processes.start(command, 2).finish()
        assert code == 0, errors[-3000:]
        return errors

    run("straight")
    errors = run("spoilt", fault_words(kind="activation", rank=1, step=6, marker=tmp_path / "marker"))
    assert causes(tmp_path / "spoilt") == [(6, "transient", ranks)] and "done again it is as it should be" in errors
    assert_equal(weights(tmp_path / "spoilt"), weights(tmp_path / "straight"))


def test_a_run_that_looks_for_its_loss_scale_cannot_tell_wrong_steps(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"safeguards.replay=true: layout.precision=fp16 finds its loss scale"):
        load_run(run_file, ["safeguards.replay=true", "layout.precision=fp16"])
