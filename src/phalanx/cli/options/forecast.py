"""Arguments, options and help of `phalanx forecast`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from phalanx.cli.arguments import Device, Json, Overrides


def forecast(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Run directory (its newest whole checkpoint), or one checkpoint.")
    ],
    overrides: Overrides = None,
    hours: Annotated[int, typer.Option(min=1, help="Longest lead time to forecast and score.")] = 72,
    split: Annotated[Literal["test", "validation", "train"], typer.Option(help="Which part of the data.")] = "test",
    step: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="HOURS", help="Roll out in steps of this lead time; by default the fewest steps that do."
        ),
    ] = None,
    starts: Annotated[
        int | None, typer.Option(min=1, help="Forecast from this many inputs, spread over the split; by default all.")
    ] = None,
    shown: Annotated[
        list[str] | None, typer.Option("--map", metavar="VARIABLE", help="Variable to show as maps; may be repeated.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the page; by default forecast.html in RUN_DIR.")
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Forecast from every time of a split, score all lead times, and write a page with curves and maps.

    Scores follow WeatherBench 2: area-weighted RMSE and anomaly correlation by variable and lead time, beside persistence
    and climatology. A checkpoint of any layout will do.
    """
