"""Structures a second that `phalanx predict` streams to files, and its peak memory, over many small made ones.

    python benchmarks/streamed_predictions.py RUN WORK --out benchmarks/results/materials/streamed_predictions.json

RUN: folder of a run of a materials model that knows H, C and O. Writes molecules of 3 to 6 atoms into WORK, 50,000 a file,
and predicts them with one process on the CPU, for each number of structures that is asked for. In its memory stand the
program, the model, one file and one part, whatever the number. With `--kill-at 0.3 0.6` the process is killed when these
shares of the parts are there, and the same command is given again: what was there must stay as it was. Started again with
the same WORK it goes on with the parts that are missing; the result then says of each process what it made.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from data_loading import machine

FILE = 50_000
PART = 8192
"""Structures of a part of the predictions."""


def write_file(path: Path, seed: int) -> None:
    """Write `FILE` molecules of random elements on a jittered grid."""
    random = np.random.default_rng(seed)
    atoms = random.integers(3, 7, FILE)
    grid = np.stack(np.meshgrid(*[np.arange(2)] * 3, indexing="ij"), -1).reshape(-1, 3) * 1.4
    places = np.concatenate([grid[:count] for count in atoms])
    positions = (places + random.uniform(-0.1, 0.1, places.shape)).astype("f4")
    species = random.choice([1, 6, 8], len(places)).astype(np.uint8)
    np.savez(path, ptr=np.concatenate(([0], np.cumsum(atoms))), z=species, pos=positions)


def measure(run: Path, work: Path, structures: int, kills: list[float]) -> dict[str, Any]:
    """Predict `structures` molecules; return times, rates and peak memory of all processes that did it."""
    folder = work / str(structures)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(structures // FILE):
        if not (folder / f"{number:05d}.npz").exists():
            write_file(folder / f"{number:05d}.npz", number)
    words = [sys.executable, "-m", "phalanx", "predict", str(run), str(folder / "*.npz"), "--device", "cpu", "--json"]
    words += ["--out", str(folder / "out"), "--part", str(PART)]
    total = -(-structures // PART)
    processes = [one for share in kills if (one := predict(words, folder, round(share * total))) is not None]
    processes.append(predict(words, folder, None) or {})
    said = processes[-1].pop("said")
    assert said["structures"] == structures and said["without"] == 0 and said["out"]
    cpu = sum(one["cpu_seconds"] for one in processes)
    return {
        "structures": structures,
        "atoms": said["atoms"],
        "seconds": round(sum(one["seconds"] for one in processes), 1),
        "cpu_seconds": round(cpu, 1),
        "structures_per_cpu_second": round(structures / cpu),
        "peak_memory_mb": max(one["peak_memory_mb"] for one in processes),
        "written_mb": round(sum(path.stat().st_size for path in (folder / "out").glob("*")) / 1e6, 1),
        "processes": processes,
        "load_average": os.getloadavg()[0],
    }


def predict(words: list[str], folder: Path, until: int | None) -> dict[str, Any] | None:
    """Run `words` until there are `until` parts, then kill it, or to its end; return what the process took.

    None where so many parts are there already. Parts that are there when it begins must be there when it ends, unchanged.
    """
    before = parts_of(folder)
    if until is not None and len(before) >= until:
        return None
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(words, stdout=output)
        while until is not None and len(parts_of(folder)) < until:
            assert process.poll() is None
            time.sleep(2.0)
        if until is not None:
            process.kill()
        _, code, used = os.wait4(process.pid, 0)
        output.seek(0)
        said = output.read()
    after = parts_of(folder)
    assert code == (signal.SIGKILL if until else 0) and before.items() <= after.items()
    row = {
        "parts_before": len(before),
        "parts_after": len(after),
        "seconds": round(time.perf_counter() - begin, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_memory_mb": round(used.ru_maxrss / 1024),
    }
    return row if until else {**row, "said": json.loads(said)}


def parts_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Return time of writing (ns) and size of every finished part of predictions, by name, wherever it stands now."""
    found = {}
    for record in folder.glob("**/part-*.json"):
        status = record.with_suffix(".npz").stat()
        found[record.stem] = (status.st_mtime_ns, status.st_size)
    if not found:
        # In place, parts stand without their records.
        found = {path.stem: ((at := path.stat()).st_mtime_ns, at.st_size) for path in folder.glob("out/part-*.npz")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--structures", type=int, nargs="+", default=[50_000, 500_000])
    parser.add_argument("--kill-at", type=float, nargs="*", default=[], help="shares of the parts, ascending")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    rows = [measure(asked.run, asked.work, structures, asked.kill_at) for structures in asked.structures]
    command = shlex.join(["python", "benchmarks/streamed_predictions.py", *sys.argv[1:]])
    asked.out.write_text(json.dumps({"command": command, "machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
