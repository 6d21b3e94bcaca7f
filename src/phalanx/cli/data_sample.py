"""`phalanx data sample`: data to try the examples with, made here by a computation."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.arguments import Json, examples
from phalanx.cli.console import output, print_json
from phalanx.cli.progress import progress

sample_app = typer.Typer(no_args_is_help=True, help="Make data to try the examples with; nothing is downloaded.")


@sample_app.command("weather", epilog=examples("phalanx data sample weather --out data/weather"))
def sample_weather(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")],
    days: Annotated[int, typer.Option(min=1, help="Days to simulate, two frames each.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Another number makes other weather.")] = 0,
    json_output: Json = False,
) -> None:
    """Simulate a global atmosphere and write winds, temperatures and geopotential as netCDF.

    A quasi-geostrophic model of three levels on the 5.625 degree grid: 300 days are 13 MB and take half a minute. The same
    seed gives the same numbers on the same machine.
    """
    write = import_module("phalanx.families.weather.sample.sample_weather").write_weather
    with progress() as report:
        path = write(out, days=days, seed=seed, progress=report)
    if json_output:
        print_json({"kind": "weather", "file": str(path), "days": days, "seed": seed})
    else:
        output().print(f"{path}: {days} days, {path.stat().st_size / 1e6:.1f} MB", soft_wrap=True, highlight=False)
