"""From which size on ranks of `tp` gain by exchanging parts of sequences beside their products: steps of one short sample.

    torchrun --standalone --nproc-per-node 2 benchmarks/sequence_exchanges.py examples/llama3-8b.yaml model.n_layers=4 \\
        layout.recompute=none --out sizes.json [--lengths 1024 2048 4096 8192]

Trains the run file's model by real ranks on random samples, for each length in both ways (`layout.peer_copies` false and
true, which takes every exchange), by the code of training itself. A sample's part of a sequence has length / tp x d_model
numbers of the arithmetic's format.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.config.load import load_run
from phalanx.families.language.config import require_language
from phalanx.families.registry import bind
from phalanx.files import write_atomically
from phalanx.hardware.device import choose_device, synchronize
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionShape, choose_attention
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import build_mesh, join_process_group, ranks_from_environment
from phalanx.layout.resolve import resolve_layout
from phalanx.nn.precision import PRECISIONS
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.training.step import build_step

REPEATS = 3


def measure(run_file: Path, words: list[str], device: torch.device, steps: int) -> dict[str, Any]:
    """Return seconds of a step of one sample: the median of the repeats, and all; and bytes of a part of a sequence.

    The first repeat compiles.
    """
    world = dist.get_world_size()
    one = [f"layout.tp={world}", "layout.dp_shard=1", "layout.microbatch=1", "layout.global_batch=1"]
    run = require_language(load_run(run_file, [*one, *words]), "sequence_exchanges")
    dtype = PRECISIONS[run.layout.precision].compute_dtype
    layout = resolve_layout(bind(run), world, world)
    shape = AttentionShape(1, run.data.sequence_length, dtype, documents=False)
    attention = choose_attention(run.training.attention, run.model, shape, device)
    applied = apply_layout(bind(run, LayoutModel), layout, build_mesh(layout, device), device, attention)
    step = build_step(bind(run), applied, device)
    torch.manual_seed(0)
    batch = bind(run, TracedModel).example_batch(1, device)
    seconds = []
    for repeat in range(1 + REPEATS):
        synchronize(device)
        begun = time.perf_counter()
        # Launched ahead, as training launches them.
        for number in range(1, steps + 1):
            step.enqueue(steps * repeat + number, batch)
        synchronize(device)
        seconds.append((time.perf_counter() - begun) / steps)
    part = run.data.sequence_length // world * run.model.d_model * dtype.itemsize
    return {"part_bytes": part, "median_seconds": statistics.median(seconds[1:]), "seconds": seconds}


def main() -> None:
    """Measure both ways at each length, print a line each, write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("words", nargs="*", help="section.field=value")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--steps", type=int, default=10, help="steps of a repeat")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_intermixed_args()
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    ranks = ranks_from_environment()
    device = choose_device("auto", ranks.local_rank)
    join_process_group(ranks, device)
    rows = []
    for length in options.lengths:
        for copies in ("false", "true"):
            words = [*options.words, f"data.sequence_length={length}", f"layout.peer_copies={copies}"]
            row = measure(options.run_file, words, device, options.steps)
            rows.append({"length": length, "peer_copies": copies == "true", **row})
            if ranks.first:
                mib, seconds = row["part_bytes"] / 2**20, row["median_seconds"]
                print(
                    f"{length:6d} tokens, {mib:5.1f} MiB a part, copies {copies:5s}: {1e3 * seconds:8.2f} ms",
                    flush=True,
                )
                write_atomically(options.out, json.dumps({"words": options.words, "rows": rows}, indent=1) + "\n")
            # Programs of another length would count as recompilations of these.
            torch.compiler.reset()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
