"""Loss against tokens of AdamW and Muon, each at several learning rates: how many tokens Muon needs for AdamW's loss.

    phalanx data prepare python-stdlib --out data/python-stdlib --vocab-size 2048 --validation-fraction 0.02
    python benchmarks/optimizers_compared.py --out benchmarks/results/optimizers/NAME.json
    python benchmarks/optimizers_compared.py --out ... training.steps=600 --rates 'adamw=0.002,0.004;muon=0.002,0.004'

Trains examples/quickstart.yaml (with the fields given) once for each optimizer and rate, in this process, all from the same
weights on the same samples. The result, written again after each run, holds all curves, the best rate of each by held-out
loss at the end, and the tokens at which Muon's smoothed training loss comes under AdamW's last one. Beside it, with the
ending .svg, stand the curves of the best runs. Rates that are best at an end of their list say that the list is too short.
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

import phalanx
from phalanx.config.families import sizes_of
from phalanx.report.drawing import Plot, fit_scale

ROOT = Path(__file__).parents[1]
SMOOTHED = 10
"""Steps over which a training loss is averaged before curves are compared: a batch alone is noise."""
COLOURS = {"adamw": "#c44", "muon": "#06c"}


def main() -> None:
    """Train what is asked for and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="section.field=value for the run file")
    parser.add_argument("--run", type=Path, default=ROOT / "examples" / "quickstart.yaml")
    parser.add_argument("--rates", default="adamw=0.003,0.006,0.012;muon=0.003,0.006,0.012")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    result: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/optimizers_compared.py", *sys.argv[1:]]),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip(),
        "torch": metadata.version("torch"),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
        "runs": [],
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for text in asked.rates.split(";"):
        name, _, rates = text.partition("=")
        for rate in rates.split(","):
            result["runs"].append(train(asked.run, name, float(rate), asked.words))
            result["summary"] = summarise(result["runs"])
            asked.out.write_text(json.dumps(result, indent=1) + "\n")
    asked.out.with_suffix(".svg").write_text(draw(result["runs"]))
    print(json.dumps(result["summary"], indent=1))


def train(file: Path, name: str, rate: float, words: list[str]) -> dict[str, Any]:
    """Return the curve of one run."""
    run = phalanx.load_run(
        file, [*words, f"optimizer.name={name}", f"optimizer.lr={rate}", "training.tensorboard=false"]
    )
    with tempfile.TemporaryDirectory() as folder:
        phalanx.train(run, folder)
        steps = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        events = [json.loads(line) for line in (Path(folder) / "events.jsonl").read_text().splitlines()]
    held_out = [event for event in events if event.get("kind", event.get("event")) == "evaluation"]
    return {
        "optimizer": name,
        "lr": rate,
        "parameters": sizes_of(run.model).parameter_count(run.model),
        "tokens_per_step": steps[0]["tokens"] // steps[0]["step"] if "tokens" in steps[0] else batch_tokens(run),
        "loss": [round(step["loss"], 5) for step in steps],
        "held_out": held_out[-1]["loss"],
    }


def batch_tokens(run: Any) -> int:
    """Return the tokens of a step, as the run file states them."""
    amount, _, unit = str(run.layout.global_batch).partition(" ")
    return int(amount) * (1 if unit == "tokens" else run.data.sequence_length)


def smooth(loss: list[float]) -> list[float]:
    """Return the mean of each loss with those of the steps before it."""
    return [sum(part) / len(part) for end in range(1, len(loss) + 1) if (part := loss[max(0, end - SMOOTHED) : end])]


def best_runs(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the run of each optimizer with the least held-out loss."""
    names = dict.fromkeys(run["optimizer"] for run in runs)
    return {name: min((r for r in runs if r["optimizer"] == name), key=lambda r: r["held_out"]) for name in names}


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the best rate and last loss of each optimizer, and the share of AdamW's tokens that Muon needs for its loss."""
    best = best_runs(runs)
    found: dict[str, Any] = {
        name: {"lr": run["lr"], "held_out": run["held_out"], "last": round(smooth(run["loss"])[-1], 4)}
        for name, run in best.items()
    }
    found["parameters"] = runs[0]["parameters"]
    found["tokens"] = len(runs[0]["loss"]) * runs[0]["tokens_per_step"]
    if {"adamw", "muon"} <= best.keys():
        wanted = smooth(best["adamw"]["loss"])[-1]
        reached = [step for step, loss in enumerate(smooth(best["muon"]["loss"]), 1) if loss <= wanted]
        found["muon_reaches_adamw_after"] = reached[0] / len(best["adamw"]["loss"]) if reached else None
    return found


def draw(runs: list[dict[str, Any]]) -> str:
    """Return the best curves of each optimizer as SVG."""
    best = best_runs(runs)
    curves = {name: smooth(run["loss"]) for name, run in best.items()}
    tokens = [step * runs[0]["tokens_per_step"] / 1e6 for step in range(1, len(runs[0]["loss"]) + 1)]
    values = [loss for curve in curves.values() for loss in curve[SMOOTHED:]]
    plot = Plot(fit_scale(np.asarray(tokens)), fit_scale(np.asarray(values)), below=24)
    plot.label_up()
    plot.label_across([tokens[-1] * share for share in (0.25, 0.5, 0.75, 1.0)], lambda value: f"{value:.2f}M tokens")
    for name, curve in curves.items():
        plot.add_line(tokens[SMOOTHED:], curve[SMOOTHED:], name)
    words = ", ".join(f"{name} at {run['lr']:g}" for name, run in best.items())
    styles = [f".{name} {{ fill: none; stroke: {colour}; stroke-width: 2 }}" for name, colour in COLOURS.items()]
    keys = [
        f'<text x="600" y="{30 + 22 * place}" style="fill: {COLOURS.get(name, "black")}">{name}, lr {run["lr"]:g}</text>'
        for place, (name, run) in enumerate(best.items())
    ]
    head = "<style>text { font: 14px sans-serif } .grid { stroke: #ddd } " + " ".join(styles) + "</style>"
    svg = str(plot.finish(f"Training loss against tokens: {words}").svg)
    start = svg.index(">") + 1
    opening = svg[:start].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
    return f"{opening}{head}{''.join(keys)}{svg[start:]}\n"


if __name__ == "__main__":
    main()
