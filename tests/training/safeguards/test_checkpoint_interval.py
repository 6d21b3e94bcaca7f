"""When checkpoints are due: fixed, or chosen from what was measured, by the formula of plans and alike on all ranks."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distributed_ranks import run_ranks
from noted_log import NotedLog
from phalanx.checkpoint import open_checkpoints
from phalanx.config.load import load_run, parse_run
from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.hardware.reliability import MTBF_HOURS, find_goodput
from phalanx.layout.mesh import Ranks
from phalanx.planner.plan.budget import Reliability, estimate_goodput
from phalanx.training.safeguards.checkpoint_interval import (
    FIRST_STEPS,
    CheckpointInterval,
    choose_interval,
    count_nodes,
)
from phalanx.training.start import train
from token_data import RUN_FILE, write_run_file, write_token_folder


def parsed(*words: str) -> Run:
    return parse_run(RUN_FILE.format(data="data"), "run.yaml", list(words))


def test_a_run_chooses_the_interval_that_a_plan_assumes() -> None:
    # 1e11 parameters on 64 nodes at 1 GB/s take 18.75 s.
    planned = estimate_goodput(10**11, 64, Reliability())
    chosen = choose_interval(18.75, 18.75, 2.0, 64, MTBF_HOURS)
    assert chosen.every == round(planned.interval_s / 2.0) and chosen.failure_seconds == planned.failure_s
    assert chosen.goodput == pytest.approx(planned.share)
    assert 1500 < chosen.every < 2000


def test_no_interval_is_shorter_than_a_save_or_a_step() -> None:
    assert choose_interval(1e-4, 30.0, 1.0, 1, 0.01).every == 30
    assert choose_interval(0.0, 0.0, 1.0, 1, MTBF_HOURS).every == 1
    slow_save = find_goodput(1.0, 1000, 1.0, 600.0, least_s=50.0)
    assert slow_save.interval_s == 50.0 and 0 <= slow_save.share < 1


def test_a_choice_is_told_with_times_below_a_second() -> None:
    words = choose_interval(0.25, 2.0, 0.125, 1, 100.0).in_words(1, 100.0)
    assert "holds training up for 0.25 s and is on storage after 2 s, a step takes 0.125 s" in words


def test_nodes_are_those_the_run_file_or_the_launcher_tells() -> None:
    run = parsed()
    assert count_nodes(run, Ranks(world_size=16, ranks_per_node=8)) == 2
    assert count_nodes(run, Ranks(world_size=16)) == 1
    assert count_nodes(parsed("cluster.devices_per_node=4"), Ranks(world_size=9, ranks_per_node=8)) == 3


@pytest.mark.parametrize(("every", "due"), [("5", [5, 10]), ("null", [])])
def test_a_stated_interval_is_kept(every: str, due: list[int]) -> None:
    log = NotedLog()
    interval = CheckpointInterval(parsed(f"checkpoint.every={every}"), Ranks(), log, 0)  # type: ignore[arg-type]
    interval.saved(5, 1.0, 1.0)
    assert [step for step in range(1, 13) if interval.is_due(step)] == due and not log.events


def test_steps_to_keep_are_saved_beside_the_chosen_ones() -> None:
    run = parsed("checkpoint.every=auto", "checkpoint.keep_every=6")
    interval = CheckpointInterval(run, Ranks(), NotedLog(), 0)  # type: ignore[arg-type]
    assert [step for step in range(1, 8) if interval.is_due(step)] == [6]
    with pytest.raises(ConfigError, match=r"not a multiple of checkpoint\.every=5"):
        parsed("checkpoint.keep_every=6")


def decide_on_ranks() -> tuple[list[int], list[dict[str, Any]], list[str]]:
    """Ranks that measured other durations each; what is due on this one, and what it wrote."""
    log, rank = NotedLog(), dist.get_rank()
    run = parsed("checkpoint.every=auto", "cluster.mtbf_hours=0.1")
    interval = CheckpointInterval(run, Ranks(rank, 2), log, 0)  # type: ignore[arg-type]
    due = []
    for step in range(1, 121):
        interval.note_step(1.0 + rank)
        if interval.is_due(step):
            due.append(step)
            # From step 40 on the disk is slower.
            interval.saved(step, (0.5 if step < 40 else 8.0) + rank, 1.0)
    interval.begin(100)
    return [*due, *(step for step in range(101, 200) if interval.is_due(step))][: len(due) + 1], log.events, log.notes


def test_all_ranks_decide_alike_and_anew_after_each_save() -> None:
    (first, events, notes), (second, _, _) = run_ranks(decide_on_ranks, 2)
    assert first == second and first[0] == FIRST_STEPS
    before, after = (choose_interval(stall, 1.0, 1.0, 1, 0.1).every for stall in (0.5, 8.0))
    assert before < after
    assert [event["every"] for event in events] == [before if event["step"] < 40 else after for event in events]
    gaps = [later - sooner for sooner, later in pairwise(first[:-1])]
    assert gaps == [event["every"] for event in events][: len(gaps)]
    # A run that returns to step 100 counts from there.
    assert first[-1] == 100 + after
    assert len(notes) == 2 and f"checkpoint every {before} steps" in notes[0] and "cluster.mtbf_hours" in notes[0]


def test_training_saves_where_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data"))
    words = ["checkpoint.every=auto", "cluster.mtbf_hours=0.01", "training.steps=30", "checkpoint.keep_last=40"]
    train(load_run(run_file, words), tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    chosen = [event for event in events if event["kind"] == "checkpoint_interval"]
    assert chosen[0]["step"] == FIRST_STEPS
    for event in chosen:
        seconds = [event[name] for name in ("stall_seconds", "write_seconds", "step_seconds")]
        assert event["every"] == choose_interval(*seconds, 1, 0.01).every and min(seconds) >= 0
    expected = [event["step"] + event["every"] for event in chosen]
    saved = sorted(checkpoint.step for checkpoint in open_checkpoints(tmp_path / "run").list())
    assert saved == sorted({FIRST_STEPS, 30, *(step for step in expected if step < 30)})
    assert "checkpoint every" in capsys.readouterr().err
    assert chosen[0]["failure_seconds"] == 36.0
