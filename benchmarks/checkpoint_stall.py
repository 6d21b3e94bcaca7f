"""How long training stands still for a checkpoint: ours, synchronous and in the background, beside plain DCP.

    python benchmarks/checkpoint_stall.py --out benchmarks/results/checkpoint/cpu

saves a training state of about 400 MB (float32 parameters and two AdamW moments) several times with each way in turn, on
an accelerator where there is one and else on the CPU. Writes OUT.json (every measurement, versions, machine) and OUT.log
(the table). Plain DCP checks nothing, names nothing and publishes nothing atomically; it is the yardstick for time only.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from phalanx.checkpoint import CheckpointStore, collect_tensors, materialise_optimizer_state

LAYERS, WIDTH = 7, 640


@dataclass
class Timing:
    """One save."""

    stall_seconds: float
    """Time the caller waited."""
    total_seconds: float
    """Time until the checkpoint was on disk."""


Save = Callable[[int, dict[str, Tensor]], Timing]


def training_state(device: torch.device) -> dict[str, Tensor]:
    """Parameters and AdamW state of a stack of transformer-shaped linear layers, 12 * LAYERS * WIDTH^2 parameters."""
    shapes = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)] * LAYERS
    model = nn.ParameterList([nn.Parameter(torch.randn(shape, device=device)) for shape in shapes])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    materialise_optimizer_state(optimizer)
    return collect_tensors(model, optimizer)


def ours(root: Path, *, asynchronous: bool, reserve: dict[str, Tensor] | None = None) -> Save:
    """Our store; a background save is waited for outside the stall. reserve: tensors to get host memory for at once."""
    store = CheckpointStore(root / "run" / "checkpoints", keep_last=1)
    if reserve is not None:
        store.reserve(reserve)

    def save(step: int, tensors: dict[str, Tensor]) -> Timing:
        start = time.perf_counter()
        handle = store.save(step, tensors, {"step": step}, asynchronous=asynchronous)
        stall = time.perf_counter() - start
        handle.wait()
        return Timing(stall, time.perf_counter() - start)

    return save


def plain_dcp(root: Path, *, asynchronous: bool) -> Save:
    """DCP as it comes, to a new folder a save; the one before is removed outside the measurement."""

    def save(step: int, tensors: dict[str, Tensor]) -> Timing:
        start = time.perf_counter()
        if asynchronous:
            future = dcp.async_save(tensors, checkpoint_id=root / str(step))
            stall = time.perf_counter() - start
            future.result()
        else:
            dcp.save(tensors, checkpoint_id=root / str(step))
            stall = time.perf_counter() - start
        total = time.perf_counter() - start
        shutil.rmtree(root / str(step - 1), ignore_errors=True)
        return Timing(stall, total)

    return save


def measure(folder: Path, tensors: dict[str, Tensor], repeats: int) -> dict[str, list[Timing]]:
    """`repeats` saves of `tensors` with each way, in turn, so that a slow moment of the machine falls on all alike."""
    ways = {
        "ours, background, memory reserved": ours(folder / "reserved", asynchronous=True, reserve=tensors),
        "ours, background": ours(folder / "background", asynchronous=True),
        "ours, synchronous": ours(folder / "synchronous", asynchronous=False),
        "DCP async_save": plain_dcp(folder / "dcp-async", asynchronous=True),
        "DCP save": plain_dcp(folder / "dcp", asynchronous=False),
    }
    timings: dict[str, list[Timing]] = {name: [] for name in ways}
    time.sleep(5)  # a run that reserves memory does so while it sets up
    for step in range(repeats):
        for name, save in ways.items():
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            timings[name].append(save(step, tensors))
    return timings


def table(timings: dict[str, list[Timing]]) -> str:
    """The first save apart, then the median and the range of the others."""
    lines = [f"{'':34} {'stall of the first':>20} {'stall of later saves (min - max)':>36} {'until on disk':>15}"]
    for name, entries in timings.items():
        later = [entry.stall_seconds for entry in entries[1:]]
        total = statistics.median(entry.total_seconds for entry in entries[1:])
        spread = f"{statistics.median(later):.3f} s ({min(later):.3f} - {max(later):.3f})"
        lines.append(f"{name:34} {entries[0].stall_seconds:18.3f} s {spread:>36} {total:13.3f} s")
    return "\n".join(lines)


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures hold for."""
    if device.type == "cpu":
        models = [
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ]
        name = models[0] if models else platform.machine()
    else:
        name = torch.get_device_module(device).get_device_name()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() or "unknown",
        "device": name,
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "system": platform.platform(),
    }


def main() -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="result files, without their suffix")
    parser.add_argument("--repeats", type=int, default=7, help="saves with each way")
    parser.add_argument("--folder", type=Path, help="where to save to (default: the system's temporary folder)")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert device is not None
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        tensors = training_state(device)
        timings = measure(Path(folder), tensors, arguments.repeats)
    size = sum(tensor.nbytes for tensor in tensors.values())
    about = {
        "command": f"python benchmarks/checkpoint_stall.py --repeats {arguments.repeats}",
        "state_bytes": size,
        **machine(device),
    }
    report = f"state of {size / 1e6:.0f} MB on {about['device']}, torch {torch.__version__}, commit {about['commit']}\n"
    report += table(timings) + "\n"
    print(report)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results = {name: [vars(entry) for entry in entries] for name, entries in timings.items()}
    arguments.out.with_suffix(".json").write_text(json.dumps(about | {"saves": results}, indent=1) + "\n")
    arguments.out.with_suffix(".log").write_text(f"$ {about['command']}\n{report}")


if __name__ == "__main__":
    main()
