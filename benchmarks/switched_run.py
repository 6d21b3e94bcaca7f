"""One run that moves between CPU ranks in three layouts and GPUs in bfloat16, and back, beside runs that stay.

    phalanx data prepare TEXT... --out data/text --vocab-size 8192 --validation-fraction 0.01
    python benchmarks/switched_run.py --data data/text --out benchmarks/results/training_curves/switched.json

Every `--every` steps `phalanx train RUN --until STEP` ends with a checkpoint, and the next one resumes it elsewhere:
on a GPU in bfloat16, one CPU rank in float32, two of tensor parallelism, four of two pipeline stages and two shards,
in turn; with `--devices 2` also on two GPUs, of tensor parallelism and of two shards. Beside it run, without a pause,
the same run on the GPU and on one CPU rank, and the GPU with two other seeds, which are the noise. The result, with
every curve and two figures beside it, is written after each part; its summary says how far the run that moves is from
the one that stays, all over and right behind the switches. Without a GPU, --device cpu takes CPU ranks in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from curves import Curve, describe_benchmark, draw_curves, last_held_out, read_run, smooth, write_result

BEHIND = 5
"""Steps behind a switch that are looked at by themselves."""
SMOOTHED = 10


@dataclass(frozen=True)
class Place:
    """Where and how a part of the run computes."""

    name: str
    ranks: int
    words: tuple[str, ...]
    threads: int = 1


def list_places(device: str, devices: int, threads: int) -> tuple[Place, ...]:
    """Return the places in the order in which the run goes through them, a GPU first and before every CPU layout."""
    on_cpu = ("cluster.device=cpu", "layout.precision=fp32")
    on_gpu = (f"cluster.device={device}", "layout.precision=bf16")
    name = "CPU rank" if device == "cpu" else "GPU"
    gpu = Place(f"1 {name}, bf16", 1, (*on_gpu, "dp_shard=1"), threads)
    one = Place("1 CPU rank", 1, (*on_cpu, "dp_shard=1"), threads)
    two = Place("2 CPU ranks, tp=2", 2, (*on_cpu, "tp=2", "dp_shard=1"), max(1, threads // 2))
    four = Place("4 CPU ranks, pp=2 x dp_shard=2", 4, (*on_cpu, "pp=2", "dp_shard=2"), max(1, threads // 4))
    if devices == 1:
        return gpu, one, gpu, two, gpu, four
    split = Place(f"2 {name}s, tp=2, bf16", 2, (*on_gpu, "tp=2", "dp_shard=1"), max(1, threads // 2))
    shards = Place(f"2 {name}s, dp_shard=2, bf16", 2, (*on_gpu, "dp_shard=2"), max(1, threads // 2))
    return gpu, one, split, two, shards, four


def main() -> None:
    """Train all runs and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--every", type=int, default=25, help="steps between switches")
    parser.add_argument(
        "--parts", type=int, default=13, help="6 visit all places once, the next one is the first again"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--devices", type=int, default=1, choices=(1, 2))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=4, help="of all CPU ranks together")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    if asked.tiny:
        asked.every, asked.parts = 2, 7
    places = list_places(asked.device, asked.devices, asked.threads)
    gpu, cpu = places[0], places[1]
    last = asked.every * asked.parts
    stays = {"stays": (gpu, 0), "stays on one CPU rank": (cpu, 0), "seed 1": (gpu, 1), "seed 2": (gpu, 2)}
    result: dict[str, Any] = {**describe_benchmark(), "every": asked.every, "parts": [], "runs": {}}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(len(stays)) as beside:
        folder = Path(name)
        file = write_run_file(folder / "run.yaml", last, asked)
        futures = {
            title: beside.submit(train_until, file, folder / title.replace(" ", "-"), place, last, seed)
            for title, (place, seed) in stays.items()
        }
        for part in range(asked.parts):
            place, until = places[part % len(places)], asked.every * (part + 1)
            command = train_until(file, folder / "moves", place, until, 0)
            result["parts"].append({"first_step": until - asked.every + 1, "place": place.name, "command": command})
            result["runs"]["moves"] = read_run(folder / "moves")
            print(f"step {until}: {place.name}", flush=True)
            write_parts(result, folder, futures, asked.out)
        wait(futures.values())
        write_parts(result, folder, futures, asked.out)
    print(json.dumps(result["summary"], indent=1))


def write_parts(result: dict[str, Any], folder: Path, stays: dict[str, Future[str]], out: Path) -> None:
    """Write the result as far as it has come; its summary and figures once all runs that stay have ended."""
    for title, future in stays.items():
        if future.done():
            # Raises what ended a run early.
            future.result()
            result["runs"][title] = read_run(folder / title.replace(" ", "-"))
    if result["runs"].keys() >= stays.keys():
        runs = trim_runs(result["runs"])
        result["summary"] = summarise(runs, result["every"])
        draw(runs, result["parts"], result["every"], out)
    write_result(out, result)


def trim_runs(runs: dict[str, Any]) -> dict[str, Any]:
    """Return the runs with the losses of the steps that the run which moves has done."""
    steps = len(runs["moves"]["loss"])
    return {name: {**run, "loss": run["loss"][:steps]} for name, run in runs.items()}


def write_run_file(file: Path, steps: int, asked: argparse.Namespace) -> Path:
    """Write the run file that all runs share."""
    run = {
        "model": {
            "n_layers": 4,
            "d_model": asked.width,
            "n_heads": 4,
            "d_ff": 2 * asked.width,
            "vocab_size": asked.vocab_size,
            "max_positions": 128,
        },
        "data": {"sources": [str(asked.data.resolve())], "sequence_length": 128, "verify": False},
        "layout": {"global_batch": 16, "microbatch": 4},
        "optimizer": {"lr": 2.0e-3, "warmup_steps": max(1, steps // 10), "schedule": "cosine"},
        "training": {"steps": steps, "compile": False, "attention": "sdpa", "tensorboard": False, "log_every": steps},
        "evaluation": {"samples": 8},
    }
    file.write_text(yaml.safe_dump(run))
    return file


def train_until(file: Path, folder: Path, place: Place, step: int, seed: int) -> str:
    """Train on to a step at a place, from the newest checkpoint in the folder, and return the command."""
    words = ["train", str(file), "--run-dir", str(folder), "--until", str(step), *place.words, f"training.seed={seed}"]
    ranks = ["--nproc", str(place.ranks)] if place.ranks > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": str(place.threads)}
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *words, *ranks], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{place.name}: exit {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return " ".join(["phalanx train RUN --run-dir DIR --until", str(step), *place.words, *ranks])


def summarise(runs: dict[str, Any], every: int) -> dict[str, Any]:
    """Return how far the run that moves, and the CPU's, are from the one that stays, and how far seeds are apart."""
    curves = {name: np.array(run["loss"]) for name, run in runs.items()}
    steps = np.arange(1, len(curves["stays"]) + 1)
    switched = (steps > every) & ((steps - 1) % every < BEHIND)
    noise = np.array([curves["stays"], curves["seed 1"], curves["seed 2"]]).std(axis=0, ddof=1)
    found: dict[str, Any] = {"rms_noise_over_seeds": root_mean_square(noise)}
    for name in ("moves", "stays on one CPU rank"):
        apart = curves[name] - curves["stays"]
        found[f"{name}, less stays"] = {
            "rms": root_mean_square(apart),
            "largest": float(np.abs(apart).max()),
            f"rms_of_{BEHIND}_steps_behind_switches": root_mean_square(apart[switched]),
            "rms_of_the_others": root_mean_square(apart[~switched]),
        }
        # A run that was cut off was held out elsewhere.
        if max(map(int, runs[name]["held_out"])) == max(map(int, runs["stays"]["held_out"])):
            found[f"{name}, less stays"]["held_out"] = last_held_out(runs[name]) - last_held_out(runs["stays"])
    held_out = [last_held_out(runs[name]) for name in ("stays", "seed 1", "seed 2")]
    found["held_out_noise_over_seeds"] = float(np.std(held_out, ddof=1))
    return found


def root_mean_square(values: np.ndarray) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.square(values).mean()))


def draw(runs: dict[str, Any], parts: list[dict[str, Any]], every: int, out: Path) -> None:
    """Write two figures beside the result: the curves, the moving one in a colour a place, and the differences."""
    steps = list(range(1, len(runs["stays"]["loss"]) + 1))
    names = list(dict.fromkeys(part["place"] for part in parts))
    curves = [Curve("stays in bf16", steps, runs["stays"]["loss"], 6)]
    for part in parts:
        # From the step before: lines of neighbouring parts meet.
        first = max(0, part["first_step"] - 2)
        until = part["first_step"] + every - 1
        colour = names.index(part["place"])
        curves.append(Curve(part["place"], steps[first:until], runs["moves"]["loss"][first:until], colour))
    out.with_suffix(".svg").write_text(draw_curves(curves, f"A run that moves every {every} steps", "step"))
    apart = {
        name: np.abs(np.array(runs[name]["loss"]) - np.array(runs["stays"]["loss"])) for name in runs if name != "stays"
    }
    noise = np.sqrt((apart["seed 1"] ** 2 + apart["seed 2"] ** 2) / 2)
    rows = {"other seeds": noise, "moves": apart["moves"], "stays on one CPU rank": apart["stays on one CPU rank"]}
    shown = [
        Curve(name, steps, np.maximum(smooth(values.tolist(), SMOOTHED), 1e-7).tolist(), number)
        for number, (name, values) in enumerate(rows.items())
    ]
    words = f"Difference of the loss from the run that stays in bf16, means of {SMOOTHED} steps"
    figure = draw_curves(shown, words, "step", logarithmic=(False, True))
    out.with_name(f"{out.stem}_difference.svg").write_text(figure)


if __name__ == "__main__":
    main()
