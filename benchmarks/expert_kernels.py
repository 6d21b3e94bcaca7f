"""Rates of the kernels that mixtures of experts are made of, beside dense products of the same size; one device.

    python benchmarks/expert_kernels.py [--json FILE]

Grouped products, forward and both gradients, by the PyTorch operation and by our Triton kernel; sorting tokens by expert,
and summing rows back. Rows are shared unevenly: the share of an expert is drawn, from half to one and a half of the mean.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from phalanx.kernels import grouped_products_triton as own
from phalanx.kernels.routed_rows import combine_rows, combine_rows_backward
from phalanx.nn.experts import sort_by_expert

SHAPES = {
    "qwen3-30b-a3b": (128, 8, 2048, 768, 32768),
    "mixtral-8x7b": (8, 2, 4096, 14336, 8192),
    "deepseek-v3, 32 of 256 experts": (32, 8, 7168, 2048, 8192),
}
"""Experts, experts a token, width, hidden width, tokens."""


def median_ms(call: Callable[[], Any]) -> float:
    """Return the median time of `call` on the device."""
    found: float = triton.testing.do_bench(call, warmup=50, rep=200, return_mode="median")
    return found


def measure(experts: int, active: int, width: int, hidden: int, tokens: int) -> dict[str, Any]:
    """Return milliseconds and rates for one shape, in bfloat16."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    rows = tokens * active
    share = torch.rand(experts) + 0.5
    ends = (share.cumsum(0) / share.sum() * rows).round().int()
    ends[-1] = rows
    ends = ends.to(device)
    x, w = (
        torch.randn(shape, device=device, dtype=torch.bfloat16)
        for shape in ((rows, width), (experts, 2 * hidden, width))
    )
    grad = torch.randn((rows, 2 * hidden), device=device, dtype=torch.bfloat16)
    flops = 2 * rows * width * 2 * hidden
    dense = torch.randn((2 * hidden, width), device=device, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {
        "dense forward": lambda: F.linear(x, dense),
        "dense weight gradient": lambda: grad.t() @ x,
        "library forward": lambda: F.grouped_mm(x, w.transpose(1, 2), offs=ends),
        "library input gradient": lambda: F.grouped_mm(grad, w, offs=ends),
        "library weight gradient": lambda: F.grouped_mm(grad.t(), x, offs=ends),
        "own forward": lambda: own.run_grouped_product(x, w, ends, True),
        "own input gradient": lambda: own.run_grouped_product(grad, w.transpose(1, 2), ends, True),
        "own weight gradient": lambda: own.run_grouped_gradient(grad, x, ends),
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        ms = median_ms(call)
        found[name] = {"ms": round(ms, 4), "tflops": round(flops / ms / 1e9, 1)}
    chosen = torch.rand(tokens, experts, device=device).topk(active).indices
    order = sort_by_expert(chosen, experts)
    tokens_TD = torch.randn((tokens, width), device=device, dtype=torch.bfloat16)
    rows_RD = torch.randn((rows, width), device=device, dtype=torch.bfloat16)
    weights = torch.rand((tokens, active), device=device)
    moved = 2 * rows * width

    def note(name: str, call: Callable[[], Any], size: float) -> None:
        ms = median_ms(call)
        found[name] = {"ms": round(ms, 4), "gb_s": round(size / ms / 1e6, 0)}

    note("order of rows", lambda: sort_by_expert(chosen, experts), 0)
    note("sort rows", lambda: tokens_TD.index_select(0, order.source_R), 2 * moved)
    note("combine", lambda: combine_rows(rows_RD, order.position_TK, weights), moved + moved / active)
    note("combine, plain", lambda: plain_combine(rows_RD, order.position_TK, weights), moved + moved / active)
    note(
        "combine backward",
        lambda: combine_rows_backward(tokens_TD, rows_RD, order.position_TK, weights),
        2 * moved + moved / active,
    )
    return found


def plain_combine(rows_RD: Tensor, position_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the weighted sums by PyTorch's own operations."""
    tokens, copies = position_TK.shape
    rows = rows_RD[position_TK.flatten().long()].view(tokens, copies, -1)
    return torch.bmm(weights_TK.to(rows.dtype)[:, None], rows).squeeze(1)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "shapes": {name: {"sizes": shape, **measure(*shape)} for name, shape in SHAPES.items()},
    }
    for name, found in result["shapes"].items():
        print(f"{name}: experts, active, width, hidden, tokens = {found.pop('sizes')}")
        for call, figures in found.items():
            print(f"  {call:28} " + "  ".join(f"{key} {value}" for key, value in figures.items()))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
