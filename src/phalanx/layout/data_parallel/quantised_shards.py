"""Weights that data-parallel ranks gather in 8 bits.

Whenever the parameters have changed, each rank quantises its rows of every weight by the scales of the whole weight, for
which all ranks agree on the largest numbers in one reduction. What is gathered is then half as large as in 16 bits, and
ready for products: the transposed, which gradients of inputs need, is made of it where it is used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from phalanx.kernels.float8 import (
    BLOCK,
    QuantisedCopy,
    measure_copies,
    power_of_two_scale,
    quantise,
    quantise_blocks,
    quantise_with_blocks,
    row_column_amax,
)
from phalanx.layout.mesh import Axis
from phalanx.nn.float8_linear import Float8Product, HeldWeight, Operand
from phalanx.nn.layers import Linear
from phalanx.torch_compat import common as compat
from phalanx.torch_compat import fsdp as compat_fsdp
from phalanx.torch_compat.fsdp import ByteShard


class QuantisedShards:
    """The weights of a rank's stages that are gathered in 8 bits."""

    def __init__(self, shards: Axis) -> None:
        """shards: ranks that share the weights out."""
        self._shards = shards
        self._weights: list[QuantisedShard] = []

    def add(self, sharded: Iterable[FSDPModule], layers: Iterable[Linear]) -> None:
        """Let the weights of `layers` be gathered in 8 bits by `sharded`, where the layers multiply such rows."""
        products = {layer: product for layer in layers if (product := layer.rows_product) is not None}
        owners = {id(layer): layer for layer in products}
        for shard in compat_fsdp.gather_as_bytes(sharded, products):
            layer = owners[id(shard.owner)]
            self._weights.append(QuantisedShard(layer, products[layer], shard))

    @property
    def copies(self) -> dict[Tensor, QuantisedCopy]:
        """This rank's rows of weights with one scale, by their parameters."""
        return {weight.shard.parameter: weight.copy for weight in self._weights if weight.copy is not None}

    @torch.no_grad()
    def publish(self, written: Collection[Tensor] = ()) -> None:
        """Quantise this rank's rows anew; all ranks of the shards and of tensor parallelism call it together.

        written: numbers of `copies` that the optimizer has written.
        """
        if not self._weights:
            return
        for weight in self._weights:
            weight.make_room()
        by_tensor = [(weight.shard.main, weight.copy) for weight in self._weights if weight.copy is not None]
        measure_copies([rows for rows, _ in by_tensor], [copy for _, copy in by_tensor], written)
        amaxes = [amax for weight in self._weights for amax in weight.measure()]
        groups = [group for weight in self._weights for group in weight.groups]
        if self._shards.size > 1:
            amaxes = _agree(amaxes, self._shards.group_name)
        # At most one: what tensor parallelism splits over no rank is alike on all.
        for group in {name for name in groups if name}:
            places = [place for place, name in enumerate(groups) if name == group]
            for place, amax in zip(places, _agree([amaxes[place] for place in places], group), strict=True):
                amaxes[place] = amax
        joined = power_of_two_scale(torch.cat([amax.flatten() for amax in amaxes]).bfloat16(), self._weights[0].format)
        scales = iter(_split_like(joined, amaxes))
        for weight in self._weights:
            weight.quantise(next(scales), next(scales))


def _agree(amaxes: Sequence[Tensor], group: str) -> list[Tensor]:
    """Return the largest of what the ranks of a group have, in one reduction."""
    joined = torch.cat([amax.flatten() for amax in amaxes])
    return _split_like(compat.all_reduce(joined, group, "max"), amaxes)


def _split_like(joined: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    each = joined.split([part.numel() for part in parts])
    return [found.view(part.shape) for found, part in zip(each, parts, strict=True)]


class WeightAmax(NamedTuple):
    """Largest numbers of a weight, float32: those that share a scale, and 0 in place of those that a rank does not have."""

    rows: Tensor
    """[1] of the weight, [O] of its rows or [O / 128, I / 128] of its blocks."""
    columns: Tensor
    """[I] of its columns, where the transposed has scales of its own; else [0]."""


class QuantisedShard:
    """A rank's rows of one weight in 8 bits, and the scales of the whole weight."""

    def __init__(self, layer: Linear, product: Float8Product, shard: ByteShard) -> None:
        """Let `layer` multiply by what is gathered."""
        self._layer, self._product, self.shard = layer, product, shard
        self._scales: tuple[Tensor, Tensor] | None = None
        """Of the weight and of its transposed; the same tensors in all steps, as who computes has them."""
        self.copy: QuantisedCopy | None = None
        """This rank's rows, where the whole weight has one scale."""
        shard.receive = self._hold

    def make_room(self) -> None:
        """Make the memory for this rank's rows, once the parameter has its own."""
        if self.shard.bytes is not None:
            return
        rows = self.shard.main
        self.shard.bytes = rows.new_zeros(self.shard.rows * self.shard.shape[1], dtype=torch.uint8)
        if self._product.scaling == "tensor":
            self.copy = QuantisedCopy.empty(self._own_bytes())

    def _own_bytes(self) -> Tensor:
        assert self.shard.bytes is not None
        rows = self.shard.main
        return self.shard.bytes[: rows.numel()].view(self.format).view(rows.shape)

    @property
    def format(self) -> torch.dtype:
        """8-bit format of the numbers."""
        return self._product.format

    @property
    def groups(self) -> tuple[str, str]:
        """Names of the groups of tensor parallelism that share out what `measure` gives; "" for none."""
        product = self._product
        if product.scaling == "tensor":
            return product.input_group or product.output_group, ""
        if product.scaling == "row":
            return product.input_group, product.output_group
        # Blocks are never split.
        return "", ""

    def measure(self) -> WeightAmax:
        """Return the largest numbers of this rank's rows, those of the weight where all ranks' are compared."""
        rows, first, (count, width) = self.shard.main, self.shard.first_row, self.shard.shape
        if self.copy is not None:
            return WeightAmax(self.copy.amax, rows.new_empty(0, dtype=torch.float32))
        if self._product.scaling == "row":
            found = rows.new_zeros(count + width, dtype=torch.float32)
            of_rows, of_columns = found.split((count, width))
            if rows.numel():
                own, by_column = row_column_amax(rows)
                of_rows[first : first + len(rows)] = own
                of_columns.copy_(by_column)
            return WeightAmax(of_rows, of_columns)
        grid = rows.new_zeros((-(-count // BLOCK), -(-width // BLOCK)), dtype=torch.float32)
        for piece, place in _pieces(first, len(rows)):
            scale = quantise_blocks(rows[piece], self.format, BLOCK, True, True, False)[1]
            # The largest number that has this scale stands for the one that has it here.
            grid[place : place + len(scale)] = scale * torch.finfo(self.format).max
        return WeightAmax(grid, rows.new_empty(0, dtype=torch.float32))

    def quantise(self, scale: Tensor, column_scale: Tensor) -> None:
        """Write this rank's rows in 8 bits. scale, column_scale: of the whole weight, in the shapes of `WeightAmax`."""
        rows, first = self.shard.main, self.shard.first_row
        if self._product.scaling != "row":
            column_scale = scale.t() if scale.dim() > 1 else scale
        if self._scales is None:
            own_scale = scale.clone() if self.copy is None else self.copy.scale
            self._scales = own_scale, column_scale.clone(memory_format=torch.contiguous_format)
        if self.copy is not None:
            # Before its scale is another.
            self.copy.renew(rows, scale)
        for kept, new in zip(self._scales, (scale, column_scale), strict=True):
            kept.copy_(new)
        if self.copy is not None:
            return
        q = self._own_bytes()
        if self._product.scaling == "row":
            own = scale[first : first + len(rows)]
            q.copy_(quantise(rows, own, own, self.format, True, False)[0])
            return
        for piece, place in _pieces(first, len(rows)):
            part, blocks = rows[piece], -(-(piece.stop - piece.start) // BLOCK)
            if len(part) % BLOCK:
                # A block that ranks share has the scale of them all.
                q[piece] = quantise_with_blocks(part, scale[place : place + blocks], self.format)
            else:
                q[piece] = quantise_blocks(part, self.format, BLOCK, True, True, False)[0]

    def _hold(self, whole: Tensor) -> None:
        assert self._scales is not None
        rows = Operand(whole.view(self.format).view(self.shard.shape), self._scales[0])
        self._layer.held = HeldWeight(rows, self._scales[1])


def _pieces(first: int, count: int) -> Iterator[tuple[slice, int]]:
    """Yield the pieces of `count` rows from the `first` of a weight that blocks of rows cut, and the first block of each.

    Those of a block that has rows elsewhere come apart from whole ones.
    """
    head = min(count, -first % BLOCK)
    tail = (count - head) % BLOCK
    for start, stop in ((0, head), (head, count - tail), (count - tail, count)):
        if stop > start:
            yield slice(start, stop), (first + start) // BLOCK
