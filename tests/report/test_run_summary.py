"""The headline figures against records worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from phalanx.report.run_log import RunLog, Summary, summarise_run
from report.run_dirs import EVENTS, TOKENS_A_STEP, event, write_run


def _summary(run_dir: Path) -> Summary:
    return summarise_run(RunLog.read(run_dir))


def test_figures_of_a_whole_run(tmp_path: Path) -> None:
    def change(step: int) -> dict[str, float]:
        return {"step_seconds": 8.0, "data_wait_seconds": 1.0} if step == 1 else {}

    summary = _summary(write_run(tmp_path, change=change))
    assert (summary.steps, summary.records, summary.finished, summary.resumes) == (40, 40, True, 1)
    assert summary.tokens == 40 * TOKENS_A_STEP
    assert summary.final_loss == summary.lowest_loss == 0.25
    assert (summary.validation_step, summary.validation_loss) == (40, 0.5)
    assert (summary.perplexity, summary.bits_per_byte) == (1.6487, 0.175)
    assert summary.median_step_seconds == 0.5
    assert summary.median_tokens_per_second == TOKENS_A_STEP / 0.5
    assert (summary.median_mfu, summary.median_mfu_measured, summary.flops_convention) == (0.4, 0.5, "palm")
    assert summary.step_seconds == 8.0 + 39 * 0.5
    assert summary.wall_seconds == 115
    assert summary.data_wait_share == pytest.approx((1.0 + 39 * 0.005) / 27.5, rel=1e-12)
    assert summary.checkpoint_stall_share == 0


def test_the_last_evaluation_is_that_of_the_latest_step(tmp_path: Path) -> None:
    events = [event("evaluation", 40, 9, loss=0.5), event("evaluation", 20, 10, loss=9.0)]
    assert _summary(write_run(tmp_path, events=events)).validation_loss == 0.5


def test_a_killed_run_counts_the_steps_after_its_last_event(tmp_path: Path) -> None:
    summary = _summary(write_run(tmp_path, events=EVENTS[:4]))
    assert not summary.finished
    # 12 s from the start to the checkpoint at step 20, then 20 steps of half a second
    assert summary.wall_seconds == 22 and summary.step_seconds == 20


def test_without_events_the_wall_time_is_that_of_the_steps(tmp_path: Path) -> None:
    summary = _summary(write_run(tmp_path, events=[]))
    assert summary.wall_seconds == summary.step_seconds == 20
    assert summary.validation_step is None and math.isnan(summary.validation_loss)


def test_losses_that_are_not_finite_are_counted_and_never_averaged_in(tmp_path: Path) -> None:
    def change(step: int) -> dict[str, object]:
        bad = {7: float("nan"), 9: float("inf"), 40: None}
        return {"loss": bad[step], "updated": False} if step in bad else {}

    summary = _summary(write_run(tmp_path, change=change))
    assert (summary.nonfinite_losses, summary.skipped_updates) == (3, 3)
    assert math.isnan(summary.final_loss) and summary.lowest_loss == 10 / 39


def test_columns_that_a_cpu_run_leaves_empty_give_no_figure(tmp_path: Path) -> None:
    empty = dict.fromkeys(["mfu", "mfu_measured", "data_wait_seconds", "checkpoint_stall_seconds"])
    summary = _summary(write_run(tmp_path, change=lambda step: empty))
    figures = (summary.median_mfu, summary.median_mfu_measured, summary.data_wait_share, summary.checkpoint_stall_share)
    assert all(math.isnan(figure) for figure in figures)
