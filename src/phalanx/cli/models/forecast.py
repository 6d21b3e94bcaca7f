"""`phalanx forecast`: roll a weather model out over a split and score it against persistence and climatology."""

from __future__ import annotations

import time
from pathlib import Path

from phalanx.cli.console import make_progress_bar, print_json, print_lines, print_table
from phalanx.cli.options.models import ForecastArguments
from phalanx.cli.ranks import start_or_join_ranks
from phalanx.errors import ConfigError
from phalanx.families.weather.evaluation.compare_forecasts import ScoreRow, skill_in_words
from phalanx.families.weather.evaluation.forecast_from import forecast_from
from phalanx.families.weather.evaluation.forecast_page import ENSEMBLE_COLUMNS, render_forecasts
from phalanx.families.weather.evaluation.forecast_split import (
    forecast_split,
    load_forecaster,
)
from phalanx.files import write_atomically
from phalanx.formatting import format_number
from phalanx.hardware.device import choose_device
from phalanx.layout.mesh import leave_process_group
from phalanx.report.table import Column


def run_forecast(asked: ForecastArguments) -> None:
    """Run the subcommand."""
    if asked.times:
        _forecast_from_times(asked, asked.times)
        return
    ranks, device = start_or_join_ranks(asked.nproc, asked.device)
    loaded = load_forecaster(asked.checkpoint, device, asked.overrides or [])
    begin = time.perf_counter()
    with make_progress_bar() as bar:
        task = bar.add_task(asked.split, visible=ranks.first)
        found = forecast_split(
            loaded,
            hours=asked.hours,
            split=asked.split,
            step_hours=asked.step,
            starts=asked.starts,
            members=asked.members,
            mapped=asked.shown or (),
            out=asked.out,
            rank=ranks.rank,
            ranks=ranks.world_size,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    leave_process_group()
    if not ranks.first:
        return
    # beside the run where there is one; a single checkpoint has no place for a page
    page = asked.html or (asked.checkpoint if (asked.checkpoint / "checkpoints").is_dir() else Path()) / "forecast.html"
    write_atomically(page, render_forecasts(loaded, found))
    if asked.as_json:
        seconds = time.perf_counter() - begin
        about = {"checkpoint": str(loaded.where), "step": loaded.step, "report": str(page), "seconds": seconds}
        if asked.out is not None:
            about["forecasts"] = str(asked.out)
        print_json({**about, **found.as_dict()})
    else:
        members = f" of {found.members} members" if found.members > 1 else ""
        print_lines([f"{loaded.where} on the {found.split} split: {found.starts:,} starts{members}"])
        rain = any(row.seeps is not None for row in found.rows)
        print_table((*SCORE_COLUMNS, *[SEEPS_COLUMN] * rain, *ENSEMBLE_COLUMNS * (found.members > 1)), found.rows)
        if found.without_climatology is not None:
            print_lines([f"  no climatology: {found.without_climatology}"])
        print_lines([skill_in_words(found.rows), *([str(asked.out)] if asked.out else []), str(page)])


def _forecast_from_times(asked: ForecastArguments, times: list[str]) -> None:
    """Write forecasts from given times, of which nothing is scored."""
    if asked.out is None:
        raise ConfigError("--from writes forecasts and scores none; name --out FILE.zarr or FILE.nc")
    if asked.nproc is not None:
        raise ConfigError(f"--from forecasts from few times, on one device; leave out --nproc {asked.nproc}")
    loaded = load_forecaster(asked.checkpoint, choose_device(asked.device), asked.overrides or [])
    steps = forecast_from(loaded, times, asked.out, hours=asked.hours, step_hours=asked.step, members=asked.members)
    if asked.as_json:
        made = {str(hours): list(parts) for hours, parts in steps.items()}
        about = {"checkpoint": str(loaded.where), "step": loaded.step, "forecasts": str(asked.out)}
        print_json({**about, "from": times, "steps_hours": made})
    else:
        leads = ", ".join(map(str, steps))
        print_lines([f"{loaded.where} from {', '.join(times)}: {leads} hours ahead", str(asked.out)])


SCORE_COLUMNS: tuple[Column[ScoreRow], ...] = (
    Column("variable", lambda row: row.variable, "left"),
    Column("hours", lambda row: row.lead_hours),
    Column("RMSE", lambda row: format_number(row.rmse)),
    Column("persistence", lambda row: format_number(row.persistence_rmse)),
    Column("climatology", lambda row: "-" if row.climatology_rmse is None else format_number(row.climatology_rmse)),
    Column("saved", lambda row: f"{row.skill:+.0%}"),
    Column("ACC", lambda row: "-" if row.acc is None else f"{row.acc:.3f}"),
)
SEEPS_COLUMN: Column[ScoreRow] = Column("SEEPS", lambda row: "" if row.seeps is None else f"{row.seeps:.3f}")
