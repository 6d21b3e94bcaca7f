"""Arguments, options and help of `phalanx calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.arguments import Json

SECONDS = 200.0


def calibrate(
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="This machine's description; by default one with such devices."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The profile; by default CLUSTER.profile.yaml, which plans find."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Start N ranks on this machine, one for each device.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to measure, about.")] = SECONDS,
    device: Annotated[str, typer.Option(help="auto, cpu, or the type of this machine's accelerator.")] = "auto",
    from_runs: Annotated[
        Path | None, typer.Option(metavar="RUNS.csv", help="Fit the constants to measured runs instead.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="With --from-runs: the profile that the fit begins with.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure this machine, in a few minutes, and write a profile that plans use instead of tables.

    Matrix products of the shapes that models have, attention, memory traffic, the optimizer, the host, collectives and
    copies between devices, and whole blocks. Under torchrun, srun or --nproc every rank takes its part.
    """
