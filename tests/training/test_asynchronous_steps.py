"""Steps launched before the last one was read: the run is the same, and all that looks at its state sees the right one.

On accelerators short steps are; here a processor that computes while it launches does the same.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import phalanx_processes
from materials_runs import write_materials_run
from phalanx.checkpoint import open_checkpoints, read_tensors
from phalanx.cli.main import main
from phalanx.config.load import load_run
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.hardware.device import HostCopy
from phalanx.training import trainer
from phalanx.training.trainer import SHORT_S, AsynchronousSteps
from token_data import write_run_file, write_token_folder

STEPS, CHECKPOINTS, EVALUATIONS = 30, 10, 7
SLOW, SLOW_SECONDS = 4, 1.0


class NotedSteps(AsynchronousSteps):
    """Says in a file what it was asked for."""

    def __init__(self, file: Path, device: torch.device, *, allowed: bool) -> None:
        assert not allowed
        super().__init__(device, allowed=True)
        self.file = file

    def share(self, found: Tensor, signal_number: int, seconds: float) -> HostCopy:
        self._note("launched")
        return super().share(found, signal_number, seconds)

    def read(self, found: HostCopy) -> list[float]:
        self._note("read")
        return super().read(found)

    def _note(self, word: str) -> None:
        with self.file.open("a") as file:
            file.write(word + "\n")


class SlowSteps(NotedSteps):
    """The launch of one step, behind the one that is launched behind nothing, takes long."""

    launched = 0

    def share(self, found: Tensor, signal_number: int, seconds: float) -> HostCopy:
        self.launched += 1
        if self.launched == SLOW:
            time.sleep(SLOW_SECONDS)
        return super().share(found, signal_number, seconds)


def train_ahead(words: Sequence[str], kind: type[NotedSteps] = NotedSteps) -> None:
    """`phalanx train`, on a processor, as on an accelerator."""
    file = Path(words[words.index("--run-dir") + 1]).with_suffix(f".order-{os.environ.get('RANK', '0')}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "AsynchronousSteps", partial(kind, file))
        main(words)


def train_with_a_slow_step(words: Sequence[str]) -> None:
    train_ahead(words, SlowSteps)


def order(run_dir: Path, rank: int = 0) -> list[tuple[str, int]]:
    """What happened to which step."""
    words = run_dir.with_suffix(f".order-{rank}").read_text().split()
    counts = {"launched": 0, "read": 0}
    found = []
    for word in words:
        counts[word] += 1
        found.append((word, counts[word]))
    return found


def rows(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def figures(run_dir: Path) -> list[tuple[Any, ...]]:
    return [
        tuple(row[name] for name in ("step", "loss", "grad_norm", "lr", "tokens", "updated")) for row in rows(run_dir)
    ]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [{name: e[name] for name in ("step", "loss") if name in e} for e in found if e["kind"] == kind]


def words(run_file: Path, run_dir: Path, *more: str) -> list[str]:
    return ["train", str(run_file), "--run-dir", str(run_dir), *more]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


SCHEDULE = (f"training.steps={STEPS}", f"checkpoint.every={CHECKPOINTS}", f"evaluation.every={EVALUATIONS}")


@pytest.fixture(scope="module")
def straight(run_file: Path) -> Path:
    """Every step read before the next is launched."""
    run_dir = run_file.parent / "straight"
    phalanx_processes.finish(words(run_file, run_dir, *SCHEDULE))
    return run_dir


@pytest.fixture(scope="module")
def run_dir(run_file: Path) -> Path:
    """The same, steps launched ahead."""
    run_dir = run_file.parent / "ahead"
    phalanx_processes.finish(words(run_file, run_dir, *SCHEDULE), command=train_ahead)
    return run_dir


def test_the_run_is_the_same_to_the_bit(run_dir: Path, straight: Path) -> None:
    assert figures(run_dir) == figures(straight) and len(rows(run_dir)) == STEPS
    for kind in ("evaluation", "checkpoint"):
        assert events(run_dir, kind) == events(straight, kind) and events(run_dir, kind), kind
    assert all(row["step_seconds"] > 0.0 for row in rows(run_dir))
    one, other = (open_checkpoints(folder).newest() for folder in (run_dir, straight))
    assert one is not None and other is not None and one.step == other.step == STEPS
    ours, expected = read_tensors(one.path, ""), read_tensors(other.path, "")
    assert ours.keys() == expected.keys() and all(torch.equal(ours[name], value) for name, value in expected.items())


def test_a_step_is_launched_before_the_last_is_read_but_for_those_whose_state_is_looked_at(run_dir: Path) -> None:
    found = order(run_dir)
    place = {what: number for number, what in enumerate(found)}
    looked_at = {step for step in range(1, STEPS + 1) if not (step % CHECKPOINTS and step % EVALUATIONS)} | {STEPS}
    # That the first step was short is agreed on with the second.
    looked_at |= {1, 2}
    for step in range(1, STEPS):
        ahead = place["launched", step + 1] < place["read", step]
        assert ahead is (step not in looked_at), step
        assert place["read", step] < place.get(("launched", step + 2), len(found)), step


def test_no_time_counts_for_two_steps(run_file: Path) -> None:
    run_dir = run_file.parent / "slow"
    phalanx_processes.finish(words(run_file, run_dir, "training.steps=6"), command=train_with_a_slow_step)
    assert order(run_dir).index(("launched", SLOW)) < order(run_dir).index(("read", SLOW - 1))
    assert [row["step"] for row in rows(run_dir) if row["step_seconds"] >= SLOW_SECONDS] == [SLOW]


def test_of_long_steps_each_is_read_first() -> None:
    ahead = AsynchronousSteps(torch.device("cpu"), allowed=True)
    for seconds, expected in ((0.0, True), (2 * SHORT_S, False), (0.5 * SHORT_S, True)):
        figures_2 = torch.tensor([1.0, 2.0], dtype=torch.float64)
        assert ahead.read(ahead.share(figures_2, 0, seconds)) == [1.0, 2.0]
        assert ahead.ahead is expected and ahead.signal_number == 0
    ahead.read(ahead.share(figures_2, signal.SIGTERM, 0.1))
    assert ahead.signal_number == signal.SIGTERM


def test_ctrl_c_leaves_a_checkpoint_of_the_last_step_launched(run_file: Path, straight: Path) -> None:
    run_dir = run_file.parent / "stopped"
    slow = (f"training.steps={STEPS}", "checkpoint.every=null", "evaluation.every=null")
    process = phalanx_processes.start(words(run_file, run_dir, *slow), command=train_ahead)
    deadline = time.monotonic() + 120
    while len(rows(run_dir)) < 5:
        assert process.poll() is None, process.finish()
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    code, errors = process.finish()
    assert code == 130, errors
    newest = open_checkpoints(run_dir).newest()
    assert newest is not None and newest.step == len(rows(run_dir)) >= 5
    assert order(run_dir)[-1] == ("read", newest.step)
    assert f"stopped by signal 2 after step {newest.step}, checkpoint written" in errors
    assert figures(run_dir) == figures(straight)[: newest.step]


def test_a_step_that_is_not_finite_ends_the_run(run_file: Path) -> None:
    run_dir = run_file.parent / "broken"
    process = phalanx_processes.start(
        words(run_file, run_dir, "optimizer.lr=1.0e+30", "training.steps=12", "optimizer.warmup_steps=1"),
        command=train_ahead,
    )
    code, errors = process.finish()
    last = rows(run_dir)[-1]
    assert code == 1 and not last["updated"] and f"step {last['step']}: loss=" in errors
    assert [row["step"] for row in rows(run_dir)] == list(range(1, last["step"] + 1))
    assert not list((run_dir / "checkpoints").glob("step-*"))


def test_ranks_with_uneven_shares_tell_their_times_in_every_row(tmp_path: Path) -> None:
    run_file = write_materials_run(tmp_path)
    prepare_graphs(load_run(run_file).data, workers=1)
    # Fits of costs to measured times would deal structures out differently each time.
    more = ("training.steps=8", "data.fit_cost_every=null", "layout.dp_shard=2")
    phalanx_processes.finish(words(run_file, tmp_path / "straight", *more), ranks=2)
    phalanx_processes.finish(words(run_file, tmp_path / "ahead", *more), ranks=2, command=train_ahead)
    assert figures(tmp_path / "ahead") == figures(tmp_path / "straight")
    for one, other in zip(rows(tmp_path / "ahead"), rows(tmp_path / "straight"), strict=True):
        assert one["imbalance_expected"] == other["imbalance_expected"]
        assert one["compute_seconds"] > 0.0 and one["rank_wait_seconds"] >= 0.0 and one["imbalance"] >= 1.0
    assert order(tmp_path / "ahead", 0) == order(tmp_path / "ahead", 1)
    assert order(tmp_path / "ahead").index(("launched", 4)) < order(tmp_path / "ahead").index(("read", 3))
