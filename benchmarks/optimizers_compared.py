"""Loss against tokens of AdamW and Muon, each at several learning rates: how many tokens Muon needs for AdamW's loss.

    phalanx data prepare python-stdlib --out data/python-stdlib --vocab-size 2048 --validation-fraction 0.02
    python benchmarks/optimizers_compared.py --out benchmarks/results/optimizers/NAME.json \
        --runs 'adamw=0.003,0.006,0.012@120;muon=0.006,0.012,0.024@90;muon=0.012@60'

    phalanx tune RUN.yaml optimizer.name=adamw --out studies/adamw     # and likewise for muon
    python benchmarks/optimizers_compared.py --studies studies/adamw studies/muon --out FILE

Trains the run file (examples/quickstart.yaml, with the fields given) once for each optimizer, rate and number of
steps, all from the same weights on the same samples, each with the whole of its schedule. Muon needs the tokens of
its shortest run whose held-out loss at the end is at most the best of AdamW. The result, written again after each
run, holds all curves. Beside it, with the ending .svg, stand the best curves of each optimizer and length. A rate
that is best at an end of its list says that the list is too short. --studies takes the trials of `phalanx tune` instead,
whole trainings only (tune.asha=null), and trains nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml

from curves import (
    ROOT,
    Curve,
    Job,
    collect_runs,
    describe_benchmark,
    draw_curves,
    last_held_out,
    read_run,
    smooth,
    write_result,
)

SMOOTHED = 20
"""Steps over which a training loss is averaged in the figure: a batch alone is noise."""


def main() -> None:
    """Train what is asked for and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="section.field=value for the run file")
    parser.add_argument("--run", type=Path, default=ROOT / "examples" / "quickstart.yaml")
    parser.add_argument("--runs", default="adamw=0.003,0.006,0.012@120;muon=0.006,0.012,0.024@90")
    parser.add_argument("--studies", type=Path, nargs="+", help="folders of studies, in place of --runs")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    if asked.studies:
        runs = [row for folder in asked.studies for row in read_trials(folder)]
        result = {**describe_benchmark(), "runs": runs, "summary": summarise(runs)}
        write_result(asked.out, result)
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = collect_runs(list_jobs(asked, Path(folder)), asked.at_once, asked.out, summarise)
    asked.out.with_suffix(".svg").write_text(draw(result["runs"]))
    print(json.dumps(result["summary"], indent=1))


def list_jobs(asked: argparse.Namespace, folder: Path) -> list[Job]:
    """Return the runs that are asked for, the longest first: those that run at once then end together."""
    jobs = []
    for text in asked.runs.split(";"):
        name, _, rest = text.partition("=")
        rates, _, steps = rest.partition("@")
        for rate in rates.split(","):
            words = [f"optimizer.name={name}", f"optimizer.lr={rate}", f"training.steps={steps}"]
            facts = {"optimizer": name, "lr": float(rate), "steps": int(steps)}
            title = f"{name} at {rate}, {steps} steps"
            jobs.append(Job(title, asked.run, (*asked.words, *words), folder / f"{name}-{rate}-{steps}", facts))
    return sorted(jobs, key=lambda job: -job.facts["steps"])


def read_trials(study: Path) -> list[dict[str, Any]]:
    """Return a row for each trial of a study that trained to its end."""
    rows = []
    for folder in sorted((study / "trials").iterdir()):
        chosen = yaml.safe_load((folder / "run.yaml").read_text())
        name, lr, steps = chosen["optimizer"]["name"], chosen["optimizer"]["lr"], chosen["training"]["steps"]
        run = read_run(folder)
        if len(run["loss"]) == steps:
            title = f"{name} at {lr:.3g}, {steps} steps"
            rows.append({"name": title, "optimizer": name, "lr": lr, "steps": steps, "trial": folder.name, **run})
    return rows


def best_runs(runs: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the run with the least held-out loss of each optimizer and number of steps, the longest first."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    whole = [run for run in runs if "failed" not in run]
    for run in sorted(whole, key=lambda run: (run["optimizer"], -run["steps"], last_held_out(run))):
        found.setdefault((run["optimizer"], run["steps"]), run)
    return found


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the best rate and losses of each optimizer and length, and the share of AdamW's tokens that Muon needs."""
    best = best_runs(runs)
    found: dict[str, Any] = {
        f"{name}, {steps} steps": {"lr": run["lr"], "tokens": run["tokens"], "held_out": last_held_out(run)}
        for (name, steps), run in best.items()
    }
    adamw = [run for (name, _), run in best.items() if name == "adamw"]
    if not adamw:
        return found
    wanted = min(adamw, key=last_held_out)
    reached = [
        r["steps"] for (name, _), r in best.items() if name == "muon" and last_held_out(r) <= last_held_out(wanted)
    ]
    found["muon_needs_of_adamws_tokens"] = min(reached) / wanted["steps"] if reached else None
    return found


def draw(runs: list[dict[str, Any]]) -> str:
    """Return the best curves of each optimizer and length as SVG."""
    curves, colours = [], {"adamw": 1, "muon": 0}
    for (name, steps), run in best_runs(runs).items():
        loss = smooth(run["loss"], SMOOTHED)
        tokens = [run["tokens"] * step / len(loss) for step in range(1, len(loss) + 1)]
        longest = steps == max(length for other, length in best_runs(runs) if other == name)
        title = f"{name}, lr {run['lr']:.3g}"
        first = min(SMOOTHED, len(loss) // 2)
        curves.append(Curve(title, tokens[first:], loss[first:], colours.get(name, 2), dashed=not longest))
    return draw_curves(curves, "Training loss over tokens, the best rate of each optimizer and length", "tokens")


if __name__ == "__main__":
    main()
