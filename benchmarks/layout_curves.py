"""One run of 2,000 steps in four layouts of two CPU ranks beside one rank: loss curves that lie on top of each other.

    phalanx data prepare python-stdlib --out data/python-stdlib --vocab-size 2048 --validation-fraction 0.02
    python benchmarks/layout_curves.py --data data/python-stdlib --out benchmarks/results/training_curves/layouts.json

Trains a small decoder in float32 on one rank and on two, by shards, tensor, pipeline and context parallelism. All
compute the same numbers but for the order in which they are added up, and training makes such differences grow. How much
is shown by one rank that computes the batch in micro-batches of other sizes: the same run but for rounding. The result
holds every loss; its summary compares the layouts' distance from one rank with that of the micro-batches', in windows of
steps. Two figures stand beside it. Curves that the file holds already, of the same commit, are not trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from curves import Curve, describe_benchmark, draw_curves, read_lines, smooth, write_result

ONE = "one rank"
ROUNDED = {"micro-batches of 4": ("microbatch=4",), "micro-batches of 2": ("microbatch=2",)}
"""One rank whose sums are rounded otherwise."""
LAYOUTS = {
    "pp=2": ("pp=2", "dp_shard=1", "microbatch=2"),
    "cp=2": ("cp=2", "dp_shard=1"),
    "dp_shard=2": ("dp_shard=2", "microbatch=4"),
    "tp=2": ("tp=2", "dp_shard=1"),
}
SMOOTHED = 25
WINDOWS = 8


def main() -> None:
    """Train all and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the machine")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    result: dict[str, Any] = {**describe_benchmark(), "loss": {}}
    if asked.out.exists():
        held = json.loads(asked.out.read_text())
        result["loss"] = held["loss"] if held["commit"] == result["commit"] else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write_run_file(folder / "run.yaml", asked)
        with ThreadPoolExecutor(asked.at_once) as pool:
            waiting = {
                title: pool.submit(train, file, folder / title.replace(" ", "-"), 2 if title in LAYOUTS else 1, words)
                for title, words in {ONE: (), **LAYOUTS, **ROUNDED}.items()
                if title not in result["loss"]
            }
            for title, curve in waiting.items():
                result["loss"][title] = curve.result()
                print(f"{title}: {result['loss'][title][-1]:.7f}", flush=True)
                write_result(asked.out, result)
    result["summary"] = summarise(result["loss"])
    write_result(asked.out, result)
    draw(result["loss"], asked.out)
    print(json.dumps(result["summary"], indent=1))


def write_run_file(file: Path, asked: argparse.Namespace) -> Path:
    """Write the run file that all share."""
    run = {
        "model": {
            "n_layers": 2,
            "d_model": 64,
            "n_heads": 4,
            "d_ff": 128,
            "vocab_size": asked.vocab_size,
            "max_positions": 64,
        },
        "data": {"sources": [str(asked.data.resolve())], "sequence_length": 64, "verify": False},
        "layout": {"global_batch": 8, "microbatch": 8, "precision": "fp32"},
        "optimizer": {"lr": 1.0e-3, "warmup_steps": max(1, asked.steps // 20), "schedule": "cosine"},
        "training": {"steps": asked.steps, "tensorboard": False, "log_every": asked.steps},
        "checkpoint": {"last": False},
        "evaluation": {"samples": 8},
        "cluster": {"device": "cpu"},
    }
    file.write_text(yaml.safe_dump(run))
    return file


def train(file: Path, folder: Path, ranks: int, words: tuple[str, ...]) -> list[float]:
    """Train in one layout and return the loss of every step."""
    command = [sys.executable, "-m", "phalanx", "train", str(file), "--run-dir", str(folder), *words]
    command += ["--nproc", str(ranks)] if ranks > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-3000:]}")
    # Nine digits tell float32 numbers apart.
    return [float(f"{row['loss']:.9g}") for row in read_lines(folder / "metrics.jsonl")]


def distances(loss: dict[str, list[float]]) -> dict[str, np.ndarray]:
    """Return how far each curve is from that of one rank at every step."""
    return {name: np.abs(np.array(curve) - np.array(loss[ONE])) for name, curve in loss.items() if name != ONE}


def summarise(loss: dict[str, list[float]]) -> dict[str, Any]:
    """Return root mean squares of the distances in windows of steps, and the largest of each curve."""
    apart = distances(loss)
    steps = len(loss[ONE])
    edges = np.linspace(0, steps, WINDOWS + 1).astype(int)
    windows = {
        name: [float(np.sqrt((part**2).mean())) for part in np.split(values, edges[1:-1])]
        for name, values in apart.items()
    }
    rounded = np.array([windows[name] for name in ROUNDED]).max(axis=0)
    return {
        "last_step_of_window": edges[1:].tolist(),
        "rms": windows,
        "largest": {name: float(values.max()) for name, values in apart.items()},
        "of_first_10_steps": {name: float(values[:10].max()) for name, values in apart.items()},
        "largest_rms_over_that_of_rounding": {
            name: float((np.array(windows[name]) / rounded).max()) for name in LAYOUTS if name in windows
        },
    }


def draw(loss: dict[str, list[float]], out: Path) -> None:
    """Write two figures beside the result: the curves, and how far each is from that of one rank."""
    steps = list(range(1, len(loss[ONE]) + 1))
    # A result that was cut off has some of them.
    shown = [name for name in (ONE, *LAYOUTS) if name in loss]
    curves = [Curve(name, steps, smooth(loss[name], SMOOTHED), number) for number, name in enumerate(shown)]
    words = f"Loss in {len(shown)} layouts, means of {SMOOTHED} steps"
    out.with_suffix(".svg").write_text(draw_curves(curves, words, "step"))
    apart = distances(loss)
    rows = [
        Curve(
            "one rank, other micro-batches" if name in ROUNDED else name,
            steps,
            np.maximum(smooth(apart[name].tolist(), SMOOTHED), 1e-9).tolist(),
            0 if name in ROUNDED else 1 + list(LAYOUTS).index(name),
            dashed=name in ROUNDED,
        )
        for name in (*ROUNDED, *LAYOUTS)
        if name in apart
    ]
    words = f"Distance of the loss from that of one rank, means of {SMOOTHED} steps"
    figure = draw_curves(rows, words, "step", logarithmic=(False, True))
    out.with_name(f"{out.stem}_distance.svg").write_text(figure)


if __name__ == "__main__":
    main()
