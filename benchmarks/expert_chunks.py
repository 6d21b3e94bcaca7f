"""What tokens that travel to their experts in several chunks cost and hide, kernel by kernel; two devices of one host.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/expert_chunks.py --json FILE

One mixture of Qwen3-30B-A3B over `ep=2`, forward and backward, in one, two and four chunks: the median time in turns, and of
one step every kernel with its beginning, length and stream. Beside it grouped products and exchanges alone, of all rows and
of the rows of one chunk.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.layers import Experts, MixtureConfig
from phalanx.config.model import LanguageModel
from phalanx.layout.expert_parallel.token_exchange import TokenExchange, split_experts
from phalanx.layout.mesh import Axis, join_process_group, ranks_from_environment
from phalanx.nn.experts import MixtureOfExperts
from phalanx.torch_compat.common import await_tensor, begin_all_to_all_rows

CHUNKS = (1, 2, 4)
EXPERTS, ACTIVE = 128, 8
KINDS = {
    "grouped product": r"group",
    "exchange": r"SendRecv|AllGather",
    "sort rows": r"gather|index|combine|sum_copies",
    "order": r"sort|scan|searchsorted|bucket",
    "pointwise": r"elementwise|triton|copy|Memcpy|Memset|fill|reduce|softmax|Cat",
}
"""Kinds of kernels, each with what its names contain; the first that matches counts."""


def build_mixture(ep: Axis, chunks: int, device: torch.device, *, width: int, hidden: int) -> MixtureOfExperts:
    """Return this rank's part of a mixture in bfloat16, with random parameters."""
    model = LanguageModel(
        n_layers=1,
        d_model=width,
        n_heads=16,
        vocab_size=64,
        max_positions=64,
        d_ff=hidden,
        experts=Experts(count=EXPERTS, active=ACTIVE, balance="none"),
    )
    config = model.layer(0).mlp
    assert isinstance(config, MixtureConfig)
    with torch.device("meta"):
        mixture = MixtureOfExperts(config)
    split_experts(mixture, ep, TokenExchange(ep, chunks=chunks))
    mixture.to_empty(device=device).to(torch.bfloat16)
    torch.manual_seed(ep.rank)
    for parameter in mixture.parameters():
        nn.init.normal_(parameter, std=0.02)
    for buffer in mixture.buffers():
        buffer.zero_()
    return mixture


def run_step(mixture: nn.Module, x: Tensor, grad: Tensor) -> None:
    """Run a mixture forward and backward; gradients of a step before are freed."""
    x.grad = None
    for parameter in mixture.parameters():
        parameter.grad = None
    mixture(x).backward(grad)


def synchronize() -> None:
    """Wait until the device has done everything."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def time_once(call: Callable[[], object]) -> float:
    """Return the milliseconds of one call, begun by all ranks together."""
    dist.barrier()
    synchronize()
    begun = time.perf_counter()
    call()
    synchronize()
    return (time.perf_counter() - begun) * 1e3


def time_median(call: Callable[[], object], repeats: int = 12) -> float:
    """Return the median milliseconds of a call, after three others."""
    for _ in range(3):
        call()
    return round(statistics.median(time_once(call) for _ in range(repeats)), 3)


def record_kernels(call: Callable[[], object]) -> dict[str, Any]:
    """Return every kernel of one call as [begin, length, stream, kind, name] in microseconds, and sums of each kind."""
    dist.barrier()
    activities = {torch.profiler.ProfilerActivity.CUDA}
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        torch.accelerator.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    kernels = sorted(
        (e["ts"], e["dur"], e["args"].get("stream"), _kind(e["name"]), e["name"][:90])
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in e
    )
    busy, end = 0.0, kernels[0][0]
    for begin, length, *_ in kernels:
        busy += max(0.0, begin + length - max(begin, end))
        end = max(end, begin + length)
    sums: dict[str, list[float]] = {}
    for _, length, _, kind, _ in kernels:
        count, total = sums.get(kind, (0, 0.0))
        sums[kind] = [count + 1, round(total + length / 1e3, 3)]
    waits = [e for e in events if e.get("cat") == "cuda_runtime" and "Synchronize" in e["name"]]
    return {
        "span_ms": round((end - kernels[0][0]) / 1e3, 3),
        "busy_ms": round(busy / 1e3, 3),
        "kernels and ms of each kind": sums,
        "host waits": [round(e["dur"] / 1e3, 3) for e in waits],
        "kernels": [[round(begin - kernels[0][0], 1), round(length, 1), *rest] for begin, length, *rest in kernels],
    }


def _kind(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE)), "other")


def time_alone(ep: Axis, rows: int, device: torch.device, *, width: int, hidden: int) -> dict[str, float]:
    """Return milliseconds of the grouped products and of an exchange of so many rows, with nothing beside them."""
    experts = EXPERTS // ep.size
    ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * (rows // experts)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    x, w, grad = numbers(rows, width), numbers(experts, 2 * hidden, width), numbers(rows, 2 * hidden)
    h, v = numbers(rows, hidden), numbers(experts, width, hidden)
    half = [rows // ep.size] * ep.size
    whole = numbers(experts, 2 * hidden, width)
    calls: dict[str, Callable[[], object]] = {
        "gate_up forward": lambda: F.grouped_mm(x, w.transpose(1, 2), offs=ends),
        "gate_up input gradient": lambda: F.grouped_mm(grad, w, offs=ends),
        "gate_up weight gradient": lambda: F.grouped_mm(grad.t(), x, offs=ends),
        "down forward": lambda: F.grouped_mm(h, v.transpose(1, 2), offs=ends),
        "down input gradient": lambda: F.grouped_mm(x, v, offs=ends),
        "down weight gradient": lambda: F.grouped_mm(x.t(), h, offs=ends),
        "sum of two gate_up gradients": lambda: whole + w,
        "exchange": lambda: await_tensor(begin_all_to_all_rows(x, half, half, ep.group_name)),
    }
    return {name: time_median(call) for name, call in calls.items()}


def main() -> None:
    """Measure on all ranks; the first prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16384, help="of a rank")
    parser.add_argument("--compiled", action="store_true", help="measure the compiled mixture, and nothing alone")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=768)
    options = parser.parse_args()
    ranks = ranks_from_environment()
    device = torch.device("cuda", ranks.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    join_process_group(ranks, device)
    group = dist.group.WORLD
    assert group is not None
    size = dist.get_world_size()
    ep = Axis("ep", ranks.rank, size, group, tuple(range(size)), group.group_name)
    sizes, tokens = {"width": options.width, "hidden": options.hidden}, options.tokens
    torch.manual_seed(100 + ep.rank)
    x = torch.randn((1, tokens, options.width), device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    steps: dict[str, Callable[[], object]] = {}
    for chunks in CHUNKS:
        mixture = build_mixture(ep, chunks, device, **sizes)
        if options.compiled:
            mixture.compile()

        steps[f"{chunks} chunks"] = partial(run_step, mixture, x, grad)
    found: dict[str, Any] = {name: {"first ms": round(time_once(step))} for name, step in steps.items()}
    for _ in range(2):
        for name, step in steps.items():
            found[name].setdefault("ms, two turns", []).append(time_median(step))
    for name, step in steps.items() if device.type == "cuda" else ():
        found[name].update(record_kernels(step))
    rows = tokens * ACTIVE
    alone: dict[str, dict[str, float]] = {}
    for chunks in () if options.compiled else CHUNKS:
        alone[f"{rows // chunks} rows"] = time_alone(ep, rows // chunks, device, **sizes)
    if ranks.first:
        words = f"{' --compiled' if options.compiled else ''} --tokens {tokens}"
        result = {
            "command": f"python -m torch.distributed.run --nproc-per-node 2 benchmarks/expert_chunks.py{words}",
            "devices": f"two {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPUs'} of one host",
            "torch": torch.__version__,
            "steps": found,
            "alone, ms": alone,
        }
        options.json.write_text(json.dumps(result))
        for name, each in found.items():
            print(name, json.dumps({key: value for key, value in each.items() if key != "kernels"}))
        print(json.dumps(alone, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
