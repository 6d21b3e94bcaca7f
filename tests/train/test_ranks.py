"""The same run on several ranks: same samples, same losses, and checkpoints that any number of ranks goes on from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from token_data import write_run_file, write_token_folder


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


def train(run_file: Path, run_dir: Path, ranks: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [
        sys.executable,
        *launcher,
        "-m",
        "phalanx",
        "train",
        str(run_file),
        "--run-dir",
        str(run_dir),
        *overrides,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=200)


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def finished(done: subprocess.CompletedProcess[str], run_dir: Path) -> list[float]:
    assert done.returncode == 0, done.stderr[-3000:]
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
    straight = run_file.parent / "straight"
    expected = finished(train(run_file, straight, 1, "training.steps=12", constant), straight)
    assert finished(train(run_file, run_dir, 2, "training.steps=8", constant), run_dir) == pytest.approx(
        expected[:8], abs=1e-5
    )
    assert finished(train(run_file, run_dir, 1, "training.steps=12", constant), run_dir) == pytest.approx(
        expected, abs=1e-5
    )


def test_replicas_with_recompute_train_as_one_rank_does(run_file: Path, one_rank: list[float]) -> None:
    run_dir = run_file.parent / "replicated"
    done = train(run_file, run_dir, 2, "training.steps=20", "layout.dp_replicate=2", "layout.recompute=full")
    assert finished(done, run_dir) == pytest.approx(one_rank, abs=1e-5)


def test_a_batch_that_the_ranks_cannot_share_is_refused_before_anything_starts(run_file: Path) -> None:
    done = train(run_file, run_file.parent / "uneven", 2, "layout.global_batch=12", "layout.microbatch=4")
    assert done.returncode != 0
    assert (
        "layout.global_batch=12 samples is not a multiple of layout.microbatch=4 x 2 data-parallel ranks" in done.stderr
    )
    assert "nearest legal: global_batch=8 or 16" in done.stderr
    assert not (run_file.parent / "uneven").exists()
