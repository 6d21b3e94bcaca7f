"""Loss of a decoder trained on text in 8-bit recipes beside bfloat16, whose seeds are the noise.

    phalanx data prepare TEXT... --out data/text --vocab-size 8192 --validation-fraction 0.01
    python benchmarks/low_precision_loss.py --data data/text --out benchmarks/results/training_curves/fp8.json

Trains a size of `text_training.py` in bfloat16 with seeds 0, 1 and 2 and in each recipe with seed 0, or those of
--recipe-seeds: the same initial weights and samples as bfloat16 of that seed. The summary compares the loss of each step,
and the last tenth's mean, with the noise: the standard deviation of bfloat16 over the seeds. A figure stands beside it.
--size tiny is for a CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from curves import Curve, Job, collect_runs, draw_curves, last_held_out, smooth
from text_training import SIZES, write_run_file

SEEDS = (0, 1, 2)
SMOOTHED = 25
"""Steps whose mean the figure shows."""


def main() -> None:
    """Train all runs and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--size", default="125m", choices=SIZES)
    parser.add_argument("--steps", type=float, default=1.0, help="factor of the number of steps")
    parser.add_argument("--recipes", nargs="*", default=["fp8-tensor", "fp8-row"])
    parser.add_argument("--recipe-seeds", type=int, nargs="+", choices=SEEDS, default=[0])
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write_run_file(folder / "run.yaml", asked.size, asked.data, asked.steps)
        recipes = [(recipe, seed) for seed in asked.recipe_seeds for recipe in asked.recipes]
        rows = [("bf16", 0), *recipes, *(("bf16", seed) for seed in SEEDS[1:])]
        jobs = [
            Job(
                f"{precision}, seed {seed}",
                file,
                (f"layout.precision={precision}", f"training.seed={seed}"),
                folder / f"{precision}-{seed}",
                {"precision": precision, "seed": seed},
            )
            for precision, seed in rows
        ]
        result = collect_runs(jobs, asked.at_once, asked.out, summarise)
    draw(result["runs"], asked.size, asked.out)
    print(json.dumps(result["summary"], indent=1))


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how far each recipe that has ended is from bfloat16, and the noise, once all of bfloat16's runs have."""
    ended = [row for row in runs if "failed" not in row]
    seeds = {row["seed"]: row for row in ended if row["precision"] == "bf16"}
    if len(seeds) < len(SEEDS):
        return {}
    noise = np.array([row["loss"] for row in seeds.values()]).std(axis=0, ddof=1)
    last = max(1, len(noise) // 10)
    found: dict[str, Any] = {
        "rms_noise": float(np.sqrt((noise**2).mean())),
        "last_tenth_noise": float(np.std([np.mean(row["loss"][-last:]) for row in seeds.values()], ddof=1)),
        "held_out_noise": float(np.std([last_held_out(row) for row in seeds.values()], ddof=1)),
    }
    for row in ended:
        if row["precision"] != "bf16":
            same = seeds[row["seed"]]
            apart = np.array(row["loss"]) - np.array(same["loss"])
            found[row["name"]] = {
                "rms_difference": float(np.sqrt((apart**2).mean())),
                "last_tenth_difference": float(apart[-last:].mean()),
                "held_out_difference": last_held_out(row) - last_held_out(same),
            }
    return found


def draw(runs: list[dict[str, Any]], size: str, out: Path) -> None:
    """Write the curves beside the result: recipes less bfloat16 of the same seed, bfloat16 less its first seed."""
    ended = {row["name"]: row for row in runs if "failed" not in row}
    first = ended["bf16, seed 0"]
    steps = range(1, len(first["loss"]) + 1)
    curves = []
    for number, (name, row) in enumerate(sorted((name, row) for name, row in ended.items() if row is not first)):
        other = first if row["precision"] == "bf16" else ended[f"bf16, seed {row['seed']}"]
        apart = np.array(row["loss"]) - np.array(other["loss"])
        curves.append(Curve(name, steps, smooth(apart.tolist(), SMOOTHED), number))
    words = (
        f"Loss less that of bf16 (seeds of bf16: less its seed 0), {size.upper()} parameters, means of {SMOOTHED} steps"
    )
    out.with_suffix(".svg").write_text(draw_curves(curves, words, "step"))


if __name__ == "__main__":
    main()
