"""Sizes to measure: large ones for accelerators, small ones for the CPU. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Literal

import numpy as np
import torch
import yaml

from phalanx.config.load import parse_run
from phalanx.config.model import LanguageModel
from phalanx.families.registry import bind
from phalanx.layout.layout_model import LayoutModel
from phalanx.planner.trace.operations import Attention, Matmul, Operation
from phalanx.planner.trace.part_costs import part_costs
from phalanx.planner.trace.traced_model import Setting

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
    eighths: int
    """Most 8-bit products, on devices that have any."""
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
    eighths=12,
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
    eighths=1,
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


_DOUBLE_FLOPS = 2.0**37
"""Most operations of a timed 64-bit product: some devices compute a trillion a second, and all products must take
seconds."""

Order = Literal["forward", "input", "weight"]
"""Order of a product's factors in memory: of a layer's forward pass, of its input's gradient, or of its weight's
gradient."""


@dataclass(frozen=True)
class Product:
    """One matrix product."""

    sizes: Matmul
    order: Order


@dataclass(frozen=True)
class Shapes:
    """Products and attention calls to time."""

    products: tuple[Product, ...]
    singles: tuple[Product, ...]
    """Products of 32-bit numbers."""
    doubles: tuple[Product, ...]
    """Products of 64-bit numbers."""
    eighths: tuple[Product, ...]
    """Products of 8-bit numbers, with one scale a matrix."""
    attentions: tuple[Attention, ...]
    """Forward calls; each is timed backward too."""


def model_of(width: int, length: int) -> LanguageModel:
    """Return a one-layer model of this width as most are built today: SwiGLU, grouped queries, rotary positions."""
    head = 128 if width >= 1024 else 32
    heads = width // head
    return LanguageModel(
        n_layers=1,
        d_model=width,
        n_heads=heads,
        n_kv_heads=max(1, heads // 4),
        # Llama 3's ratio, rounded up to what tensor cores like.
        d_ff=-(-width * 7 // 2 // 256) * 256,
        vocab_size=32 * width if width < 1024 else 32768,
        max_positions=length,
    )


def bind_decoder(width: int, length: int) -> LayoutModel:
    """Return such a model bound to a run that trains it in bf16 on samples of `length` tokens."""
    sections = {
        "model": model_of(width, length).model_dump(exclude_defaults=True) | {"family": "language"},
        "data": {"sources": ["nothing is read"], "sequence_length": length},
        "layout": {"global_batch": 1, "precision": "bf16"},
        "optimizer": {"lr": 1e-4},
        "training": {"steps": 1},
    }
    return bind(parse_run(yaml.safe_dump(sections), "calibration"), LayoutModel)


def setting_of(width: int, length: int, tp: int = 1) -> Setting:
    """Return what tracing needs of such a model, uncompiled."""
    return Setting(model_of(width, length), length, tp=tp, compile=False)


def shapes_for(effort: Effort, memory_bytes: float) -> Shapes:
    """Return what to time on a device with `memory_bytes` of free memory."""
    # Products and attention as blocks and heads of real models call them, whole and split over tp.
    operations = [
        operation
        for width, length, samples in effort.models
        for tp in effort.tp
        if (width // 128) % tp == 0 or width < 1024
        for name in ("block", "head")
        for operation in part_costs(name, setting_of(width, length, tp), samples).costs.operations
    ]
    # Factors and results of one product must fit beside what the allocator keeps of the one before.
    room = memory_bytes / 4
    found = list(dict.fromkeys(_product_of(op) for op in operations if op.matmul is not None))
    products = [product for product in found if _product_bytes(product.sizes) < room]
    small = [product for product in products if product.sizes.flops < _DOUBLE_FLOPS] or products[:1]
    attentions = list(
        dict.fromkeys(op.attention for op in operations if op.attention is not None and not op.attention.backward)
    )
    whole = [
        Attention(samples, heads, heads, length, length, size, causal=False, backward=False)
        for samples, length, heads, size in effort.whole
    ]
    return Shapes(
        _spread_out(products, effort.matmuls),
        _spread_out(products, effort.singles),
        _spread_out(small, effort.doubles),
        _spread_out([product for product in products if product.sizes.batch == 1], effort.eighths),
        (
            *(attentions[place] for place in spread_points([_log_attention(x) for x in attentions], effort.attentions)),
            *whole,
        ),
    )


def _spread_out(products: Sequence[Product], most: int) -> tuple[Product, ...]:
    return tuple(products[place] for place in spread_points([_log_sizes(x.sizes) for x in products], most))


def spread_points(places: Sequence[Sequence[float]], most: int) -> list[int]:
    """Return the indices of at most `most` of `places`, each the farthest from those before it; the first is 0."""
    # Models have many shapes in common: the farthest next one covers the range evenly, whatever is frequent.
    points = np.asarray(places, np.float64)
    chosen = [0]
    distance = np.linalg.norm(points - points[0], axis=1)
    while len(chosen) < min(most, len(points)) and distance.max() > 0:
        chosen.append(int(np.argmax(distance)))
        distance = np.minimum(distance, np.linalg.norm(points - points[chosen[-1]], axis=1))
    return chosen


def _product_of(op: Operation) -> Product:
    assert op.matmul is not None
    # The head's loss makes gradients in its forward pass; those of its weight are added up in 32 bits.
    if op.weight_gradient or op.dtype == torch.float32:
        return Product(op.matmul, "weight")
    return Product(op.matmul, "forward" if op.phase == "forward" else "input")


def _log_sizes(sizes: Matmul) -> list[float]:
    return [log2(size) for size in (sizes.batch, sizes.m, sizes.n, sizes.k)]


def _log_attention(sizes: Attention) -> list[float]:
    heads = sizes.samples * sizes.heads
    return [*(log2(size) for size in (sizes.queries, sizes.keys, sizes.head_size)), log2(heads) / 2]


def _product_bytes(sizes: Matmul) -> float:
    return 4.0 * sizes.batch * (sizes.m * sizes.n + sizes.m * sizes.k + sizes.n * sizes.k)
