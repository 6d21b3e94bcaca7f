"""`phalanx plan --check`: what the models say of runs that were measured, and how far off they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.cli.console import print_lines
from phalanx.planner.measured.check import CheckedGroup, CheckedRun, check, summarise_check
from phalanx.planner.measured.runs import read_runs
from phalanx.report.table import Column, write_text_table

_RENAMED = {
    "predicted_tokens_per_s": "predicted_tokens_per_s_per_gpu",
    "measured_tokens_per_s": "measured_tokens_per_s_per_gpu",
}


def _format_share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


GROUP_COLUMNS: tuple[Column[CheckedGroup], ...] = (
    Column("group", lambda group: group.group, "left"),
    Column("rows", lambda group: group.rows),
    Column("median", lambda group: _format_share(group.median)),
    Column("95%", lambda group: _format_share(group.p95)),
    Column("rank corr.", lambda group: "" if group.rank_correlation is None else f"{group.rank_correlation:.2f}"),
    Column("top-3 regret", lambda group: _format_share(group.top3_regret)),
    Column("memory rows", lambda group: group.memory_rows or ""),
    Column("median", lambda group: _format_share(group.memory_median)),
    Column("95%", lambda group: _format_share(group.memory_p95)),
    Column("said to fit", lambda group: group.said_to_fit or ""),
    Column("false", lambda group: _format_share(group.false_fits)),
)


def check_table(table: Path) -> tuple[list[CheckedRun], list[CheckedGroup]]:
    """Predict every row of a table of runs and summarise the errors. Raises DataError for a bad table."""
    runs = read_runs(table)
    rows = check(runs)
    return rows, summarise_check(rows, runs)


def list_checked_runs(rows: Sequence[CheckedRun], groups: Sequence[CheckedGroup]) -> dict[str, Any]:
    """Return every row with its prediction, and the errors by group, as `--json` prints them."""
    return {
        "rows": [{_RENAMED.get(name, name): value for name, value in asdict(row).items()} for row in rows],
        "groups": [asdict(group) for group in groups],
    }


def print_checked_groups(rows: Sequence[CheckedRun], groups: Sequence[CheckedGroup]) -> None:
    """Print the errors by group, one line each, and how many rows could not be predicted."""
    print_lines(write_text_table(GROUP_COLUMNS, groups))
    print_lines([f"{sum(not row.used for row in rows)} of {len(rows)} rows could not be predicted; --json says why"])
