"""`phalanx train`: run a run file, or go on with a run directory."""

from __future__ import annotations

from pathlib import Path

import typer

from phalanx.config.load import load_run
from phalanx.config.override import parse_overrides
from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.launch.local_launch import launch_ranks
from phalanx.layout.mesh import ranks_from_environment
from phalanx.layout.resolve import resolve_layout
from phalanx.train.start import train as start_training


def train(
    *,
    run: Path,
    overrides: list[str] | None,
    run_dir: Path | None,
    nproc: int | None,
    grace: float,
) -> None:
    """Run the subcommand; `phalanx.cli.options.train` declares its arguments."""
    loaded = load_run(run, overrides or [])
    if nproc is not None:
        _start_ranks(loaded, run, overrides or [], run_dir, nproc, grace)
        return
    start_training(loaded, run_dir or _run_directory(loaded, run, overrides or []))


def _run_directory(loaded: Run, run: Path, overrides: list[str]) -> Path:
    """Where a run goes whose command has no --run-dir.

    A folder goes on where it is, though the run file in it may name another: the one it began in, before it was moved or
    copied, or the one that --run-dir was given in place of.
    """
    default = run if run.is_dir() else Path("runs") / run.stem
    named_here = any(change.path == ("training", "run_dir") for change in parse_overrides(overrides))
    return Path(loaded.training.run_dir or default) if named_here or not run.is_dir() else default


def _start_ranks(
    loaded: Run, run: Path, overrides: list[str], run_dir: Path | None, nproc: int, grace_s: float
) -> None:
    """Start this command again as `nproc` ranks. What is wrong with the layout is said once, here."""
    if ranks_from_environment().world_size > 1:
        raise ConfigError(f"--nproc {nproc} starts ranks, but torchrun or srun has started them already; leave it out")
    resolve_layout(loaded, nproc, nproc)
    where = [] if run_dir is None else ["--run-dir", str(run_dir)]
    code = launch_ranks(["train", str(run), *where, *overrides], nproc, grace_s=grace_s)
    if code:
        raise typer.Exit(code)
