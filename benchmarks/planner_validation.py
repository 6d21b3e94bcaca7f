"""Predictions of the planner beside measured runs, on 1, 2 and 4 devices: step time and peak memory of many layouts.

    phalanx calibrate --nproc 4 --out h200-x4.profile.yaml
    python benchmarks/planner_validation.py --profile h200-x4.profile.yaml --devices 4 --data data/text --out validation.json

Every prediction is made, and written to --out, before anything runs. Then each case is `phalanx train` for a few steps under
torchrun, several cases at a time where they need fewer devices than there are. What is done already in --out is not run
again, so that the work may be spread over several calls (--minutes); predictions of those are kept as they were. Times are
medians over the steps after --skip, from the run's own metrics.jsonl; memory is what rank 0's allocator gave out at most,
with the buffers that peers read. --predict-only runs nothing. --tiny runs the same layouts of tiny models on the CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from layout_speed import QUIET, ROOT, phalanx_command, run_environment, run_with_timeout
from phalanx.config.load import load_run
from phalanx.families.language.config import LanguageRun, require_language
from phalanx.families.registry import bind
from phalanx.files import write_atomically
from phalanx.hardware.calibrate.measure_machine import plain_machine
from phalanx.hardware.device_facts import device_facts
from phalanx.hardware.machine import Machine, load_machine
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import LayoutTable
from phalanx.planner.memory.model import Kernels, memory, rank_memory
from phalanx.planner.memory.probability import BESIDE, GIB, Beside, communicators, fits
from phalanx.planner.time.profile import NamedProfile, load_profile
from phalanx.planner.time.step_time import StepBreakdown
from phalanx.planner.time.timing import our_framework, step_times
from phalanx.planner.trace.traced_model import Kernel, TracedModel

RUN_FILE = ROOT / "examples/llama3-8b.yaml"
_LLAMA = "mlp=swiglu norm=rmsnorm positions=rope bias=false"
_GPT = "mlp=gelu norm=layernorm positions=learned bias=true n_kv_heads=null"
SHAPES = {
    "l1024": f"n_layers=16 d_model=1024 n_heads=8 n_kv_heads=4 d_ff=3584 vocab_size=32768 length=2048 {_LLAMA}",
    "l2048": f"n_layers=16 d_model=2048 n_heads=16 n_kv_heads=8 d_ff=8192 vocab_size=32768 length=4096 {_LLAMA}",
    "l4096": f"n_layers=8 d_model=4096 n_heads=32 n_kv_heads=8 d_ff=14336 vocab_size=32768 length=4096 {_LLAMA}",
    "l4096long": f"n_layers=8 d_model=4096 n_heads=32 n_kv_heads=8 d_ff=14336 vocab_size=32768 length=16384 {_LLAMA}",
    "l8192": f"n_layers=4 d_model=8192 n_heads=64 n_kv_heads=8 d_ff=28672 vocab_size=32768 length=4096 {_LLAMA}",
    "g2048": f"n_layers=16 d_model=2048 n_heads=16 d_ff=8192 vocab_size=32768 length=2048 {_GPT}",
    "g4096": f"n_layers=8 d_model=4096 n_heads=32 d_ff=16384 vocab_size=32768 length=2048 {_GPT}",
}
TINY = "n_layers=8 d_model=64 n_heads=4 n_kv_heads=4 d_ff=128 vocab_size=512 length=64 " + _LLAMA


@dataclass(frozen=True)
class Case:
    """One layout of one model."""

    devices: int
    shape: str
    accumulation: int
    """Micro-batches a step."""
    layout: str

    @property
    def name(self) -> str:
        """Unlike any other."""
        return f"{self.devices}x {self.shape} a{self.accumulation} {self.layout}"


_NONE, _FULL, _SELECTIVE = "recompute=none", "recompute=full", "recompute=selective"
CASES = (
    Case(1, "l1024", 1, f"microbatch=8 {_NONE}"),
    Case(1, "l1024", 2, f"microbatch=32 {_NONE}"),
    Case(1, "l2048", 4, f"microbatch=1 {_NONE}"),
    Case(1, "l2048", 1, f"microbatch=4 {_NONE}"),
    Case(1, "l2048", 2, f"microbatch=8 {_FULL}"),
    Case(1, "l2048", 2, f"microbatch=8 {_SELECTIVE}"),
    Case(1, "l4096", 1, f"microbatch=2 {_NONE}"),
    Case(1, "l4096", 4, f"microbatch=4 {_SELECTIVE}"),
    Case(1, "l4096", 1, f"microbatch=24 {_NONE}"),
    Case(1, "l4096long", 1, f"microbatch=1 {_FULL}"),
    Case(1, "l8192", 2, f"microbatch=1 {_NONE}"),
    Case(1, "g2048", 2, f"microbatch=16 {_NONE}"),
    Case(1, "g4096", 1, f"microbatch=8 {_SELECTIVE}"),
    Case(1, "l2048", 1, f"microbatch=2 precision=fp32 {_NONE}"),
    Case(1, "l1024", 1, f"microbatch=4 precision=fp64 {_NONE}"),
    Case(2, "l2048", 1, f"dp_shard=2 microbatch=4 reshard_after_forward=true {_NONE}"),
    Case(2, "l4096", 2, f"dp_shard=2 microbatch=2 reshard_after_forward=false {_NONE}"),
    Case(2, "l2048", 2, f"dp_replicate=2 dp_shard=1 zero=0 microbatch=4 {_NONE}"),
    Case(2, "l4096", 4, f"dp_shard=2 zero=1 microbatch=2 {_NONE}"),
    Case(2, "l4096", 2, f"dp_shard=2 zero=2 microbatch=2 {_SELECTIVE}"),
    Case(2, "l4096", 2, f"tp=2 dp_shard=1 microbatch=4 {_NONE}"),
    Case(2, "l8192", 1, f"tp=2 dp_shard=1 microbatch=2 {_SELECTIVE}"),
    Case(2, "l4096long", 1, f"cp=2 dp_shard=1 microbatch=1 {_NONE}"),
    Case(2, "l4096long", 1, f"cp=2 dp_shard=1 context=all_to_all microbatch=1 {_SELECTIVE}"),
    Case(2, "l2048", 8, f"pp=2 dp_shard=1 schedule=1f1b microbatch=2 {_NONE}"),
    Case(2, "g4096", 8, f"pp=2 dp_shard=1 schedule=interleaved_1f1b stages_per_rank=2 microbatch=4 {_FULL}"),
    Case(2, "l2048", 8, f"pp=2 dp_shard=1 schedule=zbv stages_per_rank=2 microbatch=2 {_NONE}"),
    Case(2, "l2048", 2, f"dp_shard=2 microbatch=1 reshard_after_forward=true precision=fp32 {_NONE}"),
    Case(2, "l4096", 8, f"pp=2 dp_shard=1 schedule=1f1b microbatch=1 precision=fp32 {_NONE}"),
    Case(2, "l1024", 1, f"dp_shard=2 microbatch=2 reshard_after_forward=false precision=fp64 {_NONE}"),
    Case(4, "l4096", 1, f"dp_shard=4 microbatch=4 reshard_after_forward=true {_NONE}"),
    Case(4, "l8192", 2, f"dp_shard=4 microbatch=2 reshard_after_forward=false {_NONE}"),
    Case(4, "g2048", 1, f"dp_shard=4 microbatch=16 reshard_after_forward=true {_SELECTIVE}"),
    Case(4, "l4096", 2, f"dp_replicate=2 dp_shard=2 microbatch=2 {_NONE}"),
    Case(4, "l4096", 1, f"tp=2 dp_shard=2 microbatch=4 {_NONE}"),
    Case(4, "l8192", 2, f"tp=4 dp_shard=1 microbatch=2 {_NONE}"),
    Case(4, "l4096", 8, f"pp=4 dp_shard=1 schedule=1f1b microbatch=2 {_NONE}"),
    Case(4, "l4096", 8, f"pp=4 dp_shard=1 schedule=interleaved_1f1b stages_per_rank=2 microbatch=2 {_NONE}"),
    Case(4, "l2048", 8, f"pp=4 dp_shard=1 schedule=zbv stages_per_rank=2 microbatch=2 {_NONE}"),
    Case(4, "l4096", 8, f"pp=2 dp_shard=2 schedule=1f1b microbatch=2 {_NONE}"),
    Case(4, "g4096", 4, f"pp=2 tp=2 dp_shard=1 schedule=1f1b microbatch=4 {_SELECTIVE}"),
    Case(4, "l4096long", 1, f"cp=2 dp_shard=2 microbatch=1 {_SELECTIVE}"),
    Case(4, "l4096long", 2, f"cp=4 dp_shard=1 microbatch=1 {_NONE}"),
)


def overrides(case: Case, options: argparse.Namespace) -> list[str]:
    """The command-line words of a case."""
    shape = dict(word.split("=") for word in (TINY if options.tiny else SHAPES[case.shape]).split())
    fields = dict(word.split("=") for word in case.layout.split())
    length = shape.pop("length")
    shards = int(fields.get("dp_shard", 1)) * int(fields.get("dp_replicate", 1))
    batch = shards * int(fields["microbatch"]) * case.accumulation
    return [
        "model.preset=null",
        *(f"model.{name}={value}" for name, value in shape.items()),
        f"model.max_positions={length}",
        f"data.sequence_length={length}",
        f"data.sources=[{Path(options.data).resolve()}]",
        *(f"layout.{word}" for word in case.layout.split()),
        f"layout.global_batch={batch}",
        f"training.steps={options.steps}",
        *QUIET,
        *(["training.compile=false", "cluster.device=cpu"] if options.tiny else []),
    ]


# --- predictions -------------------------------------------------------------------------------------------------------


def predict(case: Case, words: list[str], machine: Machine, named: NamedProfile) -> dict[str, Any]:
    """Step time and memory of a case, with the probability that it fits where the device's memory is known."""
    run = require_language(load_run(RUN_FILE, words), "this benchmark")
    layout = resolve_layout(bind(run), case.devices, case.devices)
    one = layout.table
    kernel = _kernel(run, machine)
    constants = named.collectives_on(machine)
    times = step_times(bind(run, TracedModel), one, machine, named.profile, constants=constants, attention=kernel)
    kernels = Kernels(kernel, run.training.compile is not False)
    copies = our_framework(bind(run, TracedModel), machine).copy_engines
    ranks = rank_memory(bind(run, TracedModel), layout, run.layout.recompute, kernels, peer_copies=copies)
    estimate = memory(bind(run, TracedModel), one, kernels, peer_copies=copies)
    beside = float(estimate.peer_buffers[0])
    return {
        "step_seconds": float(times.total[0]),
        "seconds_by_cause": {
            component.name.lower(): round(float(times.of(component)[0]), 6)
            for component in StepBreakdown
            if times.of(component)[0]
        },
        "memory_gib": (ranks[0].allocated + beside) / GIB,
        "worst_rank_memory_gib": float(estimate.held[0]) / GIB,
        "p_fits": _fits(machine, named, one, float(estimate.allocated[0]), beside),
    }


def _kernel(run: LanguageRun, machine: Machine) -> Kernel:
    return (
        "cpu"
        if machine.node.device == "CPU"
        else bind(run, TracedModel).likely_kernel(rocm=machine.node.device.startswith("MI"))
    )


def _fits(machine: Machine, named: NamedProfile, one: LayoutTable, allocated: float, peers: float) -> float | None:
    size = device_facts(machine.node.device).memory_bytes
    if size is None:
        return None
    beside = BESIDE["cuda"] if named.beside is None else Beside(**named.beside)
    held = torch.tensor([allocated], dtype=torch.float64).numpy()
    return float(fits(held, communicators(one), size, beside, peers)[0])


# --- runs --------------------------------------------------------------------------------------------------------------


def measure(
    case: Case, words: list[str], devices: list[int], options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Run one case on these devices of the machine and summarise its metrics."""
    command = [*phalanx_command(case.devices), "train", str(RUN_FILE)]
    command += ["--run-dir", str(folder), *words]
    seen = ",".join(map(str, devices))
    environment = run_environment()
    if not options.tiny:
        environment |= {"CUDA_VISIBLE_DEVICES": seen}
    start = time.monotonic()
    output, code = run_with_timeout(command, folder, environment, options.timeout)
    wall = time.monotonic() - start
    if code:
        lines = output.strip().splitlines()
        full = any("out of memory" in line.lower() for line in lines)
        return {"failed": code, "out_of_memory": full, "error": lines[-8:], "wall_seconds": wall}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "step_seconds": statistics.median(row["step_seconds"] for row in rows[options.skip :]),
        "step_seconds_all": [row["step_seconds"] for row in rows],
        "memory_gib": max((row["memory_peak_gib"] or 0.0) for row in rows) or None,
        "wall_seconds": wall,
    }


def run_cases(rows: list[dict[str, Any]], chosen: dict[str, Case], options: argparse.Namespace) -> None:
    """Measure the rows that have no result yet, as many at a time as there are devices for; --out grows with each."""
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as scratch:
        for count in (4, 2, 1):
            waiting = [
                row for row in rows if row["devices"] == count and "measured" not in row and row["case"] in chosen
            ]
            places: SimpleQueue[list[int]] = SimpleQueue()
            lots = 1 if options.tiny else options.devices // count
            for lot in range(lots):
                places.put(list(range(lot * count, (lot + 1) * count)))

            def work(row: dict[str, Any], places: SimpleQueue[list[int]] = places) -> None:
                devices = places.get()
                try:
                    if time.monotonic() + options.timeout / 2 < end:
                        folder = Path(scratch) / f"run{rows.index(row)}"
                        row["measured"] = measure(chosen[row["case"]], row["words"], devices, options, folder)
                        print_row(row)
                        save(rows, options)
                finally:
                    places.put(devices)

            with ThreadPoolExecutor(max(1, lots)) as pool:
                list(pool.map(work, waiting))


def save(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write everything known so far."""
    document = {
        "date": datetime.now(UTC).isoformat(),
        "torch": torch.__version__,
        "profile": str(options.profile),
        "summary": summary(rows),
        "cases": rows,
    }
    write_atomically(options.out, json.dumps(document, indent=1) + "\n")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Absolute relative errors, predicted over measured less 1, and what was said to fit and did not."""
    done = [row for row in rows if "step_seconds" in row.get("measured", {})]
    found: dict[str, Any] = {"cases": len(rows), "measured": len(done)}
    for name in ("step_seconds", "memory_gib"):
        errors = [abs(row["predicted"][name] / row["measured"][name] - 1) for row in done if row["measured"][name]]
        if errors:
            found[name] = {"median_error": statistics.median(errors), "worst_error": max(errors)}
    full = [row for row in rows if row.get("measured", {}).get("out_of_memory")]
    found["failed"] = [row["case"] for row in rows if "failed" in row.get("measured", {})]
    found["false_fits"] = [row["case"] for row in full if (row["predicted"]["p_fits"] or 0.0) >= 0.9]
    return found


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    predicted, measured = row["predicted"], row["measured"]
    if "failed" in measured:
        print(f"{row['case']:95} failed ({measured['failed']}): {' | '.join(measured['error'])[-300:]}", flush=True)
        return
    both = [(predicted[name], measured[name]) for name in ("step_seconds", "memory_gib")]
    words = [f"{p:9.4f} {m:9.4f} {100 * (p / m - 1):+6.1f}%" if m else f"{p:9.4f}" for p, m in both]
    print(f"{row['case']:95} {'   '.join(words)}   {measured['wall_seconds']:5.0f} s", flush=True)


def add_options(parser: argparse.ArgumentParser, *, steps: int, timeout: float) -> None:
    """Options of benchmarks that predict these cases and then run them."""
    parser.add_argument("--devices", type=int, default=4, help="devices here; cases that need more are left out")
    parser.add_argument("--data", default="data/text", help="prepared data, see `phalanx data prepare`")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds a case may take")
    parser.add_argument("--minutes", type=float, default=60.0, help="after this no case is begun")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--out", type=Path, required=True)


def main() -> None:
    """Predict, write, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", required=True, help="measured profile, from phalanx calibrate")
    parser.add_argument("--cluster", default="h200-x4", help="description of this machine")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name holds this; may be repeated")
    parser.add_argument("--skip", type=int, default=4)
    add_options(parser, steps=8, timeout=150.0)
    options = parser.parse_args()
    named = load_profile(options.profile)
    machine = plain_machine("CPU", options.devices) if options.tiny else load_machine(options.cluster)
    wanted = [case for case in CASES if case.devices <= options.devices]
    chosen = {c.name: c for c in wanted if not options.case or any(words in c.name for words in options.case)}
    rows = json.loads(options.out.read_text())["cases"] if options.out.exists() else []
    known = {row["case"] for row in rows}
    for case in (case for name, case in chosen.items() if name not in known):
        words = overrides(case, options)
        predicted = predict(case, words, machine, named)
        rows.append({"case": case.name, "devices": case.devices, "words": words, "predicted": predicted})
    save(rows, options)
    print(f"{len(rows)} cases predicted, in {options.out}", flush=True)
    if not options.predict_only:
        run_cases(rows, chosen, options)
    save(rows, options)
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
