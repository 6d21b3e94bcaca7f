"""ORBIT's scaling beside what the time model says of it: `python benchmarks/published/orbit.py --out RESULT.json`.

Every model of `orbit.yaml` is planned on the published numbers of devices and on the number that efficiency is assumed to be
relative to, as ORBIT's program runs it and as ours does, by the shipped profile of Frontier; nothing is fitted. What a step
has as its batch is not published, so it is read in two ways (`Batch`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from phalanx.config.presets import load_preset
from phalanx.families.weather.config import WeatherModel
from phalanx.families.weather.sizes import model_flops_per_sample
from phalanx.hardware.machine import load_machine
from phalanx.layout.spec import LayoutTable, ResolvedLayout
from phalanx.planner.measured.measured_groups import System
from phalanx.planner.time.profile import load_profile
from phalanx.planner.time.step_parts import steps_of
from phalanx.planner.time.step_time import StepBreakdown
from phalanx.planner.trace.traced_model import Setting
from published.frameworks import framework_of
from published.groups import PublishedGroup, steps_as_sent

Batch = Literal["grows", "stays"]
"""`grows`: a step has one micro-batch of every group of ranks that shares samples, as in ORBIT's public trainer.
`stays`: a step has one sample of each of these groups on the most devices, and as many in all on fewer, in larger
micro-batches where there are enough."""
_FIGURES = Path(__file__).with_name("orbit.yaml")


@dataclass(frozen=True)
class PlannedPoint:
    """One model on one number of devices."""

    model: str
    program: str
    batch: Batch
    devices: int
    most_samples: int
    """Samples of a micro-batch where a rank has so many."""
    microbatch: int
    global_batch: int
    step_s: float
    observation_s: float
    """Seconds of a step over its samples."""
    efficiency: float
    """Samples a second and device, over those on the fewest devices."""
    pflop_s: float
    """Model FLOPs of all devices, the aggregation's as published, nothing for what is computed again."""
    breakdown: dict[str, float]
    """Seconds of a step by what they are spent on, without those that are 0."""


def read_figures() -> dict[str, Any]:
    """Return what is published and what is assumed (`orbit.yaml`)."""
    figures: dict[str, Any] = yaml.safe_load(_FIGURES.read_text("utf-8"))
    return figures


def plan_points(preset: str, program: str, batch: Batch, microbatch: int) -> list[PlannedPoint]:
    """Plan a model on all numbers of devices, the fewest first. microbatch: samples, where a rank has so many."""
    figures = read_figures()
    degrees = next(row for row in figures["models"] if row["preset"] == preset)
    tp, shards = degrees["tp"], degrees["dp_shard"]
    counts = sorted({figures["from_devices"], *(row["devices"] for row in figures["published"])})
    model = load_preset(preset).model()
    framework = framework_of(program)
    assert isinstance(model, WeatherModel) and framework is not None
    layouts = []
    for devices in counts:
        groups = devices // tp
        samples = microbatch if batch == "grows" else counts[-1] // devices
        layouts.append(
            ResolvedLayout(
                global_batch=groups * samples,
                microbatch=min(microbatch, samples),
                tp=tp,
                dp_shard=shards,
                dp_replicate=groups // shards,
                zero=3,
                reshard_after_forward=True,
                recompute="full",
            )
        )
    machine = load_machine("frontier")
    setting = Setting(model, model.n_tokens, attention="flash", compile=framework.compiled)
    steps = steps_as_sent(steps_of(setting, LayoutTable.from_rows(layouts), machine, framework), framework)
    times = PublishedGroup(System("frontier", machine), framework, (), steps).step_times(load_profile("frontier"))
    samples_s = [layout.global_batch / seconds for layout, seconds in zip(layouts, times.total, strict=True)]
    flops = model_flops_per_sample(model, "published")
    return [
        PlannedPoint(
            model=preset,
            program=program,
            batch=batch,
            devices=devices,
            most_samples=microbatch,
            microbatch=layout.microbatch,
            global_batch=layout.global_batch,
            step_s=float(times.total[place]),
            observation_s=float(1 / samples_s[place]),
            efficiency=float(samples_s[place] / devices / (samples_s[0] / counts[0])),
            pflop_s=float(samples_s[place] * flops / 1e15),
            breakdown={
                part.name.lower(): float(times.of(part)[place]) for part in StepBreakdown if times.of(part)[place]
            },
        )
        for place, (devices, layout) in enumerate(zip(counts, layouts, strict=True))
    ]


def all_points() -> Iterator[PlannedPoint]:
    """Plan every model, program, batch and micro-batch."""
    figures = read_figures()
    batches: tuple[Batch, ...] = ("grows", "stays")
    for row in figures["models"]:
        for program in ("ORBIT", "Phalanx"):
            for batch in batches:
                for microbatch in figures["microbatches"]:
                    yield from plan_points(row["preset"], program, batch, microbatch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    parser.add_argument("--commit", required=True, help="what the code is of, to be written down")
    options = parser.parse_args()
    points = []
    for point in all_points():
        points.append(asdict(point))
        print(
            f"{point.model:11} {point.program:8} {point.batch:6} {point.devices:6} GCDs, "
            f"{point.microbatch} of {point.most_samples} a micro-batch: "
            f"{point.efficiency:6.1%}  {point.observation_s:.2e} s an observation  {point.pflop_s:7.1f} PFLOP/s"
        )
    made = {
        "command": "python benchmarks/published/orbit.py --out FILE --commit COMMIT",
        "commit": options.commit,
        "date": datetime.now(UTC).date().isoformat(),
        "profile": "frontier, as shipped",
        "figures": read_figures(),
        "points": points,
    }
    options.out.write_text(json.dumps(made) + "\n", "utf-8")


if __name__ == "__main__":
    main()
