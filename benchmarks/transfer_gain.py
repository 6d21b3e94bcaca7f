"""Held-out errors of models that begin with other weights, beside those from scratch, on a tenth of the data and on all.

    python benchmarks/transfer_gain.py --out benchmarks/results/transfer/sample.json [--weather-steps N] [...]
    python benchmarks/transfer_gain.py --families moist --moist FILE.nc --out benchmarks/results/transfer/moist.json

All data are simulated (`phalanx data sample`). Weather: weights of a forecaster of six variables go to one of five on
another simulation, of which it knew four. Moist: they go from the sample weather, which is dry and of three levels, to 24
days of another model of the atmosphere, SPEEDY, with three seeds. Materials: weights of a potential of metal clusters go to
alloy crystals, whose head begins as the clusters' head, with three seeds. Forecasters are scored at the best of their
evaluations, in RMSE of all variables at 24 h over that of persistence; potentials at their end, in the mean error of force
components on structures of another seed. The result is written again after each family; beside it, with the ending .svg,
stand the bars of materials, or the curves of moist.
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
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.report.drawing import Bar, Plot, Scale, draw_bars, fit_scale, make_line, make_text

ROOT = Path(__file__).parents[1]
KNOWN = ["geopotential_500", "temperature_650", "u_component_of_wind_500", "v_component_of_wind_500"]
BEFORE = [*KNOWN, "temperature_350", "u_component_of_wind_200"]
AFTER = ["u_component_of_wind_800", *KNOWN[::-1]]
DRY = ["geopotential_500", *(f"{one}_component_of_wind_{level}" for level in (200, 500) for one in "uv")]
MOIST = [*DRY[::-1], "temperature_500", "specific_humidity_850"]
MOIST_SPLITS = {
    "train": {"first": "step 0", "last": "step 47"},
    "validation": {"first": "step 80", "last": "step 139"},
}
SEEDS = (0, 1, 2)
FRAMES = {"all": 300, "tenth": 30}
"""Frames to train on; 370 to 399 are held out."""
DAYS, TRAJECTORIES = 200, 80
EVALUATIONS = 6
"""Evaluations of a run, evenly spaced: what learns from little data is soon at its best."""


def main() -> None:
    """Train all runs and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weather-steps", type=int, default=600)
    parser.add_argument("--materials-steps", type=int, default=480)
    parser.add_argument("--moist-steps", type=int, default=240)
    parser.add_argument("--moist", type=Path, help="netCDF file of SPEEDY every 12 hours, for the family moist")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--families", nargs="+", default=["materials", "weather"])
    parser.add_argument(
        "--work", type=Path, help="folder for data and runs, kept; data that are there are not made again"
    )
    parser.add_argument("--out", type=Path, required=True, help="families that it holds already are kept")
    asked = parser.parse_args()
    made: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/transfer_gain.py", *sys.argv[1:]]),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip(),
        "torch": metadata.version("torch"),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        root = asked.work or Path(folder)
        for name, compare, steps in (
            ("materials", compare_potentials, asked.materials_steps),
            ("weather", compare_forecasters, asked.weather_steps),
            ("moist", partial(compare_simulations, asked.moist), asked.moist_steps),
        ):
            if name not in asked.families:
                continue
            result[name] = {**made, **compare(root / name, steps, asked.jobs)}
            asked.out.write_text(json.dumps(result, indent=1) + "\n")
    if "materials" in result:
        asked.out.with_suffix(".svg").write_text(draw_potentials(result["materials"]))
    if "moist" in result:
        asked.out.with_suffix(".svg").write_text(draw_curves(result["moist"]))


def compare_forecasters(root: Path, steps: int, jobs: int) -> dict[str, Any]:
    """Return errors of forecasters, as shares of persistence's."""
    for name, seed in (("before", 1), ("after", 2)):
        if not (root / name).exists():
            phalanx("data", "sample", "weather", "--out", root / name, "--days", DAYS, "--seed", seed)
    begin = {"training.init_from": str(root / "runs" / "before")}
    transfer = {"training.transfer": {"resize": ["embedding.*", "head.output.*"]}}
    runs = {
        "before": forecaster(root, "before", BEFORE, "all", steps),
        "scratch all": forecaster(root, "after", AFTER, "all", steps),
        "scratch tenth": forecaster(root, "after", AFTER, "tenth", steps),
        "transfer tenth": forecaster(root, "after", AFTER, "tenth", steps) | begin | transfer,
    }
    return {"what": "RMSE at 24 h over persistence's", "steps": steps, **train_all(root, runs, relative_rmse, jobs)}


def compare_simulations(moist: Path, root: Path, steps: int, jobs: int) -> dict[str, Any]:
    """Return errors of forecasters of SPEEDY, as shares of persistence's, by the seed of their training."""
    if not (root / "before").exists():
        phalanx("data", "sample", "weather", "--out", root / "before", "--days", DAYS, "--seed", 1)
    begin = {"training.init_from": str(root / "runs" / "before")}
    transfer = {"training.transfer": {"resize": ["embedding.*", "head.output.*"]}}
    runs = {"before": forecaster(root, "before", DRY, "all", 2 * steps)}
    for seed in SEEDS:
        for name, words in (("scratch", {}), ("transfer", begin | transfer)):
            fields = forecaster(root, "before", MOIST, "all", steps) | words | {"training.seed": seed}
            fields["data"] |= {"sources": [str(moist.resolve())], "splits": MOIST_SPLITS}
            runs[f"{name} {seed}"] = fields
    return {"what": "RMSE at 24 h over persistence's", "steps": steps, **train_all(root, runs, relative_rmse, jobs)}


def forecaster(root: Path, data: str, variables: list[str], share: str, steps: int) -> dict[str, Any]:
    """Return the fields of a run on a share of the frames."""
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
            "variables": [*variables, "orography"],
            "outputs": variables,
        },
        "data": {
            "sources": [str(root / data / "weather.nc")],
            "inputs": variables,
            "static": ["orography"],
            "lead_hours": 24,
            "splits": {
                "train": {"first": "step 0", "last": f"step {FRAMES[share] - 1}"},
                "validation": {"first": "step 340", "last": "step 399"},
            },
            "climatology_days": 183,
        },
        **settings(8, steps, 2e-3),
    }


def relative_rmse(event: dict[str, Any]) -> float:
    """Return the RMSE of all variables over that of persistence, in the mean."""
    return float(np.mean([score["rmse"] / score["persistence_rmse"] for score in event["scores"]]))


def compare_potentials(root: Path, steps: int, jobs: int) -> dict[str, Any]:
    """Return errors of forces, in eV/A, by the seed of the training."""
    for name, seed in (("before", 1), ("after", 2), ("held-out", 3)):
        if not (root / name).exists():
            phalanx("data", "sample", "molecules", "--out", root / name, "--trajectories", TRAJECTORIES, "--seed", seed)
    take_tenth(root / "after" / "crystals.npz", root / "tenth" / "crystals.npz")
    begin = {"training.init_from": str(root / "runs" / "before")}
    transfer = {"training.transfer": {"rename": {"head.*.copies.crystals.*": "head.*.copies.clusters.*"}}}
    runs = {"before": potential(root, "before", "clusters", steps)}
    for seed in SEEDS:
        for name, data, words in (
            ("scratch all", "after", {}),
            ("scratch tenth", "tenth", {}),
            ("transfer tenth", "tenth", begin | transfer),
        ):
            fields = potential(root, data, "crystals", steps)
            runs[f"{name} {seed}"] = fields | words | {"training.seed": seed}
    return {"what": "mean error of forces, eV/A", "steps": steps, **train_all(root, runs, None, jobs)}


def potential(root: Path, data: str, name: str, steps: int) -> dict[str, Any]:
    """Return the fields of a run on the clusters or the crystals of a folder."""
    source = {"name": name, "path": str(root / data / f"{name}.npz"), "group_by": "trajectory"}
    return {
        "model": {
            "family": "materials",
            "body": "painn",
            "n_layers": 2,
            "d_model": 48,
            "n_radial": 12,
            "cutoff": 5.0,
            "envelope": "polynomial",
            "max_atomic_number": 79,
            "energy": {"loss": "mae", "weight": 1.0, "force_weight": 1.0},
            "branches": [{"name": name}],
        },
        "data": {
            "sources": [{**source, "labels": {"energy": "eV", "forces": "eV/A"}}],
            "prepared": str(root / "graphs" / f"{data}-{name}"),
            "cutoff": 5.0,
            "validation_fraction": 0.1,
        },
        **settings(8, steps, 1e-3),
    }


def take_tenth(whole: Path, part: Path) -> None:
    """Write a tenth of the trajectories of `whole`."""
    arrays = dict(np.load(whole))
    kept = np.flatnonzero(arrays["trajectory"] < (arrays["trajectory"].max() + 1) // 10)
    starts, count = arrays["ptr"], len(arrays["energy"])
    atoms = np.concatenate([np.arange(starts[one], starts[one + 1]) for one in kept])
    rows = {name: kept if len(values) == count else atoms for name, values in arrays.items() if name != "ptr"}
    taken = {name: arrays[name][found] for name, found in rows.items()}
    part.parent.mkdir(parents=True, exist_ok=True)
    np.savez(part, ptr=np.concatenate(([0], np.cumsum(np.diff(starts)[kept]))), **taken)


def settings(batch: int, steps: int, rate: float) -> dict[str, Any]:
    """Return the sections that all runs have in common."""
    return {
        "layout": {"global_batch": batch, "precision": "fp32"},
        "optimizer": {"lr": rate, "warmup_steps": min(20, steps), "weight_decay": 0.01, "schedule": "cosine"},
        "training": {"steps": steps, "tensorboard": False, "log_every": 100},
        "checkpoint": {"every": None},
        "evaluation": {"every": steps // EVALUATIONS, "samples": 64},
    }


def train_all(root: Path, runs: dict[str, dict[str, Any]], score: Any, jobs: int) -> dict[str, Any]:
    """Train the first run, then the others, `jobs` at a time; return the errors of each, the best evaluation's for weather.

    score: gives the error of an evaluation; None takes the error of forces on the structures of held-out.
    """
    for name, fields in runs.items():
        words = {key: fields.pop(key) for key in list(fields) if "." in key}
        for key, value in words.items():
            section, _, field = key.partition(".")
            fields[section] |= {field: value}
        # JSON is YAML.
        file_of(root, name).write_text(json.dumps(fields))
        if fields["model"]["family"] == "materials":
            phalanx("data", "prepare-graphs", file_of(root, name))

    def train(name: str) -> None:
        phalanx("train", file_of(root, name), "--run-dir", folder_of(root, name))

    first, *others = runs
    train(first)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(train, others))
    found: dict[str, Any] = {}
    for name in runs:
        if score is not None:
            events = [json.loads(line) for line in (folder_of(root, name) / "events.jsonl").read_text().splitlines()]
            curve = [score(event) for event in events if event["kind"] == "evaluation"]
            found[name] = {"error": round(min(curve), 5), "curve": [round(value, 5) for value in curve]}
        elif name != "before":
            found[name] = {"error": round(force_error(root, folder_of(root, name)), 5)}
    return found


def file_of(root: Path, name: str) -> Path:
    """Return the run file of a run."""
    return root / f"{name}.yaml".replace(" ", "-")


def folder_of(root: Path, name: str) -> Path:
    """Return the run directory of a run."""
    return root / "runs" / name.replace(" ", "-")


def force_error(root: Path, run_dir: Path) -> float:
    """Return the mean absolute error of force components on the held-out crystals, eV/A."""
    source = {"name": "crystals", "path": str(root / "held-out" / "crystals.npz"), "group_by": "trajectory"}
    data = {
        "sources": [{**source, "labels": {"energy": "eV", "forces": "eV/A"}}],
        "prepared": str(root / "graphs" / "held-out"),
        "cutoff": 5.0,
        "validation_fraction": 0.1,
    }
    words = [f"data.{name}={json.dumps(value)}" for name, value in data.items()]
    if not Path(str(data["prepared"])).exists():
        phalanx("data", "prepare-graphs", run_dir / "run.yaml", *words)
    text = phalanx("errors", run_dir, "--split", "train", "--device", "cpu", "--json", *words)
    rows = json.loads(text)["errors"]
    return float(next(row["mae"] for row in rows if row["quantity"].startswith("forces")))


def phalanx(*words: object) -> str:
    """Run a command of phalanx to its end; return what it wrote on stdout."""
    return subprocess.run(
        [sys.executable, "-m", "phalanx", *map(str, words)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def draw_curves(found: dict[str, Any]) -> str:
    """Return the errors against steps: the mean over seeds, and each seed."""
    curves = {name: np.array([found[f"{kind} {seed}"]["curve"] for seed in SEEDS]) for kind, name in NAMES.items()}
    return draw_seeds(curves, found["steps"], "RMSE over persistence's against training steps")


def draw_seeds(curves: dict[str, Any], steps: int, what: str) -> str:
    """Return curves of evaluations evenly spaced over `steps`: the mean over seeds, and each seed.

    curves: by what they show, [seeds, evaluations]. what: the drawing, for who does not see it.
    """
    every = np.concatenate([each.ravel() for each in curves.values()])
    count = next(iter(curves.values())).shape[1]
    at = [steps * (number + 1) / count for number in range(count)]
    plot = Plot(Scale(0.0, at[-1] * 1.02), fit_scale(every), left=70, top=40)
    plot.label_up()
    plot.label_across(at, lambda step: f"{step:.0f}")
    wide = 660 // len(curves)
    for number, (name, each) in enumerate(curves.items()):
        for seed in each:
            plot.add_line(at, seed.tolist(), f"line-{number + 1} thin")
        plot.add_curve(at, each.mean(0).tolist(), number + 1)
        plot.parts.append(make_text(130 + wide * number, 22, name))
        plot.parts.append(make_line(90 + wide * number, 17, 122 + wide * number, 17, f"line-{number + 1}"))
    colours = ("#06c", "#999") if len(curves) == 2 else ("#06c", "#c60", "#999")
    styles = (
        "text { font: 18px sans-serif } polyline, line { fill: none; stroke-width: 3 } "
        ".grid { stroke: #ddd; stroke-width: 1 } .thin { stroke-width: 1; opacity: 0.6 }"
    )
    for number, colour in enumerate(colours, 1):
        styles += f" .line-{number} {{ stroke: {colour} }} .dot-{number} {{ fill: {colour} }}"
    return _with_styles(str(plot.finish(what).svg), styles)


NAMES = {"transfer": "from weights of dry weather", "scratch": "from scratch"}


def draw_potentials(found: dict[str, Any]) -> str:
    """Return the errors of forces as bars, one a seed."""
    bars = []
    for kind, name in POTENTIALS.items():
        for seed in SEEDS:
            error = found[f"{kind} {seed}"]["error"]
            bars.append(Bar(f"{name}, seed {seed}", error, f"{error:.3f}", kind.split()[0]))
    svg = str(draw_bars(bars, "Mean error of forces on held-out crystals (eV/A)", left=330).svg)
    styles = "text { font: 14px sans-serif } .grid { stroke: #ddd } .scratch { fill: #999 } .transfer { fill: #06c }"
    return _with_styles(svg, styles)


POTENTIALS = {
    "scratch tenth": "a tenth of the data, from scratch",
    "transfer tenth": "a tenth, from weights of clusters",
    "scratch all": "all data, from scratch",
}


def _with_styles(svg: str, styles: str) -> str:
    """Return a drawing that is a file of its own."""
    start = svg.index(">") + 1
    return (
        svg[:start].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
        + f"<style>{styles}</style>"
        + svg[start:]
    )


if __name__ == "__main__":
    main()
