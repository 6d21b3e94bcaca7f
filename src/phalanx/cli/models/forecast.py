"""`phalanx forecast`: roll a weather model out over a split and score it against persistence and climatology."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.console import make_progress_bar, print_json, print_lines, print_table
from phalanx.cli.options.models import ForecastArguments
from phalanx.cli.ranks import start_or_join_ranks
from phalanx.errors import ConfigError
from phalanx.families.weather.evaluation.compare_forecasts import ScoreRow, skill_in_words
from phalanx.families.weather.evaluation.forecast_from import forecast_from
from phalanx.families.weather.evaluation.forecast_page import DIFFERENCE_COLUMNS, ENSEMBLE_COLUMNS, render_forecasts
from phalanx.families.weather.evaluation.forecast_split import (
    Forecasts,
    LoadedForecaster,
    forecast_split,
    load_forecaster,
)
from phalanx.families.weather.evaluation.significance import compare_scores
from phalanx.files import write_atomically
from phalanx.formatting import format_number
from phalanx.layout.mesh import Ranks, leave_process_group
from phalanx.report.table import Column


def run_forecast(asked: ForecastArguments) -> None:
    """Run the subcommand."""
    if asked.times:
        _forecast_from_times(asked, asked.times)
        return
    ranks, device = start_or_join_ranks(asked.nproc, asked.device)
    loaded = load_forecaster(asked.checkpoint, device, asked.overrides or [])
    begin = time.perf_counter()
    found = _forecast_split(asked, loaded, ranks, members=asked.members, out=asked.out, mapped=asked.shown or ())
    other, differences = None, []
    if asked.against is not None:
        other = load_forecaster(asked.against, device, asked.overrides or [])
        # A model without noise is a single forecast, also beside an ensemble.
        members = asked.members if other.run.model.noise_channels else None
        differences = compare_scores(found.by_start, _forecast_split(asked, other, ranks, members=members).by_start)
    leave_process_group()
    if not ranks.first:
        return
    # beside the run where there is one; a single checkpoint has no place for a page
    page = asked.html or (asked.checkpoint if (asked.checkpoint / "checkpoints").is_dir() else Path()) / "forecast.html"
    against = "" if other is None else f"{other.where}, step {other.step}"
    write_atomically(page, render_forecasts(loaded, found, against, differences))
    if asked.as_json:
        seconds = time.perf_counter() - begin
        about = {"checkpoint": str(loaded.where), "step": loaded.step, "report": str(page), "seconds": seconds}
        if asked.out is not None:
            about["forecasts"] = str(asked.out)
        if other is not None:
            tests = [difference.as_dict() for difference in differences]
            about["against"] = {"checkpoint": str(other.where), "step": other.step, "differences": tests}
        print_json({**about, **found.as_dict()})
        return
    _print_scores(loaded, found)
    if other is not None:
        print_lines(
            [f"less those of {against}, with 95% intervals and the factor of their width by correlation in time:"]
        )
        print_table(DIFFERENCE_COLUMNS, differences)
    print_lines([skill_in_words(found.rows), *([str(asked.out)] if asked.out else []), str(page)])


def _forecast_split(
    asked: ForecastArguments,
    loaded: LoadedForecaster,
    ranks: Ranks,
    *,
    members: int | None,
    out: Path | None = None,
    mapped: Sequence[str] = (),
) -> Forecasts:
    """Forecast the split that is asked for with one model."""
    with make_progress_bar() as bar:
        task = bar.add_task(asked.split, visible=ranks.first)
        return forecast_split(
            loaded,
            hours=asked.hours,
            split=asked.split,
            step_hours=asked.step,
            starts=asked.starts,
            members=members,
            mapped=mapped,
            out=out,
            rank=ranks.rank,
            ranks=ranks.world_size,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _print_scores(loaded: LoadedForecaster, found: Forecasts) -> None:
    """Print the table of scores."""
    members = f" of {found.members} members" if found.members > 1 else ""
    print_lines([f"{loaded.where} on the {found.split} split: {found.starts:,} starts{members}"])
    rain = any(row.seeps is not None for row in found.rows)
    print_table((*SCORE_COLUMNS, *[SEEPS_COLUMN] * rain, *ENSEMBLE_COLUMNS * (found.members > 1)), found.rows)
    if found.without_climatology is not None:
        print_lines([f"  no climatology: {found.without_climatology}"])


def _forecast_from_times(asked: ForecastArguments, times: list[str]) -> None:
    """Write forecasts from given times, of which nothing is scored."""
    if asked.out is None:
        raise ConfigError("--from writes forecasts and scores none; name --out FILE.zarr or FILE.nc")
    if asked.against is not None:
        raise ConfigError(f"--from scores nothing that could be compared; leave out --against {asked.against}")
    ranks, device = start_or_join_ranks(asked.nproc, asked.device)
    loaded = load_forecaster(asked.checkpoint, device, asked.overrides or [])
    steps = forecast_from(
        loaded,
        times,
        asked.out,
        hours=asked.hours,
        step_hours=asked.step,
        members=asked.members,
        rank=ranks.rank,
        ranks=ranks.world_size,
    )
    leave_process_group()
    if not ranks.first:
        return
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
