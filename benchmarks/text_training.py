"""Loss of two decoders trained on text by Phalanx, over three seeds, beside plain PyTorch and `transformers` on the
same.

    phalanx data prepare TEXT... --out data/text --vocab-size 8192 --validation-fraction 0.01
    python benchmarks/text_training.py --data data/text --tasks TASKS --out benchmarks/results/training_curves/text.json

Trains each size by `phalanx.train` with seeds 0, 1 and 2, which change initial weights and the order of samples, and by
`rivals/transformers_run.py` with the initial weights, samples and schedule of some of the seeds. TASKS is a folder of
in-context tasks in LLM Foundry's form, scored at the end. The result holds every curve; its summary compares the
difference from `transformers` at every step, the mean over the seeds that both trained, with the noise: the standard
deviation of ours over the seeds, pooled over the 51 steps around. The first of them trains by `transformers` a second
time, from weights that differ by a millionth: how far rounding alone drives two runs apart. Figures stand beside it.
--sizes tiny is for a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from curves import ROOT, Curve, Job, describe_benchmark, draw_curves, last_held_out, smooth, train_all, write_result
from phalanx.config.load import load_run
from phalanx.families.language.config import require_language
from phalanx.families.language.huggingface.export_folder import Export, write_folder
from phalanx.families.language.huggingface.find_architecture import architecture_for
from phalanx.families.language.huggingface.folder_files import SpecialTokens, TokenizerFiles
from phalanx.families.registry import bind
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import ONE_RANK
from phalanx.layout.resolve import resolve_layout

SEEDS = (0, 1, 2)
AROUND = 25
"""Steps before and behind one over which the noise is pooled."""
SMOOTHED = 50
ROUNDING = 1e-6
"""Relative change of the initial weights of the rival's second run."""
DECODER = {"vocab_size": 8192, "max_positions": 512, "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope"}
SIZES: dict[str, dict[str, Any]] = {
    "125m": {
        "model": {**DECODER, "n_layers": 12, "d_model": 768, "n_heads": 12, "d_ff": 3072, "tied_head": False},
        "optimizer": {"lr": 1.0e-3, "warmup_steps": 50},
        "training": {"steps": 500},
    },
    "30m": {
        "model": {**DECODER, "n_layers": 8, "d_model": 512, "n_heads": 8, "d_ff": 1408, "tied_head": True},
        "optimizer": {"lr": 1.0e-3, "warmup_steps": 200},
        "training": {"steps": 1000},
    },
    "tiny": {
        "model": {**DECODER, "n_layers": 2, "d_model": 64, "n_heads": 2, "d_ff": 128, "tied_head": True},
        "optimizer": {"lr": 1.0e-3, "warmup_steps": 60},
        "training": {"steps": 200},
    },
}
"""Sections of the run file of each size, the longest first."""


def main() -> None:
    """Train all sizes and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--sizes", nargs="*", default=["125m", "30m"], choices=SIZES)
    parser.add_argument("--steps", type=float, default=1.0, help="factor of all numbers of steps")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--rival-seeds", type=int, nargs="+", default=[0], choices=SEEDS)
    parser.add_argument("--rivals-at-once", type=int, default=1)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    sizes = asked.sizes
    result: dict[str, Any] = {**describe_benchmark(), "runs": []}
    lock = threading.Lock()

    def take(row: dict[str, Any]) -> None:
        with lock:
            result["runs"].append(row)
            result["summary"] = {size: summarise(result["runs"], size) for size in sizes}
            write_result(asked.out, result)

    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(asked.rivals_at_once) as beside:
        folder = Path(name)
        files = {
            size: write_run_file(
                folder / f"{size}.yaml", size, asked.data, asked.steps, asked.tasks, precision=asked.precision
            )
            for size in sizes
        }
        rivals = [
            beside.submit(lambda row=row: take(train_rival(files[row[0]], *row, folder)))
            for size in sizes
            for row in [*((size, seed, 0.0) for seed in asked.rival_seeds), (size, asked.rival_seeds[0], ROUNDING)]
        ]
        jobs = [
            Job(
                f"{size}, seed {seed}",
                files[size],
                (f"training.seed={seed}",),
                folder / f"{size}-{seed}",
                {"program": "phalanx", "size": size, "seed": seed},
            )
            for size in sizes
            for seed in SEEDS
        ]
        train_all(jobs, asked.at_once, take)
        for rival in rivals:
            rival.result()
    for size in sizes:
        draw(result["runs"], size, asked.out)
    print(json.dumps(result["summary"], indent=1))


def write_run_file(
    file: Path, size: str, data: Path, factor: float, tasks: Path | None = None, *, precision: str = "bf16"
) -> Path:
    """Write the run file of a size. factor: of its numbers of steps. tasks: folder of in-context tasks, scored last."""
    chosen = SIZES[size]
    steps = max(2, round(chosen["training"]["steps"] * factor))
    warm_up = max(1, round(chosen["optimizer"]["warmup_steps"] * factor))
    samples = 4 if size == "tiny" else 64
    files = [] if tasks is None else sorted(str(path.resolve()) for path in tasks.glob("*.jsonl"))
    questions = 2 if size == "tiny" else 256
    run = {
        "model": {"family": "language", **chosen["model"]},
        "data": {"sources": [str(data.resolve())], "sequence_length": 512},
        "layout": {"global_batch": samples, "microbatch": samples, "precision": precision},
        "optimizer": {**chosen["optimizer"], "warmup_steps": warm_up, "schedule": "cosine"},
        "training": {"steps": steps},
        "checkpoint": {"last": False},
        "evaluation": {
            "samples": 4 if size == "tiny" else 512,
            **({"tasks": {"files": files, "shots": 0, "questions": questions}} if files else {}),
        },
    }
    file.write_text(yaml.safe_dump(run))
    return file


def write_initial_weights(file: Path, seed: int, folder: Path) -> None:
    """Write the weights that the run begins with by this seed as a Hugging Face folder."""
    run = require_language(load_run(file, [f"training.seed={seed}"]), "this script")
    bound = bind(run, LayoutModel)
    applied = apply_layout(bound, resolve_layout(bound, 1), ONE_RANK, torch.device("cpu"), AttentionChoice("sdpa"))
    parameters = applied.parameters
    no_tokenizer = TokenizerFiles({}, SpecialTokens())
    write_folder(
        folder,
        Export(
            run.model,
            architecture_for(run.model, None),
            lambda name, rows: parameters[name].detach()[rows],
            torch.float32,
            no_tokenizer,
        ),
    )


def train_rival(file: Path, size: str, seed: int, rounding: float, folder: Path) -> dict[str, Any]:
    """Train the size by `transformers` in a process of its own and return its row."""
    program = "transformers, rounded" if rounding else "transformers"
    name = f"rival-{size}-{seed}-{rounding}"
    out, script = folder / f"{name}.json", ROOT / "benchmarks" / "rivals" / "transformers_run.py"
    write_initial_weights(file, seed, folder / name)
    command = [sys.executable, str(script), "--weights", str(folder / name), "--out", str(out)]
    command += ["--rounding", str(rounding)]
    command += [str(file), f"training.seed={seed}"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    print(done.stdout, end="", flush=True)
    facts = {"name": f"{size}, seed {seed}, {program}", "program": program, "size": size, "seed": seed}
    if done.returncode:
        return {**facts, "failed": done.stderr[-2000:]}
    return {**json.loads(out.read_text()), **facts}


def summarise(runs: list[dict[str, Any]], size: str) -> dict[str, Any]:
    """Return how far the curves of a size lie apart, its held-out losses and its scores, of what has ended by now."""
    ours, rivals = curves_of(runs, size, "phalanx"), curves_of(runs, size, "transformers")
    losses = {
        name: {seed: last_held_out(row) for seed, row in rows.items()}
        for name, rows in (("phalanx", ours), ("transformers", rivals))
    }
    found: dict[str, Any] = {"held_out": losses}
    found["perplexity"] = {seed: math.exp(loss) for seed, loss in losses["phalanx"].items()}
    found["tasks"] = {seed: {task["task"]: task["accuracy"] for task in row["tasks"]} for seed, row in ours.items()}
    for seed, row in curves_of(runs, size, "transformers, rounded").items():
        if seed in rivals:
            apart = np.array(row["loss"]) - np.array(rivals[seed]["loss"])
            found["rounding_of_transformers"] = {
                "rms_difference": float(np.sqrt((apart**2).mean())),
                "held_out_difference": last_held_out(row) - last_held_out(rivals[seed]),
            }
    both = sorted(ours.keys() & rivals.keys())
    if not both or len(ours) < len(SEEDS):
        return found
    for name, steps in (("each_step", 1), ("smoothed", SMOOTHED)):
        difference, noise = compare(ours, rivals, steps)
        ratio = np.abs(difference) / noise
        found[name] = {
            "largest_difference_over_noise": float(ratio.max()),
            "steps_under_the_noise": float((ratio < 1).mean()),
            "rms_difference": float(np.sqrt((difference**2).mean())),
            "rms_noise": float(np.sqrt((noise**2).mean())),
        }
    found["held_out_difference"] = float(np.mean([losses["phalanx"][s] - losses["transformers"][s] for s in both]))
    found["held_out_noise"] = float(np.std(list(losses["phalanx"].values()), ddof=1))
    return found


def curves_of(runs: list[dict[str, Any]], size: str, program: str) -> dict[int, dict[str, Any]]:
    """Return the runs of a size by a program that have ended well, by seed."""
    rows = [row for row in runs if (row["size"], row["program"]) == (size, program) and "failed" not in row]
    return {row["seed"]: row for row in sorted(rows, key=lambda row: row["seed"])}


def compare(
    ours: dict[int, dict[str, Any]], rivals: dict[int, dict[str, Any]], steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean difference from the rival and the noise at each step, of curves smoothed over so many steps."""
    curves = {seed: np.array(smooth(row["loss"], steps)) for seed, row in ours.items()}
    apart = [curves[seed] - np.array(smooth(row["loss"], steps)) for seed, row in rivals.items() if seed in curves]
    variance = np.array(list(curves.values())).var(axis=0, ddof=1)
    pooled = [variance[max(0, step - AROUND) : step + AROUND + 1].mean() for step in range(len(variance))]
    return np.mean(apart, axis=0), np.sqrt(pooled)


def draw(runs: list[dict[str, Any]], size: str, out: Path) -> None:
    """Write the figures of a size beside the result: the curves, and the difference beside the noise."""
    ours, rivals = curves_of(runs, size, "phalanx"), curves_of(runs, size, "transformers")
    if not ours.keys() & rivals.keys() or len(ours) < len(SEEDS):
        return
    steps = range(1, len(ours[0]["loss"]) + 1)
    first = min(SMOOTHED // 2, len(steps) // 2)
    shown = [
        Curve(name, steps[first:], smooth(row["loss"], SMOOTHED)[first:], number)
        for number, (name, rows) in enumerate((("Phalanx", ours), ("transformers", rivals)))
        for row in rows.values()
    ]
    words = f"Training loss of {size.upper()} parameters by seed, means of {SMOOTHED} steps"
    out.with_name(f"{out.stem}_{size}.svg").write_text(draw_curves(shown, words, "step"))
    difference, noise = compare(ours, rivals, 1)
    # A difference of exactly nothing has no place on a logarithmic scale.
    apart = np.maximum(np.abs(difference), 1e-7)
    pair = [Curve("noise over seeds", steps, noise.tolist(), 0), Curve("difference", steps, apart.tolist(), 1)]
    words = f"Loss of Phalanx less that of transformers, {size.upper()} parameters, every step"
    svg = draw_curves(pair, words, "step", logarithmic=(False, True))
    out.with_name(f"{out.stem}_{size}_difference.svg").write_text(svg)


if __name__ == "__main__":
    main()
