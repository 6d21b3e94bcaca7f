"""Structures a second that `phalanx predict` streams to files, and its peak memory, over many small made ones.

    python benchmarks/streamed_predictions.py RUN WORK --out benchmarks/results/materials/streamed_predictions.json

RUN: folder of a run of a materials model that knows H, C and O. Writes molecules of 3 to 6 atoms into WORK, 50,000 a file,
and predicts them with one process on the CPU, for each number of structures that is asked for. In its memory stand the
program, the model, one file and one part, whatever the number.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from data_loading import machine

FILE = 50_000


def write_file(path: Path, seed: int) -> None:
    """Write `FILE` molecules of random elements on a jittered grid."""
    random = np.random.default_rng(seed)
    atoms = random.integers(3, 7, FILE)
    grid = np.stack(np.meshgrid(*[np.arange(2)] * 3, indexing="ij"), -1).reshape(-1, 3) * 1.4
    places = np.concatenate([grid[:count] for count in atoms])
    positions = (places + random.uniform(-0.1, 0.1, places.shape)).astype("f4")
    species = random.choice([1, 6, 8], len(places)).astype(np.uint8)
    np.savez(path, ptr=np.concatenate(([0], np.cumsum(atoms))), z=species, pos=positions)


def measure(run: Path, work: Path, structures: int) -> dict[str, Any]:
    """Predict `structures` molecules in a process of its own; return its time, rate and peak memory."""
    folder = work / str(structures)
    folder.mkdir(parents=True)
    for number in range(structures // FILE):
        write_file(folder / f"{number:05d}.npz", number)
    words = [sys.executable, "-m", "phalanx", "predict", str(run), str(folder / "*.npz"), "--device", "cpu", "--json"]
    begin = time.perf_counter()
    process = subprocess.Popen([*words, "--out", str(folder / "out")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = json.loads(process.stdout.read())
    _, code, used = os.wait4(process.pid, 0)
    seconds, cpu = time.perf_counter() - begin, used.ru_utime + used.ru_stime
    assert code == 0 and said["structures"] == structures and said["without"] == 0
    return {
        "structures": structures,
        "atoms": said["atoms"],
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "structures_per_cpu_second": round(structures / cpu),
        "peak_memory_mb": round(used.ru_maxrss / 1024),
        "written_mb": round(sum(path.stat().st_size for path in (folder / "out").glob("*")) / 1e6, 1),
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--structures", type=int, nargs="+", default=[50_000, 500_000])
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    rows = [measure(asked.run, asked.work, structures) for structures in asked.structures]
    command = f"python benchmarks/streamed_predictions.py RUN WORK --structures {' '.join(map(str, asked.structures))}"
    asked.out.write_text(json.dumps({"command": command, "machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
