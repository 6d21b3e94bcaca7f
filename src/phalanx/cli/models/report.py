"""`phalanx report`: one HTML page about a run."""

from __future__ import annotations

from dataclasses import asdict

from phalanx.cli.console import print_json, print_warning
from phalanx.cli.models.serve import serve_page
from phalanx.cli.models.watched import open_watched
from phalanx.cli.options.models import ReportArguments
from phalanx.errors import ConfigError
from phalanx.printable import make_printable
from phalanx.report.run_log import RunLog, summarise_run
from phalanx.report.run_page import write_page


def run_report(asked: ReportArguments) -> None:
    """Run the subcommand."""
    if asked.serve:
        if asked.out is not None or asked.json_output:
            raise ConfigError("--serve writes no file and prints no figures; leave --out and --json away")
        if not asked.run_dir.exists():
            print_warning(f"{asked.run_dir} is not there yet: the page waits for it")
        serve_page(open_watched(asked.run_dir), asked.host, asked.port)
        return
    log = RunLog.read(asked.run_dir)
    page = write_page(log, asked.out)
    if asked.json_output:
        print_json({"report": str(page), **asdict(summarise_run(log)), "notes": log.notes})
    else:
        print(make_printable(str(page)))
