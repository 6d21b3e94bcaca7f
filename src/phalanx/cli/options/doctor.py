"""Arguments, options and help of `phalanx doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.arguments import Json
from phalanx.hardware.doctor.finding import PATIENCE_S


def doctor(
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="This machine's description, whose settings and binding are looked for."
        ),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Start N ranks on this machine, one for each device.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure nothing: look at settings, binding and versions.")
    ] = False,
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", min=1.0, help="How long a rank may say nothing.")
    ] = PATIENCE_S,
    device: Annotated[str, typer.Option(help="auto, cpu, or the type of this machine's accelerator.")] = "auto",
    json: Json = False,
) -> None:
    """Look for what would stop a training job, slow it down or spoil its results: before the first step, in a minute.

    Under torchrun, srun or --nproc every rank takes its part. Ends with exit code 3 where training would fail or be wrong.
    """
