"""FSDP, tensor parallelism and Hybrid-STOP of one forecaster on one machine's devices, beside the planner's predictions.

    python benchmarks/weather_layouts.py --profile h200-x4.profile.yaml --out weather_layouts.json
    python benchmarks/weather_layouts.py --tiny --out tiny.json         # a tiny model on CPU ranks: does it all run?

ORBIT-1B (128 x 256 points, 48 variables) on samples without content, for FSDP 4, TP 4 and Hybrid-STOP 2 x 2 with
gather=layer and gather=stream: at few and at many samples a device, below and above the break-even of FSDP and
Hybrid-STOP. Each case gives samples/s, peak memory of rank 0 with the buffers that peers read, how much of the
communication nothing ran beside (from one profiled step), and for stream the most bytes of gathered weights, counted as
buffers are handed out. Then the largest width that fits in each layout is looked for: real allocations, two steps each,
beginning where the planner expects the limit.

Every prediction is written to --out before anything runs. What is done already in --out is not run again, so that the work
may be spread over several calls (--minutes).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from layout_speed import ROOT, run_with_timeout
from phalanx.calibrate.where import plain_machine
from phalanx.cluster.machine import Machine, load_machine
from phalanx.config.load import load_run
from phalanx.config.schema import Run
from phalanx.cost.candidates import Candidates
from phalanx.cost.family import Kernel, likely_kernel, setting_of
from phalanx.cost.memory_fit import GIB
from phalanx.cost.memory_model import Kernels, memory
from phalanx.cost.profile import NamedProfile, load_profile, profile_for
from phalanx.cost.step_time import StepCause
from phalanx.cost.streamed import chain_sizes
from phalanx.cost.timing import our_software, step_times
from phalanx.files import write_atomically
from phalanx.layout.precision import PRECISIONS
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.plan.break_even import break_even

RUN_FILE = ROOT / "examples/orbit-1b.yaml"
Words = list[str]
Row = dict[str, Any]


def layouts(devices: int) -> dict[str, str]:
    """Layouts by name; hybrid ones have half of the devices in each axis, as nearly as may be."""
    tp = 2 if devices % 2 == 0 else 1
    hybrid = f"tp={tp} dp_shard={devices // tp}"
    return {
        "fsdp": f"tp=1 dp_shard={devices}",
        "tp": f"tp={devices} dp_shard=1",
        "hybrid-layer": f"{hybrid} gather=layer",
        "hybrid-stream": f"{hybrid} gather=stream",
    }


TINY = {
    "model.preset": "null",
    "model.family": "weather",
    "model.n_layers": "2",
    "model.d_model": "64",
    "model.n_heads": "4",
    "model.n_lat": "8",
    "model.n_lon": "16",
    "model.patch_size": "2",
    "model.qk_norm": "true",
    "model.variables": "[2m_temperature, geopotential_500, temperature_850]",
    "data.inputs": "[2m_temperature, geopotential_500, temperature_850]",
    "training.compile": "false",
    "cluster.device": "cpu",
}


def case_words(layout: str, samples: int, options: argparse.Namespace, width: int | None = None) -> Words:
    """The run file's overrides of a case. samples: each device computes as many in a step, by itself or its share of them.

    width: of the model, with heads of the preset's size; None is the preset's.
    """
    tp = int(dict(word.split("=") for word in layout.split())["tp"])
    fields = dict(TINY) if options.tiny else {"model.preset": "orbit-1b"}
    if width is not None:
        fields |= {"model.d_model": str(width), "model.n_heads": str(width // head_size(options))}
    return [
        *(f"{name}={value}" for name, value in fields.items()),
        *(f"layout.{word}" for word in layout.split()),
        f"layout.microbatch={samples * tp}",
        f"layout.global_batch={samples * options.devices}",
        "layout.dp_replicate=1",
        f"layout.recompute={options.recompute if width is None else 'full'}",
        f"cluster.devices_per_node={options.devices}",
        "optimizer.warmup_steps=2",
        "evaluation.every=null",
        *options.set,
    ]


def head_size(options: argparse.Namespace) -> int:
    """Of the preset."""
    return 16 if options.tiny else 192


# --- predictions -------------------------------------------------------------------------------------------------------


def predict(words: Words, devices: int, machine: Machine, named: NamedProfile) -> Row:
    """Step time, memory, and the closed form of gathered weights."""
    run = load_run(RUN_FILE, words)
    layout = resolve_layout(run, devices, devices)
    one = Candidates.of([layout], [run.layout.recompute])
    kernel = _kernel(run, machine)
    constants = named.collectives_on(machine)
    times = step_times(run, one, machine, named.profile, constants=constants, attention=kernel, exact=True)
    seconds = float(times.total[0])
    return {
        "step_seconds": seconds,
        "samples_per_second": layout.global_batch / seconds,
        "seconds_by_cause": {
            cause.name.lower(): round(float(times.of(cause)[0]), 6) for cause in StepCause if times.of(cause)[0]
        },
        "memory_gib": memory_gib(run, layout, machine),
        "gathered_weights_bytes": gathered_weights(run, layout, kernel),
    }


def memory_gib(run: Run, layout: ResolvedLayout, machine: Machine) -> float:
    """Peak of live tensors on the worst rank, with the buffers that peers read."""
    kernels = Kernels(_kernel(run, machine), run.training.compile is not False)
    one = Candidates.of([layout], [run.layout.recompute])
    found = memory(run, one, kernels, peer_copies=our_software(run, machine).copy_engines)
    return float(found.allocated[0] + found.peer_buffers[0]) / GIB


def gathered_weights(run: Run, layout: ResolvedLayout, kernel: Kernel) -> Row:
    """Bytes of gathered weights by closed form: two blocks, or two chunks of the larger chain; and 2 P / (T F)."""
    width = PRECISIONS[run.layout.precision].itemsize
    shards = layout.shards
    streamed = run.model_copy(update={"layout": run.layout.model_copy(update={"gather": "stream"})})
    if shards == 1:
        return {"peak": 0}
    setting = setting_of(streamed, resolve_layout(streamed, layout.world_size), attention=kernel, compiled=False)
    chains = chain_sizes(setting)
    split = sum(chain.plan.chunk_size(k) for chain in chains for k in range(chain.plan.chunks))
    stream = layout.gather == "stream"
    peak = 2 * width * max(chain.chunk for chain in chains) if stream else 2 * width * split
    return {"peak": peak, "two_blocks_over_shards": 2 * width * split // shards}


def _kernel(run: Run, machine: Machine) -> Kernel:
    return "cpu" if machine.node.device == "CPU" else likely_kernel(run, rocm=machine.node.device.startswith("MI"))


def widest(layout: str, options: argparse.Namespace, machine: Machine, room_gib: float) -> int:
    """The largest width whose predicted memory is below `room_gib`."""
    grid = width_grid(options)
    low, high = 1, 2
    while high < 256 and _fits_predicted(layout, high * grid, options, machine, room_gib):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = _fits_predicted(layout, middle * grid, options, machine, room_gib)
        low, high = (middle, high) if fits else (low, middle)
    return low * grid


def _fits_predicted(layout: str, width: int, options: argparse.Namespace, machine: Machine, room_gib: float) -> bool:
    run = load_run(RUN_FILE, case_words(layout, 1, options, width))
    return memory_gib(run, resolve_layout(run, options.devices, options.devices), machine) <= room_gib


def width_grid(options: argparse.Namespace) -> int:
    """Widths tried are multiples of this: whole heads on every rank of `tp`."""
    return head_size(options) * options.devices


# --- all cases ---------------------------------------------------------------------------------------------------------


def launch(words: Words, options: argparse.Namespace, *, steps: int, profile: bool) -> Row:
    """Run a case on all devices; what rank 0 found, or how it failed."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.devices)),
            *(str(Path(__file__).with_name("weather_steps.py")), str(RUN_FILE), *words),
            *("--result", str(result), "--steps", str(steps)),
            *("--skip", str(options.skip), "--room-gib", str(options.room_gib)),
            *(["--profile-step"] if profile else []),
        ]
        search_path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ, "PYTHONPATH": search_path}
        if options.tiny:
            environment["OMP_NUM_THREADS"] = "1"
        begin = time.monotonic()
        output, code = run_with_timeout(command, Path(folder), environment, options.timeout)
        wall = time.monotonic() - begin
        with options.out.with_suffix(".log").open("a") as log:
            log.write(f"$ {' '.join(command)}\n{output}\n")
        if code:
            full = "out of memory" in output.lower()
            return {
                "failed": code,
                "out_of_memory": full,
                "error": output.strip().splitlines()[-6:],
                "wall_seconds": wall,
            }
        return json.loads(result.read_text()) | {"wall_seconds": wall}


def search_width(row: Row, options: argparse.Namespace, keep: Callable[[], None], end: float) -> None:
    """Find the largest width that fits, from `row["predicted_width"]` on; `row["tries"]` holds what was tried."""
    grid, tries = width_grid(options), row["tries"]
    while time.monotonic() + options.timeout / 2 < end:
        fits = max((int(width) for width, found in tries.items() if found), default=0)
        full = min((int(width) for width, found in tries.items() if not found), default=None)
        if full is not None and full - fits <= grid:
            row["largest_width"] = fits
            return
        if not tries:
            width = row["predicted_width"]
        elif full is None:
            width = fits + grid * max(1, round(0.05 * fits / grid))
        elif not fits:
            width = max(grid, full - grid * max(1, round(0.05 * full / grid)))
        else:
            width = (fits + full) // 2 // grid * grid
        found = launch(case_words(row["layout"], 1, options, width), options, steps=2, profile=False)
        if "failed" in found and not found["out_of_memory"]:
            row["error"] = found["error"]
            return
        tries[str(width)] = "failed" not in found
        print(f"{row['case']:28} width {width:6} {'fits' if tries[str(width)] else 'does not fit'}", flush=True)
        keep()


def plan_rows(rows: list[Row], options: argparse.Namespace, machine: Machine, named: NamedProfile) -> None:
    """Add all cases that `rows` lacks, each with its prediction."""
    known = {row["case"] for row in rows}
    for name, layout in layouts(options.devices).items():
        for samples in options.samples:
            case = f"{name} {samples} a device"
            if case not in known:
                words = case_words(layout, samples, options)
                predicted = predict(words, options.devices, machine, named)
                rows.append({"case": case, "layout": layout, "words": words, "predicted": predicted})
        case = f"{name} width"
        if case not in known and not options.no_width:
            expected = widest(layout, options, machine, options.room_gib)
            rows.append({"case": case, "layout": layout, "predicted_width": expected, "tries": {}})


def measure_rows(rows: list[Row], options: argparse.Namespace, keep: Callable[[], None]) -> None:
    """Run what has no result yet, speeds first."""
    end = time.monotonic() + 60 * options.minutes
    for row in rows:
        if "words" in row and "measured" not in row and time.monotonic() + options.timeout / 2 < end:
            row["measured"] = launch(row["words"], options, steps=options.steps, profile=True)
            print_row(row)
            keep()
    for row in rows:
        if "tries" in row and "largest_width" not in row:
            search_width(row, options, keep, end)
            keep()


def print_row(row: Row) -> None:
    """One line of the table."""
    measured, predicted = row["measured"], row["predicted"]
    if "failed" in measured:
        print(f"{row['case']:28} failed ({measured['failed']}): {' | '.join(measured['error'])[-300:]}", flush=True)
        return
    error = 100 * (predicted["step_seconds"] / measured["step_seconds"] - 1)
    words = [f"{measured['step_seconds']:8.4f} s (planned {predicted['step_seconds']:.4f}, {error:+.1f}%)"]
    if measured["memory_gib"] is not None:
        words.append(f"{measured['memory_gib']:8.2f} GiB (planned {predicted['memory_gib']:.2f})")
    if measured["communication"] is not None:
        words.append(f"exposed {measured['communication']['exposed_ms']:.1f} ms")
    print(f"{row['case']:28} {'  '.join(words)}", flush=True)


def main() -> None:
    """Predict, write, run, compare."""
    options = _options()
    machine = plain_machine("CPU", options.devices) if options.tiny else load_machine(options.cluster)
    named = load_profile(options.profile) if options.profile else profile_for(load_machine(options.cluster))
    rows: list[Row] = json.loads(options.out.read_text())["cases"] if options.out.exists() else []

    def keep() -> None:
        document = {"date": datetime.now(UTC).isoformat(), "profile": named.name, "break_even": even, "cases": rows}
        write_atomically(options.out, json.dumps(document, indent=1) + "\n")

    run = load_run(RUN_FILE, case_words(layouts(options.devices)["hybrid-layer"], 1, options))
    copies = our_software(run, machine).copy_engines
    tp = run.layout.tp
    assert isinstance(tp, int)
    found = break_even(run, tp, options.devices // tp, run.layout.recompute, peer_copies=copies) if tp > 1 else None
    even = None if found is None else {"tp": found.tp, "positions_per_device": found.positions}
    plan_rows(rows, options, machine, named)
    keep()
    print(f"{len(rows)} cases predicted, in {options.out}", flush=True)
    if not options.predict_only:
        measure_rows(rows, options, keep)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", help="measured profile, from phalanx calibrate; else the shipped one")
    parser.add_argument("--cluster", default="h200-x4", help="description of this machine")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 8], help="samples a device and step")
    parser.add_argument("--recompute", default="none", choices=["none", "full"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds a case may take")
    parser.add_argument("--minutes", type=float, default=60.0, help="after this no case is begun")
    parser.add_argument("--room-gib", type=float, default=132.0, help="memory taken to be there in predicting widths")
    parser.add_argument("--no-width", action="store_true", help="leave out the search for the largest width")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--set", action="append", default=[], help="overrides after those of the case")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on CPU ranks")
    options = parser.parse_args()
    if options.tiny:
        options.room_gib = min(options.room_gib, 0.004)
    return options


if __name__ == "__main__":
    main()
