"""Layouts of one host's devices held against one device: `phalanx verify --full`, and a run that changes its layout midway.

    python benchmarks/layout_proofs.py --data data/text --out proofs.json
    python benchmarks/layout_proofs.py --data data/text --out half.json --devices 4
    python benchmarks/layout_proofs.py --data data/text --out tiny.json --tiny

Both with `--layers` blocks of Llama-3 8B in float32. Verified is tp 2 x pp 2 x dp_shard 2, by 1F1B and interleaved: loss,
every gradient and every parameter of two steps. Then a run of that layout is stopped halfway and goes on from its checkpoint
as dp_shard 8 (`moved`), beside one that does not stop (`straight`) and one that is dp_shard 8 from its first step on
(`other`): it must not leave the straight one further than the other does. --devices 4 halves dp_shard; --tiny does the same
with a tiny model on CPU ranks.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from layout_speed import QUIET, ROOT, phalanx_command, run_environment, run_with_timeout
from phalanx.files import write_atomically
from planner_validation import TINY

RUN_FILE = ROOT / "examples/llama3-8b.yaml"
SCHEDULES = ("1f1b", "interleaved_1f1b")


def layouts(devices: int) -> tuple[list[str], list[str]]:
    """Words of the three-dimensional layout, and of the one that a run goes on in."""
    return ["layout.tp=2", "layout.pp=2", f"layout.dp_shard={devices // 4}"], [f"layout.dp_shard={devices}"]


def common_words(options: argparse.Namespace) -> list[str]:
    """What all runs share."""
    tiny = {"preset": "null", **dict(word.split("=") for word in TINY.split())}
    length = tiny.pop("length") if options.tiny else "2048"
    model = {**tiny, "max_positions": length} if options.tiny else {"n_layers": str(options.layers)}
    return [
        *(f"model.{name}={value}" for name, value in model.items()),
        f"data.sequence_length={length}",
        f"data.sources=[{Path(options.data).resolve()}]",
        "layout.precision=fp32",
        "layout.recompute=none",
        "layout.microbatch=1",
        f"layout.global_batch={2 * options.devices}",
        f"cluster.devices_per_node={options.devices}",
        "training.compile=false",
        *(["cluster.device=cpu"] if options.tiny else []),
    ]


def phalanx(words: list[str], options: argparse.Namespace, folder: Path) -> tuple[str, int, float]:
    """Run a command of the program on all devices: output, exit code, seconds. folder: a path among its words."""
    command = [*phalanx_command(options.devices), *words]
    start = time.monotonic()
    output, code = run_with_timeout(command, folder, run_environment(), options.timeout)
    seconds = time.monotonic() - start
    with options.out.with_suffix(".log").open("a") as log:
        log.write(f"$ {' '.join(command[1:])}\n{output}\n")
    return output, code, seconds


def verified(schedule: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The verdict on the three-dimensional layout with this schedule."""
    run_file = folder / "run.yaml"
    shutil.copy(RUN_FILE, run_file)
    words = [*common_words(options), *layouts(options.devices)[0], f"layout.schedule={schedule}"]
    command = ["verify", str(run_file), *words, "--full", "--precision", "fp32", "--json"]
    output, code, seconds = phalanx(command, options, folder)
    row: dict[str, Any] = {"what": f"verify --full, {schedule}", "words": words, "wall_seconds": seconds}
    if code not in (0, 3):
        return {**row, "failed": code, "error": output.strip().splitlines()[-8:]}
    # Warnings of the ranks may stand before and after.
    return {**row, "verdict": json.JSONDecoder().raw_decode(output[output.index("{\n") :])[0]}


def curve(run_dir: Path, steps: int, layout: list[str], options: argparse.Namespace) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step of a run, trained up to `steps`."""
    words = [*common_words(options), *layout, *QUIET, "checkpoint.last=true", "optimizer.schedule=constant"]
    command = ["train", str(RUN_FILE), "--run-dir", str(run_dir), *words, f"training.steps={steps}"]
    output, code, _ = phalanx(command, options, run_dir)
    if code:
        raise RuntimeError(f"exit code {code}: {output.strip().splitlines()[-8:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows]


def moved(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Curves of the three runs, and how far the second and the third are from the first."""
    here, there = layouts(options.devices)
    half, steps = options.steps // 2, options.steps
    curves = {
        "straight": curve(folder / "straight", steps, here, options),
        "other": curve(folder / "other", steps, there, options),
    }
    shutil.rmtree(folder / "straight")
    shutil.rmtree(folder / "other")
    before = curve(folder / "moved", half, here, options)
    curves["moved"] = curve(folder / "moved", steps, there, options)
    return {
        "what": f"{' '.join(here)} for {half} steps, then {' '.join(there)}",
        "curves": curves,
        "same_bits_before": before == curves["straight"][:half] == curves["moved"][:half],
        "largest_difference": {
            name: {
                what: max(
                    abs(one[place] / straight[place] - 1)
                    for one, straight in zip(curves[name], curves["straight"], strict=True)
                )
                for place, what in enumerate(("loss", "grad_norm"))
            }
            for name in ("moved", "other")
        },
    }


def main() -> None:
    """Verify, move, and keep what was found after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, choices=[4, 8])
    parser.add_argument("--data", default="data/text", help="prepared data, see `phalanx data prepare`")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=200.0, help="seconds each part of it may take")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        document = {"date": datetime.now(UTC).isoformat(), "torch": torch.__version__, "rows": rows}
        write_atomically(options.out, json.dumps(document, indent=1) + "\n")
        shown = {name: value for name, value in row.items() if name not in ("curves", "words", "verdict")}
        if "verdict" in row:
            (layout,) = row["verdict"]["layouts"]
            shown |= {"passed": layout["passed"], "bound": layout["bound"], "gradient": layout["worst"]["gradient"]}
        print(json.dumps(shown), flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        for schedule in SCHEDULES:
            folder = Path(scratch) / schedule
            folder.mkdir()
            keep(verified(schedule, options, folder))
        keep(moved(options, Path(scratch)))


if __name__ == "__main__":
    main()
