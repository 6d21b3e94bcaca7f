"""Where a token stands: rotary angles (RoPE) and linear attention biases (ALiBi). Pure functions of positions."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.config.model import AlibiConfig, RopeConfig


class Positions(NamedTuple):
    """Global positions in the sequence of what a model computes: all of them on one device, some of them elsewhere."""

    tokens_S: Tensor
    """int64: of tokens and targets, and of queries."""
    rows_S: Tensor
    """int64: of the rows of the residual stream."""


def rope_frequencies(rope: RopeConfig, device: torch.device) -> Tensor:
    """Return rotary frequencies in radians a position, float32 [E/2] (Su et al. 2021, section 3.2.2).

    With a scaling, frequencies whose wavelength exceeds the pre-training context are divided by `factor`, short ones
    kept, and those between blended linearly (Llama 3.1).
    """
    # In float32, as published weights were trained: in float64 the angles of far positions would differ.
    exponents = torch.arange(0, rope.size, 2, dtype=torch.float32, device=device) / rope.size
    frequencies = rope.theta**-exponents
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def rope_tables(rope: RopeConfig, positions_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles at integer `positions_S`: two float32 [S, E/2]."""
    # float32 even beside bfloat16 activations, whose 8 bits would round positions beyond 256.
    angles = positions_S.to(torch.float32)[:, None] * rope_frequencies(rope, positions_S.device)
    return angles.cos(), angles.sin()


def rotate(x_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Rotate each pair (i, i + E/2) of the last dim by its angle, in at least float32; same shape and format."""
    dtype = torch.promote_types(x_BSHE.dtype, torch.float32)
    first, second = x_BSHE.to(dtype).chunk(2, dim=-1)
    cos, sin = cos_SE[:, None, :].to(dtype), sin_SE[:, None, :].to(dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHE.dtype)


def alibi_slopes(alibi: AlibiConfig, device: torch.device) -> Tensor:
    """Return the slope of each head, float32 [H]: bias = slope * (key position - query position) (Press et al. 2022).

    Head counts that are no power of two take every second slope of the next power of two first, as MPT does.
    """
    count = 2 ** math.ceil(math.log2(alibi.heads))
    exponents = torch.arange(1, count + 1, dtype=torch.float32, device=device) * (alibi.bias_max / count)
    slopes: Tensor = 2.0**-exponents
    if count != alibi.heads:
        slopes = torch.cat((slopes[1::2], slopes[::2]))
    return slopes[: alibi.heads]
