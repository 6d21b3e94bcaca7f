"""Speed of `phalanx train` on one device, through the command itself: tokens/s, MFU, memory, data wait.

    python benchmarks/train_speed.py --data data/text --out results.json [--case mpt-1b ...] [--steps 12]

Each case is a run file under examples/ with overrides. The figures are medians over the steps after `--skip`, taken from
the run's own metrics.jsonl. `flops=palm` counts the whole attention matrix, as LLM Foundry does.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from layout_speed import ROOT, phalanx_command, run_environment

sys.path.insert(0, str(ROOT / "src"))

from phalanx.config.load import load_run
from phalanx.families.registry import bind
from phalanx.layout.resolve import resolve_layout
from state_bytes import state_bytes

GIB = 2**30

FOUNDRY = ["model.positions=learned", "model.bias=true"]
"""What LLM Foundry's published benchmark trained: learned positions and biases, where the MPT models have ALiBi."""

LLAMA = [
    "examples/llama3-8b.yaml", "model.n_layers=8", "layout.microbatch=2", "layout.global_batch=2", "layout.recompute=none",
]  # fmt: skip
"""Eight blocks of Llama 3 8B."""
CASES: dict[str, list[str]] = {
    "mpt-1b": ["examples/mpt-1b.yaml", "layout.microbatch=16", "layout.global_batch=64"],
    "mpt-1b-foundry": ["examples/mpt-1b.yaml", "layout.microbatch=16", "layout.global_batch=64", *FOUNDRY],
    "mpt-7b-16-layers": [
        "examples/mpt-7b.yaml", "model.n_layers=16", "layout.microbatch=16", "layout.global_batch=256",
    ],
    "mpt-7b-16-layers-foundry": [
        "examples/mpt-7b.yaml", "model.n_layers=16", "layout.microbatch=16", "layout.global_batch=256", *FOUNDRY,
    ],
    "llama3-8b-8-layers": LLAMA,
    "llama3-8b-8-layers-fp8-tensor": [*LLAMA, "layout.precision=fp8-tensor"],
    "llama3-8b-8-layers-fp8-row": [*LLAMA, "layout.precision=fp8-row"],
    "llama3-8b-8-layers-fp8-block": [*LLAMA, "layout.precision=fp8-block"],
    "qwen3-30b-a3b-4-layers": [
        "examples/qwen3-30b-a3b.yaml", "model.n_layers=4", "layout.microbatch=4", "layout.global_batch=4", "layout.ep=1",
        "layout.recompute=none", "model.experts.balance=none", "model.experts.bias_rate=0.001",
    ],
    "tiny": [
        "examples/quickstart.yaml", "model.n_layers=2", "model.vocab_size=32768", "layout.global_batch=16",
        "layout.microbatch=8",
    ],
}  # fmt: skip
DEFAULT = tuple(case for case in CASES if case != "tiny")


def overrides(case: str, data: str, steps: int, more: list[str]) -> tuple[Path, list[str]]:
    """Run file of a case and the overrides it is run with, `more` the last of them."""
    run_file, *changes = CASES[case]
    return ROOT / run_file, [
        *changes,
        f"data.sources=[{data}]",
        f"training.steps={steps}",
        "training.flops=palm",
        "training.tensorboard=false",
        "checkpoint.every=null",
        "checkpoint.last=false",
        "data.verify=false",
        "evaluation.every=null",
        "evaluation.samples=8",
        "evaluation.prompt=null",
        "optimizer.warmup_steps=2",
        *more,
    ]


def measure(case: str, data: str, steps: int, skip: int, folder: Path, log: Path, more: list[str]) -> dict[str, Any]:
    """Run one case in a process of its own and summarise its metrics. more: further overrides."""
    run_file, changes = overrides(case, data, steps, more)
    command = [*phalanx_command(1), "train", str(run_file), "--run-dir", str(folder), *changes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=run_environment())
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}\n")
    if done.returncode:
        return {"case": case, "failed": done.returncode, "error": done.stderr.strip().splitlines()[-3:]}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    machine = json.loads((folder / "machine.json").read_text())
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    run = load_run(run_file, changes)
    state = state_bytes(bind(run), resolve_layout(bind(run), 1))
    kept = rows[skip:]

    def median(name: str) -> float | None:
        values = [row[name] for row in kept if row[name] is not None]
        return statistics.median(values) if values else None

    return {
        "case": case,
        "command": " ".join(command[2:]),
        "attention": events[0]["attention"],
        "tokens_per_second": median("tokens_per_second"),
        "tokens_per_second_times_layers": (median("tokens_per_second") or 0) * run.model.n_layers,
        "mfu_palm": median("mfu"),
        "mfu_palm_of_measured": median("mfu_measured"),
        "step_seconds": median("step_seconds"),
        "step_seconds_spread": [min(r["step_seconds"] for r in kept), max(r["step_seconds"] for r in kept)],
        "data_wait_share": sum(r["data_wait_seconds"] for r in kept) / sum(r["step_seconds"] for r in kept),
        "memory_peak_gib": max((r["memory_peak_gib"] or 0) for r in rows),
        "memory_between_steps_gib": rows[-1]["memory_now_gib"],
        "memory_accounted_between_steps_gib": state.between_steps / GIB,
        "memory_accounted_gib": state.total / GIB,
        "memory_growth_gib": (rows[-1]["memory_now_gib"] or 0) - (rows[skip]["memory_now_gib"] or 0),
        "loss": [rows[0]["loss"], rows[-1]["loss"]],
        "machine": machine,
    }


def main() -> None:
    """Measure the cases named on the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="prepared data, see `phalanx data prepare`")
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], help="overrides after those of the case")
    parser.add_argument("--keep", type=Path, help="folder that keeps the run folders, with what the profiler recorded")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    log = options.out.with_suffix(".log")
    log.unlink(missing_ok=True)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in options.case or DEFAULT:
            data = str(Path(options.data).resolve())
            folder = (options.keep or Path(scratch)) / case
            result = measure(case, data, options.steps, options.skip, folder, log, options.set)
            results.append(result)
            print_row(result)
    options.out.write_text(json.dumps({"python": platform.python_version(), "results": results}, indent=1) + "\n")


def print_row(result: dict[str, Any]) -> None:
    """One line of the table."""
    if "failed" in result:
        print(f"{result['case']:29s} failed with {result['failed']}: {' / '.join(result['error'])}", flush=True)
        return
    mfu = "-" if result["mfu_palm"] is None else f"{result['mfu_palm']:.4f}"
    print(
        f"{result['case']:29s} {result['attention']:9s} {result['tokens_per_second']:10,.0f} tok/s  MFU {mfu}  "
        f"step {result['step_seconds']:.3f} s  data wait {result['data_wait_share']:.3%}  "
        f"peak {result['memory_peak_gib']:.1f} GiB  between steps {result['memory_between_steps_gib'] or 0:.2f} "
        f"(accounted {result['memory_accounted_between_steps_gib']:.2f}) GiB  "
        f"loss {result['loss'][0]:.3f}->{result['loss'][1]:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
