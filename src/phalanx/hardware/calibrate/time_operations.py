"""Times single operations of one device: products, attention, memory traffic, the optimizer, and the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from phalanx.hardware.calibrate.clock import Clock
from phalanx.hardware.calibrate.measured_sizes import Product, Shapes, bind_decoder, model_of, setting_of
from phalanx.kernels.float8 import scaled_product
from phalanx.layout.context_parallel.kernel_choice import (
    AttentionChoice,
    AttentionShape,
    choose_attention,
    choose_whole_attention,
)
from phalanx.layout.context_parallel.split_context import SequenceShare
from phalanx.layout.layout_model import BuildContext
from phalanx.layout.mesh import Axis
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.attention import attend, attend_whole, attention_context
from phalanx.nn.splits import ModelChunk
from phalanx.optimizers.adamw import AdamW
from phalanx.planner.time.timed_operations import Kind, TimedOperation
from phalanx.planner.trace.operations import Attention
from phalanx.planner.trace.part_costs import block_arguments
from phalanx.planner.trace.traced_model import part_tracer
from phalanx.torch_compat import common as compat

T = TypeVar("T")


@dataclass(frozen=True)
class Passed:
    """One timed pass over memory."""

    bytes: float
    """Bytes read and written."""
    seconds: float


_KINDS: Mapping[torch.dtype, Kind] = {torch.bfloat16: "matmul", torch.float32: "matmul32", torch.float64: "matmul64"}
OPTIMIZER_BYTES = 28
"""Bytes per parameter that fused AdamW moves: it reads main parameter, gradient and two moments, and writes all but the
gradient, each in 32 bits."""


def warm_up(clock: Clock, seconds: float) -> None:
    """Run large products until the device is as warm, and its clocks as low, as in training."""
    if clock.device.type == "cpu":
        return
    a = torch.randn(8192, 8192, device=clock.device, dtype=torch.bfloat16)
    spent = 0.0
    while spent < seconds:
        spent += 100 * clock.seconds(lambda: torch.mm(a, a), calls=20)


def time_shapes(clock: Clock, shapes: Shapes, more: Callable[[], bool]) -> Iterator[TimedOperation]:
    """Time products and attention calls until `more` returns False; the first of each kind is always timed."""
    for product in _take_while(more, shapes.products):
        yield _time_product(clock, product, torch.bfloat16)
    for product in _take_while(more, shapes.singles):
        yield _time_product(clock, product, torch.float32)
    for product in _take_while(more, shapes.doubles):
        yield _time_product(clock, product, torch.float64)
    if not compat.float8_refusal(clock.device):
        for product in _take_while(more, shapes.eighths):
            yield _time_8_bits(clock, product)
    for attention in _take_while(more, shapes.attentions):
        yield from _time_attention(clock, attention)


def _take_while(more: Callable[[], bool], wanted: Sequence[T]) -> Iterator[T]:
    for number, one in enumerate(wanted):
        if number and not more():
            return
        yield one


def _time_product(clock: Clock, product: Product, dtype: torch.dtype) -> TimedOperation:
    x = product.sizes

    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(x.batch, rows, columns, device=clock.device, dtype=dtype)

    a = random(x.k, x.m).mT if product.order == "weight" else random(x.m, x.k)
    b = random(x.n, x.k).mT if product.order == "forward" else random(x.k, x.n)
    out = torch.empty(x.batch, x.m, x.n, device=clock.device, dtype=dtype)
    # A batch of one is the plain product that layers call.
    multiply = torch.bmm
    if x.batch == 1:
        a, b, out, multiply = a[0], b[0], out[0], torch.mm
    seconds = clock.seconds(lambda: multiply(a, b, out=out))
    return TimedOperation(_KINDS[dtype], x.batch, x.m, x.n, x.k, seconds)


def _time_8_bits(clock: Clock, product: Product) -> TimedOperation:
    """Time a product of 8-bit numbers, both factors in the order that tensor cores read them in."""
    x, (e4m3, _) = product.sizes, compat.float8_formats(clock.device)
    a, b = (torch.randn(rows, x.k, device=clock.device).to(e4m3) for rows in (x.m, x.n))
    one = torch.ones(1, device=clock.device)
    fast = product.order == "forward"
    seconds = clock.seconds(lambda: scaled_product(a, b, one, one, torch.bfloat16, fast))
    return TimedOperation("matmul8", 1, x.m, x.n, x.k, seconds)


def _time_attention(clock: Clock, x: Attention) -> Iterator[TimedOperation]:
    """Time attention forward and backward, by the kernel that training chooses for this shape."""
    device, dtype = clock.device, torch.bfloat16
    choice, attended = _causal_attention(x, device) if x.causal else _whole_attention(x, device)

    def random(heads: int) -> Tensor:
        made = torch.randn(x.samples, x.queries, heads, x.head_size, device=device, dtype=dtype)
        # As in the model: [B, S, H, E] in memory, seen as [B, H, S, E].
        return made.transpose(1, 2).requires_grad_()

    query, key, value = random(x.heads), random(x.kv_heads), random(x.kv_heads)
    sizes = (x.samples * x.heads, x.queries, x.keys, x.head_size)
    with choice.active(device):
        forward = clock.seconds(lambda: attended(query, key, value))
        yield TimedOperation("attention" if x.causal else "whole_attention", *sizes, forward)
        out = attended(query, key, value)
        grad = torch.randn_like(out)
        inputs = (query, key, value)
        backward = clock.seconds(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True))
    yield TimedOperation("attention_backward" if x.causal else "whole_attention_backward", *sizes, backward)


Attended = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of queries, keys and values [B, A, S, E]."""


def _causal_attention(x: Attention, device: torch.device) -> tuple[AttentionChoice, Attended]:
    model = model_of(x.heads * x.head_size, x.queries)
    model = model.model_copy(update={"n_heads": x.heads, "n_kv_heads": x.kv_heads})
    shape = AttentionShape(x.samples, x.queries, torch.bfloat16, documents=False)
    choice = choose_attention("auto", model, shape, device)
    positions = torch.arange(x.queries, device=device)
    context = attention_context(model.layer(0).attention, positions, torch.bfloat16, kernel=choice.kernel)
    return choice, lambda query, key, value: attend(query, key, value, context)


def _whole_attention(x: Attention, device: torch.device) -> tuple[AttentionChoice, Attended]:
    shape = (x.samples, x.queries, x.heads, x.head_size)
    return choose_whole_attention(shape, torch.bfloat16, device), attend_whole


def time_traffic(clock: Clock, sizes: Iterable[int]) -> Iterator[Passed]:
    """Time sums, format changes and reductions of so many bytes."""
    for size in sizes:
        yield from _time_passes(clock, size // 6)


def _time_passes(clock: Clock, count: int) -> Iterator[Passed]:
    wide = torch.randn(count, device=clock.device)
    first, second = wide.to(torch.bfloat16), wide.to(torch.bfloat16)
    out = torch.empty_like(first)
    yield Passed(6 * count, clock.seconds(lambda: torch.add(first, second, out=out)))
    yield Passed(6 * count, clock.seconds(lambda: out.copy_(wide)))
    rows = first[: count // 1024 * 1024].view(-1, 1024)
    sums = torch.empty(len(rows), device=clock.device)
    yield Passed(2 * rows.numel(), clock.seconds(lambda: torch.sum(rows, 1, dtype=torch.float32, out=sums)))


def time_optimizer(clock: Clock, sizes: Iterable[int]) -> Iterator[Passed]:
    """Time AdamW over so many parameters, as training updates them."""
    for count in sizes:
        yield Passed(OPTIMIZER_BYTES * count, _time_update(clock, count))


def _time_update(clock: Clock, count: int) -> float:
    parameter = nn.Parameter(torch.randn(count, device=clock.device))
    parameter.grad = torch.randn_like(parameter)
    optimizer = AdamW([parameter], lr=1e-6, fused=True)
    divisor, skip = (torch.tensor(value, device=clock.device) for value in (1.0, 0.0))
    return clock.seconds(lambda: compat.update_scaled(optimizer, divisor, skip))


def time_host(clock: Clock) -> float:
    """Return the seconds in which the host issues one small operation of plain PyTorch code."""
    x = torch.zeros(64, device=clock.device)
    out = torch.zeros_like(x)

    def issue() -> None:
        for _ in range(50):
            torch.add(x, x, out=out)

    return clock.host_seconds(issue) / 50


@dataclass(frozen=True)
class TimedBlock:
    """Times of one block."""

    width: int
    length: int
    samples: int
    compiled: bool
    forward_s: float
    backward_s: float

    @property
    def name(self) -> str:
        """Name of the block in a profile."""
        return f"block {self.width} x {self.length} x {self.samples}"


def time_blocks(
    clock: Clock, blocks: Sequence[tuple[int, int, int]], more: Callable[[], bool], *, compiled: bool
) -> Iterator[TimedBlock]:
    """Time blocks of (width, positions, samples), one after another, until `more` returns False."""
    for width, length, samples in blocks:
        if not more():
            return
        yield _time_block(clock, width, length, samples, compiled)


def _time_block(clock: Clock, width: int, length: int, samples: int, compiled: bool) -> TimedBlock:
    """Time the block that a run trains, on one rank: built, and called, by the stage that holds it."""
    device, dtype, model = clock.device, torch.bfloat16, bind_decoder(width, length)
    choice = model.choose_attention(ResolvedLayout(samples, microbatch=samples), device)
    context = BuildContext(device, choice, SequenceShare(Axis("cp"), Axis("tp"), "ring"))
    stage, _ = model.build_stage(context, ModelChunk(range(1), first=False, last=False), 0)
    stage.to(dtype).to_empty(device=device)
    for parameter in stage.parameters():
        # Of the size that training has: on zeros devices draw less power, and clock higher.
        torch.nn.init.normal_(parameter, std=0.02)
    (block,) = stage.part.blocks
    x = torch.randn(stage.hidden_shape(samples), device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    batch = part_tracer(setting_of(width, length)).example_batch("block", stage, samples)
    arguments = block_arguments(
        stage, {name: torch.zeros_like(each, device=device) for name, each in batch.items()} | {"x": x}
    )
    run = torch.compile(block, dynamic=False) if compiled else block
    inputs = (x, *block.parameters())
    with choice.active(device):
        forward = clock.seconds(lambda: run(*arguments))
        both = clock.seconds(lambda: torch.autograd.grad(run(*arguments), inputs, grad))
    return TimedBlock(width, length, samples, compiled, *split_times(forward, both))


def split_times(forward_s: float, both_s: float) -> tuple[float, float]:
    """Return the seconds of the forward and of the backward pass, given those of the forward pass and of both together."""
    if both_s > forward_s:
        return forward_s, both_s - forward_s
    # On a busy machine the forward pass alone may take longer than both. Their matmuls then divide the time: the backward
    # pass has two for each one of the forward pass.
    return both_s / 3, both_s * 2 / 3
