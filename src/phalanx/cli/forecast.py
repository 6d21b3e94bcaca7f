"""`phalanx forecast`: roll a weather model out over a split and score it against persistence and climatology."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from phalanx.cli.console import output, print_json
from phalanx.cli.inference import progress_bar
from phalanx.families.weather.evaluation.compare_forecasts import skill_in_words
from phalanx.families.weather.evaluation.forecast_split import (
    Forecasts,
    LoadedForecaster,
    forecast_split,
    load_forecaster,
)
from phalanx.files import write_atomically
from phalanx.hardware.device import choose_device
from phalanx.report.forecast_page import render_forecasts
from phalanx.report.formatting import format_number


def forecast(
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
    """Run the subcommand; `phalanx.cli.options.forecast` declares its arguments."""
    loaded = load_forecaster(checkpoint, choose_device(device), overrides or [])
    begin = time.perf_counter()
    with progress_bar() as bar:
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
    page = html or (checkpoint if (checkpoint / "checkpoints").is_dir() else Path()) / "forecast.html"
    write_atomically(page, render_forecasts(loaded, found))
    if as_json:
        seconds = time.perf_counter() - begin
        about = {"checkpoint": str(loaded.where), "step": loaded.step, "report": str(page), "seconds": seconds}
        print_json({**about, **found.as_dict()})
    else:
        _print_scores(loaded, found, page)


def _print_scores(loaded: LoadedForecaster, found: Forecasts, page: Path) -> None:
    console = output()
    console.print(f"{loaded.where} on the {found.split} split: {found.starts:,} starts")
    console.print(
        f"  {'variable':<28}{'hours':>6}{'RMSE':>12}{'persistence':>13}{'climatology':>13}{'saved':>8}{'ACC':>8}"
    )
    for row in found.rows:
        usual = "-" if row.climatology_rmse is None else format_number(row.climatology_rmse)
        acc = "-" if row.acc is None else f"{row.acc:.3f}"
        console.print(
            f"  {row.variable:<28}{row.lead_hours:>6}{format_number(row.rmse):>12}{format_number(row.persistence_rmse):>13}{usual:>13}"
            f"{row.skill:>+8.0%}{acc:>8}"
        )
    if found.without_climatology is not None:
        console.print(f"  no climatology: {found.without_climatology}")
    console.print(skill_in_words(found.rows))
    console.print(str(page))
