"""Structures a second that `phalanx predict` streams to files, and its peak memory, over many small made ones.

    python benchmarks/streamed_predictions.py RUN WORK --out benchmarks/results/materials/streamed_predictions.json
    python benchmarks/streamed_predictions.py RUN WORK --structures 10000000 --nproc 16 --kill-at 0.3 0.6 --out OUT

RUN: folder of a run of a materials model that knows H, C and O; where there is none, a small one is trained on made ones
first. Writes molecules of 3 to 6 atoms into WORK, 50,000 a file, and predicts them with `--nproc` processes, for each number
of structures that is asked for. In the memory of each stand the program, the model, one file and one part.
With `--kill-at 0.3 0.6` all processes are killed when these shares of the parts are there, and the same command is given
again: what was there must stay as it was. Started again with the same WORK it goes on with the parts that are missing; the
result then says of each start what it made. CPU time and peak memory are read from /proc twice a second.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
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
import numpy.typing as npt
import yaml

from data_loading import machine

FILE = 50_000
PART = 8192
"""Structures of a part of the predictions."""
TRAINED_ON = 2000
"""Molecules that RUN is trained on where it is not there."""
LOOK_S = 0.5


def made_molecules(seed: int, count: int) -> dict[str, npt.NDArray[Any]]:
    """Return `count` molecules of random elements on a jittered grid, as arrays of a source."""
    random = np.random.default_rng(seed)
    atoms = random.integers(3, 7, count)
    grid = np.stack(np.meshgrid(*[np.arange(2)] * 3, indexing="ij"), -1).reshape(-1, 3) * 1.4
    places = np.concatenate([grid[:number] for number in atoms])
    positions = (places + random.uniform(-0.1, 0.1, places.shape)).astype("f4")
    species = random.choice([1, 6, 8], len(places)).astype(np.uint8)
    return {"ptr": np.concatenate(([0], np.cumsum(atoms))), "z": species, "pos": positions}


def write_file(path: Path) -> None:
    """Write the molecules of one file, whole or not at all; its name is the seed."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, allow_pickle=False, **made_molecules(int(path.stem), FILE))
    part.replace(path)


def train(run: Path) -> None:
    """Train a PaiNN of two blocks and 16 channels on springs between all atoms of made molecules, 1.4 A long at rest."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arrays = made_molecules(2**31, TRAINED_ON)
        energy, forces = [], np.zeros(arrays["pos"].shape)
        for start, end in zip(arrays["ptr"], arrays["ptr"][1:], strict=False):
            vectors = arrays["pos"][start:end, None].astype("f8") - arrays["pos"][None, start:end]
            distances = np.linalg.norm(vectors, axis=-1) + np.eye(end - start) * 1.4
            energy.append(0.25 * np.square(distances - 1.4).sum())
            forces[start:end] = -((1 - 1.4 / distances)[..., None] * vectors).sum(1)
        np.savez(folder / "springs.npz", allow_pickle=False, **arrays, energy=np.array(energy), forces=forces)
        (folder / "run.yaml").write_text(yaml.safe_dump(run_file(folder)))
        for words in (["data", "prepare-graphs"], ["train", "--run-dir", str(run)]):
            subprocess.run([sys.executable, "-m", "phalanx", *words, str(folder / "run.yaml")], check=True)


def run_file(folder: Path) -> dict[str, Any]:
    """Return the run file of the model that is trained, on data in `folder`."""
    return {
        "model": {
            "family": "materials",
            "body": "painn",
            "n_layers": 2,
            "d_model": 16,
            "n_radial": 8,
            "cutoff": 5.0,
            "envelope": "polynomial",
            "max_atomic_number": 9,
            "energy": {"loss": "mae", "force_weight": 1.0},
            "branches": [{"name": "springs"}],
        },
        "data": {
            "sources": [
                {
                    "name": "springs",
                    "path": str(folder / "springs.npz"),
                    "labels": {"energy": "eV", "forces": "eV/A"},
                }
            ],
            "prepared": str(folder / "graphs"),
            "cutoff": 5.0,
            "validation_fraction": 0.05,
        },
        "layout": {"global_batch": 16, "precision": "fp32"},
        "optimizer": {"lr": 0.003},
        "training": {"steps": 100, "log_every": 20, "tensorboard": False},
        "cluster": {"device": "cpu"},
    }


def measure(asked: argparse.Namespace, structures: int) -> dict[str, Any]:
    """Predict `structures` molecules; return times, rates and peak memory of all processes that did it."""
    folder = asked.work / str(structures)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{number:05d}.npz" for number in range(structures // FILE)]
    with multiprocessing.Pool(asked.nproc) as pool:
        pool.map(write_file, [path for path in files if not path.exists()], chunksize=1)
    words = [sys.executable, "-m", "phalanx", "predict", str(asked.run), str(folder / "*.npz"), "--json"]
    words += ["--device", asked.device, "--out", str(folder / "out"), "--part", str(PART)]
    if asked.nproc > 1:
        words += ["--nproc", str(asked.nproc)]
    total = -(-structures // PART)
    shares = [round(share * total) for share in asked.kill_at]
    starts = [one for share in shares if (one := predict(words, folder, share)) is not None]
    starts.append(predict(words, folder, None) or {})
    said = starts[-1].pop("said")
    assert said["structures"] == structures and said["without"] == 0 and said["out"]
    cpu, seconds = (sum(one[name] for one in starts) for name in ("cpu_seconds", "seconds"))
    return {
        "structures": structures,
        "processes": asked.nproc,
        "device": asked.device,
        "atoms": said["atoms"],
        "seconds": round(seconds, 1),
        "structures_per_second": round(structures / seconds),
        "cpu_seconds": round(cpu, 1),
        "structures_per_cpu_second": round(structures / cpu),
        "peak_memory_mb": max(one["peak_memory_mb"] for one in starts),
        "written_mb": round(sum(path.stat().st_size for path in (folder / "out").glob("*")) / 1e6, 1),
        "starts": starts,
        "load_average": os.getloadavg()[0],
    }


def predict(words: list[str], folder: Path, until: int | None) -> dict[str, Any] | None:
    """Run `words` until there are `until` parts, then kill it and its ranks, or to its end; return what they took.

    None where so many parts are there already. Parts that are there when it begins must be there when it ends, unchanged.
    """
    before = parts_of(folder)
    if until is not None and len(before) >= until:
        return None
    begin = time.perf_counter()
    used: dict[int, tuple[float, float]] = {}
    with tempfile.TemporaryFile() as output:
        # Ranks have process groups of their own, in the session of the command.
        process = subprocess.Popen(words, stdout=output, start_new_session=True)
        while process.poll() is None and (until is None or len(parts_of(folder)) < until):
            used |= used_by(process.pid)
            time.sleep(LOOK_S)
        if until is not None:
            assert process.returncode is None
            kill_session(process.pid)
        code = process.wait()
        output.seek(0)
        said = output.read()
    after = parts_of(folder)
    assert code == (-signal.SIGKILL if until else 0) and before.items() <= after.items()
    row = {
        "parts_before": len(before),
        "parts_after": len(after),
        "seconds": round(time.perf_counter() - begin, 1),
        "cpu_seconds": round(sum(seconds for seconds, _ in used.values()), 1),
        "peak_memory_mb": round(max(peak for _, peak in used.values())),
        "sum_of_peaks_mb": round(sum(peak for _, peak in used.values())),
    }
    return row if until else {**row, "said": json.loads(said)}


def used_by(session: int) -> dict[int, tuple[float, float]]:
    """Return CPU seconds and peak resident memory (MB) so far of each process of a session."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            peaks = [line for line in (folder / "status").read_text().splitlines() if line.startswith("VmHWM")]
        except OSError:
            continue  # ended meanwhile
        if int(fields[3]) == session and peaks:
            seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            found[int(folder.name)] = seconds, int(peaks[0].split()[1]) / 1024
    return found


def kill_session(session: int) -> None:
    """Kill every process of a session, the command before its ranks, and wait until the ranks are gone."""
    os.kill(session, signal.SIGKILL)
    while ranks := used_by(session).keys() - {session}:
        for rank in ranks:
            try:
                os.kill(rank, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--structures", type=int, nargs="+", default=[50_000, 500_000])
    parser.add_argument("--nproc", type=int, default=1, help="ranks that share the structures")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kill-at", type=float, nargs="*", default=[], help="shares of the parts, ascending")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    if not asked.run.exists():
        train(asked.run)
    rows = [measure(asked, structures) for structures in asked.structures]
    command = shlex.join(["python", "benchmarks/streamed_predictions.py", *sys.argv[1:]])
    asked.out.write_text(json.dumps({"command": command, "machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
