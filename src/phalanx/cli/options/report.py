"""Arguments, options and help of `phalanx report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory that `phalanx train` wrote.")],
    out: Annotated[Path | None, typer.Option(help="HTML file to write; by default RUN_DIR/report.html.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the headline figures as one JSON object.")] = False,
) -> None:
    """Write one self-contained HTML page about a run: curves, samples, events, configuration, machine.

    Works on a finished run, a stopped one, and one that is still training.
    """
