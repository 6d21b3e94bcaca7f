"""What sums of weight gradients over micro-batches cost, and what they would inside the products that form the gradients.

    python benchmarks/gradient_sums.py --out sums.json [--tokens 4096 8192 16384] [--steps]

For each matrix of a block of Llama 3 8B and each number of tokens of a micro-batch: the product and the sum as they are (in
bf16 `kernels.parts_sum.add_gradient` adds the product to a float32 sum, in FP8 autograd adds a float32 product), and a
product that adds to the float32 sum by itself. `torch._scaled_mm` cannot. `head` is what the head's gradient takes on its
way from the sum over chunks into the sum over micro-batches: scaled in float32 and then cast, or at once, as it is.

`--steps` instead times forward and backward passes of `--accumulation` micro-batches of eight such blocks with embedding and
head, compiled, in bf16: with products that add to the sums, as training does, and with gradients that autograd is given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from float8_kernels import E4M3, MATRICES, seconds
from phalanx.config.load import load_run
from phalanx.families.language.data.token_batches import TokenBatch
from phalanx.families.registry import bind
from phalanx.files import write_atomically
from phalanx.hardware.device import choose_device
from phalanx.kernels.float8 import scaled_product
from phalanx.kernels.parts_sum import add_gradient
from phalanx.layout.apply import ParallelModel, apply_layout
from phalanx.layout.execute import Executor
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import ONE_RANK
from phalanx.layout.resolve import resolve_layout
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


def time_steps(tokens: int, accumulation: int, changes: list[str], rounds: int) -> dict[str, Any]:
    """Milliseconds and peak memory of the passes of a step both ways, in turn, and how far apart the gradients are."""
    words = [f"data.sequence_length={tokens}", f"layout.global_batch={accumulation}", "layout.microbatch=1"]
    words += ["layout.recompute=none", "model.n_layers=8", "layout.dp_shard=1", *changes]
    run = load_run(Path(__file__).parents[1] / "examples/llama3-8b.yaml", words)
    device, model = choose_device("auto", 0), bind(run, LayoutModel)
    layout = resolve_layout(model, 1)
    applied = apply_layout(model, layout, ONE_RANK, device, model.choose_attention(layout, device))
    shape = accumulation, tokens + 1
    drawn = torch.randint(run.model.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    batch = TokenBatch(drawn[:, :-1], drawn[:, 1:], None, torch.arange(accumulation, device=device))
    executor = Executor(applied)
    ways = {"given to autograd": lambda _: None, "added in products": ParallelModel.begin_sums}
    found: dict[str, Any] = {way: {"ms": [], "gib": 0.0} for way in ways}
    kept: dict[str, torch.Tensor] = {}
    for number in range(rounds + 1):
        for way, begin in ways.items():
            executor.discard_gradients()
            if device.type != "cpu":
                torch.accelerator.reset_peak_memory_stats()
            with patch.object(ParallelModel, "begin_sums", begin):
                start = now(device)
                executor.forward_backward(1, batch, 1.0 / drawn[:, 1:].numel())
                took = now(device) - start
            if number:
                found[way]["ms"].append(round(1e3 * took, 3))
                found[way]["gib"] = 0.0 if device.type == "cpu" else torch.accelerator.max_memory_allocated() / 2**30
            else:
                found[way]["first step s"] = round(took, 2)
                kept[way] = torch.cat(
                    [p.grad.flatten()[::97] for p in applied.parameters.values() if p.grad is not None]
                )
    first, second = kept.values()
    for of_way in found.values():
        of_way["median ms"] = statistics.median(of_way["ms"])
    gain = found["given to autograd"]["median ms"] / found["added in products"]["median ms"]
    apart = float((first - second).norm() / first.norm())
    return {"tokens": tokens, "accumulation": accumulation, "ways": found, "gain": gain, "difference": apart}


def now(device: torch.device) -> float:
    """Return the time once the device has done all that it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def main() -> None:
    """Measure, print, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[], help="changes of the run file that --steps takes")
    options = parser.parse_args()
    if options.steps:
        write_steps(
            [time_steps(n, options.accumulation, options.set, options.rounds) for n in options.tokens], options.out
        )
        return
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


def write_steps(rows: list[dict[str, Any]], out: Path) -> None:
    """Print and write what `time_steps` found."""
    for row in rows:
        medians = ", ".join(
            f"{way} {found['median ms']:.2f} ms {found['gib']:.2f} GiB" for way, found in row["ways"].items()
        )
        print(
            f"{row['tokens']:6d} tokens x {row['accumulation']}: {medians}; {row['gain']:.4f}, {row['difference']:.1e}"
        )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    write_atomically(out, json.dumps({"torch": torch.__version__, "device": device, "steps": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
