"""The same run on several ranks: same samples, same losses, and checkpoints that any number of ranks goes on from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx_processes
from distributed_ranks import run_ranks
from phalanx.layout.place import as_place
from phalanx.training.safeguards.divergence import all_finite
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
        "dp_shard=2 reshard_after_forward=True microbatch=4 x 1 (auto)",
        "one rank microbatch=8 x 1 (auto)",
    ]


def test_replicas_with_recompute_train_as_one_rank_does(run_file: Path, one_rank: list[float]) -> None:
    run_dir = run_file.parent / "replicated"
    done = train(run_file, run_dir, 2, "training.steps=20", "layout.dp_replicate=2", "layout.recompute=full")
    assert finished(done, run_dir) == pytest.approx(one_rank, abs=1e-5)


def test_ranks_agree_that_weights_are_lost_and_resume_from_those_before(run_file: Path) -> None:
    run_dir = run_file.parent / "diverged"
    words = ["optimizer.lr=1e30", "optimizer.warmup_steps=0", "optimizer.grad_clip=null", "checkpoint.every=1"]
    code, errors = train(run_file, run_dir, 2, "training.steps=8", *words)
    assert code == 1 and "Traceback" not in errors, errors[-3000:]
    assert errors.count("step-00000001.nonfinite holds these very weights and was set aside") == 2
    assert not list((run_dir / "checkpoints").glob("step-????????"))
    assert len(finished(train(run_file, run_dir, 2, "training.steps=8", "optimizer.lr=1e-3"), run_dir)) == 8


def one_rank_has_nan(where: int | None) -> bool:
    weight = torch.ones(4)
    if dist.get_rank() == where:
        weight[2] = torch.nan
    return all_finite([as_place(weight)], torch.device("cpu"))


def test_a_weight_that_one_rank_holds_counts_for_all() -> None:
    assert run_ranks(one_rank_has_nan, 2, None) == [True, True]
    assert run_ranks(one_rank_has_nan, 2, 1) == [False, False]


def test_a_batch_that_the_ranks_cannot_share_is_refused_before_anything_starts(run_file: Path) -> None:
    code, errors = train(run_file, run_file.parent / "uneven", 2, "layout.global_batch=12", "layout.microbatch=4")
    assert code != 0
    assert "layout.global_batch=12 samples is not a multiple of layout.microbatch=4 x 2 data-parallel ranks" in errors
    assert "nearest legal: microbatch=3" in errors
    assert not (run_file.parent / "uneven").exists()
