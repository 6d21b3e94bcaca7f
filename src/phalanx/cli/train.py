"""`phalanx train`: run a run file, or go on with a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.config.load import load_run
from phalanx.errors import ConfigError
from phalanx.train.start import train as start_training


def train(
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml|RUN_DIR", help="Run file, or run directory to go on with.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Fields to change, e.g. training.steps=100."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for metrics and checkpoints; by default runs/<name of the run file>.")
    ] = None,
) -> None:
    """Train a model; goes on by itself from the newest whole checkpoint in the run directory.

    Examples: `phalanx train examples/quickstart.yaml`, `phalanx train runs/quickstart training.steps=2000`,
    `torchrun --nproc-per-node 8 -m phalanx train examples/llama3-8b.yaml`.
    """
    run_file, default_dir = _locate(run)
    loaded = load_run(run_file, overrides or [])
    chosen = run_dir or (Path(loaded.training.run_dir) if loaded.training.run_dir else default_dir)
    start_training(loaded, chosen)


def _locate(path: Path) -> tuple[Path, Path]:
    """The run file, and the run directory to use when nobody names one."""
    if not path.is_dir():
        return path, Path("runs") / path.stem
    run_file = path / "run.yaml"
    if not run_file.is_file():
        raise ConfigError(
            f"{path} is a folder without run.yaml, so no run directory; give a run file or a run directory"
        )
    return run_file, path
