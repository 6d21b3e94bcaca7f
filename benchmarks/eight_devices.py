"""Three-dimensional layouts on eight devices of one host, the planner's prediction beside each.

    python benchmarks/eight_devices.py --profile h200-x4.profile.yaml --out eight.json --predict-only
    python benchmarks/eight_devices.py --profile h200-x4.profile.yaml --out eight.json --data data/text --minutes 9
    python benchmarks/eight_devices.py --profile h200-x4.profile.yaml --out half.json --devices 4 --data data/text
    python benchmarks/eight_devices.py --profile h200-x4.profile.yaml --out tiny.json --data data/text --tiny

Llama-3 8B at sequence 8192 (and 65,536 for context parallelism) and the deepest GPT of width 8192 that the planner says fits
in FSDP 8; where it does not fit in another layout, that is not run. Then half of Llama's layers, which fit one device, in
FSDP over 1, 2, 4 and 8 of them: two samples each (weak scaling), and 16 samples together (strong). Every prediction is
written to --out before anything runs; what --out holds is not run again. Each case is `phalanx train` under torchrun; its
last step is profiled on rank 0: exposed communication is time in which nothing but communication ran, idle time is when
nothing ran at all, a pipeline's bubble above all. --devices 4 halves the degree named last in each layout. --tiny runs the
same layouts of tiny models on CPU ranks. ORBIT-10B is `weather_layouts.py --devices 8 --tp 2` and `--tp 4`;
`layout_proofs.py` holds the layouts against one device.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exposed_communication import communication_in
from layout_speed import QUIET
from phalanx.hardware.calibrate.measure_machine import plain_machine
from phalanx.hardware.machine import Machine, load_machine
from phalanx.planner.time.profile import NamedProfile, load_profile
from planner_validation import TINY, Case, add_options, measure, predict, print_row, save

LLAMA = "preset=llama3-8b length=8192"
HALF = f"{LLAMA} n_layers=16"
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

    def on(self, devices: int) -> Layout:
        """The same for so many devices: for four the last degree is halved."""
        words = dict(word.split("=") for word in self.fields.split())
        if devices == 4:
            last = [
                name for name in words if name in ("dp_replicate", "dp_shard", "cp", "tp", "pp") and words[name] != "1"
            ][-1]
            words[last] = str(int(words[last]) // 2)
        return replace(self, fields=" ".join(f"{name}={value}" for name, value in words.items()))


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
TOGETHER = 16
"""Samples of a step, of strong scaling."""


@dataclass(frozen=True)
class Row:
    """What is predicted and run: a layout of a model, on some of the devices."""

    name: str
    model: str
    layout: Layout
    devices: int


def scaling_rows(devices: int) -> list[Row]:
    """FSDP over 1, 2, 4, ... devices, with the same samples a device and with the same samples together."""
    counts = [count for count in (1, 2, 4, 8) if count <= devices]
    layouts = {count: f"dp_shard={count} recompute=none" for count in counts}
    weak = [Row(f"weak {count}", HALF, Layout(layouts[count], 2), count) for count in counts]
    strong = [Row(f"strong {n}", HALF, Layout(layouts[n], 2, TOGETHER // 2 // n), n) for n in counts]
    return weak + strong


def all_rows(devices: int) -> list[Row]:
    """Everything, with layouts for so many devices."""

    def of(name: str, model: str, several: tuple[Layout, ...]) -> list[Row]:
        return [Row(f"{name} {layout.fields}", model, layout.on(devices), devices) for layout in several]

    return [
        *of("llama3-8b", LLAMA, LAYOUTS),
        *of("llama3-8b 65536", LONG, LONG_LAYOUTS),
        *of("gpt", GPT, GPT_LAYOUTS),
        *scaling_rows(devices),
    ]


def words_of(row: Row, layers: int, options: argparse.Namespace) -> list[str]:
    """The overrides of a row. layers: of GPT."""
    layout = row.layout
    shape = dict(word.split("=") for word in (f"preset=null {TINY}" if options.tiny else row.model).split())
    length = shape.pop("length")
    if options.tiny:
        shape["max_positions"] = length
    fields = dict(word.split("=") for word in layout.fields.split())
    data_ranks = int(fields.get("dp_shard", 1)) * int(fields.get("dp_replicate", 1))
    return [
        *(f"model.{name}={value}".replace("LAYERS", str(layers)) for name, value in shape.items()),
        *(f"layout.{name}={value}" for name, value in fields.items()),
        f"layout.microbatch={layout.microbatch}",
        f"layout.global_batch={data_ranks * layout.microbatch * layout.accumulation}",
        f"data.sequence_length={length}",
        f"data.sources=[{Path(options.data).resolve()}]",
        f"training.steps={options.steps}",
        f"training.profile={{first: {options.steps}, last: {options.steps}}}",
        *QUIET,
        f"cluster.devices_per_node={row.devices}",
        *(["training.compile=false", "cluster.device=cpu"] if options.tiny else []),
    ]


def deepest_gpt(options: argparse.Namespace, machine: Machine, named: NamedProfile) -> int:
    """Most layers, a multiple of eight, with which GPT fits in its first layout with a probability of 0.95."""
    if options.tiny:
        return 8
    first = Row("gpt", GPT, GPT_LAYOUTS[0].on(options.devices), options.devices)

    def fits(layers: int) -> bool:
        probability = predict(_case(first.devices), words_of(first, layers, options), machine, named)["p_fits"]
        return probability is None or probability >= 0.95

    layers = 8
    while fits(layers + 8):
        layers += 8
    return layers


def _case(devices: int) -> Case:
    return Case(devices, "", 1, "")


def planned_rows(options: argparse.Namespace, machine: Machine, named: NamedProfile) -> list[dict[str, Any]]:
    """Every row with its prediction."""
    layers = deepest_gpt(options, machine, named)
    rows = []
    for row in all_rows(options.devices):
        words = words_of(row, layers, options)
        planned = predict(_case(row.devices), words, machine, named)
        rows.append({"case": row.name, "devices": row.devices, "words": words, "predicted": planned})
    return rows


def run_rows(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Measure what has no result yet, one case after the other."""
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as scratch:
        for number, row in enumerate(rows):
            hopeless = (row["predicted"]["p_fits"] or 1.0) < 0.5
            chosen = not options.case or any(words in row["case"] for words in options.case)
            if not chosen or "measured" in row or hopeless or time.monotonic() + options.timeout / 2 > end:
                continue
            folder = Path(scratch) / f"run{number}"
            found = measure(_case(row["devices"]), row["words"], list(range(row["devices"])), options, folder)
            if "failed" not in found and not options.tiny:
                (trace,) = (folder / "profile").glob("*-rank-0.json")
                found["communication"] = communication_in(trace)
                found["idle_share"] = 1 - found["communication"]["busy_ms"] / found["communication"]["span_ms"]
            row["measured"] = found
            print_row(row)
            save(rows, options)


def scaling(rows: list[dict[str, Any]], kind: str) -> dict[int, float]:
    """Samples a second a device over those of one device, by devices, of what was measured."""
    seconds = {row["devices"]: row["measured"].get("step_seconds") for row in _measured(rows, kind)}
    if seconds.get(1) is None:
        return {}
    # Of weak scaling each device has the same work, of strong all together.
    work = {count: count if kind == "strong" else 1 for count in seconds}
    return {count: seconds[1] / (work[count] * took) for count, took in seconds.items() if took}


def _measured(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["case"].startswith(kind) and "measured" in row]


def main() -> None:
    """Predict, write, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", required=True, help="measured profile, from phalanx calibrate")
    parser.add_argument("--cluster", default="h200-x8", help="description of this machine")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name holds this; may be repeated")
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
    for kind in ("weak", "strong"):
        print(f"{kind} scaling: {json.dumps(scaling(rows, kind))}")


if __name__ == "__main__":
    main()
