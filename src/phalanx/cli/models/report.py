"""`phalanx report`: one HTML page about a run."""

from __future__ import annotations

from dataclasses import asdict

from phalanx.cli.console import print_json
from phalanx.cli.options.models import ReportArguments
from phalanx.printable import make_printable
from phalanx.report.run_log import RunLog, summarise_run
from phalanx.report.run_page import write_page


def run_report(asked: ReportArguments) -> None:
    """Run the subcommand."""
    log = RunLog.read(asked.run_dir)
    page = write_page(log, asked.out)
    if asked.json_output:
        print_json({"report": str(page), **asdict(summarise_run(log)), "notes": log.notes})
    else:
        print(make_printable(str(page)))
