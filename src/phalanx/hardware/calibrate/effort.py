"""Sizes to measure: large ones for accelerators, small ones for the CPU. Data only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MIB = 2**20


@dataclass(frozen=True)
class Effort:
    """Sizes to measure and the seconds to spend on each."""

    span_s: float
    """Seconds of a sample."""
    samples: int
    models: tuple[tuple[int, int, int], ...]
    """(width, positions, samples) of models whose products and attention are measured."""
    tp: tuple[int, ...]
    """Tensor-parallel degrees that cut those products."""
    matmuls: int
    """Most 16-bit products."""
    singles: int
    """Most 32-bit products."""
    doubles: int
    """Most 64-bit products."""
    attentions: int
    """Most calls of causal attention, each forward and backward."""
    whole: tuple[tuple[int, int, int, int], ...]
    """(samples, positions, heads, size of a head) of attention of all positions with all."""
    traffic: tuple[int, ...]
    """Bytes that a memory-bound operation reads and writes."""
    optimizer: tuple[int, ...]
    """Parameters of an optimizer step."""
    exchanged: tuple[int, ...]
    """Bytes of collectives."""
    copied: tuple[int, ...]
    """Bytes of gathers by copies between devices."""
    blocks: tuple[tuple[int, int, int], ...]
    """(width, positions, samples) of whole blocks, compiled, that correct what single operations add up to."""
    beside: tuple[int, int, int]
    """(rows of square products, how many, bytes of the collective beside them)."""


ACCELERATOR = Effort(
    span_s=0.03,
    samples=5,
    models=(
        *((1024, 2048, 2), (1024, 2048, 16), (2048, 2048, 1), (2048, 4096, 4), (2048, 2048, 16)),
        *((4096, 2048, 1), (4096, 8192, 1), (4096, 8192, 2), (8192, 4096, 1), (8192, 2048, 2)),
    ),
    tp=(1, 2, 4, 8),
    matmuls=96,
    singles=6,
    doubles=4,
    attentions=10,
    whole=(
        *((8, 2048, 16, 192), (16, 2048, 8, 192), (2, 2048, 8, 192), (1, 2048, 32, 256), (2, 2048, 16, 256)),
        *((8, 2048, 16, 64), (32, 512, 16, 64), (8, 512, 8, 128)),
    ),
    traffic=tuple(MIB * size for size in (2, 8, 32, 128, 512, 2048)),
    optimizer=(2**22, 2**25, 2**28),
    exchanged=tuple(2**power for power in range(16, 31, 2)),
    copied=tuple(MIB * size for size in (4, 32, 128, 512, 1024)),
    blocks=((4096, 8192, 1), (2048, 2048, 8), (4096, 2048, 4), (8192, 4096, 1), (1024, 2048, 8)),
    beside=(8192, 24, 512 * MIB),
)
"""Sizes that a modern accelerator measures in under four minutes."""

PROCESSOR = Effort(
    span_s=0.004,
    samples=3,
    models=((64, 64, 1), (64, 64, 4), (256, 128, 1), (256, 128, 4), (512, 128, 2)),
    tp=(1, 2),
    matmuls=10,
    singles=6,
    doubles=4,
    attentions=3,
    whole=((2, 64, 2, 32),),
    traffic=(MIB // 4, MIB, 4 * MIB),
    optimizer=(2**16, 2**19),
    exchanged=(2**16, 2**18, 2**20),
    copied=(2**18, 2**20),
    blocks=((128, 128, 2), (256, 128, 2), (256, 128, 4)),
    beside=(256, 8, MIB // 4),
)
"""Sizes that a CPU measures in seconds."""


def effort_for(device: torch.device) -> Effort:
    """Return the sizes to measure on `device`."""
    return PROCESSOR if device.type == "cpu" else ACCELERATOR
