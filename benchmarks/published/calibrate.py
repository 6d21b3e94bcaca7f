"""Fit the constants of each system in a table: `python benchmarks/published/calibrate.py RUNS.csv --out DIR`.

The files in `profiles/` were made by this.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from phalanx.planner.measured.calibration import calibrate_machines
from phalanx.planner.time.profile import save_profile
from published.groups import grouped
from published.runs import read_published_runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, metavar="RUNS.csv")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="one file for each system is written here"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for found in calibrate_machines(grouped(read_published_runs(options.table))):
        save_profile(options.out / f"{found.named.name}.yaml", found.named)
        print(found.named.name, found.named.fitted)


if __name__ == "__main__":
    main()
