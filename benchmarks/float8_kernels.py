"""Rates of the products and of the quantisation that FP8 recipes are made of, beside those of bf16, on one device.

    python benchmarks/float8_kernels.py --out rates.json [--tokens 16384] [--tiles]
    python benchmarks/float8_kernels.py --out kernels.json --trace RUN/trace.json

The shapes are those of a block of Llama 3 8B. With --trace: the longest kernels of a step that `training.profile` recorded.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from layout_speed import ROOT

sys.path.insert(0, str(ROOT / "src"))

from phalanx.kernels import float8_triton as kernels
from phalanx.kernels.float8 import block_product, quantise, quantise_blocks, row_column_amax, scaled_product
from phalanx.kernels.float8_swiglu import quantise_swiglu_gradient

MATRICES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Output and input features."""
E4M3 = torch.float8_e4m3fn


def seconds(call: Callable[[], object], count: int = 10) -> float:
    """Median of `count` calls on the device, after three to warm up, with the cache emptied before each."""
    scratch = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    times = []
    for number in range(count + 3):
        scratch.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def product_rates(tokens: int) -> list[dict[str, Any]]:
    """TFLOP/s of each product of each matrix: forward, gradient of the input, gradient of the weight."""
    rows = []
    for name, (out, into) in MATRICES.items():
        for what, (m, n, k) in {
            "forward": (tokens, out, into),
            "input gradient": (tokens, into, out),
            "weight gradient": (out, into, tokens),
        }.items():
            a, b = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
            q_a, q_b = a.to(E4M3), b.to(E4M3)
            one, of_m, of_n = (torch.ones(size, device="cuda") for size in (1, m, n))
            blocks_m, blocks_n = torch.ones(m, k // 128, device="cuda"), torch.ones(n, k // 128, device="cuda")
            square = torch.ones(n // 128, k // 128, device="cuda")
            calls: dict[str, Callable[[], object]] = {
                "bf16": lambda a=a, b=b: a @ b.t(),
                "tensor fast": lambda a=q_a, b=q_b, s=one: scaled_product(a, b, s, s, torch.bfloat16, True),
                "tensor": lambda a=q_a, b=q_b, s=one: scaled_product(a, b, s, s, torch.bfloat16, False),
                "row fast": lambda a=q_a, b=q_b, s=of_m, t=of_n: scaled_product(a, b, s, t, torch.bfloat16, True),
                "row": lambda a=q_a, b=q_b, s=of_m, t=of_n: scaled_product(a, b, s, t, torch.bfloat16, False),
                "block": lambda a=q_a, b=q_b, s=blocks_m, t=blocks_n: block_product(a, b, s, t, torch.bfloat16, 128),
                "square": lambda a=q_a, b=q_b, s=blocks_m, t=square: block_product(a, b, s, t, torch.bfloat16, 128),
            }
            rates = {how: 2 * m * n * k / seconds(call) / 1e12 for how, call in calls.items()}
            rows.append({"matrix": name, "product": what, "m": m, "n": n, "k": k, "tflops": rates})
            print(f"{name:8s} {what:16s}", "  ".join(f"{how} {rate:,.0f}" for how, rate in rates.items()), flush=True)
            del a, b, q_a, q_b, calls
    return rows


def quantisation_rates(tokens: int) -> list[dict[str, Any]]:
    """GB/s of what is read and written."""
    rows = []
    for width in (4096, 14336, 28672):
        x = torch.randn(tokens, width, device="cuda").bfloat16()
        one, of_rows, of_columns = (torch.ones(size, device="cuda") for size in (1, tokens, width))
        amax_of_rows = torch.compile(lambda x: x.abs().amax(-1).amax())
        calls: dict[str, tuple[int, Callable[[], object]]] = {
            "amax": (2, lambda x=x, f=amax_of_rows: f(x)),
            "row_column_amax": (2, lambda x=x: row_column_amax(x)),
            "rows": (3, lambda x=x, s=one: quantise(x, s, s, E4M3, True, False)),
            "columns": (3, lambda x=x, s=one: quantise(x, s, s, E4M3, False, True)),
            "both": (4, lambda x=x, s=one: quantise(x, s, s, E4M3, True, True)),
            "both by row": (4, lambda x=x, s=of_rows, t=of_columns: quantise(x, s, t, E4M3, True, True)),
            "both by block": (4, lambda x=x: quantise_blocks(x, E4M3, 128, False, True, True)),
            "both by square": (4, lambda x=x: quantise_blocks(x, E4M3, 128, True, True, True)),
        }
        rates = {how: size * x.numel() / seconds(call) / 1e9 for how, (size, call) in calls.items()}
        rows.append({"tokens": tokens, "width": width, "gb_s": rates})
        print(f"{tokens} x {width}", "  ".join(f"{how} {rate:,.0f}" for how, rate in rates.items()), flush=True)
    return rows


def tile_rates(tokens: int) -> list[dict[str, Any]]:
    """GB/s of quantisation by size of its tiles."""
    rows = []
    one = torch.ones(1, device="cuda")
    before, gated = kernels.QUANTISE_TILES, kernels.SWIGLU_TILES
    for width in (4096, 14336):
        x = torch.randn(tokens, width, device="cuda").bfloat16()
        for tiles in itertools.product((32, 64, 128), (64, 128, 256), (4, 8)):
            kernels.QUANTISE_TILES = tiles
            rate = 4 * x.numel() / seconds(lambda x=x: quantise(x, one, one, E4M3, True, True)) / 1e9
            rows.append({"width": width, "tiles": tiles, "gb_s": rate})
            print(f"quantise {width} tiles {tiles} {rate:,.0f}", flush=True)
    kernels.QUANTISE_TILES = before
    grad, gate_up = (torch.randn(tokens, width, device="cuda").bfloat16() for width in (14336, 28672))
    for tiles in itertools.product((32, 64, 128), (16, 32, 64), (4, 8)):
        kernels.SWIGLU_TILES = tiles
        both = seconds(lambda: quantise_swiglu_gradient(grad, gate_up, 64, one, one, E4M3, E4M3))
        rate = 11 * grad.numel() / both / 1e9
        rows.append({"gated": tiles, "gb_s": rate})
        print(f"gated gradient tiles {tiles} {rate:,.0f}", flush=True)
    kernels.SWIGLU_TILES = gated
    return rows


def longest_kernels(trace: Path) -> list[dict[str, Any]]:
    """Milliseconds and calls of each kernel of a Chrome trace, the longest first."""
    text = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    total: dict[str, list[float]] = defaultdict(list)
    for event in json.loads(text)["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            total[event["name"]].append(event["dur"] / 1e3)
    kernels = sorted(total.items(), key=lambda item: -sum(item[1]))
    for name, times in kernels[:45]:
        print(f"{sum(times):9.3f} ms  {len(times):5d} x  {name[:150]}")
    print(f"{sum(sum(times) for times in total.values()):9.3f} ms  all kernels")
    return [{"kernel": name, "calls": len(times), "ms": sum(times)} for name, times in kernels]


def main() -> None:
    """Measure, print, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--tiles", action="store_true", help="time sizes of tiles instead of products")
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    if options.trace is not None:
        found: dict[str, Any] = {"kernels": longest_kernels(options.trace)}
    else:
        found = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
        if options.tiles:
            found["tiles"] = tile_rates(options.tokens)
        else:
            found["quantisation"] = quantisation_rates(options.tokens)
            found["products"] = product_rates(options.tokens)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
