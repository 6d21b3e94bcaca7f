"""`phalanx report`: one HTML page about a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.console import print_json
from phalanx.report.run_log import RunLog
from phalanx.report.run_page import write_page
from phalanx.report.summary import summarise


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory that `phalanx train` wrote.")],
    out: Annotated[Path | None, typer.Option(help="HTML file to write; by default RUN_DIR/report.html.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the headline figures as one JSON object.")] = False,
) -> None:
    """Write one self-contained HTML page about a run: curves, samples, events, configuration, machine.

    Works on a finished run, a stopped one, and one that is still training.
    """
    log = RunLog.read(run_dir)
    page = write_page(log, out)
    if json_output:
        print_json({"report": str(page), **asdict(summarise(log)), "notes": log.notes})
    else:
        print(page)
