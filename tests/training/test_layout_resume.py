"""One run through four layouts: its loss curve is that of one rank, and the same layout goes on to the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from families.language.evaluation.test_in_context import ANSWERS, CHOICES, SCHEMA, TEXTS, write
from phalanx.families.language.evaluation.icl_tasks import load_tasks
from phalanx.families.language.evaluation.in_context import score_tasks
from phalanx.families.language.evaluation.load_weights import load_for_inference
from phalanx_processes import train
from token_data import write_run_file, write_token_folder

LAYOUTS = [
    (4, "layout.dp_shard=4"),
    (8, "layout.tp=2", "layout.pp=2", "layout.dp_shard=2"),
    (1,),
    (4, "layout.cp=2", "layout.dp_shard=2"),
]
STEPS = 3
"""In each layout."""
LONGER = "data.length_warmup=[{steps: 4, sequence_length: 8}, {steps: 7, sequence_length: 24}]"
"""Samples are whole in the last step alone: every layout meets parts, and each of the last two stages ends within one."""
COMMON = (
    "layout.microbatch=1",
    "layout.global_batch=8",
    "model.n_layers=3",
    "optimizer.warmup_steps=0",
    "checkpoint.every=null",
    "evaluation.samples=2",
)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


def curve(run_file: Path, run_dir: Path, until: int, ranks: int, *words: str, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step up to `until` of a run of `steps`, whose learning rate falls up to the last."""
    return train(run_file, run_dir, steps, ranks, "--until", str(until), *COMMON, *words).steps


def asked_tasks(folder: Path) -> list[Path]:
    """A file of each kind of task."""
    kinds = {"choices": CHOICES, "schema": SCHEMA, "texts": TEXTS, "answers": ANSWERS}
    return [write(folder / f"{name}.jsonl", rows) for name, rows in kinds.items()]


def task_scores(run_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """The scores of each evaluation on tasks, by step."""
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return {event["step"]: event["tasks"] for event in events if event["kind"] == "tasks"}


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same names, and figures that are apart by rounding at most."""
    for one, other in zip(found, expected, strict=True):
        figures = [{name: x for name, x in scores.items() if isinstance(x, int | float)} for scores in (one, other)]
        assert (one["task"], one["kind"]) == (other["task"], other["kind"])
        assert figures[0] == pytest.approx(figures[1], rel=1e-4)


def test_a_run_goes_through_layouts_as_if_nothing_had_happened(run_file: Path) -> None:
    files = asked_tasks(run_file.parent)
    asked = (LONGER, f"evaluation.tasks.files=[{', '.join(map(str, files))}]", f"evaluation.tasks.every={STEPS}")
    steps = STEPS * len(LAYOUTS)
    straight = curve(run_file, run_file.parent / "straight", steps, 1, *asked, steps=steps)
    run_dir = run_file.parent / "matrix"
    for number, (ranks, *words) in enumerate(LAYOUTS, 1):
        found = curve(run_file, run_dir, STEPS * number, ranks, *words, *asked, steps=steps)
    for (loss, norm), (expected_loss, expected_norm) in zip(found, straight, strict=True):
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    # Tasks are scored where the run has come to, by all of its ranks; and as by one that loads the checkpoint.
    scored = task_scores(run_dir)
    assert list(scored) == [STEPS * number for number in range(1, len(LAYOUTS) + 1)]
    for step, expected in task_scores(run_file.parent / "straight").items():
        assert_close(scored[step], expected)
    loaded = load_for_inference(run_dir, torch.device("cpu"))
    alone = [score.as_dict() for score in score_tasks(loaded, load_tasks(files))]
    assert_close(scored[max(scored)], alone)


def test_the_same_layout_goes_on_to_the_same_bits(run_file: Path) -> None:
    growing = "layout.batch_warmup=[{steps: 2, global_batch: 4}, {steps: 2, global_batch: 6}]"
    ranks, words = 4, ("layout.tp=2", "layout.pp=2", growing)
    straight = curve(run_file, run_file.parent / "whole", 6, ranks, *words, steps=6)
    run_dir = run_file.parent / "parts"
    curve(run_file, run_dir, 3, ranks, *words, steps=6)
    assert curve(run_file, run_dir, 6, ranks, *words, steps=6) == straight
    # Batches of a warm-up are those of one rank too, and so is the count of what was trained on.
    alone = run_file.parent / "alone"
    assert [loss for loss, _ in straight] == pytest.approx(
        [loss for loss, _ in curve(run_file, alone, 6, 1, growing, steps=6)], abs=1e-5
    )
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["tokens"] // 32 for line in lines] == [4, 8, 14, 20, 28, 36]
