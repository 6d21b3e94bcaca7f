"""The device's side of a step: one rank of a layout computes on one device, and exchanges with ranks that are not there.

    python benchmarks/rank_alone.py RUN.yaml --world 4 --steps 12 --skip 4 layout.dp_shard=4 layout.zero=1 ... [--out OUT]

A fake process group takes every collective at once, so gathered parameters and sums of gradients are meaningless, while
kernels have the shapes and the memory that they have among real ranks. What is left of a step is what no faster link
would save. Samples are drawn at random; no data are read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from phalanx.config.load import load_run
from phalanx.families.language.config import require_language
from phalanx.families.registry import bind
from phalanx.files import write_atomically
from phalanx.hardware.device import choose_device, device_name, synchronize
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionShape, choose_attention
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import build_mesh
from phalanx.layout.resolve import resolve_layout
from phalanx.nn.precision import PRECISIONS
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.torch_compat.fake import fake_process_group, silent_neighbours
from phalanx.training.step import build_step

GIB = 2**30


def measure(run_file: Path, words: list[str], world: int, rank: int, steps: int) -> dict[str, Any]:
    """Seconds of each step of `rank`, and the most that its allocator gave out (None on the CPU)."""
    with fake_process_group(rank, world), silent_neighbours():
        run = require_language(load_run(run_file, [*words, "layout.peer_copies=false"]), "rank_alone")
        layout = resolve_layout(bind(run), world, world)
        device = choose_device(run.cluster.device, 0)
        shape = AttentionShape(
            run.layout.microbatch,
            run.data.sequence_length,
            PRECISIONS[run.layout.precision].compute_dtype,
            documents=False,
        )
        attention = choose_attention(run.training.attention, run.model, shape, device)
        applied = apply_layout(bind(run, LayoutModel), layout, build_mesh(layout, device), device, attention)
        step = build_step(bind(run), applied, device)
        batch = bind(run, TracedModel).example_batch(layout.samples_per_rank, device)
        seconds = [timed(lambda: step.enqueue(1, batch), device) for _ in range(steps)]
        peak = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None
        return {"layout": str(layout), "attention": attention.name, "seconds": seconds, "peak_gib": peak}


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done it."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("words", nargs="*", help="section.field=value")
    parser.add_argument("--world", type=int, required=True, help="ranks of the layout")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=4, help="first steps that are not counted")
    parser.add_argument("--out", type=Path)
    options = parser.parse_intermixed_args()
    found = measure(options.run_file, options.words, options.world, options.rank, options.steps)
    median = statistics.median(found["seconds"][options.skip :])
    peak = "" if found["peak_gib"] is None else f", peak {found['peak_gib']:.2f} GiB"
    print(f"{found['layout']}  attention {found['attention']}  {median:.4f} s a step{peak}")
    if options.out is not None:
        document = {
            "command": f"python benchmarks/rank_alone.py {' '.join(sys.argv[1:])}",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "device": device_name(choose_device("auto", 0)),
            "median_seconds": median,
            **found,
        }
        write_atomically(options.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
