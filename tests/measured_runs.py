"""A table of measured runs, as `plan --check` and `calibrate --from-runs` read it."""

from __future__ import annotations

import csv
from pathlib import Path

from phalanx.planner.measured.cells import COLUMNS

MEASURED = {
    "row_id": "mine-1",
    "group": "mine",
    "system": "h200-x4",
    "framework": "Phalanx",
    "status": "ok",
    "gpu": "H200",
    "n_gpus": "4",
    "model": "GPT",
    "layers": "4",
    "hidden": "512",
    "heads": "8",
    "ffn": "2048",
    "vocab": "1024",
    "seq": "256",
    "tp": "1",
    "pp": "1",
    "zero_stage": "3",
    "mbs": "2",
    "gbs": "16",
    "precision": "bf16",
    "recompute": "none",
    "step_time_s": "0.02",
    "mem_per_gpu": "1.5",
    "mem_unit": "GiB",
}


def write_measured_runs(path: Path, *rows: dict[str, str]) -> None:
    """Write a row for each of `rows`: `MEASURED` with some cells changed."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(MEASURED | row for row in rows)
