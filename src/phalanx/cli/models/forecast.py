"""`phalanx forecast`: roll a weather model out over a split and score it against persistence and climatology."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from phalanx.cli.console import make_progress_bar, print_json, print_lines, print_table
from phalanx.families.weather.evaluation.compare_forecasts import ScoreRow, skill_in_words
from phalanx.families.weather.evaluation.forecast_page import render_forecasts
from phalanx.families.weather.evaluation.forecast_split import (
    forecast_split,
    load_forecaster,
)
from phalanx.files import write_atomically
from phalanx.hardware.device import choose_device
from phalanx.report.formatting import format_number
from phalanx.report.table import Column


def run_forecast(
    *,
    checkpoint: Path,
    overrides: list[str] | None,
    hours: int,
    split: Literal["test", "validation", "train"],
    step: int | None,
    starts: int | None,
    shown: list[str] | None,
    html: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Run the subcommand; `phalanx.cli.options.models` declares its arguments."""
    loaded = load_forecaster(checkpoint, choose_device(device), overrides or [])
    begin = time.perf_counter()
    with make_progress_bar() as bar:
        task = bar.add_task(split)
        found = forecast_split(
            loaded,
            hours=hours,
            split=split,
            step_hours=step,
            starts=starts,
            mapped=shown or (),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    # beside the run where there is one; a single checkpoint has no place for a page
    page = html or (checkpoint if (checkpoint / "checkpoints").is_dir() else Path()) / "forecast.html"
    write_atomically(page, render_forecasts(loaded, found))
    if as_json:
        seconds = time.perf_counter() - begin
        about = {"checkpoint": str(loaded.where), "step": loaded.step, "report": str(page), "seconds": seconds}
        print_json({**about, **found.as_dict()})
    else:
        print_lines([f"{loaded.where} on the {found.split} split: {found.starts:,} starts"])
        print_table(SCORE_COLUMNS, found.rows)
        if found.without_climatology is not None:
            print_lines([f"  no climatology: {found.without_climatology}"])
        print_lines([skill_in_words(found.rows), str(page)])


SCORE_COLUMNS: tuple[Column[ScoreRow], ...] = (
    Column("variable", lambda row: row.variable, "left"),
    Column("hours", lambda row: row.lead_hours),
    Column("RMSE", lambda row: format_number(row.rmse)),
    Column("persistence", lambda row: format_number(row.persistence_rmse)),
    Column("climatology", lambda row: "-" if row.climatology_rmse is None else format_number(row.climatology_rmse)),
    Column("saved", lambda row: f"{row.skill:+.0%}"),
    Column("ACC", lambda row: "-" if row.acc is None else f"{row.acc:.3f}"),
)
