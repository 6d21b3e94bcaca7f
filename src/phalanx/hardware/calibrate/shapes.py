"""Chooses the products and attention calls to time, from those that tracing finds in models of several widths.

Tracing finds hundreds. Each next one to be chosen is the one least like those already chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Literal

import numpy as np
import torch

from phalanx.config.model import LanguageModel
from phalanx.hardware.calibrate.effort import Effort
from phalanx.planner.trace.family import Setting
from phalanx.planner.trace.operations import Attention, Matmul, Operation
from phalanx.planner.trace.parts import part_costs

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
        d_ff=-(-width * 7 // 2 // 256) * 256,
        vocab_size=32 * width if width < 1024 else 32768,
        max_positions=length,
    )


def setting_of(width: int, length: int, tp: int = 1) -> Setting:
    """Return what tracing needs of such a model, uncompiled."""
    return Setting(model_of(width, length), length, tp=tp, compile=False)


def shapes_for(effort: Effort, memory_bytes: float) -> Shapes:
    """Return what to time on a device with `memory_bytes` of free memory."""
    operations = [
        operation
        for width, length, samples in effort.models
        for tp in effort.tp
        if (width // 128) % tp == 0 or width < 1024
        for name in ("block", "head")
        for operation in part_costs(name, setting_of(width, length, tp), samples).costs.operations
    ]
    room = memory_bytes / 4
    found = list(dict.fromkeys(_product(op) for op in operations if op.matmul is not None))
    products = [product for product in found if _bytes(product.sizes) < room]
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
        (*(attentions[place] for place in spread([_attended(x) for x in attentions], effort.attentions)), *whole),
    )


def _spread_out(products: Sequence[Product], most: int) -> tuple[Product, ...]:
    return tuple(products[place] for place in spread([_place(x.sizes) for x in products], most))


def spread(places: Sequence[Sequence[float]], most: int) -> list[int]:
    """Return the indices of at most `most` of `places`, each the farthest from those before it; the first is 0."""
    points = np.asarray(places, np.float64)
    chosen = [0]
    distance = np.linalg.norm(points - points[0], axis=1)
    while len(chosen) < min(most, len(points)) and distance.max() > 0:
        chosen.append(int(np.argmax(distance)))
        distance = np.minimum(distance, np.linalg.norm(points - points[chosen[-1]], axis=1))
    return chosen


def _product(op: Operation) -> Product:
    assert op.matmul is not None
    # The head's loss makes gradients in its forward pass; those of its weight are added up in 32 bits.
    if op.weight_gradient or op.dtype == torch.float32:
        return Product(op.matmul, "weight")
    return Product(op.matmul, "forward" if op.phase == "forward" else "input")


def _place(sizes: Matmul) -> list[float]:
    return [log2(size) for size in (sizes.batch, sizes.m, sizes.n, sizes.k)]


def _attended(sizes: Attention) -> list[float]:
    heads = sizes.samples * sizes.heads
    return [*(log2(size) for size in (sizes.queries, sizes.keys, sizes.head_size)), log2(heads) / 2]


def _bytes(sizes: Matmul) -> float:
    return 4.0 * sizes.batch * (sizes.m * sizes.n + sizes.m * sizes.k + sizes.n * sizes.k)
