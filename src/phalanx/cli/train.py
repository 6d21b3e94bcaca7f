"""`phalanx train`: run a run file, or go on with a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.arguments import Overrides, RunFile
from phalanx.config.load import load_run
from phalanx.train.start import train as start_training


def train(
    run: RunFile,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for metrics and checkpoints; by default runs/<name of the run file>.")
    ] = None,
) -> None:
    """Train a model, or go on with a run.

    Goes on by itself from the newest whole checkpoint in the run directory. Under torchrun or srun every rank takes its
    part; metrics, logs and checkpoints come out the same.
    """
    loaded = load_run(run, overrides or [])
    default = run if run.is_dir() else Path("runs") / run.stem
    start_training(loaded, run_dir or (Path(loaded.training.run_dir) if loaded.training.run_dir else default))
