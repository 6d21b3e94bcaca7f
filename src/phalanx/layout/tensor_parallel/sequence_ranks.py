"""How ranks that hold parts of a sequence exchange it around products in 8 bits: by collectives, or beside the products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.kernels.float8 import scaled_product
from phalanx.layout.tensor_parallel.autograd_collectives import join_parts, split_parts
from phalanx.layout.tensor_parallel.overlapped_products import gather_scaled_product, scaled_product_scatter
from phalanx.nn.float8_linear import Beside, Operand
from phalanx.torch_compat import common as compat

SEQUENCE = 1
"""The dim of positions in [B, S, D]."""


@dataclass(frozen=True)
class SequenceRanks:
    """A `phalanx.nn.float8_linear.SequenceExchange` over the ranks of `tp`."""

    group: str
    """Name of their group."""
    size: int
    overlapped_bytes: int | None = None
    """Bytes of a sample's part of a sequence from which on it travels beside the product; None: before or behind it."""

    def overlaps(self, part_bytes: int) -> bool:
        """Return whether a sample's part of a sequence, of so many bytes, travels beside the product."""
        return self.overlapped_bytes is not None and part_bytes >= self.overlapped_bytes

    def gather_multiply(
        self, x_BsI: Tensor, x_scale: Tensor, weight: Operand, dtype: torch.dtype, *, fast: bool
    ) -> tuple[Tensor, Tensor]:
        """Return x W^T of all positions, and all positions of x in 8 bits; see `SequenceExchange`."""
        if self.overlaps(x_BsI[0].numel()):
            y, whole = gather_scaled_product(x_BsI, weight.q, x_scale, weight.scale, dtype, fast, self.group)
            return y, whole
        # Few operations know 8-bit floating point.
        parts = compat.all_gather(x_BsI.view(torch.uint8), self.group, self.size)
        whole = join_parts(parts, SEQUENCE).view(x_BsI.dtype)
        y = scaled_product(whole.flatten(0, 1), weight.q, x_scale, weight.scale, dtype, fast)
        return y.view(*whole.shape[:-1], y.shape[-1]), whole

    def multiply_scatter(
        self, x_BSI: Tensor, x_scale: Tensor, weight: Operand, dtype: torch.dtype, *, fast: bool, beside: Beside | None
    ) -> tuple[Tensor, Tensor]:
        """Return x W^T summed over ranks, of some positions, and the product `beside`; see `SequenceExchange`."""
        operands = x_BSI, weight.q, x_scale, weight.scale, dtype, fast
        two = () if beside is None else (beside.a.q, beside.b.q, beside.a.scale, beside.b.scale)
        wide = dtype if beside is None else beside.dtype
        if self.overlaps(x_BSI.shape[SEQUENCE] // self.size * weight.q.shape[0] * dtype.itemsize):
            y, product = scaled_product_scatter(*operands, list(two), wide, self.group)
            return y, product
        y = scaled_product(x_BSI.flatten(0, 1), *operands[1:])
        product = scaled_product(*two, wide, False) if two else y.new_empty(0)
        parts = split_parts(y.view(*x_BSI.shape[:-1], y.shape[-1]), self.size, SEQUENCE)
        return compat.reduce_scatter(parts, self.group, self.size), product
