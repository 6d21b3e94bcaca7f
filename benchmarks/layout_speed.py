"""Speed of `phalanx train` in several layouts of one machine's devices: tokens/s a device, MFU, memory.

    python benchmarks/layout_speed.py --nproc 4 --data data/text --out results.json --case fsdp [--case tp2 ...]

Each case is Llama-3 8B at sequence 8192 (or --model) with overrides, run through torchrun and the command itself. Figures
are medians over the steps after `--skip`, from the run's own metrics.jsonl; memory is the largest of rank 0's. `flops` of
MFU count the causal half of attention.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

QUIET = (
    "training.tensorboard=false",
    "checkpoint.every=null",
    "checkpoint.last=false",
    "data.verify=false",
    "evaluation.every=null",
    "evaluation.prompt=null",
    "optimizer.warmup_steps=2",
)
"""Overrides of runs of which only steps are wanted."""
CASES: dict[str, list[str]] = {
    "fsdp-mb1": ["dp_shard=N", "microbatch=1", "reshard_after_forward=false"],
    "fsdp-mb2": ["dp_shard=N", "microbatch=2", "reshard_after_forward=true"],
    "fsdp-mb2-keep": ["dp_shard=N", "microbatch=2", "reshard_after_forward=false"],
    "fsdp-mb3": ["dp_shard=N", "microbatch=3", "reshard_after_forward=true"],
    "fsdp-mb4-selective": ["dp_shard=N", "microbatch=4", "reshard_after_forward=true", "recompute=selective"],
    "fsdp-mb2-selective": ["dp_shard=N", "microbatch=2", "reshard_after_forward=true", "recompute=selective"],
    "tp2-fsdp2-mb2": ["tp=2", "dp_shard=2", "microbatch=2"],
    "tp2-fsdp2-mb2-selective": ["tp=2", "dp_shard=2", "microbatch=2", "recompute=selective"],
    "tp2-fsdp2-mb4": ["tp=2", "dp_shard=2", "microbatch=4"],
    "weak-mb2": ["dp_shard=N", "microbatch=2", "reshard_after_forward=true"],
    "tp4-mb2": ["tp=4", "dp_shard=1", "microbatch=2"],
    "pp4-1f1b": ["pp=4", "dp_shard=1", "microbatch=1", "schedule=1f1b"],
    "pp4-interleaved": ["pp=4", "dp_shard=1", "microbatch=1", "schedule=interleaved_1f1b"],
    "pp4-zbv": ["pp=4", "dp_shard=1", "microbatch=1", "schedule=zbv"],
    "pp2-1f1b": ["pp=2", "dp_shard=1", "microbatch=1", "schedule=1f1b"],
    "pp2-interleaved": ["pp=2", "dp_shard=1", "microbatch=1", "schedule=interleaved_1f1b", "stages_per_rank=2"],
    "pp2-fsdp2": ["pp=2", "dp_shard=2", "microbatch=1", "schedule=1f1b"],
    "cp2-fsdp2": ["cp=2", "dp_shard=2", "microbatch=2"],
    "cp2-fsdp2-all-to-all": ["cp=2", "dp_shard=2", "microbatch=2", "context=all_to_all"],
    "stream": ["dp_shard=N", "microbatch=2", "gather=stream"],
    "tp2-fsdp2-stream": ["tp=2", "dp_shard=2", "microbatch=4", "gather=stream"],
    "ep-mb4": ["dp_shard=N", "ep=N", "microbatch=4"],
    "ep-fsdp-mb4": ["dp_shard=N", "ep=N", "microbatch=4", "zero=3"],
    "one": ["dp_shard=1", "microbatch=1"],
}


def overrides(case: str, options: argparse.Namespace) -> list[str]:
    """The command-line words of a case."""
    chosen = [f"layout.{word.replace('=N', f'={options.nproc}')}" for word in CASES[case]]
    fields = dict(word.split("=") for word in chosen)
    shards = int(fields.get("layout.dp_shard", 1))
    batch = shards * int(fields["layout.microbatch"]) * (options.accumulation or (8 if "layout.pp" in fields else 1))
    return [
        *options.model,
        *chosen,
        f"layout.global_batch={options.global_batch or batch}",
        f"data.sources=[{Path(options.data).resolve()}]",
        f"training.steps={options.steps}",
        *QUIET,
        "evaluation.samples=8",
        *([f"training.profile={{first: {options.steps}, last: {options.steps}}}"] if options.profile else []),
        *options.set,
    ]


def measure(case: str, options: argparse.Namespace, folder: Path, log: Path) -> dict[str, Any]:
    """Run one case and summarise its metrics."""
    command = [*phalanx_command(options.nproc), "train", str(options.run_file)]
    command += ["--run-dir", str(folder), *overrides(case, options)]
    output, code = run_with_timeout(command, folder, run_environment(), options.timeout)
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n{output}\n")
    if code:
        return {"case": case, "failed": code, "error": output.strip().splitlines()[-6:]}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = rows[options.skip : len(rows) - 1 if options.profile else None]
    seconds = statistics.median(row["step_seconds"] for row in kept)
    return {
        "case": case,
        "command": " ".join(command[1:]),
        "tokens_per_second_per_device": statistics.median(row["tokens_per_second"] for row in kept) / options.nproc,
        "step_seconds": seconds,
        "step_seconds_all": [row["step_seconds"] for row in rows],
        "model_tflops": statistics.median(row["model_tflops"] for row in kept),
        "mfu": kept[-1]["mfu"] and statistics.median(row["mfu"] for row in kept),
        "memory_peak_gib": max((row["memory_peak_gib"] or 0) for row in rows),
        "loss": [row["loss"] for row in rows],
        "machine": json.loads((folder / "machine.json").read_text()),
    }


def phalanx_command(ranks: int) -> list[str]:
    """What starts `phalanx` on so many ranks of this machine, up to the verb."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *(launcher if ranks > 1 else []), "-m", "phalanx"]


def run_environment() -> dict[str, str]:
    """Of runs that are measured: these sources, and the allocator as torchtitan's launcher sets it, too."""
    search_path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ, "PYTHONPATH": search_path}


def run_with_timeout(command: list[str], folder: Path, environment: dict[str, str], seconds: float) -> tuple[str, int]:
    """Output and exit code of a launcher and its ranks; all of them end after `seconds`, with the stacks they were in.

    folder: a path in the command, by which ranks are known: torchrun gives them sessions of their own.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"PYTHONFAULTHANDLER": "1", **environment},
    )
    for name, patience in (("ABRT", seconds), ("KILL", 10.0)):
        try:
            return process.communicate(timeout=patience)[0], process.returncode
        except subprocess.TimeoutExpired:
            subprocess.run(["pkill", f"-{name}", "-f", str(folder)], check=False)
    return process.communicate()[0], -1


def main() -> None:
    """Measure the cases named on the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, required=True)
    parser.add_argument("--data", required=True, help="prepared data, see `phalanx data prepare`")
    parser.add_argument("--case", action="append", choices=list(CASES), required=True)
    parser.add_argument("--run-file", type=Path, default=ROOT / "examples/llama3-8b.yaml")
    parser.add_argument("--model", action="append", default=["layout.recompute=none"], help="overrides of every case")
    parser.add_argument("--set", action="append", default=[], help="overrides after those of the case")
    parser.add_argument("--accumulation", type=int, help="micro-batches a step; by default 1, or 8 with a pipeline")
    parser.add_argument("--global-batch", type=int)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--skip", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=200.0, help="seconds a case may take")
    parser.add_argument("--profile", type=Path, help="folder for the trace of rank 0's last step in each case")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    log = options.out.with_suffix(".log")
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in options.case:
            folder = Path(scratch) / case
            results.append(measure(case, options, folder, log))
            print_row(results[-1])
            document = {"date": datetime.now(UTC).isoformat(), "python": platform.python_version(), "results": results}
            options.out.write_text(json.dumps(document, indent=1) + "\n")
            if options.profile:
                options.profile.mkdir(parents=True, exist_ok=True)
                for trace in folder.glob("profile*/*rank*0*"):
                    trace.rename(options.profile / f"{case}-{trace.name}")


def print_row(result: dict[str, Any]) -> None:
    """One line of the table."""
    if "failed" in result:
        print(f"{result['case']:26} failed ({result['failed']}): {' | '.join(result['error'])[-600:]}", flush=True)
        return
    mfu = "" if result["mfu"] is None else f"MFU {result['mfu']:.3f}  "
    print(
        f"{result['case']:26} {result['tokens_per_second_per_device']:9,.0f} tokens/s/device  "
        f"{result['step_seconds']:7.3f} s/step  {mfu}peak {result['memory_peak_gib']:6.1f} GiB  "
        f"loss {result['loss'][0]:.3f} -> {result['loss'][-1]:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
