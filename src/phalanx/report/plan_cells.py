"""How a layout reads in a table, the same on a terminal and on a page."""

from __future__ import annotations

from typing import Any

from phalanx.report.text import duration_with_interval

Row = dict[str, Any]


def schedule_cell(row: Row) -> str:
    """The pipeline's schedule, with the stages of a rank where there are several; - without a pipeline."""
    if row["pp"] == 1:
        return "-"
    return str(row["schedule"]) + (f" x{row['stages_per_rank']}" if row["stages_per_rank"] > 1 else "")


def zero_cell(row: Row) -> str:
    """The ZeRO stage, with r where parameters are resharded after the forward pass; - where nothing is sharded."""
    if row["dp_shard"] * row["cp"] == 1:
        return "-"
    return f"{row['zero']}{'r' if row['reshard_after_forward'] else ''}"


def gather_cell(row: Row) -> str:
    """How parameters are gathered; - where nothing is sharded."""
    return "-" if row["dp_shard"] * row["cp"] == 1 else str(row["gather"])


def step_cell(row: Row) -> str:
    """Time of a step and its 90% interval, in one unit."""
    return duration_with_interval(row["step_s"], *row["step_s_interval"])


def gathers_differ(rows: list[Row]) -> bool:
    """Whether the column of `gather_cell` tells anything."""
    return any(row["gather"] != "layer" for row in rows)
