"""`phalanx plan --check`: what the models say of runs that were measured, and how far off they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.cli.console import output
from phalanx.planner.measured.check import CheckedGroup, CheckedRun, check, summarise_check
from phalanx.planner.measured.runs import read_runs

_RENAMED = {
    "predicted_tokens_per_s": "predicted_tokens_per_s_per_gpu",
    "measured_tokens_per_s": "measured_tokens_per_s_per_gpu",
}


def check_table(table: Path) -> tuple[list[CheckedRun], list[CheckedGroup]]:
    """Predict every row of a table of runs and summarise the errors. Raises DataError for a bad table."""
    runs = read_runs(table)
    rows = check(runs)
    return rows, summarise_check(rows, runs)


def check_facts(rows: Sequence[CheckedRun], groups: Sequence[CheckedGroup]) -> dict[str, Any]:
    """Return every row with its prediction, and the errors by group, as `--json` prints them."""
    return {"rows": [_row(row) for row in rows], "groups": [asdict(group) for group in groups]}


def print_check(rows: Sequence[CheckedRun], groups: Sequence[CheckedGroup]) -> None:
    """Print the errors by group, one line each, and how many rows could not be predicted."""
    console = output()
    wide = max((len(group.group) for group in groups), default=0)
    heads = "rows  median    95%  rank corr.  top-3 regret  memory rows  median    95%  said to fit  false"
    console.print(f"{'group':{wide}}  {heads}", soft_wrap=True)
    for group in groups:
        console.print(_line(group, wide), soft_wrap=True)
    console.print(f"{sum(not row.used for row in rows)} of {len(rows)} rows could not be predicted; --json says why")


def _row(row: CheckedRun) -> dict[str, Any]:
    return {_RENAMED.get(name, name): value for name, value in asdict(row).items()}


def _line(group: CheckedGroup, wide: int) -> str:
    correlation = "" if group.rank_correlation is None else f"{group.rank_correlation:.2f}"
    regret = "" if group.top3_regret is None else f"{100 * group.top3_regret:.1f}%"
    line = (
        f"{group.group:{wide}}  {group.rows:4}  {_percent(group.median)}  {_percent(group.p95)}  "
        f"{correlation:>10}  {regret:>12}  {group.memory_rows or '':>11}  {_percent(group.memory_median)}  "
        f"{_percent(group.memory_p95)}  {group.said_to_fit or '':>11}  {_percent(group.false_fits)[1:]}"
    )
    return line.rstrip()


def _percent(share: float | None) -> str:
    return " " * 6 if share is None else f"{100 * share:5.1f}%"
