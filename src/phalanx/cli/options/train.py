"""Arguments, options and help of `phalanx train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.arguments import Overrides, RunFile
from phalanx.launch.parent import GRACE_S


def train(
    run: RunFile,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for metrics and checkpoints; by default runs/<name of the run file>.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Start N ranks on this machine, one for each device.")
    ] = None,
    grace: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.0, help="Time that ranks of --nproc have to save and stop."),
    ] = GRACE_S,
) -> None:
    """Train a model, or go on with a run.

    Goes on by itself from the newest whole checkpoint in the run directory. Under torchrun or srun every rank takes its
    part; metrics, logs and checkpoints come out the same.
    """
