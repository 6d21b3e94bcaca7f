"""Learning-rate transfer: the loss of decoders of several widths over learning rates, with muP and without it.

    phalanx data prepare TEXT... --out data/text --vocab-size 8192 --validation-fraction 0.01
    python benchmarks/width_transfer.py --data data/text --out benchmarks/results/optimizers/width_transfer.json

Trains a decoder of four layers of each width, 128 to 1,024, at each rate for some hundred steps, by AdamW in
bfloat16. muP has its base at the least width, where both parametrisations are the same model: it runs once. Under muP
the best rate should stay where it is (Yang et al., arXiv:2203.03466, figure 1). The result, written again after each
run, holds all curves; beside it, with the endings _mup.svg and _usual.svg, stand the held-out losses over rates.
--tiny tries everything out on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from curves import Curve, Job, collect_runs, draw_curves, last_held_out

WIDTHS = (1024, 512, 256, 128)
"""The longest runs first: those that run at once then end together."""
BASE = 128
RATES = tuple(2.0**-power for power in range(12, 4, -1))
SMOOTHED = 20


def main() -> None:
    """Train all widths at all rates and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = collect_runs(list_jobs(asked, Path(folder)), asked.at_once, asked.out, summarise)
    for name in ("mup", "usual"):
        asked.out.with_name(f"{asked.out.stem}_{name}.svg").write_text(draw(result["runs"], name))
    print(json.dumps(result["summary"], indent=1))


def list_jobs(asked: argparse.Namespace, folder: Path) -> list[Job]:
    """Return the runs of all widths, rates and parametrisations."""
    jobs = []
    for width in WIDTHS[2:] if asked.tiny else WIDTHS:
        for name in ("mup", "usual") if width != BASE else ("mup",):
            file = write_run_file(folder / f"{name}-{width}.yaml", width, name, asked)
            for rate in RATES[3:5] if asked.tiny else RATES:
                title = f"width {width}, {name}, rate 2^{math.log2(rate):.0f}"
                facts = {"width": width, "parametrisation": name, "lr": rate}
                where = folder / f"{name}-{width}-{math.log2(rate):.0f}"
                jobs.append(Job(title, file, (f"optimizer.lr={rate}",), where, facts))
    return jobs


def write_run_file(file: Path, width: int, name: str, asked: argparse.Namespace) -> Path:
    """Write the run file of a width."""
    samples = 2 if asked.tiny else 32
    run = {
        "model": {
            "n_layers": 4,
            "d_model": width,
            "n_heads": width // 64,
            "d_ff": 2 * width,
            "vocab_size": 8192,
            "max_positions": 256,
            "mup_base_width": BASE if name == "mup" else None,
            # Matrices begin with the variance 1 / width. muP takes that of its base and scales it by itself.
            "init_std": (BASE if name == "mup" else width) ** -0.5,
        },
        "data": {"sources": [str(asked.data.resolve())], "sequence_length": 256},
        "layout": {"global_batch": samples, "microbatch": samples, "precision": "bf16"},
        "optimizer": {"lr": RATES[0], "warmup_steps": max(1, asked.steps // 10), "schedule": "cosine"},
        # Runs as short as these would take most of their time to be compiled.
        "training": {"steps": asked.steps, "compile": False, "attention": "sdpa", "on_nonfinite": "skip"},
        "checkpoint": {"last": False},
        "evaluation": {"samples": 4 if asked.tiny else 512},
    }
    file.write_text(yaml.safe_dump(run))
    return file


def losses_by_rate(runs: list[dict[str, Any]], name: str) -> dict[int, dict[float, float]]:
    """Return held-out losses by width and rate. The base's runs belong to both parametrisations."""
    found: dict[int, dict[float, float]] = {}
    for row in runs:
        if "failed" not in row and (row["parametrisation"] == name or row["width"] == BASE):
            found.setdefault(row["width"], {})[row["lr"]] = last_held_out(row)
    return {width: dict(sorted(found[width].items())) for width in sorted(found)}


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the best rate of each width, and what each would lose at the best rate of the base."""
    found: dict[str, Any] = {"failed": [row["name"] for row in runs if "failed" in row]}
    for name in ("mup", "usual"):
        losses = losses_by_rate(runs, name)
        best = {width: min(by_rate, key=by_rate.__getitem__) for width, by_rate in losses.items()}
        found[name] = {
            str(width): {
                "best_rate_log2": math.log2(best[width]),
                "best_loss": by_rate[best[width]],
                "lost_at_the_rate_of_the_base": by_rate.get(best.get(BASE, 0.0), math.nan) - by_rate[best[width]],
            }
            for width, by_rate in losses.items()
        }
    return found


def draw(runs: list[dict[str, Any]], name: str) -> str:
    """Return losses over rates of each width as SVG."""
    losses = losses_by_rate(runs, name)
    best = min(min(by_rate.values()) for by_rate in losses.values())
    # Losses of runs that diverged would press all others together.
    kept = {w: {r: loss for r, loss in by_rate.items() if loss < best + 1.5} for w, by_rate in losses.items()}
    curves = [
        Curve(f"width {width}", np.log2(list(by_rate)).tolist(), list(by_rate.values()), number)
        for number, (width, by_rate) in enumerate(kept.items())
    ]
    words = {"mup": f"muP (base {BASE})", "usual": "Usual parametrisation"}[name]
    return draw_curves(
        curves, f"{words}: held-out loss over the learning rate", "learning rate", label=lambda power: f"2^{power:g}"
    )


if __name__ == "__main__":
    main()
