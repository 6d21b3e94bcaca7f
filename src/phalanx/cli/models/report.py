"""`phalanx report`: one HTML page about a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from phalanx.cli.console import print_json
from phalanx.printable import make_printable
from phalanx.report.run_log import RunLog, summarise_run
from phalanx.report.run_page import write_page


def run_report(
    *,
    run_dir: Path,
    out: Path | None,
    json_output: bool,
) -> None:
    """Run the subcommand; `phalanx.cli.options.models` declares its arguments."""
    log = RunLog.read(run_dir)
    page = write_page(log, out)
    if json_output:
        print_json({"report": str(page), **asdict(summarise_run(log)), "notes": log.notes})
    else:
        print(make_printable(str(page)))
