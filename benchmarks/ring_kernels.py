"""The parts of ring attention by each kernel a device has: parity with float64, and milliseconds at the shapes of two ranks.

    python benchmarks/ring_kernels.py [--length 8192] [--heads 32] [--kv-heads 8] [--width 128] --out ring_kernels.json

A rank of a ring of two computes its own queries and keys (causal), and then either its late queries and all keys of the
other rank or all its queries and the other's early keys. bfloat16; times are means of ten calls.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from phalanx.files import write_atomically
from phalanx.hardware.device import device_name, synchronize
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.context_parallel.ring_attention import Part, attend_part, join_parts, part_gradients

DTYPE = torch.bfloat16


def random_heads(samples: int, heads: int, length: int, width: int, device: torch.device) -> Tensor:
    """[B, H, S, E] as a model makes it: heads beside each other in memory."""
    return torch.randn(samples, length, heads, width, device=device, dtype=DTYPE).transpose(1, 2)


def parity(device: torch.device, heads: int, kv_heads: int, width: int, length: int = 512) -> dict[str, float]:
    """Relative errors, in the 2-norm, of the result and of the gradients put together from parts of two halves."""
    query, key, value, grad = (random_heads(2, n, length, width, device) for n in (heads, kv_heads, kv_heads, heads))
    exact = [x.double().detach().requires_grad_() for x in (query, key, value)]
    many = [x.repeat_interleave(heads // kv_heads, 1) for x in exact[1:]]
    future = torch.ones(length, length, device=device, dtype=torch.bool).triu(1)
    scores = (exact[0] @ many[0].mT * width**-0.5).masked_fill(future, -torch.inf)
    expected = scores.softmax(-1) @ many[1]
    expected.backward(grad.double())
    early, late = slice(0, length // 2), slice(length // 2, length)
    out, log_z = expected.detach().to(DTYPE), scores.detach().logsumexp(-1).float()
    own = attend_part(query[:, :, late], key[:, :, late], value[:, :, late], causal=True, bias=None)
    other = attend_part(query[:, :, late], key[:, :, early], value[:, :, early], causal=False, bias=None)
    joined = join_parts(join_parts(None, own), other)
    found = [torch.zeros_like(x) for x in exact]
    for q, k, causal in ((early, early, True), (late, late, True), (late, early, False)):
        parts = (query[:, :, q], key[:, :, k], value[:, :, k])
        whole = Part(out[:, :, q], log_z[:, :, q])
        grads = part_gradients(grad[:, :, q], *parts, whole, causal=causal, bias=None)
        for total, where, part in zip(found, (q, k, k), grads, strict=True):
            total[:, :, where] += part
    errors = {"out": _distance(joined.out, expected.detach()[:, :, late])}
    for name, one, x in zip(("query", "key", "value"), found, exact, strict=True):
        assert x.grad is not None
        errors[f"gradient of the {name}"] = _distance(one, x.grad)
    return errors


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def milliseconds(
    device: torch.device, heads: int, kv_heads: int, width: int, length: int
) -> dict[str, dict[str, float]]:
    """Forward and backward milliseconds of each part."""
    query, key, value, grad = (random_heads(1, n, length, width, device) for n in (heads, kv_heads, kv_heads, heads))
    every, early, late = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    shapes = {"own": (every, every, True), "late queries": (late, every, False), "early keys": (every, early, False)}
    found = {}
    for name, (q, k, causal) in shapes.items():
        parts = (query[:, :, q], key[:, :, k], value[:, :, k])
        part = attend_part(*parts, causal=causal, bias=None)
        whole = Part(part.out.to(DTYPE), part.log_z)
        found[name] = {
            "forward": _mean(device, partial(attend_part, *parts, causal=causal, bias=None)),
            "backward": _mean(device, partial(part_gradients, grad[:, :, q], *parts, whole, causal=causal, bias=None)),
        }
    return found


def _mean(device: torch.device, call: Callable[[], object], count: int = 10) -> float:
    for _ in range(3):
        call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / count * 1e3


def main() -> None:
    """Check, measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192, help="positions a rank holds")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    sizes = (options.heads, options.kv_heads, options.width)
    kernels = {}
    for name in ("cudnn", "flash"):
        with AttentionChoice(name).active(device):
            kernels[name] = {
                "relative_error": parity(device, *sizes),
                "milliseconds": milliseconds(device, *sizes, options.length),
            }
        print(name, json.dumps(kernels[name]), flush=True)
    about = {"date": datetime.now(UTC).isoformat(), "device": device_name(device), "torch": torch.__version__}
    document = {
        **about,
        "python": platform.python_version(),
        "sizes": vars(options) | {"out": None},
        "kernels": kernels,
    }
    write_atomically(options.out, json.dumps(document, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
