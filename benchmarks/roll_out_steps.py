"""Time and memory of roll-outs on one device, beside what the planner expects of each.

    python benchmarks/roll_out_steps.py --cluster h200-x4 --out benchmarks/results/weather/roll-out-steps.json
    python benchmarks/roll_out_steps.py --tiny --out tiny.json     # a tiny model on the CPU: does it all run?

ORBIT-1B on random fields of 48 variables, which are written to a netCDF file first: a single step, roll-outs of two and of
four steps whose last step learns, and the same trained through. Each is `phalanx bench` in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import xarray

from phalanx.config.load import load_run
from phalanx.families.weather.config import WeatherRun

ROOT = Path(__file__).parents[1]
RUN_FILE = ROOT / "examples/orbit-1b.yaml"
FRAMES = 60
STEP_HOURS = 6
CASES: dict[str, list[str]] = {
    "a single step": ["data.lead_hours=6"],
    "the last of 2 steps": ["data.lead_hours=12", "data.rollout_hours=6"],
    "the last of 4 steps": ["data.lead_hours=24", "data.rollout_hours=6"],
    "2 steps trained through": ["data.lead_hours=12", "data.rollout_hours=6", "data.rollout_steps=2"],
    "4 steps trained through": ["data.lead_hours=24", "data.rollout_hours=6", "data.rollout_steps=4"],
}
LAYOUT = ["layout.tp=1", "layout.dp_shard=1", "layout.recompute=none", "layout.global_batch=8", "layout.microbatch=4"]
SPLITS = (
    'data.splits={train: {first: "step 0", last: "step 39"}, validation: {first: "step 45", last: "step 49"}, '
    'test: {first: "step 55", last: "step 59"}}'
)
TINY = ["model.n_layers=2", "model.d_model=64", "model.n_heads=4", "model.d_ff=128", "model.n_lat=16", "model.n_lon=32"]


def main() -> None:
    """Run all cases and write what was measured and planned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cluster", default="h200-x4")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    words = [*LAYOUT, SPLITS, "data.gap_hours=24"]
    if asked.tiny:
        words += [*TINY, "training.compile=false", "cluster.device=cpu"]
    content: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {one: metadata.version(one) for one in ("torch", "numpy")},
        "cases": {},
    }
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        fields = Path(name) / "fields.nc"
        write_fields(fields, words)
        for case, changes in CASES.items():
            command = [sys.executable, "-m", "phalanx", "bench", str(RUN_FILE), "--nproc", "1", "--json"]
            command += ["--cluster", asked.cluster, *words, f'data.sources=["{fields}"]', *changes]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            content["cases"][case] = json.loads(done.stdout) if done.returncode == 0 else done.stderr[-2000:]
            # Whatever comes later, this case is known.
            asked.out.write_text(json.dumps(content, indent=1) + "\n")
            print(case, "done" if done.returncode == 0 else done.stderr[-2000:], flush=True)


def write_fields(path: Path, words: list[str]) -> None:
    """Write random fields of all variables of the run file, on its grid."""
    run = load_run(RUN_FILE, words)
    assert isinstance(run, WeatherRun)
    generator, rows, columns = np.random.default_rng(0), run.model.n_lat, run.model.n_lon
    shape = (FRAMES, rows, columns)
    variables = {
        name: (("time", "latitude", "longitude"), generator.standard_normal(shape, dtype=np.float32))
        for name in run.data.inputs
    }
    spacing = 180.0 / rows
    coordinates = {
        "time": np.datetime64("2000-01-01", "ns") + np.arange(FRAMES) * np.timedelta64(STEP_HOURS, "h"),
        "latitude": -90.0 + spacing * (np.arange(rows) + 0.5),
        "longitude": np.arange(columns) * 360.0 / columns,
    }
    xarray.Dataset(variables, coordinates).to_netcdf(path)


if __name__ == "__main__":
    main()
