"""The same run on several ranks: same samples, same losses, and checkpoints that any number of ranks goes on from."""

import json
from pathlib import Path
from typing import Any

import pytest

import phalanx_processes
from token_data import write_run_file, write_token_folder


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


def train(run_file: Path, run_dir: Path, ranks: int, *overrides: str) -> tuple[int, str]:
    """Exit code, and what was written on stderr."""
    return phalanx_processes.start(["train", str(run_file), "--run-dir", str(run_dir), *overrides], ranks).finish()


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def finished(done: tuple[int, str], run_dir: Path) -> list[float]:
    assert done[0] == 0, done[1][-3000:]
    return losses(run_dir)


@pytest.fixture(scope="module")
def one_rank(run_file: Path) -> list[float]:
    run_dir = run_file.parent / "one"
    return finished(train(run_file, run_dir, 1, "training.steps=20"), run_dir)


def test_two_sharded_ranks_train_as_one_does_and_one_goes_on_from_their_checkpoint(
    run_file: Path, one_rank: list[float]
) -> None:
    run_dir = run_file.parent / "sharded"
    # The schedule must not see where the first part ends.
    constant = "optimizer.schedule=constant"
    auto = "layout.microbatch=auto"
    straight = run_file.parent / "straight"
    expected = finished(train(run_file, straight, 1, "training.steps=12", constant), straight)
    assert finished(train(run_file, run_dir, 2, "training.steps=8", constant, auto), run_dir) == pytest.approx(
        expected[:8], abs=1e-5
    )
    assert finished(train(run_file, run_dir, 1, "training.steps=12", constant, auto), run_dir) == pytest.approx(
        expected, abs=1e-5
    )
    # Other ranks, another micro-batch: the run file leaves it to each start, which writes down what it took.
    begun = [line for line in events(run_dir) if line["kind"] in ("start", "resume")]
    assert [line["layout"] for line in begun] == [
        "dp_shard=2 reshard_after_forward=True microbatch=4 x 1",
        "one rank microbatch=8 x 1",
    ]


def test_replicas_with_recompute_train_as_one_rank_does(run_file: Path, one_rank: list[float]) -> None:
    run_dir = run_file.parent / "replicated"
    done = train(run_file, run_dir, 2, "training.steps=20", "layout.dp_replicate=2", "layout.recompute=full")
    assert finished(done, run_dir) == pytest.approx(one_rank, abs=1e-5)


def test_a_batch_that_the_ranks_cannot_share_is_refused_before_anything_starts(run_file: Path) -> None:
    code, errors = train(run_file, run_file.parent / "uneven", 2, "layout.global_batch=12", "layout.microbatch=4")
    assert code != 0
    assert "layout.global_batch=12 samples is not a multiple of layout.microbatch=4 x 2 data-parallel ranks" in errors
    assert "nearest legal: microbatch=3" in errors
    assert not (run_file.parent / "uneven").exists()
