"""What sums of weight gradients over micro-batches cost, and what they would inside the products that form the gradients.

    python benchmarks/gradient_sums.py --out sums.json [--tokens 4096 8192 16384]

For each matrix of a block of Llama 3 8B and each number of tokens of a micro-batch: the product and the sum as they are (in
bf16 `kernels.parts_sum.add_gradient` adds the product to a float32 sum, in FP8 autograd adds a float32 product), and a
product that adds to the float32 sum by itself. `torch._scaled_mm` cannot. `head` is what the head's gradient takes on its
way from the sum over chunks into the sum over micro-batches: scaled in float32 and then cast, or at once, as it is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from float8_kernels import E4M3, MATRICES, seconds
from phalanx.files import write_atomically
from phalanx.kernels.float8 import scaled_product
from phalanx.kernels.parts_sum import add_gradient
from phalanx.torch_compat import common as compat

HEAD = (128256, 4096)
"""Rows and columns of the head's weight."""


def time_matrix(name: str, tokens: int) -> dict[str, Any]:
    """Milliseconds of each way to sum the gradient of one matrix, and of the three products of the matrix alone."""
    out, into = MATRICES[name]
    x, grad = (torch.randn(tokens, width, device="cuda").bfloat16() for width in (into, out))
    weight = torch.randn(out, into, device="cuda").bfloat16()
    total = torch.zeros(out, into, device="cuda")
    q_x, q_grad = x.t().contiguous().to(E4M3), grad.t().contiguous().to(E4M3)
    one = torch.ones(1, device="cuda")

    def product_in(dtype: torch.dtype) -> torch.Tensor:
        product: torch.Tensor = scaled_product(q_grad, q_x, one, one, dtype, False)
        return product

    ways: dict[str, Callable[[], object]] = {
        "three products bf16": lambda: (x @ weight.t(), grad @ weight, grad.t() @ x),
        "product bf16": lambda: grad.t() @ x,
        "product and sum bf16": lambda: add_gradient(grad.t() @ x, total, torch.float32),
        "product with sum bf16": lambda: compat.add_matmul(total, grad.t(), x, torch.float32),
        "product fp8": lambda: product_in(torch.float32),
        "product and sum fp8": lambda: total.add_(product_in(torch.float32)),
        "product and sum fp8, gradient in 16 bits": lambda: add_gradient(
            product_in(torch.bfloat16), total, torch.float32
        ),
    }
    return {"matrix": name, "tokens": tokens, "ms": {how: 1e3 * seconds(call) for how, call in ways.items()}}


def time_head() -> dict[str, float]:
    """Milliseconds of what follows the head's products in the backward pass of one micro-batch, with bf16 parameters."""
    found, scale = torch.randn(HEAD, device="cuda"), torch.full((), 0.5, device="cuda")
    total = torch.zeros(HEAD, device="cuda")

    def at_once() -> torch.Tensor:
        return torch.mul(found, scale, out=torch.empty_like(found, dtype=torch.bfloat16))

    def one_by_one() -> torch.Tensor:
        return (found * scale).bfloat16()

    ways: dict[str, Callable[[], object]] = {
        "scaled, cast, added": lambda: add_gradient(one_by_one(), total, torch.float32),
        "scaled and cast at once, added": lambda: add_gradient(at_once(), total, torch.float32),
        "scaled, cast": one_by_one,
        "scaled and cast at once": at_once,
    }
    return {how: 1e3 * seconds(call) for how, call in ways.items()}


def main() -> None:
    """Measure, print, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    options = parser.parse_args()
    rows = [time_matrix(name, tokens) for tokens in options.tokens for name in MATRICES]
    for tokens in options.tokens:
        of_block = [row["ms"] for row in rows if row["tokens"] == tokens]
        for how in of_block[0]:
            print(f"{tokens:6d} tokens, a block: {sum(ms[how] for ms in of_block):8.3f} ms  {how}", flush=True)
    head = time_head()
    for how, ms in head.items():
        print(f"head: {ms:8.3f} ms  {how}", flush=True)
    found = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "blocks": rows, "head": head}
    write_atomically(options.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
