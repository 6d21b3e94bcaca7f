"""Faults in real training on two accelerators of one host: what finds them, and how long training stands still.

    python benchmarks/faults_on_devices.py --out benchmarks/results/faults/h100

Parts (rows of the fault table in benchmarks/results/faults): `chaos` (random faults over NCCL, ranks forked of a process
that has loaded PyTorch, compile caches cold and then warm), `bitflip` (two replicas), `slow` (a rank whose device comes
late), `device` (an assertion in a kernel, one that does not end, kernels that slow one rank down), `links` (the same steps
without peer access), `reshard` (parameters that go through layouts), `replay` (a step done again), `spike` (bf16), `memory`
(ten times out of memory on a full device), `checkpoint` (the share of one of eight ranks of an 8B model) and `cost` (hashes
and heartbeats of a 1B model). Parts that share the devices run side by side; no part outlives its limit.
Writes OUT.json after each part. --small tries the script itself on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from phalanx.chaos.run import compare_ends
from phalanx.checkpoint.reader import read_tensors
from phalanx.training.safeguards.replicas import same_bits
from phalanx.training.safeguards.step_replay import FAULT_CLASS
from token_data import write_token_folder

SMALL_RUN = """
model: {{n_layers: 4, d_model: 256, n_heads: 4, n_kv_heads: 2, d_ff: 512, vocab_size: 512, max_positions: 2048}}
data: {{sources: ["{data}"], sequence_length: 128}}
layout: {{global_batch: 16, microbatch: 4, precision: bf16}}
optimizer: {{lr: 1e-3, warmup_steps: 5}}
training: {{steps: 100, tensorboard: false, log_every: 10, deterministic: true}}
checkpoint: {{every: 10}}
evaluation: {{samples: 8}}
restart: {{heartbeat_s: 3.0, backoff_s: 0.0, max: 20}}
"""
LARGE_MODEL = ["model.n_layers=16", "model.d_model=2048", "model.n_heads=16", "model.n_kv_heads=8", "model.d_ff=5632"]
"""About a billion parameters with the vocabulary of LARGE_MODEL_MORE."""
LARGE_MODEL_MORE = ["model.vocab_size=32768", "data.sequence_length=2048", "layout.global_batch=16"]


class Bench:
    """What all parts share: the folder, the run file and how processes are started and ended."""

    def __init__(self, folder: Path, logs: Path, *, small: bool, most_s: float = 600.0) -> None:
        """Use `folder` and `logs`. most_s: seconds after which each command is ended, whatever its own limit is."""
        self.folder, self.logs, self.small, self.most_s = folder, logs, small, most_s
        described = folder / "device_faults-1.0.dist-info"
        described.mkdir(parents=True)
        (described / "METADATA").write_text("Metadata-Version: 2.1\nName: device-faults\nVersion: 1.0\n")
        (described / "entry_points.txt").write_text("[phalanx.callbacks]\ndevice_fault = device_faults:DeviceFault\n")
        self.run_file = folder / "run.yaml"
        text = SMALL_RUN.format(
            data=write_token_folder(folder / "data", train_tokens=500_000, validation_tokens=50_000)
        )
        if small:
            text = (
                text.replace("256", "32")
                .replace("n_layers: 4", "n_layers: 1")
                .replace("sequence_length: 128", "sequence_length: 16")
            )
        self.run_file.write_text(text)

    def call(
        self, name: str, *words: str, limit_s: float, devices: str = "0,1", more: Mapping[str, str] | None = None
    ) -> tuple[int | None, float, str]:
        """Run `phalanx WORDS`; return exit code (None: ended after the limit), seconds and what it said."""
        log = self.logs / f"{name}.log"
        path = os.pathsep.join([str(self.folder), str(Path(__file__).parent), *sys.path])
        environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": devices, "OMP_NUM_THREADS": "1"}
        # Deterministic products of cuBLAS need workspaces of one size.
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / f"compiled-{name}")
        began = time.monotonic()
        with log.open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "phalanx", *words, *(["cluster.device=cpu"] if self.small else [])],
                env={**environment, **(more or {})},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(5 * limit_s if self.small else min(limit_s, self.most_s))
            except subprocess.TimeoutExpired:
                code = None
                process.terminate()
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return code, time.monotonic() - began, log.read_text(errors="replace")

    def train(
        self,
        name: str,
        ranks: int,
        *words: str,
        limit_s: float,
        devices: str = "0,1",
        more: Mapping[str, str] | None = None,
    ) -> tuple[int | None, float, str]:
        """Run `phalanx train` in the folder `name`."""
        return self.call(
            name,
            *("train", str(self.run_file), "--run-dir", str(self.folder / name), "--nproc", str(ranks)),
            *words,
            limit_s=limit_s,
            devices=devices,
            more=more,
        )

    def read(self, name: str, file: str = "events.jsonl") -> list[dict[str, Any]]:
        """Return the rows of a run's log."""
        path = self.folder / name / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fault_callbacks(*options: dict[str, Any]) -> str:
    """Return the override that puts faults into a run."""
    return f"training.callbacks={json.dumps([{'name': 'device_fault', 'options': one} for one in options])}"


def run_chaos(bench: Bench, name: str, *words: str, limit_s: float) -> dict[str, Any]:
    """Run `phalanx chaos`; return its table's lines and how long ranks took from their start to their first step."""
    out = bench.folder / name
    code, seconds, said = bench.call(
        f"{name}-command",
        *("chaos", str(bench.run_file), "--nproc", "2", "--out", str(out), *words),
        limit_s=limit_s,
    )
    starts = []
    for log in sorted(out.glob("faults-*/steps.log")):
        rows = [line.split() for line in log.read_text().splitlines()]
        starts += [float(b[0]) - float(a[0]) for a, b in pairwise(rows) if a[1] == "start" != b[1]]
    events = [json.loads(line) for line in _lines(out / "undisturbed" / "metrics.jsonl")]
    return {
        "code": code,
        "seconds": seconds,
        "first_step_cold_s": events[0].get("step_seconds") if events else None,
        "start_to_first_step_s": starts,
        "said": said.splitlines()[-40:],
        "faults": [line for log in sorted(out.glob("run-*/faults.jsonl")) for line in _lines(log)],
    }


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def random_faults(bench: Bench) -> dict[str, Any]:
    """Inject faults of all usual kinds into a compiled run sharded over two ranks (G01, G02, G11, G12)."""
    return run_chaos(
        bench, "chaos", "layout.dp_shard=2", "--faults", "kill,segfault,abort,error,hang,stop,save,damage,kill,kill",
        "--faults-per-run", "10", "--count", "20", "--seed", "3", "--minutes", "5", "training.steps=120",
        limit_s=300,
    )  # fmt: skip


def slow_ranks(bench: Bench) -> dict[str, Any]:
    """Keep the device of one rank busy for twice a step's time before each of forty steps (G08)."""
    return run_chaos(
        bench, "slow", "layout.dp_shard=2", "training.compile=false", "--faults", "slow", "--faults-per-run", "1",
        "--count", "1", "--seed", "1", "--minutes", "1", "training.steps=80",
        limit_s=110,
    )  # fmt: skip


def flipped_bits(bench: Bench) -> dict[str, Any]:
    """Flip bits of parameters of one of two replicas (G06, G07)."""
    return run_chaos(
        bench, "bitflip", "layout.dp_replicate=2", "layout.dp_shard=1", "training.compile=false",
        "--faults", "bitflip", "--faults-per-run", "4", "--count", "4", "--seed", "1", "--minutes", "0.5",
        limit_s=110,
    )  # fmt: skip


def device_faults(bench: Bench) -> dict[str, Any]:
    """Have a kernel assert, one that does not end, and kernels beside the steps of one rank (G02, G03, G08)."""
    markers = {kind: bench.folder / f"{kind}.marker" for kind in ("assert", "sleep", "slow")}
    kinds = [("slow", 60, 1)] if bench.small else [("assert", 8, 1), ("sleep", 22, 0), ("slow", 60, 1)]
    chosen = [
        {"kind": kind, "marker": str(markers[kind]), "step": step, "rank": rank}
        for kind, step, rank in kinds
        if not bench.small
    ]
    code, seconds, said = bench.train(
        "device", 2, "layout.dp_shard=2", "training.compile=false", "training.steps=110", fault_callbacks(*chosen),
        limit_s=110,
    )  # fmt: skip
    happened = {kind: float(path.read_text()) for kind, path in markers.items() if path.exists()}
    straggler = [row for row in bench.read("device") if row["kind"] in ("straggler", "resume", "start")]
    faults = bench.read("device", "faults.jsonl")
    return {"code": code, "seconds": seconds, "happened": happened, "faults": faults, "events": straggler,
            "said": said.splitlines()[-60:]}  # fmt: skip


def links(bench: Bench) -> dict[str, Any]:
    """Train the same steps with peer access and without it (G10)."""
    losses = []
    for name, more in (("peer", {}), ("no-peer", {"NCCL_P2P_DISABLE": "1"})):
        bench.train(
            name, 2, "layout.dp_shard=2", "training.compile=false", "training.steps=20", limit_s=50, more=more
        )  # fmt: skip
        losses.append([row["loss"] for row in bench.read(name, "metrics.jsonl")])
    apart = [abs(a - b) for a, b in zip(*losses, strict=False)]
    return {"steps": [len(one) for one in losses], "largest_difference": max(apart, default=None), "losses": losses}


def reshard(bench: Bench) -> dict[str, Any]:
    """Take parameters from two shards to one device, two of tensor parallelism, two stages and back to shards (G05).

    A learning rate of 1e-38 changes no bit of a parameter, so that each place has a step to do and a checkpoint to write.
    """
    places = (
        (2, "dp_shard=2"),
        (1, "dp_shard=1"),
        (2, "tp=2", "dp_shard=1"),
        (2, "pp=2", "dp_shard=1"),
        (2, "dp_shard=2"),
    )
    small = ["model.n_layers=2"] if bench.small else []
    codes, checkpoints = [], []
    for number, (ranks, *layout) in enumerate(places):
        step = 10 + number
        still = [] if number == 0 else ["optimizer.lr=1e-38"]
        code, _, _ = bench.train(
            "reshard", ranks, *layout, *still, *small, "--until", str(step), "training.compile=false",
            "checkpoint.keep_last=10", limit_s=50,
        )  # fmt: skip
        codes.append(code)
        checkpoints.append(bench.folder / "reshard" / "checkpoints" / f"step-{step:08d}")
    first, *others = [read_tensors(path, "model.") for path in checkpoints]
    equal = [
        tensors.keys() == first.keys() and all(same_bits(tensors[name], first[name]) for name in first)
        for tensors in others
    ]
    moved = [sum(not same_bits(x, torch.zeros_like(x)) for x in tensors.values()) for tensors in (first, *others)]
    return {"places": places, "codes": codes, "tensors": moved, "same_bits_as_first": equal}


def replay(bench: Bench) -> dict[str, Any]:
    """Multiply the gradients of one step by 10,000 once, and have it done again, beside a run without (G07)."""
    steps = 45 if bench.small else 70
    words = ("layout.dp_shard=2", "training.compile=false", f"training.steps={steps}", "safeguards.replay=true")
    marker = bench.folder / "replay.marker"
    fault = fault_callbacks({"kind": "spike", "marker": str(marker), "step": 41, "rank": 0})
    for name, more in (("replay-none", ()), ("replay", (fault,))):
        code, _, said = bench.train(name, 2, *words, *more, limit_s=60)
    same, apart = compare_ends(bench.folder / "replay", bench.folder / "replay-none")
    seconds = {row["step"]: row["step_seconds"] for row in bench.read("replay", "metrics.jsonl")}
    return {"code": code, "same_bits": same, "apart": apart, "happened": marker.exists(),
            "events": [row for row in bench.read("replay") if row["kind"] == FAULT_CLASS],
            "step_s": seconds.get(41), "median_s": statistics.median(list(seconds.values())[5:] or [0.0]),
            "said": said.splitlines()[-20:]}  # fmt: skip


def spikes(bench: Bench) -> dict[str, Any]:
    """Multiply the gradients of one step of a bf16 run by 10,000, with each policy, beside a run without."""
    found: dict[str, Any] = {}

    def disturb(policy: str, device: str) -> None:
        marker = bench.folder / f"spike-{policy}.marker"
        words = (
            []
            if policy == "none"
            else [fault_callbacks({"kind": "spike", "marker": str(marker), "step": 45, "rank": 0})]
        )
        on_spike = "warn" if policy == "none" else policy
        code, _, said = bench.train(
            f"spike-{policy}", 1, f"safeguards.on_spike={on_spike}", "training.compile=false", "training.steps=70", *words,
            limit_s=70, devices=device,
        )  # fmt: skip
        rows = {row["step"]: row["loss"] for row in bench.read(f"spike-{policy}", "metrics.jsonl")}
        events = [row for row in bench.read(f"spike-{policy}") if row["kind"] in ("spike", "rewind")]
        found[policy] = {"code": code, "losses": rows, "events": events, "said": said.splitlines()[-10:]}

    run_together(
        [lambda policy=policy, device=device: disturb(policy, device)
         for policy, device in (("none", "0"), ("warn", "1"), ("skip", "0"), ("rewind", "1"))]
    )  # fmt: skip
    return found


def memory_events(bench: Bench) -> dict[str, Any]:
    """Run out of memory ten times in one run on a full device; compare losses with a run that did not."""
    words = [
        "model.n_layers=2", "model.d_model=1024", "model.n_heads=16", "model.n_kv_heads=16", "model.d_ff=4096",
        "layout.global_batch=4096", "training.steps=14", "training.compile=false", "checkpoint.every=null",
        "optimizer.lr=1e-4", "training.deterministic=false",
    ]  # fmt: skip
    if bench.small:
        words = [*words, "model.n_layers=1", "model.d_model=64", "model.n_heads=4", "model.n_kv_heads=4", "model.d_ff=64",
                 "layout.global_batch=64"]  # fmt: skip
    batch = "64" if bench.small else "4096"
    smooth, _, _ = bench.train("memory-none", 1, *words, "layout.microbatch=64", limit_s=45, devices="0")
    fault = {"kind": "fill", "marker": str(bench.folder / "fill.marker"), "step": 2, "rank": 0}
    chosen = [] if bench.small else [fault_callbacks(fault)]
    code, seconds, said = bench.train(
        "memory", 1, *words, f"layout.microbatch={batch}", *chosen, limit_s=75, devices="0"
    )  # fmt: skip
    losses = [
        {row["step"]: row["loss"] for row in bench.read(name, "metrics.jsonl")} for name in ("memory-none", "memory")
    ]
    apart = [abs(losses[0][step] - losses[1][step]) for step in losses[0].keys() & losses[1].keys()]
    return {"code": code, "undisturbed_code": smooth, "seconds": seconds, "steps": len(losses[1]),
            "events": [row for row in bench.read("memory") if row["kind"] == "less_memory"],
            "largest_difference": max(apart, default=None), "losses": losses, "said": said.splitlines()[-40:]}  # fmt: skip


STALL = """
import json, sys, tempfile, time, torch
from pathlib import Path
import checkpoint_stall as c
c.LAYERS, c.WIDTH = int(sys.argv[1]), int(sys.argv[2])
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
with tempfile.TemporaryDirectory(dir=sys.argv[3]) as folder:
    tensors = c.training_state(device)
    size = sum(x.nbytes for x in tensors.values())
    print(json.dumps({"bytes": size}), flush=True)
    for name, asynchronous in (("background", True), ("synchronous", False)):
        save = c.ours(Path(folder, name), asynchronous=asynchronous, reserve=tensors if asynchronous else None)
        time.sleep(8 if asynchronous and size > 1e9 else 0)
        for step in range(3 if asynchronous else 2):
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            timing = save(step, tensors)
            print(json.dumps({"way": name, "stall_s": timing.stall_seconds, "total_s": timing.total_seconds}), flush=True)
"""


def checkpoint_stall(bench: Bench) -> dict[str, Any]:
    """Save the state of a billion parameters, an eighth of an 8B model's, in the background and synchronously."""
    script = bench.folder / "stall.py"
    script.write_text(STALL)
    sizes = ["1", "128"] if bench.small else ["5", "4096"]
    log = bench.logs / "checkpoint.log"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "1"}
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, str(script), *sizes, str(bench.folder)],
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(240)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    rows = [json.loads(line) for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]
    return {"code": process.returncode, "rows": rows}


def safeguard_cost(bench: Bench) -> dict[str, Any]:
    """Time hashes and heartbeats in a run of a billion parameters on two replicas."""
    marker = bench.folder / "cost.json"
    large = ["layout.global_batch=4"] if bench.small else [*LARGE_MODEL, *LARGE_MODEL_MORE]
    code, _, said = bench.train(
        "cost", 2, *large, "layout.dp_replicate=2", "layout.dp_shard=1", "layout.microbatch=2", "training.steps=30",
        "training.deterministic=false", "safeguards.compare_replicas=5", "checkpoint.every=null", "checkpoint.last=false",
        fault_callbacks({"kind": "cost", "marker": str(marker), "step": 1, "rank": 0}), limit_s=110,
    )  # fmt: skip
    if not marker.exists():
        return {"code": code, "said": said.splitlines()[-40:]}
    times = json.loads(marker.read_text())
    step, hashed = statistics.median(times["step"][10:]), statistics.median(times["hash"][1:])
    beats = sum(times["heartbeat"]) / len(times["step"])
    return {"code": code, "step_s": step, "hash_s": hashed, "heartbeats_a_step_s": beats,
            "heartbeat_share": beats / step, "hash_share_every": {n: hashed / n / step for n in (5, 25, 100)},
            "seconds": times}  # fmt: skip


Part = Callable[[Bench], dict[str, Any]]
PARTS: dict[str, Part] = {
    "chaos": random_faults,
    "bitflip": flipped_bits,
    "slow": slow_ranks,
    "device": device_faults,
    "links": links,
    "reshard": reshard,
    "replay": replay,
    "spike": spikes,
    "memory": memory_events,
    "checkpoint": checkpoint_stall,
    "cost": safeguard_cost,
}
WAVES = (
    ("chaos", "bitflip", "device", "links", "reshard", "replay", "spike"),
    ("memory", "checkpoint"),
    ("slow",),
    ("cost",),
)
"""Parts that run side by side: the first measure no step, and of the second each has a device of its own."""


def run_together(calls: Sequence[Callable[[], None]]) -> None:
    """Run all calls at once and wait for them."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()


def main() -> None:
    """Run the parts, and write what they found after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="result files, without their suffix")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run")
    parser.add_argument("--seconds", type=float, default=600.0, help="most for each command, whatever its own limit")
    parser.add_argument("--small", action="store_true", help="try the script on a CPU")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    logs = arguments.out.with_name(f"{arguments.out.name}-logs")
    logs.mkdir(exist_ok=True)
    device = "CPU" if arguments.small else torch.cuda.get_device_name()
    found: dict[str, Any] = {"command": " ".join(sys.argv), "torch": torch.__version__, "device": device}
    began = time.monotonic()

    def run_part(bench: Bench, name: str) -> None:
        start = time.monotonic()
        try:
            result = PARTS[name](bench)
        # The other parts go on.
        except Exception as error:
            result = {"error": repr(error)}
        found[name] = {**result, "began_s": start - began, "took_s": time.monotonic() - start}
        text = json.dumps(found, indent=1, default=str)
        arguments.out.with_suffix(".json").write_text(text + "\n")
        brief = {key: value for key, value in result.items() if key not in ("losses", "seconds", "said", "faults")}
        print(f"{time.monotonic() - began:6.1f} s  {name}: {json.dumps(brief, default=str)[:1500]}", flush=True)
        for line in result.get("said", [])[-20:]:
            print(f"    {line}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), logs, small=arguments.small, most_s=arguments.seconds)
        for wave in WAVES:
            chosen = [name for name in wave if name in arguments.parts.split(",")]
            if chosen:
                run_together([lambda name=name: run_part(bench, name) for name in chosen])  # type: ignore[misc]


if __name__ == "__main__":
    main()
