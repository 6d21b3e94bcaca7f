"""Published runs of other frameworks beside what the models say of them: `python benchmarks/published/check.py RUNS.csv`.

Emulates what those programs do otherwise than ours (`frameworks.py`, `memory.py`); `phalanx plan --check` holds the models
against your own runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from phalanx.cli.console import print_json
from phalanx.cli.planning.plan import list_checked_runs, print_checked_groups
from phalanx.planner.measured.check_predictions import CheckedRun, compare, summarise_check
from published.groups import grouped, refused
from published.memory import published_peak
from published.runs import PublishedRun, read_published_runs


def check_published(runs: Sequence[PublishedRun], *, calibrated: bool = True) -> list[CheckedRun]:
    """Predict every run, in the order given. calibrated: by fitted profiles, where there are such."""
    return compare(runs, grouped(runs), refused, published_peak, calibrated=calibrated)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, metavar="RUNS.csv", help="columns: published.cells.COLUMNS")
    parser.add_argument("--json", action="store_true", help="print every row, and the errors by group, as JSON")
    options = parser.parse_args()
    runs = read_published_runs(options.table)
    rows = check_published(runs)
    groups = summarise_check(rows, runs)
    print_json(list_checked_runs(rows, groups)) if options.json else print_checked_groups(rows, groups)


if __name__ == "__main__":
    main()
