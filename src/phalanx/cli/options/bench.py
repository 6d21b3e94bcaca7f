"""Arguments, options and help of `phalanx bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.arguments import Json, Overrides, RunFile
from phalanx.hardware.machine import described_names


def bench(
    run: RunFile,
    overrides: Overrides = None,
    devices: Annotated[
        int, typer.Option("--nproc", "--devices", metavar="N", min=1, help="Ranks to start, one for each device.")
    ] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps to train.")] = 12,
    skip: Annotated[int, typer.Option(min=0, help="First steps that do not count; the first one compiles.")] = 4,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"Print the plan beside, for {', '.join(described_names())} or a description of your own.",
            autocompletion=lambda: list(described_names()),
        ),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Constants of that plan, from phalanx calibrate.")
    ] = None,
    where: Annotated[
        str, typer.Option(help="local: this machine; slurm: the allocation this runs in, whole nodes of --cluster.")
    ] = "local",
    limit: Annotated[float, typer.Option(metavar="SECONDS", min=1.0, help="After which it is given up.")] = 900.0,
    keep: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep the run and the logs of its processes.")
    ] = None,
    json: Json = False,
) -> None:
    """Train some steps of a run for real, and say how long they took, how much memory, and what the planner expected.

    Checkpoints, evaluations and logs are left out; data are read as in training. Nothing of the run itself is touched.
    """
