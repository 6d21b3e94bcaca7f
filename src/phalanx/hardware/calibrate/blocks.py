"""Times whole blocks of a model, forward and backward, compiled or not, as they run in training.

The sum of single operations is corrected by these times, which include fused kernels, power limits and the host's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from phalanx.families.language.model.decoder import Block
from phalanx.hardware.calibrate.clock import Clock
from phalanx.hardware.calibrate.shapes import model_of
from phalanx.layout.context_parallel.kernel_choice import AttentionShape, choose_attention
from phalanx.nn.attention import attention_context


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
    device, dtype, model = clock.device, torch.bfloat16, model_of(width, length)
    choice = choose_attention("auto", model, AttentionShape(samples, length, dtype, documents=False), device)
    context = attention_context(model, torch.arange(length, device=device), dtype, kernel=choice.kernel)
    with torch.device(device):
        block = Block(model).to(dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(samples, length, width, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    run = torch.compile(block, dynamic=False) if compiled else block
    inputs = (x, *block.parameters())
    with choice.active():
        forward = clock.seconds(lambda: run(x, context))
        both = clock.seconds(lambda: torch.autograd.grad(run(x, context), inputs, grad))
    return TimedBlock(width, length, samples, compiled, *split_times(forward, both))


def split_times(forward_s: float, both_s: float) -> tuple[float, float]:
    """Return the seconds of the forward and of the backward pass, given those of the forward pass and of both together."""
    if both_s > forward_s:
        return forward_s, both_s - forward_s
    # On a busy machine the forward pass alone may take longer than both. Their matmuls then divide the time: the backward
    # pass has two for each one of the forward pass.
    return both_s / 3, both_s * 2 / 3
