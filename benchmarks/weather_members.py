"""A forecaster that goes on for the almost fair CRPS beside one that goes on for the squared error: are members calibrated?

    python benchmarks/weather_members.py --out benchmarks/results/weather/members.json [--work FOLDER] [--steps N]

Both begin with the weights of a small network that learnt the squared error on 300 days of the sample weather (`phalanx data
sample weather`) for half as many steps, and take as many steps of as many samples; the first gets noise in its norms. On the
test split, which neither has seen, the first gives eight members from every start. A single forecast has no spread, and its
CRPS is its mean absolute error.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).parents[1]
CHANGES = {
    "geopotential_500": 0.33,
    "temperature_650": 0.32,
    "u_component_of_wind_500": 0.91,
    "v_component_of_wind_500": 1.3,
}
"""Variables, with the standard deviation of their change over 72 h in units of their own."""
TRAINED, SCORED = 4, 8
"""Members in training and on the test split."""
HOURS = 48


def main() -> None:
    """Train both and write their scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument(
        "--work", type=Path, help="folder for data and runs, kept; data that are there are not made again"
    )
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = compare(asked.work or Path(folder), asked.steps)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("crps", "mse")}, indent=1))


def compare(root: Path, steps: int) -> dict[str, Any]:
    """Return what was run and the scores of both."""
    if not (root / "weather").exists():
        phalanx("data", "sample", "weather", "--out", root / "weather")
    before = root / f"before-{steps // 2}"
    if not before.exists():
        train(before, run_file(root, "mse", steps // 2))
    begin = {"init_from": str((before / "run").resolve())}
    runs = {"crps": {**begin, "transfer": {"new": ["blocks.*.noise.weight"]}}, "mse": begin}
    found = {loss: train_and_score(root, loss, steps, training) for loss, training in runs.items()}
    return {
        "command": shlex.join(["python", "benchmarks/weather_members.py", *sys.argv[1:]]),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip(),
        "torch": metadata.version("torch"),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
        "steps": steps,
        **{loss: {**summarise(scores), "cpu_seconds": seconds} for loss, (scores, seconds) in found.items()},
        "scores": {loss: scores for loss, (scores, _) in found.items()},
    }


def train(folder: Path, fields: dict[str, Any]) -> None:
    """Train a run of these sections in a new folder."""
    folder.mkdir()
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(fields))
    phalanx("train", path, "--run-dir", folder / "run")


def train_and_score(root: Path, loss: str, steps: int, training: dict[str, Any]) -> tuple[list[dict[str, Any]], float]:
    """Train a run of this loss; return its scores on the test split, and the CPU time of both in seconds.

    training: fields of that section, with the weights that it begins with.
    """
    folder, fields = root / f"{loss}-{steps}", run_file(root, loss, steps)
    fields["training"] |= training
    before = os.times()
    train(folder, fields)
    members = ["--members", SCORED] if loss == "crps" else []
    said = phalanx("forecast", folder / "run", "--hours", HOURS, "--device", "cpu", "--json", *members)
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return json.loads(said)["scores"], round(seconds, 1)


def run_file(root: Path, loss: str, steps: int) -> dict[str, Any]:
    """Return the sections of a run."""
    ensemble = {"members": TRAINED, "noise_channels": 8} if loss == "crps" else {}
    # Every variable counts alike, in the loss's own power of the error.
    power = 1 if loss == "crps" else 2
    return {
        "model": {
            "family": "weather",
            "n_layers": 3,
            "d_model": 64,
            "n_heads": 4,
            "d_ff": 128,
            "n_lat": 32,
            "n_lon": 64,
            "patch_size": 4,
            "prediction": "change",
            "variables": [*CHANGES, "orography"],
            "outputs": list(CHANGES),
            "change_scales": list(CHANGES.values()),
            "loss": loss,
            "loss_weights": [change**-power for change in CHANGES.values()],
            **ensemble,
        },
        "data": {
            "sources": [str((root / "weather" / "weather.nc").resolve())],
            "inputs": list(CHANGES),
            "static": ["orography"],
            "lead_hours": [24, HOURS],
            "splits": {
                "train": {"first": "step 0", "last": "step 459"},
                "validation": {"first": "step 466", "last": "step 529"},
                "test": {"first": "step 536", "last": "step 599"},
            },
            # The sample has no seasons.
            "climatology_days": 183,
        },
        "layout": {"global_batch": 8, "microbatch": 8, "precision": "fp32"},
        "optimizer": {"lr": 2e-3, "weight_decay": 0.1, "warmup_steps": steps // 10, "schedule": "cosine"},
        "training": {"steps": steps, "log_every": 50, "tensorboard": False},
        "evaluation": {"samples": 60},
    }


def summarise(scores: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means over variables by lead time: RMSE and CRPS as shares of persistence's RMSE, spread over error, ranks."""
    found: dict[str, Any] = {}
    for lead in sorted({row["lead_hours"] for row in scores}):
        rows = [row for row in scores if row["lead_hours"] == lead]
        members = [row["ensemble"] for row in rows if row["ensemble"] is not None]
        crps = [row["mae"] for row in rows] if not members else [one["fair_crps"] for one in members]
        persistence = np.array([row["persistence_rmse"] for row in rows])
        found[f"{lead} h"] = {
            "rmse": float(np.mean([row["rmse"] for row in rows] / persistence)),
            "crps": float(np.mean(crps / persistence)),
            "spread_skill": [one["spread_skill"] for one in members] or [0.0] * len(rows),
            "ranks": np.mean([one["ranks"] for one in members], axis=0).tolist() if members else None,
        }
    return found


def phalanx(*words: object) -> str:
    """Run a command of phalanx to its end; return what it wrote on stdout."""
    return subprocess.run(
        [sys.executable, "-m", "phalanx", *map(str, words)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


if __name__ == "__main__":
    main()
