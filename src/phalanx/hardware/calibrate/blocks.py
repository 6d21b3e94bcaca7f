"""Times whole blocks of a model, forward and backward, as they run in training: on an accelerator compiled, or not.

What single operations add up to is checked against these: fused kernels, power limits, and what the host adds.
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
    """One block."""

    width: int
    length: int
    samples: int
    compiled: bool
    forward_s: float
    backward_s: float

    @property
    def name(self) -> str:
        """What it is called in a profile."""
        return f"block {self.width} x {self.length} x {self.samples}"


def time_blocks(
    clock: Clock, blocks: Sequence[tuple[int, int, int]], more: Callable[[], bool], *, compiled: bool
) -> Iterator[TimedBlock]:
    """Blocks of (width, positions, samples), as long as there is time for `more`."""
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
    return TimedBlock(width, length, samples, compiled, *apart(forward, both))


def apart(forward_s: float, both_s: float) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass, from those of the one alone and of both.

    On a busy machine the one may have been timed slower than both: then by their products, of which the backward pass has
    two for each of the forward pass.
    """
    if both_s > forward_s:
        return forward_s, both_s - forward_s
    return both_s / 3, both_s * 2 / 3
