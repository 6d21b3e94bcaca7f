"""Training runs of which loss curves are wanted: many at once on one device, what they logged, and figures of them.

For the scripts beside this one; `train_all` runs each job in a process that has phalanx imported already, since short
runs would take most of their time for that.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import phalanx
from phalanx.files import write_atomically
from phalanx.formatting import format_tick
from phalanx.report.drawing import Plot, Scale, choose_value_ticks, fit_scale

ROOT = Path(__file__).parents[1]
QUIET = ("training.tensorboard=false", "training.log_every=1000000", "data.verify=false", "training.resume=never")
"""Words of runs whose metrics alone are wanted."""
COLOURS = ("#06c", "#c44", "#282", "#a60", "#639", "#088", "#777", "#c0a")


@dataclass(frozen=True)
class Job:
    """A run to train."""

    name: str
    file: Path
    words: tuple[str, ...]
    folder: Path
    """Of the run; what it prints goes to a file beside it, with the ending .log."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the result says of it beside its curve."""


def describe_benchmark() -> dict[str, Any]:
    """Return what a result says of how it was made: command, date, commit, versions, machine."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    words = [str(Path(sys.argv[0]).resolve()).removeprefix(f"{ROOT}/"), *sys.argv[1:]]
    cuda = torch.cuda.is_available()
    return {
        "command": shlex.join(["python", *words]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        # A copy of the sources may come without their history.
        "commit": git.stdout.strip() or None,
        "versions": {"python": platform.python_version(), "torch": metadata.version("torch")},
        "machine": {
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "device": torch.cuda.get_device_name() if cuda else "cpu",
        },
    }


def write_result(out: Path, result: dict[str, Any]) -> None:
    """Write a result as it is so far: a script that is cut off leaves what it had."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, json.dumps(result, indent=1) + "\n")


def train_all(jobs: Sequence[Job], at_once: int, done: Callable[[dict[str, Any]], None]) -> None:
    """Train `jobs`, so many at once, in their order, and hand each row to `done` as it ends; a failed one says why."""
    with ProcessPoolExecutor(at_once, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(train_job, job): job for job in jobs}
        for finished in as_completed(waiting):
            job, error = waiting[finished], finished.exception()
            row = {"name": job.name, **job.facts}
            row |= finished.result() if error is None else {"failed": f"{type(error).__name__}: {error}"}
            print(f"{job.name}: {row.get('failed') or row['loss'][-1]}", flush=True)
            done(row)


def collect_runs(
    jobs: Sequence[Job], at_once: int, out: Path, summarise: Callable[[list[dict[str, Any]]], dict[str, Any]]
) -> dict[str, Any]:
    """Train `jobs` and return the result with all rows and their summary, which `out` holds as far as it has come."""
    result: dict[str, Any] = {**describe_benchmark(), "runs": []}

    def take(row: dict[str, Any]) -> None:
        result["runs"].append(row)
        result["summary"] = summarise(result["runs"])
        write_result(out, result)

    train_all(jobs, at_once, take)
    return result


def train_job(job: Job) -> dict[str, Any]:
    """Train a run in this process and return its row."""
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    log = job.folder.with_suffix(".log")
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        phalanx.train(phalanx.load_run(job.file, [*QUIET, *job.words]), job.folder)
    return {"words": list(job.words), **read_run(job.folder)}


def read_run(folder: Path) -> dict[str, Any]:
    """Return the curve of a run, its held-out losses and task scores by step, and how fast it trained."""
    steps = read_lines(folder / "metrics.jsonl")
    events = read_lines(folder / "events.jsonl")
    seconds = [step["step_seconds"] for step in steps]
    return {
        "loss": [round(step["loss"], 6) for step in steps],
        "tokens": steps[-1]["tokens"],
        "held_out": {event["step"]: event["loss"] for event in events if event["kind"] == "evaluation"},
        "tasks": next((event["tasks"] for event in reversed(events) if event["kind"] == "tasks"), []),
        "step_seconds_median": float(np.median(seconds)),
        "seconds": sum(seconds),
    }


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def last_held_out(row: dict[str, Any]) -> float:
    """Return the held-out loss behind the last step."""
    # Steps are numbers in a run and texts in a file.
    return float(row["held_out"][max(row["held_out"], key=int)])


def smooth(loss: Sequence[float], steps: int) -> list[float]:
    """Return the mean of each loss with those of the steps before it, up to `steps` of them together."""
    return [float(np.mean(loss[max(0, end - steps) : end])) for end in range(1, len(loss) + 1)]


@dataclass(frozen=True)
class Curve:
    """A line of a figure."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    """Number of its colour; curves of one colour share the first one's name in the legend."""
    dashed: bool = False


def draw_curves(
    curves: Sequence[Curve],
    words: str,
    across: str,
    *,
    logarithmic: tuple[bool, bool] = (False, False),
    label: Callable[[float], str] = format_tick,
) -> str:
    """Return curves as an SVG image that stands alone.

    words: what it shows. across: what the axis below it is. logarithmic: whether the axes across and up are.
    """
    xs = np.concatenate([np.asarray(curve.xs, float) for curve in curves])
    ys = np.concatenate([np.asarray(curve.ys, float) for curve in curves])
    wide = fit_scale(xs, logarithmic=True) if logarithmic[0] else Scale(float(xs.min()), float(xs.max()))
    plot = Plot(wide, fit_scale(ys, logarithmic=logarithmic[1]), below=24)
    plot.label_up()
    ticks = [tick.value for tick in choose_value_ticks(wide, label)]
    plot.label_across(ticks, label, apart=50)
    for curve in curves:
        plot.add_line(curve.xs, curve.ys, f"c{curve.colour}{' dashed' if curve.dashed else ''}")
    named = {curve.colour: curve.name for curve in reversed(curves)}
    keys = "".join(_legend(sorted(named.items()), plot.right))
    styles = " ".join(f".c{n} {{ fill: none; stroke: {COLOURS[n]}; stroke-width: 1.6 }}" for n in named)
    styles += " .grid { stroke: #ddd } .dashed { stroke-dasharray: 6 4 }"
    head = f"<style>text {{ font: 14px sans-serif }} {styles}</style>"
    svg = str(plot.finish(words).svg)
    start = svg.index(">") + 1
    # Room above for the title and below for the name of the axis.
    opening = svg[:start].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
    opening, height = _raise_height(opening)
    title = f'<text x="80" y="-10" font-weight="bold">{words}</text>'
    axis = f'<text x="{plot.right:.0f}" y="{height - 8:.0f}" text-anchor="end">{across}</text>'
    return f"{opening}{head}{title}{axis}{keys}{svg[start:]}\n"


def _raise_height(opening: str) -> tuple[str, float]:
    """Return the opening tag with 30 more units above and 22 below, and where it ends below."""
    before, _, rest = opening.partition('viewBox="0 0 ')
    sizes, _, behind = rest.partition('"')
    width, height = sizes.split()
    return f'{before}viewBox="0 -30 {width} {float(height) + 52:.0f}"{behind}', float(height) + 22


def _legend(named: Sequence[tuple[int, str]], right: float) -> Iterator[str]:
    """Yield a line of text for each colour, in the upper right corner."""
    for place, (number, name) in enumerate(named):
        yield f'<text x="{right:.0f}" y="{32 + 20 * place}" text-anchor="end" style="fill: {COLOURS[number]}">{name}</text>'
