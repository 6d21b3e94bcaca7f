"""Three-dimensional layouts on eight devices of one host, the planner's prediction beside each.

    python benchmarks/eight_devices.py --profile h200-x4.profile.yaml --out eight.json --predict-only
    python benchmarks/eight_devices.py --profile h200-x4.profile.yaml --out eight.json --data data/text --minutes 9
    python benchmarks/eight_devices.py --profile h200-x4.profile.yaml --out half.json --devices 4 --data data/text
    python benchmarks/eight_devices.py --profile h200-x4.profile.yaml --out tiny.json --data data/text --tiny

Llama-3 8B at sequence 8192 (and 65,536 for context parallelism) and the deepest GPT of width 8192 that the planner says fits
in FSDP 8; where it does not fit in another layout, that is not run. Every prediction is written to --out before anything
runs; what --out holds is not run again. Each case is `phalanx train` under torchrun; its last step is profiled on rank 0:
exposed communication is time in which nothing but communication ran, idle time is when nothing ran at all, a pipeline's
bubble above all. --devices 4 halves the degree named last in each layout. --tiny runs the same layouts of tiny models
on CPU ranks.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exposed_communication import communication_in
from layout_speed import QUIET
from phalanx.calibrate.where import plain_machine
from phalanx.cluster.machine import Machine, load_machine
from phalanx.cost.profile import NamedProfile, load_profile
from planner_validation import TINY, Case, add_options, measure, predict, print_row, save

LLAMA = "preset=llama3-8b length=8192"
LONG = "preset=llama3-8b max_positions=65536 length=65536"
GPT = (
    "preset=null n_layers=LAYERS d_model=8192 n_heads=64 n_kv_heads=null d_ff=32768 vocab_size=51200 positions=learned "
    "norm=layernorm mlp=gelu bias=true max_positions=2048 length=2048"
)


@dataclass(frozen=True)
class Layout:
    """A layout of eight devices."""

    fields: str
    microbatch: int
    accumulation: int = 1
    """Micro-batches a step."""

    def on(self, devices: int) -> str:
        """Its words for so many devices: for four the last degree is halved."""
        words = dict(word.split("=") for word in f"{self.fields} microbatch={self.microbatch}".split())
        if devices == 4:
            last = [
                name for name in words if name in ("dp_replicate", "dp_shard", "cp", "tp", "pp") and words[name] != "1"
            ][-1]
            words[last] = str(int(words[last]) // 2)
        return " ".join(f"{name}={value}" for name, value in words.items())


PIPED = 16
"""Micro-batches a step in pipelines: twice as many as the most stages."""
LAYOUTS = (
    Layout("dp_shard=8 recompute=none", 2),
    Layout("dp_replicate=2 dp_shard=4 recompute=none", 2),
    Layout("tp=2 dp_shard=4 recompute=none", 4),
    Layout("tp=4 dp_shard=2 recompute=none", 4),
    Layout("dp_shard=1 tp=8 recompute=none", 4),
    Layout("pp=2 dp_shard=4 schedule=1f1b recompute=none", 1, PIPED),
    Layout("tp=2 pp=4 dp_shard=1 schedule=1f1b recompute=none", 2, PIPED),
    *(
        Layout(f"tp=2 pp=2 dp_shard=2 schedule={schedule} recompute=none", 2, PIPED)
        for schedule in ("1f1b", "interleaved_1f1b stages_per_rank=2", "zbv stages_per_rank=2")
    ),
)
LONG_LAYOUTS = (Layout("cp=2 dp_shard=4 recompute=full", 1),)
GPT_LAYOUTS = tuple(
    Layout(layout.fields.replace("recompute=none", "recompute=full"), 1, layout.accumulation)
    for layout in LAYOUTS
    if "dp_replicate" not in layout.fields and "zbv" not in layout.fields
)
CASES = (
    *((f"llama3-8b {layout.fields}", LLAMA, layout) for layout in LAYOUTS),
    *((f"llama3-8b 65536 {layout.fields}", LONG, layout) for layout in LONG_LAYOUTS),
    *((f"gpt {layout.fields}", GPT, layout) for layout in GPT_LAYOUTS),
)


def words_of(model: str, layout: Layout, layers: int, options: argparse.Namespace) -> list[str]:
    """The overrides of a case."""
    shape = dict(word.split("=") for word in (f"preset=null {TINY}" if options.tiny else model).split())
    length = shape.pop("length")
    if options.tiny:
        shape["max_positions"] = length
    fields = dict(word.split("=") for word in layout.on(options.devices).split())
    data_ranks = int(fields.get("dp_shard", 1)) * int(fields.get("dp_replicate", 1))
    return [
        *(f"model.{name}={value}".replace("LAYERS", str(layers)) for name, value in shape.items()),
        *(f"layout.{name}={value}" for name, value in fields.items()),
        f"layout.global_batch={data_ranks * layout.microbatch * layout.accumulation}",
        f"data.sequence_length={length}",
        f"data.sources=[{Path(options.data).resolve()}]",
        f"training.steps={options.steps}",
        f"training.profile={{first: {options.steps}, last: {options.steps}}}",
        *QUIET,
        f"cluster.devices_per_node={options.devices}",
        *(["training.compile=false", "cluster.device=cpu"] if options.tiny else []),
    ]


def deepest_gpt(options: argparse.Namespace, machine: Machine, named: NamedProfile) -> int:
    """Most layers, a multiple of eight, with which GPT fits in its first layout with a probability of 0.95."""
    if options.tiny:
        return 8

    def fits(layers: int) -> bool:
        words = words_of(GPT, GPT_LAYOUTS[0], layers, options)
        probability = predict(_case(options), words, machine, named)["p_fits"]
        return probability is None or probability >= 0.95

    layers = 8
    while fits(layers + 8):
        layers += 8
    return layers


def _case(options: argparse.Namespace) -> Case:
    return Case(options.devices, "", 1, "")


def planned_rows(options: argparse.Namespace, machine: Machine, named: NamedProfile) -> list[dict[str, Any]]:
    """Every case with its prediction."""
    layers = deepest_gpt(options, machine, named)
    rows = []
    for name, model, layout in CASES:
        words = words_of(model, layout, layers, options)
        planned = predict(_case(options), words, machine, named)
        rows.append({"case": name, "devices": options.devices, "words": words, "predicted": planned})
    return rows


def run_rows(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Measure what has no result yet, one case after the other."""
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as scratch:
        for number, row in enumerate(rows):
            hopeless = (row["predicted"]["p_fits"] or 1.0) < 0.5
            if "measured" in row or hopeless or time.monotonic() + options.timeout / 2 > end:
                continue
            folder = Path(scratch) / f"run{number}"
            found = measure(_case(options), row["words"], list(range(options.devices)), options, folder)
            if "failed" not in found and not options.tiny:
                (trace,) = (folder / "profile").glob("*-rank-0.json")
                found["communication"] = communication_in(trace)
                found["idle_share"] = 1 - found["communication"]["busy_ms"] / found["communication"]["span_ms"]
            row["measured"] = found
            print_row(row)
            save(rows, options)


def main() -> None:
    """Predict, write, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", required=True, help="measured profile, from phalanx calibrate")
    parser.add_argument("--cluster", default="h200-x8", help="description of this machine")
    add_options(parser, steps=8, timeout=150.0)
    parser.set_defaults(devices=8, skip=3)
    options = parser.parse_args()
    named = load_profile(options.profile)
    machine = plain_machine("CPU", options.devices) if options.tiny else load_machine(options.cluster)
    rows = (
        json.loads(options.out.read_text())["cases"] if options.out.exists() else planned_rows(options, machine, named)
    )
    save(rows, options)
    print(f"{len(rows)} cases predicted, in {options.out}", flush=True)
    for row in rows:
        print(
            f"{row['case']:90} {row['predicted']['step_seconds']:9.4f} s {row['predicted']['memory_gib']:8.2f} GiB",
            flush=True,
        )
    if not options.predict_only:
        run_rows(rows, options)


if __name__ == "__main__":
    main()
