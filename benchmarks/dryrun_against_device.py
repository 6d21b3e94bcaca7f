"""Peak memory by `phalanx dryrun` beside what the allocator of a device gave out at most in a real run.

    python benchmarks/dryrun_against_device.py --devices 2 --data data/text --out dryrun.json [--predict-only] [--tiny]

Blocks run uncompiled, as in a dry run, with one attention kernel, and ranks exchange by collectives: a dry run counts no
buffers that peers read. All dry runs come first, and are in --out before anything runs; those that --out has are not
made again, nor are runs. Each run is `phalanx train` for a few steps; memory is that of rank 0.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from phalanx.files import write_atomically
from planner_validation import CASES, RUN_FILE, Case, add_options, measure, overrides

GIB = 2**30
CHOSEN = (
    "1x l1024 a2 microbatch=32 recompute=none",
    "1x l2048 a2 microbatch=8 recompute=selective",
    "1x l4096 a1 microbatch=2 recompute=none",
    "1x g2048 a2 microbatch=16 recompute=none",
    "1x g4096 a1 microbatch=8 recompute=selective",
    "2x l2048 a1 dp_shard=2 microbatch=4 reshard_after_forward=true recompute=none",
    "2x l2048 a2 dp_replicate=2 dp_shard=1 zero=0 microbatch=4 recompute=none",
    "2x l4096 a2 dp_shard=2 zero=2 microbatch=2 recompute=selective",
    "2x l4096 a2 tp=2 dp_shard=1 microbatch=4 recompute=none",
    "2x l2048 a8 pp=2 dp_shard=1 schedule=1f1b microbatch=2 recompute=none",
)


def words_of(case: Case, options: argparse.Namespace) -> list[str]:
    """Overrides of a case: nothing that a dry run leaves out."""
    plain = ["training.compile=false", "layout.peer_copies=false"]
    return [*overrides(case, options), *plain, *([] if options.tiny else ["training.attention=cudnn"])]


def dry_run(case: Case, words: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Peak of rank 0 by a dry run, and what it consists of."""
    command = [sys.executable, "-m", "phalanx", "dryrun", str(RUN_FILE), *words, "--devices", str(case.devices)]
    command += ["--rank", "0", "--device", "cpu" if options.tiny else "gpu", "--json"]
    start = time.monotonic()
    (rank,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["ranks"]
    parts = {name: round(size / GIB, 4) for name, size in rank["bytes_at_peak"].items()}
    return {"memory_gib": rank["peak_bytes"] / GIB, "gib_at_peak": parts, "wall_seconds": time.monotonic() - start}


def save(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write everything known so far."""
    found = [row for row in rows if (row.get("measured") or {}).get("memory_gib")]
    errors = [abs(row["dryrun"]["memory_gib"] / row["measured"]["memory_gib"] - 1) for row in found]
    about = {"date": datetime.now(UTC).isoformat(), "torch": torch.__version__, "python": platform.python_version()}
    document = {**about, "measured": len(found), "worst_error": max(errors, default=None), "cases": rows}
    write_atomically(options.out, json.dumps(document, indent=1) + "\n")


def main() -> None:
    """Run dry, write, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, steps=3, timeout=100.0)
    options = parser.parse_args()
    options.skip = 1
    rows: list[dict[str, Any]] = json.loads(options.out.read_text())["cases"] if options.out.exists() else []
    known = {row["case"]: row for row in rows}
    chosen = [case for case in CASES if case.name in CHOSEN and case.devices <= options.devices]
    for case in chosen:
        if case.name not in known:
            words = words_of(case, options)
            known[case.name] = {"case": case.name, "words": words, "dryrun": dry_run(case, words, options)}
            rows.append(known[case.name])
            save(rows, options)
            print(f"{case.name:90} {known[case.name]['dryrun']['memory_gib']:8.3f} GiB by a dry run", flush=True)
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as scratch:
        for case in chosen if not options.predict_only else []:
            row = known[case.name]
            if "measured" in row or time.monotonic() + options.timeout / 2 > end:
                continue
            folder = Path(scratch) / f"run{rows.index(row)}"
            row["measured"] = measure(case, row["words"], list(range(case.devices)), options, folder)
            save(rows, options)
            expected, found = row["dryrun"]["memory_gib"], row["measured"].get("memory_gib")
            error = f"{100 * (expected / found - 1):+.2f}%" if found else str(row["measured"].get("error", ""))[-300:]
            print(f"{case.name:90} {expected:8.3f} {found or 0.0:8.3f} GiB {error}", flush=True)


if __name__ == "__main__":
    main()
