"""Arguments, options and help of `phalanx search`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.arguments import Json, complete_override
from phalanx.hardware.machine import described_names


def search(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run file, or folder of a run.")],
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help=f"What the planner takes the devices to be: {', '.join(described_names())}, or the path of a description.",
            autocompletion=lambda: list(described_names()),
        ),
    ],
    devices: Annotated[int, typer.Option(metavar="N", min=1, help="Devices of a trial.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIELD=VALUE",
            help="Fields of the layout to keep, e.g. tp=8; other fields as section.field=value.",
            autocompletion=complete_override,
        ),
    ] = None,
    measure: Annotated[
        int, typer.Option(metavar="K", min=1, help="Trials of the study, those done before included.")
    ] = 10,
    engine: Annotated[
        str, typer.Option(help="planner, optuna-tpe, optuna-gp, deephyper, random or exhaustive.")
    ] = "planner",
    where: Annotated[
        str, typer.Option(help="local: this machine; slurm: the allocation this runs in; simulated: no devices at all.")
    ] = "local",
    storage: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Optuna journal of the study; by default RUN.search.log.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Measured constants of the device, from phalanx calibrate.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of engines that draw at random, and of the simulated truth.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep run directories of trials.")] = False,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the run file with the best layout.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the study as one HTML page.")] = None,
    json: Json = False,
) -> None:
    """Measure the layouts that the planner thinks best, learn from each, and say which one is best and what matters.

    Every trial is a short training run in processes of its own. One that runs out of memory, hangs, crashes or gives another
    loss is recorded and not repeated. A killed search goes on when it is started again; several may share one file.
    """
