"""One run through four layouts: its loss curve is that of one rank, and the same layout goes on to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx_processes import train
from token_data import write_run_file, write_token_folder

LAYOUTS = [
    (8, "layout.dp_shard=8"),
    (8, "layout.tp=2", "layout.pp=2", "layout.dp_shard=2"),
    (1,),
    (8, "layout.cp=2", "layout.dp_shard=4"),
]
STEPS = 3
"""In each layout."""
COMMON = (
    "layout.microbatch=1",
    "layout.global_batch=8",
    "model.n_layers=3",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "checkpoint.every=null",
    "evaluation.samples=2",
)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


def curve(run_file: Path, run_dir: Path, steps: int, ranks: int, *words: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step up to `steps`."""
    return train(run_file, run_dir, steps, ranks, *COMMON, *words).steps


def test_a_run_goes_through_layouts_as_if_nothing_had_happened(run_file: Path) -> None:
    straight = curve(run_file, run_file.parent / "straight", STEPS * len(LAYOUTS), 1)
    run_dir = run_file.parent / "matrix"
    for number, (ranks, *words) in enumerate(LAYOUTS, 1):
        found = curve(run_file, run_dir, STEPS * number, ranks, *words)
    for (loss, norm), (expected_loss, expected_norm) in zip(found, straight, strict=True):
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)


def test_the_same_layout_goes_on_to_the_same_bits(run_file: Path) -> None:
    ranks, words = 4, ("layout.tp=2", "layout.pp=2")
    straight = curve(run_file, run_file.parent / "whole", 6, ranks, *words)
    run_dir = run_file.parent / "parts"
    curve(run_file, run_dir, 3, ranks, *words)
    assert curve(run_file, run_dir, 6, ranks, *words) == straight
