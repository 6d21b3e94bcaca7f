"""Where a token stands: rotary angles (RoPE) and linear attention biases (ALiBi). Pure functions of positions."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.config.layers import AlibiConfig, RopeConfig


class Positions(NamedTuple):
    """Global positions in the sequence of what a model computes: all of them on one device, some of them elsewhere."""

    tokens_S: Tensor
    """int64: of tokens and targets, and of queries."""
    rows_S: Tensor
    """int64: of the rows of the residual stream."""


def rope_frequencies(rope: RopeConfig, device: torch.device) -> Tensor:
    """Return rotary frequencies in radians a position, float32 [E/2] (Su et al. 2021, section 3.2.2), as scaled."""
    scaling, theta = rope.scaling, rope.theta
    if scaling is not None and scaling.kind == "ntk":
        # The lowest frequency is stretched by the whole factor, the highest by nothing.
        theta = theta * scaling.factor ** (rope.size / (rope.size - 2))
    # In float32, as published weights were trained: in float64 the angles of far positions would differ.
    exponents = torch.arange(0, rope.size, 2, dtype=torch.float32, device=device) / rope.size
    frequencies = theta**-exponents
    if scaling is None or scaling.kind == "ntk":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # How far each frequency is kept, from 0 to 1; the rest of it is divided by the factor.
    if scaling.kind == "llama3":
        # Llama 3.1: linear in the turns within the original context.
        turns = scaling.original_positions * frequencies / (2 * math.pi)
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return frequencies * (keep + (1.0 - keep) / scaling.factor)
    # YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2), with the bounds of the published code: linear in the number of
    # the pair of features, where the paper has turns.
    first, last = (
        rope.size * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.size - 1)
    # A blend of no width would divide by zero.
    width = last - first if last != first else 0.001
    pairs = torch.arange(rope.size // 2, dtype=torch.float32, device=device)
    keep = 1.0 - ((pairs - first) / width).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def rope_tables(rope: RopeConfig, positions_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles at integer `positions_S`, times YaRN's factor: two float32 [S, E/2]."""
    # float32 even beside bfloat16 activations, whose 8 bits would round positions beyond 256.
    angles = positions_S.to(torch.float32)[:, None] * rope_frequencies(rope, positions_S.device)
    scale = 1.0 if rope.scaling is None else rope.scaling.rotated_scale()
    if scale == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * scale, angles.sin() * scale


def rotate(x_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Rotate each pair (i, i + R/2) of the first R features by its angle, in at least float32; same shape and format.

    cos_SE, sin_SE: [S, R/2]; the features behind R are left as they are.
    """
    size = 2 * cos_SE.shape[-1]
    if size < x_BSHE.shape[-1]:
        return torch.cat((rotate(x_BSHE[..., :size], cos_SE, sin_SE), x_BSHE[..., size:]), dim=-1)
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
