"""The time model against published runs: the errors that docs/planning.md states, recomputed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.cost.check import CheckedRun, check, summarise_check
from phalanx.cost.published import PublishedRun, Rate, read_runs

RUNS = Path(__file__).parents[3] / "shared" / "reference" / "published_runs.csv"
STATED = {
    # group: median and 95th percentile of the absolute error, by the profiles that are shipped
    "llm-foundry": (0.03, 0.10),
    "korthikanti": (0.03, 0.08),
    "megatron-2020": (0.03, 0.05),
    "vtrain-multi": (0.08, 0.18),
    "vtrain-single": (0.075, 0.20),
    "bigscience-a100": (0.065, 0.21),
    "all": (0.06, 0.20),
}


@pytest.fixture(scope="module")
def runs() -> list[PublishedRun]:
    if not RUNS.exists():
        pytest.skip(f"{RUNS} with published runs is not there")
    # Those of torchtitan, seven rows, run compiled blocks: tracing them takes longer than all others.
    return [run for run in read_runs(RUNS) if not run.framework.startswith("torchtitan")]


@pytest.fixture(scope="module")
def rows(runs: list[PublishedRun]) -> list[CheckedRun]:
    return check(runs)


def test_errors_are_those_that_are_stated(runs: list[PublishedRun], rows: list[CheckedRun]) -> None:
    groups = {group.group: group for group in summarise_check(rows, runs)}
    for name, (median, p95) in STATED.items():
        assert groups[name].median <= median, name
        assert groups[name].p95 <= p95, name


def test_the_best_layout_is_found(runs: list[PublishedRun], rows: list[CheckedRun]) -> None:
    groups = {group.group: group for group in summarise_check(rows, runs)}
    for name in ("vtrain-single", "vtrain-multi", "bigscience-a100", "all"):
        regret = groups[name].top3_regret
        assert regret is not None and regret <= 0.02, name


def test_every_row_is_used_or_says_why_not(runs: list[PublishedRun], rows: list[CheckedRun]) -> None:
    assert [row.row_id for row in rows] == [run.row_id for run in runs]
    for row in rows:
        assert row.used == (row.error is not None) == (row.reason == "")


def _rows(predicted: Sequence[float], measured: Sequence[float]) -> list[CheckedRun]:
    return [
        CheckedRun(str(number), "g", True, "", p, m, p / m - 1)
        for number, (p, m) in enumerate(zip(predicted, measured, strict=True))
    ]


def test_a_summary_counts_what_the_best_three_lose(runs: list[PublishedRun]) -> None:
    one = next(run for run in runs if run.used and run.rate is not None)
    same = [replace(one, group="g", rate=Rate(1.0, "")) for _ in range(5)]
    # The fastest layout is predicted to be the worst.
    summary = summarise_check(_rows([5, 4, 3, 2, 1], [8, 9, 7, 6, 10]), same)[0]
    assert summary.top3_regret == pytest.approx(0.1)
    assert summary.median == pytest.approx(np.median([3 / 8, 5 / 9, 4 / 7, 4 / 6, 9 / 10]))
    assert summary.rank_correlation is not None and summary.rank_correlation < 0.5
    assert summarise_check(_rows([1, 2], [1, 2]), same[:2])[0].rank_correlation is None
