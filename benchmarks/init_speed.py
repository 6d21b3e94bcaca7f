"""Speed of counter-based initialisation, and whether an accelerator gives the values of the CPU.

    python benchmarks/init_speed.py --device cuda --elements 8000000000 --out benchmarks/results/init/h200.json

Fills one float32 parameter a few times; the best time counts, the first one is printed too. On an accelerator, stretches
at the beginning, in the middle and at the end of it are then compared with the CPU's, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from phalanx.counter_random import normal_values, stream_key  # noqa: E402
from phalanx.layout.initial_values import fill_initial  # noqa: E402
from phalanx.nn.parameters import InitRule  # noqa: E402

NAME, SEED, STD = "blocks.0.mlp.up.weight", 0, 0.02
COMPARED = 4_200_000
"""Values compared with the CPU at each of three places."""


def fill_seconds(tensor: Tensor, repeats: int) -> list[float]:
    """Wall time of each fill."""
    seconds = []
    for _ in range(repeats):
        synchronise(tensor.device)
        start = time.perf_counter()
        fill_initial(tensor, NAME, InitRule.normal(STD), SEED)
        synchronise(tensor.device)
        seconds.append(time.perf_counter() - start)
    return seconds


def synchronise(device: torch.device) -> None:
    """Wait for the device's work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def compare_with_cpu(tensor: Tensor) -> dict[str, int]:
    """How many float32 values differ from those computed on the CPU, and by how many units in the last place at most."""
    key = stream_key("initial values", SEED, NAME)
    count = min(COMPARED, tensor.numel())
    differing = largest = compared = 0
    for start in sorted({0, (tensor.numel() - count) // 2, tensor.numel() - count}):
        here = tensor[start : start + count].cpu()
        expected = (normal_values(key, torch.arange(start, start + count)) * STD).to(torch.float32)
        distance = (ordered(here) - ordered(expected)).abs()
        compared += count
        differing += int((distance != 0).sum())
        largest = max(largest, int(distance.max()))
    return {"compared": compared, "differing": differing, "max_ulp": largest}


def ordered(values: Tensor) -> Tensor:
    """Integers in the order of the float32 values, neighbours one apart."""
    words = values.view(torch.int32).to(torch.int64)
    return torch.where(words < 0, -(words & 0x7FFFFFFF), words)


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures hold for."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    cpu = next(
        (x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x),
        platform.machine(),
    )
    return {
        "commit": commit.stdout.strip() or "unknown",
        "device": cpu if device.type == "cpu" else torch.get_device_module(device).get_device_name(),
        "cpu": cpu,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }


def main() -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda (NVIDIA and AMD)")
    parser.add_argument("--elements", type=int, default=2**24, help="values to fill")
    parser.add_argument("--repeats", type=int, default=5, help="times to fill them")
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's)")
    parser.add_argument("--out", type=Path, help="result file")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    result: dict[str, Any] = {"command": f"python {' '.join(sys.argv)}", **machine(device)}
    tensor = torch.empty(arguments.elements, device=device)
    seconds = fill_seconds(tensor, arguments.repeats)
    if device.type != "cpu":
        result["against_cpu"] = compare_with_cpu(tensor)
    result |= {
        "elements": arguments.elements,
        "seconds": seconds,
        "values_per_second": arguments.elements / min(seconds),
    }
    print(
        f"{result['device']}, {result['threads']} CPU threads: {result['values_per_second'] / 1e6:,.1f}M values/s",
        end="",
    )
    print(f" (best of {len(seconds)}; the first took {seconds[0]:.3f} s)")
    if "against_cpu" in result:
        print(
            "of {compared:,} values, {differing:,} differ from the CPU's, by {max_ulp} ulp at most".format(
                **result["against_cpu"]
            )
        )
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
