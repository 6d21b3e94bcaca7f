"""Pretraining on ten simulated sources, on one of them and on none, by the error on a held-out source after fine-tuning.

    python benchmarks/ten_sources.py --out benchmarks/results/transfer/ten_sources.json [--pretrain N] [...]

Sources stand for models of CMIP6: quasi-geostrophic atmospheres (`phalanx data sample weather`) that differ in forcing,
damping, mountains and disturbance, each with some variables, on one of four grids, in one of three calendars. The held-out
source stands for a reanalysis: another atmosphere on a grid that no source has, with two variables that no source has and 24
days to train on. For each of three seeds a forecaster is pretrained on all ten sources, another on one of them (another one
for each seed), for equally many steps of equally many samples; then both, and one from scratch, are trained on the held-out
source. One more is pretrained on ten times the days of a single source (seed 0 alone). Errors are RMSE at 24 h over that of
persistence, the mean over variables, on frames at least 26 days later. The result is written beside its curves, with the
ending .svg.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray
import yaml

from phalanx.config.load import load_run
from phalanx.families.weather.data.quasigeostrophic import Atmosphere, Harmonics, Physics
from phalanx.families.weather.data.sample_weather import (
    FRAME_HOURS,
    TRUNCATION,
    OutputGrid,
    disturbed_state,
    mountain_heights,
)
from phalanx.training.start import train
from transfer_gain import draw_seeds

ROOT = Path(__file__).parents[1]
GRIDS = {"medium": (24, 48), "fine": (32, 64), "coarse": (16, 32), "wide": (18, 40)}
"""Rows and columns; the first is that of the model's table of positions, and patches of 4 do not divide the last's rows."""
HELD_OUT_GRID = (20, 44)
CALENDARS = ("standard", "noleap", "360_day")
Z, T350, T650 = "geopotential_500", "temperature_350", "temperature_650"
U200, U500, U800, V200, V500, V800 = (f"{one}_component_of_wind_{level}" for one in "uv" for level in (200, 500, 800))
VOCABULARY = (Z, T350, T650, U200, U500, V200, V500)
"""Variables of the sources together; the winds at 800 hPa are the held-out source's alone."""
HELD_OUT = (T650, Z, U800, V800, U500, V500)
SUBSETS = (
    (Z, T650, U500, V500),
    (Z, T350, T650, U200, V200),
    (T650, U500, V500),
    (Z, U200, U500, V200, V500),
    (T350, T650, U500, V500),
    (Z, T650, U200, V200),
    VOCABULARY,
    (Z, T350, U500, V500),
    (T650, U200, U500, V200, V500),
    (Z, T650, U500),
)
DAYS, SPIN_UP, HELD_OUT_DAYS = 90, 45, 90
TRAINED_FRAMES, FIRST_HELD_OUT = 48, 100
ALONE = (0, 6, 8)
"""The source that each seed's forecaster of one source is pretrained on."""
EVALUATIONS = 8
BATCH = 8


@dataclass(frozen=True)
class Source:
    """One simulated atmosphere and what is kept of it."""

    name: str
    grid: tuple[int, int]
    variables: tuple[str, ...]
    calendar: str
    physics: Physics
    mountains: float
    """Factor on the heights of the ground."""
    seed: int
    days: int

    def write(self, folder: Path) -> Path:
        """Simulate it, unless its file is there, and return the file."""
        file = folder / f"{self.name}.nc"
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            self._simulate().to_netcdf(file.with_suffix(".part"))
            file.with_suffix(".part").rename(file)
        return file

    def _simulate(self) -> xarray.Dataset:
        harmonics = Harmonics(TRUNCATION)
        gaussian = np.rad2deg(np.arcsin(harmonics.sines)), np.arange(harmonics.columns) * 360 / harmonics.columns
        atmosphere = Atmosphere(harmonics, self.physics, self.mountains * mountain_heights(*gaussian))
        rows, columns = self.grid
        latitudes, longitudes = (np.arange(rows) + 0.5) * 180 / rows - 90, np.arange(columns) * 360 / columns
        points, state = OutputGrid.of(latitudes, columns), disturbed_state(atmosphere, self.seed)
        steps, per_day = round(FRAME_HOURS * 3600 / atmosphere.step), 24 // FRAME_HOURS
        frames: list[dict[str, Any]] = []
        for frame in range(-SPIN_UP * per_day, self.days * per_day):
            if frame >= 0:
                frames.append(points.fields_of(atmosphere, state))
            state = atmosphere.advance(state, steps)
        hours = np.arange(len(frames)) * FRAME_HOURS
        found: dict[str, Any] = {
            name: (("time", "lat", "lon"), np.stack([frame[name] for frame in frames]).astype(np.float32))
            for name in self.variables
        }
        ground = self.mountains * mountain_heights(latitudes, longitudes)
        found["orography"] = (("lat", "lon"), ground.astype(np.float32))
        times = ("time", hours, {"units": "hours since 2001-01-01", "calendar": self.calendar})
        return xarray.Dataset(found, {"time": times, "lat": latitudes, "lon": longitudes})


def make_sources() -> tuple[list[Source], Source]:
    """Return the ten sources and the held-out one."""
    grids, drawn = list(GRIDS.values()), np.random.default_rng(7)
    found = []
    for number, variables in enumerate(SUBSETS):
        relaxation, friction, diffusion, upper, lower = drawn.uniform((20, 1.6, 0.8, 21, 15), (32, 2.6, 1.4, 28, 22))
        physics = Physics(relaxation, friction, diffusion, (upper, lower))
        mountains = float(drawn.uniform(0.6, 1.3))
        grid, calendar = grids[number % len(grids)], CALENDARS[number % len(CALENDARS)]
        found.append(Source(f"model-{number}", grid, variables, calendar, physics, mountains, 100 + number, DAYS))
    physics = Physics(relaxation=25.0, friction=2.0, diffusion=1.0, shears=(24.0, 18.0))
    return found, Source("held-out", HELD_OUT_GRID, HELD_OUT, "standard", physics, 1.0, 5, HELD_OUT_DAYS)


def model_fields(variables: tuple[str, ...], grid: tuple[int, int]) -> dict[str, Any]:
    """Return the model section of a forecaster of these variables whose own grid is `grid`."""
    return {
        "family": "weather",
        "n_layers": 3,
        "d_model": 64,
        "n_heads": 4,
        "d_ff": 128,
        "n_lat": grid[0],
        "n_lon": grid[1],
        "patch_size": 4,
        "prediction": "change",
        "absent_inputs": "masked",
        "variables": [*variables, "orography"],
        "outputs": list(variables),
    }


def settings(steps: int, rate: float, seed: int, every: int | None) -> dict[str, Any]:
    """Return the sections that all runs have in common."""
    return {
        "layout": {"global_batch": BATCH, "microbatch": BATCH, "precision": "fp32"},
        "optimizer": {"lr": rate, "warmup_steps": 20, "weight_decay": 0.01, "schedule": "cosine"},
        "training": {"steps": steps, "tensorboard": False, "log_every": 100, "seed": seed},
        "checkpoint": {"every": None},
        "evaluation": {"every": every, "samples": 64},
    }


def pretraining(sources: list[Source], files: dict[str, Path], steps: int, seed: int) -> dict[str, Any]:
    """Return the run file of a forecaster of these sources: on the grid of one, or on all of theirs."""
    variables = tuple(name for name in VOCABULARY if any(name in source.variables for source in sources))
    names = {shape: name for name, shape in GRIDS.items()}
    own = sources[0].grid
    others = dict.fromkeys(source.grid for source in sources if source.grid != own)
    model = model_fields(variables, own)
    model["grids"] = [{"name": names[shape], "n_lat": shape[0], "n_lon": shape[1]} for shape in others]
    stated = [
        {
            "path": str(files[source.name]),
            "variables": list(source.variables),
            "grid": None if source.grid == own else names[source.grid],
        }
        for source in sources
    ]
    data = {
        "sources": stated,
        "inputs": list(variables),
        "static": ["orography"],
        "lead_hours": 24,
        "splits": {"train": {"first": "step 0", "last": f"step {2 * sources[0].days - 1}"}},
    }
    return {"model": model, "data": data, **settings(steps, 2e-3, seed, None)}


def fine_tuning(file: Path, steps: int, seed: int, weights: Path | None) -> dict[str, Any]:
    """Return the run file of a forecaster of the held-out source, from the weights of a run or from scratch."""
    data = {
        "sources": [str(file)],
        "inputs": list(HELD_OUT),
        "static": ["orography"],
        "lead_hours": 24,
        "splits": {
            "train": {"first": "step 0", "last": f"step {TRAINED_FRAMES - 1}"},
            "validation": {"first": f"step {FIRST_HELD_OUT}", "last": f"step {2 * HELD_OUT_DAYS - 1}"},
        },
        "climatology_days": 183,
    }
    found = {"model": model_fields(HELD_OUT, HELD_OUT_GRID), "data": data}
    found |= settings(steps, 2e-3, seed, steps // EVALUATIONS)
    if weights is not None:
        resize = ["embedding.positions", "embedding.variables", "embedding.patches.*", "head.output.*"]
        found["training"] |= {"init_from": str(weights), "transfer": {"resize": resize}}
    return found


def run_training(root: Path, name: str, fields: dict[str, Any]) -> list[float]:
    """Train a run, unless it was, and return its evaluations: RMSE over persistence's, the mean over variables."""
    file, folder, text = root / f"{name}.yaml", root / name, yaml.safe_dump(fields)
    log = folder / "metrics.jsonl"
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else [0]
    if steps[-1] != fields["training"]["steps"] or file.read_text() != text:
        # It would go on from another one.
        shutil.rmtree(folder, ignore_errors=True)
        file.write_text(text)
        train(load_run(file), folder)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [
        round(float(np.mean([score["rmse"] / score["persistence_rmse"] for score in event["scores"]])), 5)
        for event in events
        if event["kind"] == "evaluation"
    ]


def compare(root: Path, pretrain: int, steps: int, seeds: int) -> dict[str, Any]:
    """Return the curves of all runs by what they began with, one for each seed."""
    sources, held_out = make_sources()
    began = time.process_time()
    files = {source.name: source.write(root / "data") for source in (*sources, held_out)}
    simulated = time.process_time() - began
    # What ten times the days of one source do: for one seed, as it takes as long to simulate as all else.
    long = replace(sources[ALONE[0]], name=f"{sources[ALONE[0]].name}-long", days=10 * DAYS)
    curves: dict[str, list[list[float]]] = {"ten": [], "one": [], "scratch": [], "long": []}
    for seed, alone in enumerate(ALONE[:seeds]):
        beginnings = {"ten": sources, "one": [sources[alone]], "scratch": []}
        if seed == 0:
            files[long.name] = long.write(root / "data")
            beginnings["long"] = [long]
        for kind, taken in beginnings.items():
            before = f"before-{kind}-{seed}"
            if taken:
                run_training(root, before, pretraining(taken, files, pretrain, seed))
            weights = root / before if taken else None
            fields = fine_tuning(files[held_out.name], steps, seed, weights)
            curves[kind].append(run_training(root, f"{kind}-{seed}", fields))
    return {
        "what": "RMSE at 24 h over persistence's, mean over variables",
        "pretraining_steps": pretrain,
        "steps": steps,
        "samples_per_step": BATCH,
        "one": [sources[alone].name for alone in ALONE[:seeds]],
        "sources": {
            source.name: {
                "grid": list(source.grid),
                "calendar": source.calendar,
                "variables": list(source.variables),
                "shears": [round(one, 2) for one in source.physics.shears],
                "mountains": round(source.mountains, 3),
            }
            for source in (*sources, held_out)
        },
        "curves": curves,
        "best": {kind: [min(curve) for curve in each] for kind, each in curves.items()},
        "cpu_seconds": {"simulation": round(simulated), "this call": round(time.process_time() - began)},
    }


NAMES = {"ten": "from ten sources", "one": "from one of them", "scratch": "from scratch"}


def draw(found: dict[str, Any]) -> str:
    """Return the errors against steps: the mean over seeds, and each seed."""
    curves = {name: np.array(found["curves"][kind]) for kind, name in NAMES.items()}
    return draw_seeds(
        curves, found["steps"], "RMSE over persistence's on a held-out source against steps of fine-tuning"
    )


def main() -> None:
    """Train all runs and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain", type=int, default=2400, help="steps of each pretraining")
    parser.add_argument("--seeds", type=int, default=len(ALONE), help="of training, at most 3")
    parser.add_argument("--steps", type=int, default=240, help="steps of each fine-tuning")
    parser.add_argument("--work", type=Path, help="folder for data and runs, kept; what is there is not made again")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    made = {
        "command": shlex.join(["python", "benchmarks/ten_sources.py", *sys.argv[1:]]),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip(),
        "torch": metadata.version("torch"),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
    }
    with tempfile.TemporaryDirectory() as folder:
        result = {**made, **compare((asked.work or Path(folder)).resolve(), asked.pretrain, asked.steps, asked.seeds)}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    asked.out.with_suffix(".svg").write_text(draw(result))


if __name__ == "__main__":
    main()
