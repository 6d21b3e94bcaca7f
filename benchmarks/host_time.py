"""What the host takes to issue a micro-batch: the real step of one rank among ranks that are not there, of a tiny model.

    python benchmarks/host_time.py --out benchmarks/results/weather/host_time_cpu.json

ORBIT-1B's layers and variables with a width of 32 on 8 x 16 points, so that computing takes next to nothing, in the layouts
of `weather_layouts.py`, uncompiled. A fake process group takes every collective at once. What is left is Python, PyTorch's
dispatcher and its autograd, which a device waits for where it is faster. Given are milliseconds a micro-batch, from steps of
one and of five, with eight blocks and with two; the difference of these is what a block costs. All is repeated, since
machines that are shared differ from minute to minute.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch

from phalanx.config.load import load_run
from phalanx.families.registry import bind
from phalanx.files import write_atomically
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import build_mesh
from phalanx.layout.resolve import resolve_layout
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.torch_compat.fake import fake_process_group
from phalanx.training.step import build_step

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
LAYOUTS = {
    "one device": "tp=1 dp_shard=1",
    "FSDP 4": "tp=1 dp_shard=4",
    "ZeRO-2 over 4": "tp=1 dp_shard=4 zero=2",
    "ZeRO-1 over 4": "tp=1 dp_shard=4 zero=1",
    "TP 4": "tp=4 dp_shard=1",
    "Hybrid-STOP 2x2, by layers": "tp=2 dp_shard=2 gather=layer",
    "Hybrid-STOP 2x2, streamed": "tp=2 dp_shard=2 gather=stream",
}
TINY = (
    "model.d_model=32",
    "model.n_heads=4",
    "model.n_lat=8",
    "model.n_lon=16",
    "model.patch_size=4",
    "dp_replicate=1",
    "recompute=none",
    "training.compile=false",
    "evaluation.every=null",
    "cluster.device=cpu",
)
BLOCKS = (8, 2)
STEPS = (5, 1)
"""Micro-batches of the steps that are compared."""


def issue_seconds(layout_words: str, blocks: int, microbatches: int, samples: int) -> list[float]:
    """Seconds of steps of so many micro-batches, after some to warm up."""
    fields = dict(word.split("=") for word in layout_words.split())
    tp = int(fields["tp"])
    world = tp * int(fields["dp_shard"])
    batch = (f"microbatch={tp}", f"global_batch={world * microbatches}")
    words = [*TINY, f"model.n_layers={blocks}", *layout_words.split(), *batch]
    with contextlib.ExitStack() as stack:
        if world > 1:
            stack.enter_context(fake_process_group(0, world))
        run = load_run(ROOT / "examples/orbit-1b.yaml", words)
        layout = resolve_layout(bind(run), world, world)
        applied = apply_layout(bind(run, LayoutModel), layout, build_mesh(layout, CPU), CPU, AttentionChoice("sdpa"))
        step = build_step(bind(run), applied, CPU)
        batch_of_rank = bind(run, TracedModel).example_batch(layout.samples_per_rank, CPU)
        return timed(lambda: step.enqueue(1, batch_of_rank), samples)


def timed(call: Callable[[], object], samples: int) -> list[float]:
    """Seconds of calls, after three that are not counted."""
    found = []
    for number in range(3 + samples):
        start = time.perf_counter()
        call()
        if number >= 3:
            found.append(time.perf_counter() - start)
    return found


def measure(layout_words: str, samples: int) -> dict[str, Any]:
    """Milliseconds a micro-batch with each number of blocks, and for each block."""
    each = {}
    for blocks in BLOCKS:
        many, one = (statistics.median(issue_seconds(layout_words, blocks, count, samples)) for count in STEPS)
        each[blocks] = 1e3 * (many - one) / (STEPS[0] - STEPS[1])
    most, least = BLOCKS
    return {
        "layout": layout_words,
        "ms_a_microbatch": each,
        "ms_a_block": (each[most] - each[least]) / (most - least),
    }


def main() -> None:
    """Measure all layouts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=21)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for repeat, (name, words) in product(range(options.repeats), LAYOUTS.items()):
        rows.append({"name": name, "repeat": repeat, **measure(words, options.samples)})
        found = rows[-1]["ms_a_microbatch"]
        print(f"{name:28} {found[8]:7.1f} ms a micro-batch, {rows[-1]['ms_a_block']:5.2f} ms a block", flush=True)
    document = {
        "command": f"python benchmarks/host_time.py {' '.join(sys.argv[1:])}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "rows": rows,
    }
    write_atomically(options.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
