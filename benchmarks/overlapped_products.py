"""Products of matrices split over `tp` with their exchange: collectives before or behind them, or copies beside them.

    torchrun --standalone --nproc-per-node 2 benchmarks/overlapped_products.py --out results.json

Times forward and backward pass of a column and a row matrix of Llama-3 8B in bfloat16, the product alone on one rank of the
group, and PyTorch's own operations for one sample (`torch.ops.symm_mem`), forward alone. Checks that results agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# It registers the operations of `symm_mem`.
import torch.distributed._symmetric_memory
import torch.nn.functional as F
from torch import Tensor

from phalanx.layout.mesh import Axis, build_mesh, join_process_group, ranks_from_environment
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.tensor_parallel.autograd_collectives import gather_parts, scatter_sum
from phalanx.layout.tensor_parallel.overlapped_products import gather_multiply, multiply_scatter
from phalanx.layout.tensor_parallel.peer_exchange import choose_exchange

MATRICES = {"qkv": (4096, 6144), "gate_up": (4096, 28672), "o": (4096, 4096), "down": (14336, 4096)}
"""Input and output features of the whole matrix."""
COLUMN = ("qkv", "gate_up")
Pass = Callable[[Tensor, Tensor], Tensor]


def passes(name: str, tp: Axis) -> dict[str, Pass]:
    """Return what a matrix computes, by how it exchanges."""
    group = tp.group_name
    if name in COLUMN:
        return {
            "alone": F.linear,
            "collectives": lambda x, w: F.linear(gather_parts(x, tp, 1), w),
            "copies": lambda x, w: gather_multiply(x, w, tp),
            "symm_mem": lambda x, w: torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t()], 1, group)[1][0],
        }
    return {
        "alone": F.linear,
        "collectives": lambda x, w: scatter_sum(F.linear(x, w), tp, 1),
        "copies": lambda x, w: multiply_scatter(x, w, tp),
        "symm_mem": lambda x, w: torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.t(), "sum", 1, group),
    }


def milliseconds(run: Callable[[], Any], repeats: int = 12) -> float:
    """Return the median time of `run` between events; ranks begin together."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.Event(enable_timing=True, device="cuda") for _ in range(2))
        dist.barrier()
        begin.record()
        run()
        end.record()
        torch.accelerator.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def measure(name: str, batch: int, length: int, tp: Axis, device: torch.device) -> dict[str, Any]:
    """Return times of one matrix for `batch` sequences, and the largest difference relative to collectives."""
    inputs, outputs = MATRICES[name]
    column = name in COLUMN
    shape = (outputs // tp.size, inputs) if column else (outputs, inputs // tp.size)
    generator = torch.Generator(device).manual_seed(tp.rank)
    weight = (torch.randn(shape, generator=generator, device=device) / 64).bfloat16().requires_grad_()
    row: dict[str, Any] = {"matrix": name, "batch": batch}
    wanted: list[Tensor] = []
    for how, run in passes(name, tp).items():
        own = length // tp.size if column and how != "alone" else length
        x = torch.randn(batch, own, shape[1], generator=generator, device=device).bfloat16().requires_grad_()
        if how in ("collectives", "copies"):
            generator.manual_seed(7 + tp.rank)
            x = torch.randn(x.shape, generator=generator, device=device).bfloat16().requires_grad_()
        if how == "symm_mem":
            with torch.no_grad():
                row["forward symm_mem"] = milliseconds(partial(run, x, weight))
            continue
        grad = torch.ones_like(run(x, weight))

        def both(run: Pass = run, x: Tensor = x, grad: Tensor = grad) -> list[Tensor]:
            y = run(x, weight)
            return [y, *torch.autograd.grad(y, (x, weight), grad)]

        with torch.no_grad():
            row[f"forward {how}"] = milliseconds(partial(run, x, weight))
        row[f"both {how}"] = milliseconds(both)
        if how == "collectives":
            wanted = both()
        if how == "copies":
            found = both()
            row["difference"] = [
                float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, wanted, strict=True)
            ]
    return row


def main() -> None:
    """Print a line of times for each matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=8192)
    options = parser.parse_args()
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    ranks = ranks_from_environment()
    device = torch.device("cuda", ranks.local_rank)
    join_process_group(ranks, device)
    tp = build_mesh(ResolvedLayout(1, tp=ranks.world_size), device).tp
    assert choose_exchange(True, tp, device)
    rows = []
    for name in MATRICES:
        for batch in (2, 1):
            row = measure(name, batch, options.length, tp, device)
            rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
            if ranks.first:
                print(json.dumps(rows[-1]), flush=True)
    if ranks.first:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
